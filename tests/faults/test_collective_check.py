"""Ranks that call different collectives all say so; with the check, nothing else is different."""

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from megabit import reduce
from megabit.config import Drill
from megabit.errors import RunError
from megabit.faults.collective_check import check_collectives
from megabit.faults.drills import Drills
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh, process_group
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import bits, make_mesh, own_batch, tiny

CPU = torch.device("cpu")
Call = Callable[[Axis], object]


def told(calls: dict[int, Call], usual: Call, world_size: int, tp: int = 1) -> list[str]:
    """What each rank raises if some call something else than ``usual`` over dp."""

    def run() -> str:
        mesh = ParallelMesh.create(tp, 1, CPU)
        check_collectives(mesh)
        before = dict(mesh.dp.sent)
        try:
            calls.get(mesh.world.rank, usual)(mesh.dp)
        except RunError as error:
            assert mesh.dp.sent == before
            return str(error)
        return ""

    return run_ranks(run, world_size)


def summed(length: int, op: str = "sum", dtype: torch.dtype = torch.float32) -> Call:
    return lambda axis: reduce.all_reduce(torch.zeros(length, dtype=dtype), axis, op)  # type: ignore[arg-type]


FOUR = "all_reduce sum [4] torch.float32 for control"


@pytest.mark.parametrize(
    ("other", "called"),
    [
        (summed(5), "all_reduce sum [5] torch.float32 for control"),
        (summed(4, "max"), "all_reduce max [4] torch.float32 for control"),
        (summed(4, dtype=torch.int32), "all_reduce sum [4] torch.int32 for control"),
        (
            lambda axis: reduce.all_gather(torch.zeros(4), axis),
            "all_gather [4] torch.float32 for control",
        ),
        (
            lambda axis: reduce.broadcast(torch.zeros(4), 1, axis),
            "broadcast from 1 [4] torch.float32 for control",
        ),
        (
            lambda axis: reduce.all_reduce(torch.zeros(4), axis, purpose="scales"),
            "all_reduce sum [4] torch.float32 for scales",
        ),
        (
            lambda axis: reduce.start_exchange(torch.zeros(2), [1, 1, 0], [1, 1, 0], axis),
            "exchange torch.float32 for control",
        ),
    ],
    ids=["shape", "op", "dtype", "kind", "source", "purpose", "exchange"],
)
def test_every_rank_names_who_calls_what(other: Call, called: str) -> None:
    expected = f"ranks call different collectives over dp: ranks 0, 1 call {FOUR}; rank 2 calls "
    assert told({2: other}, summed(4), 3) == [expected + called] * 3


def test_ranks_are_those_of_the_world() -> None:
    """Over dp of the second tensor-parallel place: ranks 1 and 3."""
    problems = told({3: summed(5)}, summed(4), 4, tp=2)
    assert problems[0] == problems[2] == ""
    assert problems[1] == problems[3]
    assert "over dp: rank 1 calls all_reduce sum [4]" in problems[1]
    assert "; rank 3 calls all_reduce sum [5]" in problems[1]


def test_an_exchange_has_the_same_sizes_on_both_sides() -> None:
    def swapped(sent: list[int], received: list[int]) -> Call:
        return lambda axis: reduce.start_exchange(
            torch.zeros(sum(sent)), sent, received, axis
        ).wait()

    right = {0: swapped([1, 2], [1, 3]), 1: swapped([3, 4], [2, 4])}
    assert told(right, summed(1), 2) == ["", ""]
    wrong = {**right, 1: swapped([3, 4], [1, 4])}
    expected = (
        "ranks disagree on exchange torch.float32 for control over dp: "
        "rank 0 sends 2 elements to rank 1, which expects 1"
    )
    assert told(wrong, summed(1), 2) == [expected] * 2


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((), 2),
        (("parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"), 4),
        (("communication.dp_intra=2", "parallel.bucket_mb=0.01"), 4),
        (("parallel.pp=2", "optim.zero_stage=2", "parallel.schedule=zb-h1"), 4),
    ],
    ids=["dp2", "tp2-pp2-sp", "two levels", "pp2-dp2"],
)
def test_a_run_with_it_is_the_same_run(settings: tuple[str, ...], world_size: int) -> None:
    """Bits, and bytes that are counted; and it never waits in a circle."""
    config = tiny(*settings)

    def steps(checked: bool) -> tuple[list[Tensor], dict[tuple[str, str], float], int]:
        mesh = make_mesh(config)
        if checked:
            check_collectives(mesh)
        state = TrainingState.create(config, mesh)
        for step in range(2):
            train_step(state, own_batch(config, mesh, step), step)
        return bits(state), mesh.sent(), sum(mesh.calls().values())

    def run() -> None:
        (tensors, sent, calls), (others, sent_too, calls_too) = steps(False), steps(True)
        assert all(map(torch.equal, tensors, others))
        assert sent == sent_too
        assert calls == calls_too

    run_ranks(run, world_size)


def planted(mesh: ParallelMesh, folder: Path) -> Drills:
    """A mismatch on rank 1."""
    drills, nothing = [Drill("mismatch", rank=1)], torch.nn.Identity()
    planted = Drills(
        drills, folder, nothing, mesh.world, CPU, lambda drill: None, lambda around: None
    )
    reduce.any_rank(False, mesh.world, CPU)  # all have looked for markers
    return planted


def test_the_drill_is_refused_with_it(tmp_path: Path) -> None:
    def run() -> str:
        mesh = ParallelMesh.create(1, 1, CPU)
        check_collectives(mesh)
        with pytest.raises(RunError) as caught:
            planted(mesh, tmp_path).before_step(0)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "rank 0 calls all_reduce sum [6]" in first
    assert "rank 1 calls all_reduce sum [7]" in first


def without_check(rank: int, folder: Path) -> None:
    """A rank that meets the drill without the check."""
    faulthandler.disable()  # pytest's, which would print stacks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says when it ends
    with process_group(rank, 2, CPU, f"file://{folder / 'rendezvous'}"):
        planted(ParallelMesh.create(1, 1, CPU), folder).before_step(0)


def test_without_it_gloo_ends_the_process(tmp_path: Path) -> None:
    """No exception could be caught: the reason for the check."""
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=without_check, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert -signal.SIGABRT in [process.exitcode for process in ranks]
