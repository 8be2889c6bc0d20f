"""The measured timeline of a step: gathered from all ranks, on one clock, and what is written."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.pipeline.actions import Backward, Compute, Forward, InputGradient, WeightGradient
from megabit.pipeline.clock import Clock
from megabit.pipeline.draw import kind_of
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import StagePlan, plan_stages
from megabit.pipeline.timeline import Span, Timeline
from megabit.reduce import broadcast
from megabit.training import timeline as training_timeline
from megabit.training.step import TrainingState, train_step
from megabit.training.timeline import gather_timeline, write_timeline
from tests.training.runs import config_of, rows, train
from tests.training.tiny import make_mesh, own_batch, tiny, tiny_corpus

CPU = torch.device("cpu")
FOUR_LAYERS = "model.num_hidden_layers=4"
V = ("parallel.pp=2", "parallel.schedule=zb-v", "parallel.vpp=2", FOUR_LAYERS)


def assert_well_formed(timeline: Timeline, plan: StagePlan) -> None:
    """Every compute of the schedule once, in order, one at a time, from time 0."""
    assert timeline.placement == plan.schedule.placement
    assert timeline.start == 0
    for rank, spans in enumerate(timeline.ranks):
        assert timeline.computes(rank) == plan.schedule.computes(rank)
        assert all(0 <= span.start <= span.end for span in spans)
        assert all(a.end <= b.start for a, b in pairwise(spans))


@pytest.mark.parametrize(
    "chosen",
    [
        ("parallel.pp=2",),
        ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=2", FOUR_LAYERS),
        V,
    ],
    ids=["1f1b", "interleaved", "zb-v"],
)
def test_all_ranks_gather_the_same_timeline(chosen: tuple[str, ...]) -> None:
    config = tiny(*chosen)
    plan = plan_stages(config, dp=1)

    def run() -> tuple[Timeline, list[Span]]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        spans = train_step(state, own_batch(config, mesh, 0), 0).pipeline.spans
        return gather_timeline(spans, plan.schedule.placement, mesh.pp, CPU), spans

    ranks = run_ranks(run, 2)
    timeline = ranks[0][0]
    assert all(other == timeline for other, _ in ranks)
    assert_well_formed(timeline, plan)
    for gathered, (_, own) in zip(timeline.ranks, ranks, strict=True):
        assert [s.duration for s in gathered] == pytest.approx([s.duration for s in own])


def spans_of(computes: Sequence[Compute], start: float = 0) -> list[Span]:
    """One after the other, a second each."""
    return [Span(c, start + i, start + i + 1) for i, c in enumerate(computes)]


def test_ranks_may_have_different_numbers_of_computes() -> None:
    """A schedule of a user may split the backward passes of one rank only."""
    computes: list[list[Compute]] = [
        [Forward(0), Forward(1), Backward(0), Backward(1)],
        [Forward(0), InputGradient(0), Forward(1), InputGradient(1), *map(WeightGradient, (0, 1))],
    ]

    def run() -> Timeline:
        mesh = ParallelMesh.create(1, 2, CPU)
        spans = spans_of(computes[mesh.pp.rank])
        return gather_timeline(spans, Placement.loop(2), mesh.pp, CPU)

    for timeline in run_ranks(run, 2):
        assert [timeline.computes(rank) for rank in (0, 1)] == computes


def test_clocks_of_ranks_are_brought_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of three hosts that were started at different times. Spans are really at the same
    times on all ranks; about the time of a message is left between them, on a busy machine more."""
    ahead = (0.0, 100.0, -50.0)
    computes = [Forward(0), Backward(0)]

    def run() -> Timeline:
        mesh = ParallelMesh.create(1, 3, CPU)
        mine = ahead[mesh.pp.rank]
        monkeypatch.setattr(training_timeline, "perf_counter", lambda: time.perf_counter() + mine)
        begun = broadcast(torch.tensor([time.perf_counter()], dtype=torch.float64), 0, mesh.pp)
        spans = spans_of(computes, begun.item() + mine)
        return gather_timeline(spans, Placement.loop(3), mesh.pp, CPU)

    ranks = run_ranks(run, 3)
    assert ranks[1:] == ranks[:1] * 2
    assert ranks[0].start == 0
    for spans in ranks[0].ranks:
        for span, at in zip(spans, (0, 1), strict=True):
            assert span.start == pytest.approx(at, abs=0.5)
            assert span.duration == pytest.approx(1)


