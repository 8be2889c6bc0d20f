"""Islands that are jobs of their own: DiLoCo's bits, staleness, and what may die."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.errors import RunError
from megabit.launch import run_ranks
from megabit.outer import open_outer
from megabit.outer.outer_step import outer_step
from megabit.training.step import TrainingState, train_step
from tests.outer.jobs import (
    Background,
    Job,
    StaleRun,
    both,
    free_port,
    owner_here,
    owner_process,
    share_of,
    stale_config,
    stale_settings,
    wait_until,
)
from tests.training.runs import AtStep, checkpoint, config_of, train, train_here
from tests.training.tiny import Owned, logical, make_mesh, owned, tiny, tiny_corpus

STEPS = 7
"""Two rounds, and a step that is left over."""


def diloco(islands: int) -> list[list[Tensor]]:
    """Masters and moments of each island, of a run in one world."""
    config = tiny(
        *("outer.method=diloco", f"outer.islands={islands}", "outer.inner_steps=3"),
        *("train.micro_batch_size=1", "train.global_batch_size=12"),
    )

    def train() -> list[Tensor]:
        state = TrainingState.create(config, make_mesh(config))
        outer = open_outer(config, state.optimizer)
        assert outer is not None
        for step in range(STEPS):
            train_step(state, share_of(config, state.mesh, step, state.mesh.outer.rank), step)
            outer.after_step(step + 1)
        outer.conclude(STEPS)
        return everything(state)

    return run_ranks(train, islands)


def everything(state: TrainingState) -> list[Tensor]:
    pieces = [piece.tensors for piece in state.optimizer.pieces()]
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return [tensors[kind].clone() for tensors in pieces for kind in kinds]


@pytest.mark.parametrize("islands", [2, 3])
def test_staleness_0_is_diloco_bit_by_bit(islands: int, tmp_path: Path) -> None:
    settings = (f"outer.islands={islands}", "train.global_batch_size=12")
    expected = diloco(islands)
    with owner_here(tmp_path, *settings) as (port, lines, _):

        def train(island: int) -> Callable[[], list[Tensor]]:
            config = stale_config(port, island, *settings)
            return lambda: everything(StaleRun.create(config).train(STEPS).state)

        jobs = [Job.start(train(island)) for island in range(islands)]
        results = [job.result() for job in jobs]
    for island, plain in zip(results, expected, strict=True):
        assert len(island) == len(plain)
        assert all(map(torch.equal, island, plain))
    assert sum("joined in round 0" in line for line in lines) == islands
    assert sum("has finished" in line for line in lines) == islands


def test_islands_may_have_different_layouts(tmp_path: Path) -> None:
    """TP 2, where two ranks hold each KV head's neighbours; one process; and DP 2 whose ranks both
    hold everything. All end with the same bits."""
    settings = ("outer.islands=3", "train.global_batch_size=12", "model.num_attention_heads=4")
    layouts = [
        (2, ("parallel.tp=2", "model.num_key_value_heads=1")),
        (1, ("model.num_key_value_heads=1",)),
        (2, ("optim.zero_stage=0", "model.num_key_value_heads=1")),
    ]
    with owner_here(tmp_path, *settings, "model.num_key_value_heads=1") as (port, _, _):

        def train(config: Config) -> Callable[[], tuple[Owned, list[Tensor]]]:
            def masters() -> tuple[Owned, list[Tensor]]:
                run = StaleRun.create(config).train(STEPS)
                return owned(run.state.optimizer), run.copies()

            return masters

        jobs = []
        for island, (ranks, layout) in enumerate(layouts):
            train_one = train(stale_config(port, island, *settings, *layout))
            jobs.append(Job.start(lambda t=train_one, n=ranks: run_ranks(t, n)))
        results = [job.result() for job in jobs]
    wholes = [logical(own for own, _ in ranks) for ranks in results]
    for other in wholes[1:]:
        assert all(torch.equal(x, other[name]) for name, x in wholes[0].items())
    first, second = (masters for _, masters in results[2])
    assert all(map(torch.equal, first, second))


class OuterByHand:
    """The owner's arithmetic, in the open."""

    def __init__(self, initial: list[Tensor]) -> None:
        self.anchor = initial
        self.momentum = [torch.zeros_like(x) for x in initial]

    def close(self, *islands: list[Tensor]) -> list[Tensor]:
        """The next anchor, with the default outer.lr and outer.momentum."""
        means = [(a + b) / 2 for a, b in zip(*islands, strict=True)]
        self.anchor = [x.clone() for x in self.anchor]
        for anchor, mean, momentum in zip(self.anchor, means, self.momentum, strict=True):
            outer_step(anchor, mean, momentum, 0.7, 0.9)
        return self.anchor


