"""What ranks send each other: how much of it is kept, and what happens when one is gone.

Stages are as simple as they can be here: what goes between them is what counts.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from megabit import launch
from megabit.launch import RankError, run_ranks
from megabit.mesh import TIMEOUT, Axis, ParallelMesh
from megabit.pipeline.actions import Compute, Exchange, Message, Schedule
from megabit.pipeline.execute import run_schedule
from megabit.pipeline.mailbox import MAX_SENDS, Mailbox, PeerLost
from megabit.pipeline.placement import Placement
from megabit.tensor_parallel import ForwardPass
from tests.pipeline.schedules import SCHEDULES, Named, watched

H, SHAPE = 4, (2, 3)
CPU = torch.device("cpu")
ACTIVATION_BYTES = SHAPE[0] * SHAPE[1] * H * 4


class Doubling(nn.Module):
    """Stages that double what they get. ``in_forward`` and ``in_backward`` are called midway."""

    hidden_dtype = torch.float32

    def __init__(self, in_forward: Callable[[], Any], in_backward: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.in_forward, self.in_backward = in_forward, in_backward

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        return batch * length, H

    def forward(
        self, tokens: Tensor, hidden: Tensor | None, forward_pass: ForwardPass, chunk: int
    ) -> Tensor:
        if hidden is None:
            hidden = tokens.flatten().unsqueeze(1).expand(-1, H).float()
        self.in_forward()
        return _Marked.apply(hidden * self.weight, self.in_backward)


class _Marked(Function):
    """Passes everything on, and says when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_backward: Callable[[], Any]) -> Tensor:
        ctx.in_backward = in_backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.in_backward()
        return grads[0], None


def pipeline(ranks: int, timeout: timedelta = TIMEOUT) -> Axis:
    """All ranks of the job, which have met."""
    if not dist.is_initialized():
        return Axis.single("pp")
    dist.barrier()
    return ParallelMesh.create(1, ranks, CPU, timeout).pp


def nothing() -> None:
    pass


def run_on(
    pp: Axis,
    schedule: Schedule,
    in_forward: Callable[[], Any] = nothing,
    in_backward: Callable[[], Any] = nothing,
) -> tuple[list[float], float]:
    """Outputs, which are sums of the hidden states, and the gradient of the rank's weight."""
    stages = Doubling(in_forward, in_backward)
    result = run_schedule(
        schedule,
        stages,
        [torch.full(SHAPE, i) for i in range(schedule.microbatches)],
        lambda hidden, microbatch, forward_pass: hidden.sum(),
        pp,
        output_gradient=torch.tensor(1.0),
    )
    gradient = 0.0 if stages.weight.grad is None else stages.weight.grad.item()
    return [output.item() for output in result.outputs], gradient


def check(schedule: Schedule, rank: int, outputs: list[float], gradient: float) -> None:
    """Against the formula: a stage doubles, and dL/dw of each of the rank's stages is L/2."""
    placement = schedule.placement
    size = SHAPE[0] * SHAPE[1] * H
    losses = [size * i * 2.0**placement.num_stages for i in range(schedule.microbatches)]
    has_last = placement.rank_of(placement.num_stages - 1) == rank
    assert outputs == (losses if has_last else [])
    assert gradient == sum(losses) / 2 * placement.chunks


# What is kept


def test_few_sends_are_kept_and_nothing_is_left() -> None:
    """Also where all activations leave long before anyone waits (gpipe)."""
    schedules = [each.make(2, 3 * MAX_SENDS) for each in SCHEDULES]

    def run() -> list[tuple[list[int], list[float], float]]:
        pp = pipeline(2)
        kept: list[int] = []
        ended: list[Mailbox] = []
        post, finish = Mailbox.post, Mailbox.finish

        def posting(mailbox: Mailbox, exchange: Exchange) -> None:
            post(mailbox, exchange)
            kept.append(len(mailbox._leaving))

        def finishing(mailbox: Mailbox) -> None:
            finish(mailbox)
            ended.append(mailbox)

        found = []
        with (
            patch.object(Mailbox, "post", posting),
            patch.object(Mailbox, "finish", finishing),
        ):
            for schedule in schedules:
                kept.clear()
                outputs, gradient = run_on(pp, schedule)
                found.append(([*kept], outputs, gradient))
                mailbox = ended.pop()
                assert not mailbox._outgoing
                assert not mailbox._arrived
                assert not mailbox._arriving
                assert not mailbox._leaving
        return found

    for rank, found in enumerate(run_ranks(run, 2)):
        for schedule, (kept, outputs, gradient) in zip(schedules, found, strict=True):
            assert max(kept) <= MAX_SENDS
            check(schedule, rank, outputs, gradient)
            if rank == 0 and schedule == Named("gpipe").make(2, 3 * MAX_SENDS):
                assert max(kept) == MAX_SENDS


