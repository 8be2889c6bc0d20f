"""Timelines as text, as a picture and as a trace: what is drawn is what is in them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from megabit.pipeline.actions import (
    Backward,
    Compute,
    Forward,
    InputGradient,
    Schedule,
    WeightGradient,
)
from megabit.pipeline.draw import (
    IDLE,
    color_of,
    draw_timelines,
    label_width,
    least_width,
    timeline_colored,
    timeline_text,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Costs, simulate
from megabit.pipeline.timeline import Span, Timeline
from megabit.pipeline.trace import chrome_trace

F, B, W, BW = Forward, InputGradient, WeightGradient, Backward


def timeline(placement: Placement, *ranks: list[Compute], message: float = 0) -> Timeline:
    microbatches = 1 + max(compute.microbatch for compute in ranks[0])
    costs = Costs.even(placement, message=message)
    return simulate(Schedule(placement, microbatches, ranks), costs)


def split(message: float = 0) -> Timeline:
    """Two ranks, two microbatches, backward passes in two."""
    return timeline(
        Placement.loop(2),
        [F(0), F(1), B(0), W(0), B(1), W(1)],
        [F(0), B(0), F(1), B(1), W(0), W(1)],
        message=message,
    )


def fused() -> Timeline:
    return timeline(Placement.loop(2), [F(0), F(1), BW(0), BW(1)], [F(0), BW(0), F(1), BW(1)])


def there_and_back() -> Timeline:
    """Two ranks with two stages each."""
    return timeline(
        Placement.v(2),
        [F(0), F(0, 1), B(0, 1), W(0, 1), B(0), W(0)],
        [F(0), F(0, 1), B(0, 1), B(0), W(0, 1), W(0)],
    )


# As text.


def test_text_with_room_for_labels() -> None:
    assert timeline_text(split()).splitlines() == [
        "rank 0  F0-F1-   B0-W0-B1-W1-",
        "rank 1     F0-B0-F1-B1-W0-W1-",
    ]
    assert timeline_text(fused()).splitlines() == [
        "rank 0  F0--F1--        BW0-----    BW1-----",
        "rank 1      F0--BW0-----F1--BW1-----",
    ]


def test_text_names_chunks() -> None:
    assert timeline_text(there_and_back()).splitlines() == [
        "rank 0  F0---          F0.1-B0.1-W0.1-     B0---W0---",
        "rank 1       F0---F0.1-          B0.1-B0---W0.1-W0---",
    ]


def test_text_in_fewer_columns() -> None:
    """Lower case says the second chunk; then only letters are left."""
    assert timeline_text(there_and_back(), 8 + 9 * 3).splitlines() == [
        "rank 0  F0-      f0-b0-w0-   B0-W0-",
        "rank 1     F0-f0-      b0-B0-w0-W0-",
    ]
    assert timeline_text(there_and_back(), 8 + 9).splitlines() == [
        "rank 0  F  fbw BW",
        "rank 1   Ff  bBwW",
    ]


def test_text_at_the_scale_of_another() -> None:
    longer = 2 * split().duration
    assert timeline_text(split(), 8 + 28, longer).splitlines() == [
        "rank 0  F0F1  B0W0B1W1",
        "rank 1    F0B0F1B1W0W1",
    ]


def test_messages_are_idle_time() -> None:
    assert timeline_text(split(message=1), 8 + 27).splitlines() == [
        "rank 0  F0-F1-         B0-W0-B1-W1-",
        "rank 1        F0-B0-F1-B1-W0-W1-",
    ]


def test_text_of_a_measured_timeline() -> None:
    """It starts anywhere, has gaps and spans that are too short to see."""
    spans = [Span(F(0), 1000.0, 1000.4), Span(BW(0), 1000.6, 1001.0)]
    short = [Span(F(0), 1000.4, 1000.4001), Span(BW(0), 1000.5, 1000.6)]
    measured = Timeline(Placement.loop(2), [spans, short])
    assert timeline_text(measured, 8 + 20).splitlines() == [
        "rank 0  F0------    BW0-----",
        "rank 1            BW",
    ]


@given(st.integers(9, 120), st.sampled_from([split(0.3), fused(), there_and_back()]))
def test_every_width(width: int, drawn: Timeline) -> None:
    rows = timeline_text(drawn, width).splitlines()
    assert max(map(len, rows)) == width
    assert timeline_colored(drawn, width).plain.splitlines() == [
        row.replace("-", " ") for row in rows
    ]
    for row, spans in zip(rows, drawn.ranks, strict=True):
        seen = [letter.upper() for letter in row.removeprefix("rank") if letter.isalpha()]
        expected = [letter for span in spans for letter in span.compute.letters]
        if width >= label_width(drawn):
            assert seen == expected
            assert all(str(span.compute) in row for span in spans)
        elif width >= least_width(drawn):
            assert len(seen) >= len(spans)


def test_colours_of_text() -> None:
    styles = [str(span.style) for span in timeline_colored(there_and_back()).spans]
    assert len(styles) == 12
    assert f"black on {color_of(F(0), 2)}" in styles
    assert f"black on {color_of(W(0, 1), 2)}" in styles


# As a picture.


def pixels(path: Path) -> dict[str, int]:
    """How many pixels each colour has."""
    values = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    counts: dict[str, int] = {}
    for red, green, blue in values.tolist():
        color = f"#{red:02x}{green:02x}{blue:02x}"
        counts[color] = counts.get(color, 0) + 1
    return counts


def test_picture_has_each_colour_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    draw_timelines({"split": split(), "fused": fused()}, path, "Two ranks")
    assert [file.name for file in tmp_path.iterdir()] == ["out.png"]
    height, width = imread(path).shape[:2]
    assert 1000 < width < 1500
    assert 250 < height < 600
    counts = pixels(path)
    # Units of time: 8 of F, 4 of B and of W, 8 of BW, 8 idle; and 8 % of the height of all 32 is
    # between the ranks' bars. Numbers, white edges and the legend make the difference.
    unit = counts[color_of(F(0), 1)] / 8
    assert 2500 < unit < 5000
    for compute, units in [(B(0), 4), (W(0), 4), (BW(0), 8)]:
        assert counts[color_of(compute, 1)] == pytest.approx(units * unit, rel=0.15)
    assert counts[IDLE] == pytest.approx((8 + 0.08 * 32) * unit, rel=0.15)


def test_picture_has_a_shade_for_each_chunk(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    draw_timelines({"v": there_and_back()}, path, unit="ms")
    counts = pixels(path)
    for kind in (F, B, W):
        first, second = (counts[color_of(kind(0, chunk), 2)] for chunk in (0, 1))
        assert first == pytest.approx(second, rel=0.2)
    assert color_of(BW(0), 2) not in counts


def test_a_larger_picture_is_larger(tmp_path: Path) -> None:
    sizes = []
    for microbatches in (2, 100):
        path = tmp_path / f"{microbatches}.png"
        computes = [kind(i) for i in range(microbatches) for kind in (F, BW)]
        draw_timelines({"one rank": timeline(Placement.loop(1), computes)}, path)
        sizes.append(imread(path).shape)
    assert sizes[0][1] < sizes[1][1] < 4000


def test_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out.png").mkdir()
    with pytest.raises(OSError, match="directory"):
        draw_timelines({"split": split()}, tmp_path / "out.png")
    assert [file.name for file in tmp_path.iterdir()] == ["out.png"]


# As a trace.


def test_trace_events() -> None:
    trace = json.loads(json.dumps(chrome_trace(there_and_back(), 1e-3)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 12
    assert spans[1] == {
        "name": "F0.1",
        "cat": "forward",
        "ph": "X",
        "ts": 1500.0,
        "dur": 500.0,
        "pid": 1,
        "tid": 0,
        "args": {"microbatch": 0, "stage": 3, "chunk": 1},
    }
    assert {event["tid"] for event in spans} == {0, 1}
    assert {event["cat"] for event in spans} == {"forward", "input gradient", "weight gradient"}


def test_trace_names_processes_and_ranks() -> None:
    events = chrome_trace(split(), process=3, name="zb-h1")["traceEvents"]
    names = {
        (event["name"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", 0] == "zb-h1"
    assert names["thread_name", 1] == "rank 1"
    assert {event["pid"] for event in events} == {3}


def test_a_measured_trace_begins_at_zero() -> None:
    measured = Timeline(Placement.loop(1), [[Span(F(0), 12.5, 12.75), Span(BW(0), 13.0, 13.5)]])
    spans = [event for event in chrome_trace(measured)["traceEvents"] if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in spans] == [(0, 250_000), (500_000, 500_000)]