def test_a_clock_of_a_cpu_is_the_hosts() -> None:
    before = time.perf_counter()
    clock = Clock(CPU)
    marks = [clock.mark() for _ in range(3)]
    seconds = [clock.seconds(mark) for mark in marks]
    times = [before, *seconds, time.perf_counter()]
    assert times == sorted(times)
    assert [clock.seconds(mark) for mark in marks] == seconds  # a mark can be read again


def test_what_is_written(tmp_path: Path) -> None:
    """Of a timeline whose times are known."""
    computes = [[Forward(0), Backward(0)], [Forward(0), Backward(0)]]
    ranks = [spans_of(own, start) for own, start in zip(computes, (0, 0.5), strict=True)]
    text = write_timeline(
        Timeline(Placement.loop(2), ranks), tmp_path / "new" / "folder", 7, "my.py:own"
    )
    first, *lines = text.splitlines()
    # 2 · 2.5 s for 4 s of work.
    assert first == "step 7, my.py:own: 2500.0 ms, bubble of this step 25.0%"
    assert [line.split()[:2] for line in lines] == [["rank", "0"], ["rank", "1"]]
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {
        f"step_000007.{ending}" for ending in ("txt", "json", "png")
    }
    assert (folder / "step_000007.txt").read_text() == text + "\n"
    events = json.loads((folder / "step_000007.json").read_text())["traceEvents"]
    times = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert times == [(0, 0, 1e6), (0, 1e6, 1e6), (1, 0.5e6, 1e6), (1, 1.5e6, 1e6)]


# In a run.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def assert_traced(folder: Path, said: str, step: int, plan: StagePlan) -> None:
    """The three files of a step are whole, and its text is on the console."""
    stem = folder / "timeline" / f"step_{step:06}"
    text = stem.with_suffix(".txt").read_text()
    assert text in said
    assert text.startswith(f"step {step}, ")
    assert len(text.splitlines()) == 1 + plan.schedule.placement.ranks
    assert min(imread(stem.with_suffix(".png")).shape[:2]) > 100
    trace = json.loads(stem.with_suffix(".json").read_text())
    for rank in range(plan.schedule.placement.ranks):
        events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == rank]
        computes = plan.schedule.computes(rank)
        assert [e["name"] for e in events] == [str(compute) for compute in computes]
        assert [e["cat"] for e in events] == [kind_of(compute) for compute in computes]
        assert all(e["dur"] >= 0 for e in events)
        starts = [e["ts"] for e in events]
        assert min(starts) >= 0
        assert starts == sorted(starts)


def test_a_run_records_the_last_step_before_each_log_line(
    corpus: CorpusInfo, tmp_path: Path
) -> None:
    """And trains as it does without."""
    settings = (*V, "train.steps=5", "train.log_interval=2")
    traced, plain = tmp_path / "traced", tmp_path / "plain"
    config = config_of(corpus, traced, *settings, "telemetry.trace=true")
    finished, said = train(config, 2)
    assert finished
    names = {path.stem for path in (traced / "timeline").iterdir()}
    assert names == {"step_000002", "step_000004", "step_000005"}
    for step in (2, 4, 5):
        assert_traced(traced, said, step, plan_stages(config, dp=1))

    _, said = train(config_of(corpus, plain, *settings), 2)
    assert not (plain / "timeline").exists()
    assert "rank 0  " not in said
    assert rows(plain) == rows(traced)


@pytest.mark.parametrize(("settings", "world_size"), [((), 1), (("parallel.pp=2",), 4)])
def test_other_layouts_are_recorded_too(
    corpus: CorpusInfo, tmp_path: Path, settings: tuple[str, ...], world_size: int
) -> None:
    """One process; and with DP, where the main rank's pipeline is."""
    config = config_of(corpus, tmp_path, *settings, "train.steps=1", "telemetry.trace=true")
    _, said = train(config, world_size)
    dp = world_size // config.parallel.pp
    assert_traced(tmp_path, said, 1, plan_stages(config, dp))
    assert len([*(tmp_path / "timeline").iterdir()]) == 3


def test_one_rank_needs_no_group() -> None:
    timeline = gather_timeline(
        spans_of([Forward(0), Backward(0)], 17), Placement.loop(1), Axis.single("pp"), CPU
    )
    assert timeline.ranks == [spans_of([Forward(0), Backward(0)])]