def test_stages_of_one_rank_exchange_nothing() -> None:
    """Three of a pipeline of one, and both sides of the turn of a V."""
    pp = Axis.single("pp")
    for each in SCHEDULES:
        schedule = each.make(1, 4)
        check(schedule, 0, *run_on(pp, schedule))
    assert Named("interleaved", 3).make(1, 4).placement.num_stages == 3
    assert pp.sent == {}

    schedule = Named("zb-v", 2).make(2, 4)
    assert schedule.placement == Placement(((0, 3), (1, 2)))

    def run() -> tuple[list[float], float, dict[str, float]]:
        pp = pipeline(2)
        return *run_on(pp, schedule), dict(pp.sent)

    for rank, (outputs, gradient, sent) in enumerate(run_ranks(run, 2)):
        check(schedule, rank, outputs, gradient)
        # From 0 to 1 and from 2 to 3 each once, and nothing from 1 to 2.
        expected = 4 * ACTIVATION_BYTES
        assert sent == {"activations": expected, "activation gradients": expected}


def test_messages_come_in_the_order_in_which_they_are_posted() -> None:
    """Several at once in both directions, of other shapes, taken in any order, and of a tensor that
    is not contiguous."""
    shapes = [(2, 3), (1, 3), (4, 3), (3, 3)]

    def tensor(source: int, microbatch: int) -> Tensor:
        rows, columns = shapes[microbatch]
        values = torch.arange(rows * columns, dtype=torch.float64).view(columns, rows).t()
        return values + 100 * source + 10 * microbatch

    def run() -> list[Tensor]:
        pp = pipeline(2)
        mailbox = Mailbox(pp, shapes.__getitem__, torch.float64, CPU)
        messages = [Message("activation", i, 0, 1 - pp.rank) for i in range(len(shapes))]
        for message in messages:
            mailbox.put(message, tensor(pp.rank, message.microbatch))
        mailbox.post(Exchange(tuple(messages[:3]), tuple(messages[:2])))
        mailbox.post(Exchange(tuple(messages[3:]), tuple(messages[2:])))
        taken = [mailbox.take(messages[i]).clone() for i in (3, 0, 2, 1)]
        mailbox.finish()
        assert pp.sent["activations"] == sum(8 * a * b for a, b in shapes)
        return taken

    for rank, taken in enumerate(run_ranks(run, 2)):
        for i, found in zip((3, 0, 2, 1), taken, strict=True):
            assert torch.equal(found, tensor(1 - rank, i))


# Who is gone


def told(folder: Path) -> dict[int, tuple[float, str]]:
    """By rank: when it lost a peer, and what it said."""
    found = {}
    for path in folder.glob("rank*"):
        moment, _, message = path.read_text().partition(" ")
        found[int(path.name.removeprefix("rank"))] = float(moment), message
    return found


def tell(folder: Path, name: str, text: object) -> None:
    """Files appear whole."""
    part = folder / f"part of {name}"
    part.write_text(f"{time.monotonic()} {text}")
    part.rename(folder / name)


def lose(
    folder: Path,
    each: Named,
    ranks: int,
    victim: int,
    fatal: str,
    end: Callable[[], Any],
    timeout: timedelta = TIMEOUT,
) -> None:
    """Run a schedule in which rank ``victim`` calls ``end`` in the middle of compute ``fatal``; in
    the run before nothing happened."""
    schedule = each.make(ranks, 5)
    assert fatal in map(str, schedule.computes(victim))

    def run() -> None:
        pp = pipeline(ranks, timeout)
        run_on(pp, schedule)
        now: list[Compute] = []

        def midway() -> None:
            if pp.rank == victim and str(now[-1]) == fatal:
                tell(folder, "ended", "")
                end()

        try:
            with watched(before=now.append):
                run_on(pp, schedule, midway, midway)
        except PeerLost as lost:
            if pp.rank != victim:
                tell(folder, f"rank{pp.rank}", lost)

    with all_are_heard():
        run_ranks(run, ranks)