def moved(start: list[Tensor], seed: int) -> list[Tensor]:
    """What ``StaleRun.walk`` makes of it."""
    generator = torch.Generator().manual_seed(seed)
    return [x.add(torch.randn(x.shape, generator=generator), alpha=0.1) for x in start]


def minus(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_staleness_1_is_what_it_says_bit_by_bit(tmp_path: Path) -> None:
    """Island 0 is always a round ahead: it takes each anchor less what it has done since."""
    with (
        owner_here(tmp_path, "outer.staleness=1") as (port, _, owner),
        both(port, "outer.staleness=1") as (fast, slow),
    ):
        by_hand = OuterByHand(fast.copies())
        fast.walk(0)
        fast_0 = moved(by_hand.anchor, 0)
        assert same(fast.masters(), fast_0)  # nothing is closed, so it goes on from where it is

        ahead = Background(lambda: fast.walk(1))
        wait_until(lambda: owner.rounds.islands[0].awaits == 1)
        slow.walk(10)
        ahead.result()
        anchor_1 = by_hand.close(fast_0, moved(by_hand.anchor, 10))
        change_1 = minus(fast_0, moved(fast_0, 1))
        assert same(slow.masters(), anchor_1)
        assert same(fast.masters(), minus(anchor_1, change_1))

        ahead = Background(lambda: fast.walk(2))
        wait_until(lambda: owner.rounds.islands[0].awaits == 2)
        slow.walk(11)
        ahead.result()
        anchor_2 = by_hand.close(minus(anchor_1, change_1), moved(anchor_1, 11))
        start_2 = minus(anchor_1, change_1)
        change_2 = minus(start_2, moved(start_2, 2))
        assert same(slow.masters(), anchor_2)
        assert same(fast.masters(), minus(anchor_2, change_2))

        end = Background(lambda: fast.outer.conclude(fast.steps))
        slow.walk(12)
        anchor_3 = by_hand.close(minus(anchor_2, change_2), moved(anchor_2, 12))
        assert end.result()
        assert not slow.outer.conclude(slow.steps)
        assert same(fast.masters(), anchor_3)
        assert same(slow.masters(), anchor_3)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_fast_island_is_so_many_rounds_ahead_and_then_waits(
    staleness: int, tmp_path: Path
) -> None:
    settings = (f"outer.staleness={staleness}",)
    with (
        owner_here(tmp_path, *settings) as (port, _, owner),
        both(port, *settings) as (fast, slow),
    ):
        for seed in range(staleness):
            fast.walk(seed)
        assert owner.rounds.version == 0
        ahead = Background(lambda: fast.walk(staleness))
        wait_until(lambda: owner.rounds.islands[0].awaits == 1)
        assert ahead.is_alive()
        slow.walk(10)
        ahead.result()
        assert owner.rounds.version == 1


def test_who_is_slow_is_dropped_and_told_when_it_comes(tmp_path: Path) -> None:
    settings = ("outer.patience_s=0.3",)
    with (
        owner_here(tmp_path, *settings) as (port, lines, owner),
        both(port, *settings) as (fast, slow),
    ):
        fast.walk(0)  # waits for 0.3 s
        fast.walk(1)  # for nobody
        assert owner.rounds.version == 2
        assert "island 1 dropped: the others have waited for 0.3 s" in lines
        assert not same(fast.masters(), slow.masters())
        slow.walk(10)
        assert same(fast.masters(), slow.masters())  # its round is gone
        assert "island 1 is too late with round 0 (1 so far)" in lines
        assert "island 1 came back in round 2, with the newest weights" in lines
        assert slow.said == []
        together = Background(lambda: fast.walk(2))
        slow.walk(11)
        together.result()
        assert same(fast.masters(), slow.masters())
        assert owner.rounds.version == 3
    told = [line for line in lines if line.startswith("round")]  # who it is of, and every so often
    assert told == ["round 0 closed: islands 0", "round 2 closed: islands 0, 1"]


def test_an_island_that_is_killed_stops_nobody_and_comes_back(tmp_path: Path) -> None:
    def die_in_round_1() -> None:
        run = StaleRun.create(stale_config(port, 1))
        run.outer.begin()
        for _ in range(4):
            run.step()
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_again() -> list[Tensor]:
        run = StaleRun.create(stale_config(port, 1))
        run.outer.begin()
        assert "goes on from the weights of the owner" in run.said[0]
        return run.go_on(6).copies()

    with owner_here(tmp_path) as (port, lines, owner):
        job = Job.start(die_in_round_1)
        run = StaleRun.create(stale_config(port, 0))
        run.outer.begin()
        for _ in range(9):  # three rounds, of which the other was there for one
            run.step()
        job.process.join()
        assert "island 1 dropped: its connection has ended" in lines
        assert owner.rounds.version == 3
        job = Job.start(begin_again)
        wait_until(lambda: "island 1 came back in round 3, with the newest weights" in lines)
        for _ in range(6):
            run.step()
        run.outer.conclude(run.steps)
        assert same(run.masters(), job.result())
        assert owner.rounds.version == 5
        wait_until(lambda: owner.rounds.is_over)


@pytest.mark.slow
def test_an_owner_that_is_killed_goes_on_from_its_file(tmp_path: Path) -> None:
    """With the same bits as if nothing had happened."""

    def walk(seed: int, fast: StaleRun, slow: StaleRun) -> None:
        together = Background(lambda: fast.walk(seed))
        slow.walk(10 + seed)
        together.result()

    with owner_here(tmp_path) as (port, _, _), both(port) as (fast, slow):
        for seed in range(3):
            walk(seed, fast, slow)
        expected = fast.copies()

    port, state = free_port(), tmp_path / "state" / "outer.safetensors"
    state.parent.mkdir()
    with owner_process(port, state) as (process, _), both(port) as (fast, slow):
        walk(0, fast, slow)
        ahead = Background(lambda: fast.walk(1))
        process.kill()
        process.wait()
        with owner_process(port, state) as (again, said):
            slow.walk(11)
            ahead.result()
            again.terminate()
            assert again.wait() == 0
            assert "goes on after round 1" in said.read_text()
            assert "stopped; the same command goes on" in said.read_text()
        with owner_process(port, state) as (last, said):
            walk(2, fast, slow)
            assert same(fast.masters(), expected)
            assert same(slow.masters(), expected)
            end = Background(lambda: fast.outer.conclude(fast.steps))
            slow.outer.conclude(slow.steps)
            end.result()
            assert last.wait() == 0
            assert "all islands have finished" in said.read_text()
        assert any("try 1 of 4000" in line for line in fast.said)


def test_rounds_that_an_owner_has_forgotten_are_brought_again(tmp_path: Path) -> None:
    """A round that was delivered and not closed is not in the owner's file, but with its island."""
    settings = ("outer.staleness=1",)
    with owner_here(tmp_path, *settings) as (port, _, _):
        runs = [StaleRun.create(stale_config(port, island, *settings)) for island in (0, 1)]
        fast, slow = runs
        for run in runs:
            run.outer.begin()
        by_hand = OuterByHand(fast.copies())
        fast.walk(0)
    with owner_here(tmp_path, *settings, port=port) as (_, lines, owner):
        ahead = Background(lambda: fast.walk(1))
        wait_until(lambda: owner.rounds.islands[0].awaits == 1)
        slow.walk(10)
        ahead.result()
        assert "island 0 came back in round 1" in lines
        fast_0 = moved(by_hand.anchor, 0)
        term = minus(by_hand.anchor, minus(by_hand.anchor, fast_0))
        anchor_1 = by_hand.close(term, moved(by_hand.anchor, 10))
        assert same(slow.masters(), anchor_1)
        assert same(fast.masters(), minus(anchor_1, minus(fast_0, moved(fast_0, 1))))
        for run in runs:
            run.outer.close()


def test_an_owner_that_is_lost_is_named(tmp_path: Path) -> None:
    port = free_port()
    run = StaleRun.create(stale_config(port, 0, "faults.retries=2"))
    with pytest.raises(RunError, match=rf"outer.owner: 127.0.0.1:{port} is lost: "):
        run.outer.begin()
    tries = [line.split("; ")[1] for line in run.said]
    assert tries == ["try 1 of 2 in 0.05 s", "try 2 of 2 in 0.05 s"]


def test_an_island_that_resumes_in_the_middle_of_a_round_has_the_same_bits(tmp_path: Path) -> None:
    expected = diloco(2)
    settings = ("train.global_batch_size=12",)

    def stop_and_go_on(port: int, island: int) -> list[Tensor]:
        config = stale_config(port, island, *settings)
        run = StaleRun.create(config)
        run.outer.begin()
        for _ in range(4):
            run.step()
        kept = everything(run.state)
        outer, updates = run.outer.state(), run.state.optimizer.updates
        run.outer.close()

        again = StaleRun.create(config)
        optimizer = again.state.optimizer
        optimizer.begin_restore(updates)
        kinds = ("master", "exp_avg", "exp_avg_sq")
        views = [p.tensors[kind] for p in optimizer.pieces() for kind in kinds]
        for view, values in zip(views, kept, strict=True):
            view.copy_(values)
        optimizer.publish()
        again.steps = 4
        assert not again.outer.resume(outer)
        return everything(again.go_on(STEPS - 4).state)

    with owner_here(tmp_path, *settings) as (port, lines, _):
        jobs = [Job.start(partial(stop_and_go_on, port, island)) for island in (0, 1)]
        for job, plain in zip(jobs, expected, strict=True):
            assert same(job.result(), plain)
    assert "island 1 came back in round 1" in lines


@pytest.mark.slow
def test_runs_that_are_stopped_and_go_on_are_diloco_bit_by_bit(tmp_path: Path) -> None:
    """Two jobs of ``megabit train``, each with a folder of its own, against two islands of one
    world. Both are stopped in the middle of a round, and so is the owner."""
    corpus = tiny_corpus(tmp_path)
    same_run = ("outer.islands=2", "outer.inner_steps=3", "train.steps=7", "run.timeout_s=60")
    together = tmp_path / "together"
    settings = ("outer.method=diloco", "train.micro_batch_size=1", *same_run)
    train(config_of(corpus, together, *settings), 2)

    def job(port: int, island: int, stop_after: int | None) -> Job:
        folder = tmp_path / f"island{island}"
        config = config_of(corpus, folder, *stale_settings(port, island), *same_run)
        if stop_after is None:
            return Job.start(partial(train_here, config))
        return Job.start(partial(train_here, config, partial(AtStep, stop_after, signal.SIGTERM)))

    for stop_after in (4, None):
        with owner_here(tmp_path, *same_run) as (port, lines, _):
            jobs = [job(port, island, stop_after) for island in (0, 1)]
            for finished, said in (job.result() for job in jobs):
                assert finished is (stop_after is None)
                assert stop_after is None or "Stopped after step 4" in said
    assert "island 0 came back in round 1" in lines
    ends = [checkpoint(tmp_path / f"island{island}", 7) for island in (0, 1)]
    whole = checkpoint(together, 7)
    for island, tensors in enumerate(ends):
        prefix = f"island{island}." if island else ""
        for name, tensor in tensors.items():
            assert torch.equal(tensor, whole[prefix + name]), name
