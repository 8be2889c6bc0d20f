"""Ranks as forked processes: what comes back, and what a failure looks like from outside."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabit.launch import RankError, run_ranks


def raise_an_error() -> None:
    raise ValueError("the real reason")


def exit_without_a_word() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails_on_rank_2(failure: Callable[[], None], pids: Path) -> Callable[[], None]:
    """The other ranks wait for rank 2 in a collective, so they fail too when it is gone."""

    def run() -> None:
        rank = dist.get_rank()
        (pids / str(rank)).write_text(str(os.getpid()))
        dist.barrier()  # all are there
        if rank == 2:
            failure()
        dist.all_reduce(torch.zeros(3))

    return run


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_are_in_rank_order(world_size: int) -> None:
    captured = torch.arange(4)

    def run() -> tuple[int, int, int]:
        if world_size == 1:
            return 0, 1, int(captured.sum())
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), int(captured.sum())

    assert run_ranks(run, world_size) == [(rank, world_size, 6) for rank in range(world_size)]


def test_tensors_come_back() -> None:
    def run() -> dict[str, Tensor]:
        rank = dist.get_rank()
        return {"large": torch.full((1_000_000,), rank), "half": torch.tensor(rank).bfloat16()}

    for rank, result in enumerate(run_ranks(run, 2)):
        assert torch.equal(result["large"], torch.full((1_000_000,), rank))
        assert torch.equal(result["half"], torch.tensor(rank).bfloat16())


def test_a_rank_computes_with_one_thread() -> None:
    assert run_ranks(torch.get_num_threads, 2) == [1, 1]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (raise_an_error, r"(?s)^rank 2 failed:\nTraceback.*ValueError: the real reason"),
        (exit_without_a_word, r"^rank 2 died"),
        (be_killed, r"^rank 2 died"),
    ],
)
def test_the_rank_that_failed_first_is_named(
    failure: Callable[[], None], message: str, tmp_path: Path
) -> None:
    for attempt in range(3):  # the others fail at nearly the same time: no order is lucky
        pids = tmp_path / str(attempt)
        pids.mkdir()
        with pytest.raises(RankError, match=message):
            run_ranks(fails_on_rank_2(failure, pids), 4)
        for rank in range(4):
            with pytest.raises(ProcessLookupError):
                os.kill(int((pids / str(rank)).read_text()), 0)


def test_ranks_that_wait_forever_are_ended() -> None:
    def run() -> None:
        if dist.get_rank() == 1:
            raise_an_error()
        signal.pause()

    with pytest.raises(RankError, match="the real reason"):
        run_ranks(run, 2)


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*pickle"):
        run_ranks(lambda: lambda: None, 1)