def all_are_heard() -> AbstractContextManager[object]:
    """Meanwhile ``run_ranks`` lets the others go on when a rank has died, to say what they saw."""
    return patch.object(launch, "CAUSE_S", 120)


@pytest.mark.parametrize(
    ("each", "ranks", "victim", "fatal"),
    [
        (Named("1f1b"), 2, 1, "F2"),
        (Named("1f1b"), 2, 0, "BW1"),
        (Named("1f1b"), 3, 1, "F2"),
        (Named("1f1b"), 3, 1, "BW2"),
        (Named("zb-h1"), 3, 2, "B1"),
        (Named("zb-v", 2), 3, 1, "F2.1"),
        (Named("zb-v", 2), 3, 1, "B2"),
        (Named("interleaved", 2), 3, 0, "BW1"),
    ],
    ids=lambda value: str(value),
)
def test_a_rank_that_dies_is_named(
    each: Named, ranks: int, victim: int, fatal: str, tmp_path: Path
) -> None:
    """And so is what was waited for. Ranks that lose it end, and others lose them in turn."""
    with pytest.raises(RankError, match=f"rank {victim} died without a word"):
        lose(tmp_path, each, ranks, victim, fatal, end=lambda: os._exit(1))
    found = told(tmp_path)
    assert found.keys() == {*range(ranks)} - {victim}
    blamed = {}
    for rank, (_, message) in found.items():
        match = re.match(
            rf"pipeline rank {rank}: rank (\d) of the pipeline \(world rank (\d)\) does not "
            r"answer; lost the (activation|gradient) of microbatch [0-4] \(",
            message,
        )
        assert match is not None, message
        assert match[1] == match[2]
        blamed[rank] = int(match[1])
    first = min(found, key=lambda rank: found[rank][0])
    assert blamed[first] == victim, found
    if each.chunks == 1:  # then a neighbour has nobody else to lose first
        assert all(blamed[rank] == victim for rank in found if abs(rank - victim) == 1)


def test_a_rank_that_is_silent_is_given_up_after_the_time_out(tmp_path: Path) -> None:
    timeout = 4.0

    def sleep() -> None:
        """Until the others have given up."""
        for _ in range(1200):
            time.sleep(0.1)
            if len(told(tmp_path)) == 2:
                break

    lose(tmp_path, Named("1f1b"), 3, 1, "F2", sleep, timedelta(seconds=timeout))
    found = told(tmp_path)
    assert found.keys() == {0, 2}
    silent_since = float((tmp_path / "ended").read_text())
    for rank, (moment, message) in found.items():
        # The others wait from about then on. What is longer is this machine's delay.
        assert timeout / 2 < moment - silent_since < timeout + 20
        kind, microbatch = ("gradient", 1) if rank == 0 else ("activation", 2)
        assert message.startswith(
            f"pipeline rank {rank}: rank 1 of the pipeline (world rank 1) does not answer; lost "
            f"the {kind} of microbatch {microbatch} ("
        )


@pytest.mark.parametrize("is_send", [False, True])
def test_the_lost_one_of_an_exchange_is_named(is_send: bool, tmp_path: Path) -> None:
    """Not the one before it in the list, which is well."""
    well, lost = Message("gradient", 0, 0, 0), Message("activation", 7, 0, 2)

    def run() -> None:
        pp = pipeline(3)
        mailbox = Mailbox(pp, lambda _: SHAPE, torch.float32, CPU)
        if pp.rank == 2:
            os._exit(1)
        if pp.rank == 1:
            with suppress(PeerLost):
                while True:  # until it is known here
                    time.sleep(0.1)
                    mailbox.put(lost, torch.ones(SHAPE))
                    mailbox.post(Exchange((lost,), ()))
            mailbox = Mailbox(pp, lambda _: SHAPE, torch.float32, CPU)
            for message in (well, lost):
                mailbox.put(message, torch.ones(SHAPE))
            posted = Exchange((well, lost), ()) if is_send else Exchange((well,), (lost,))
            with pytest.raises(PeerLost) as caught:
                mailbox.post(posted)
            tell(tmp_path, "rank1", caught.value)
        else:  # rank 0 is well
            while not told(tmp_path):
                time.sleep(0.1)

    with all_are_heard(), pytest.raises(RankError, match="rank 2 died without a word"):
        run_ranks(run, 3)
    _, message = told(tmp_path)[1]
    assert "rank 2 of the pipeline (world rank 2) does not answer" in message
    assert "lost the activation of microbatch 7" in message
