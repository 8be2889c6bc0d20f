"""Timelines for trace viewers: the event format of Chrome, which Perfetto reads too.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from typing import Any

from megabit.pipeline.draw import kind_of
from megabit.pipeline.timeline import Timeline


def chrome_trace(
    timeline: Timeline, unit_s: float = 1.0, process: int = 1, name: str = "pipeline"
) -> dict[str, Any]:
    """A thread for each rank, a complete event for each span, from time 0.

    Args:
        timeline: simulated or measured.
        unit_s: its unit of time, in seconds.
        process: a number; timelines with different ones can stand in one trace. Not 0, which
            viewers take for the idle task.
        name: of the process.
    """
    events: list[dict[str, Any]] = [_metadata("process_name", process, 0, name=name)]
    for rank, spans in enumerate(timeline.ranks):
        events.append(_metadata("thread_name", process, rank, name=f"rank {rank}"))
        events.append(_metadata("thread_sort_index", process, rank, sort_index=rank))
        for span in spans:
            compute = span.compute
            events.append(
                {
                    "name": str(compute),
                    "cat": kind_of(compute),
                    "ph": "X",
                    "ts": _microseconds(span.start - timeline.start, unit_s),
                    "dur": _microseconds(span.duration, unit_s),
                    "pid": process,
                    "tid": rank,
                    "args": {
                        "microbatch": compute.microbatch,
                        "stage": timeline.placement.stage(rank, compute.chunk),
                        "chunk": compute.chunk,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, process: int, thread: int, **arguments: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _microseconds(time: float, unit_s: float) -> float:
    return round(time * unit_s * 1e6, 3)
