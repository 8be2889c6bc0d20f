"""The measured timeline of a step: when each pipeline rank computed what, on one clock."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from megabit.files import write_text
from megabit.mesh import Axis
from megabit.pipeline.actions import Backward, Compute, Forward, InputGradient, WeightGradient
from megabit.pipeline.draw import draw_timelines, timeline_text
from megabit.pipeline.placement import Placement
from megabit.pipeline.timeline import Span, Timeline
from megabit.pipeline.trace import chrome_trace
from megabit.reduce import all_gather, all_reduce

KINDS: tuple[type[Compute], ...] = (Forward, Backward, InputGradient, WeightGradient)
ROUNDS = 5
"""How often ranks meet to compare their clocks."""
NO_SPAN = (-1, 0, 0, 0.0, 0.0)
"""In the place of what other ranks have more of."""
TEXT_WIDTH = 120
"""Columns"""


def gather_timeline(
    spans: Sequence[Span], placement: Placement, pp: Axis, device: torch.device
) -> Timeline:
    """What all ranks of a pipeline measured in a step, in seconds since the first start; the same
    on each of them. Collective over ``pp``.

    Clocks are brought together by the moment at which the ranks leave a collective, which is exact
    to about the time that a message takes.
    """
    by_rank = _gather_spans(spans, pp, device)
    offsets = _clock_offsets(pp, device)
    started = min(
        span.start - offset for own, offset in zip(by_rank, offsets, strict=True) for span in own
    )
    return Timeline(
        placement,
        [
            [
                Span(span.compute, span.start - offset - started, span.end - offset - started)
                for span in own
            ]
            for own, offset in zip(by_rank, offsets, strict=True)
        ],
    )


def _gather_spans(spans: Sequence[Span], pp: Axis, device: torch.device) -> list[list[Span]]:
    """Those of each rank, by its own clock."""
    rows = [
        (KINDS.index(type(s.compute)), s.compute.microbatch, s.compute.chunk, s.start, s.end)
        for s in spans
    ]
    # Ranks have different numbers of computes where a schedule splits some backward passes only.
    count = int(all_reduce(torch.tensor(len(rows), device=device), pp, "max"))
    rows += [NO_SPAN] * (count - len(rows))
    own = torch.tensor(rows, dtype=torch.float64, device=device)
    return [
        [
            Span(KINDS[int(kind)](int(microbatch), int(chunk)), start, end)
            for kind, microbatch, chunk, start, end in by_rank
            if kind >= 0
        ]
        for by_rank in all_gather(own.unsqueeze(0), pp).tolist()
    ]


def _clock_offsets(pp: Axis, device: torch.device) -> list[float]:
    """How far each rank's clock is ahead of the first one's, in seconds."""
    moments = []
    for _ in range(ROUNDS):
        all_reduce(torch.zeros(1, device=device), pp).item()
        moments.append(perf_counter())
    own = torch.tensor(moments, dtype=torch.float64, device=device)
    by_rank = all_gather(own.unsqueeze(0), pp)
    return [median(row) for row in (by_rank - by_rank[0]).tolist()]


def write_timeline(timeline: Timeline, folder: Path, step: int, schedule: str) -> str:
    """Write the timeline after ``step`` steps to ``folder``, as text, as a picture and as a Chrome
    trace; returns the text."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step_{step:06}"
    name = f"step {step}, {schedule}"
    figures = f"{timeline.duration * 1000:.1f} ms, bubble of this step {timeline.bubble:.1%}"
    text = f"{name}: {figures}\n{timeline_text(timeline, TEXT_WIDTH)}"
    write_text(stem.with_suffix(".txt"), text + "\n")
    write_text(stem.with_suffix(".json"), json.dumps(chrome_trace(timeline)))
    draw_timelines({name: timeline}, stem.with_suffix(".png"), unit="s")
    return text
