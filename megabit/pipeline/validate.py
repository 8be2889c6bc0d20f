"""Proof that a schedule computes everything once and cannot hang, before any rank runs it.

A send is taken to be over only when its receiver has posted the receive (rendezvous, as in gloo).
A transport that buffers, as NCCL may, only ends sends sooner, so what passes here passes there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megabit.pipeline.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    Message,
    Schedule,
    needed_by,
    produced_by,
)


class ScheduleError(ValueError):
    """A schedule is wrong; each finding is one line that names the stage."""

    def __init__(self, *findings: str) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


def validate(
    schedule: Schedule, stages: int, microbatches: int, forward_only: bool = False
) -> None:
    """Check that the schedule is complete, consistent between stages and free of deadlock.

    Deadlock is looked for only in a schedule without other findings: a message that is missing or
    out of order hangs the pipeline anyway, and the finding about it says more.

    Raises:
        ScheduleError: with every finding.
    """
    if len(schedule) != stages:
        raise ScheduleError(f"has {len(schedule)} stages, must have {stages}")
    computes: list[Compute] = [*map(Forward, range(microbatches))]
    if not forward_only:
        computes += map(Backward, range(microbatches))
    findings = [
        f"stage {stage}: {finding}"
        for stage, actions in enumerate(schedule)
        for finding in _stage_findings(actions, stage, stages, computes)
    ]
    findings += _order_findings(schedule)
    findings = findings or _deadlock_findings(schedule)
    if findings:
        raise ScheduleError(*findings)


def peak_activations(schedule: Schedule) -> list[int]:
    """For each stage, the most microbatches that wait for their backward pass at one time."""
    peaks = []
    for actions in schedule:
        live = peak = 0
        for action in actions:
            live += isinstance(action, Forward) - isinstance(action, Backward)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _stage_findings(
    actions: Sequence[Action], stage: int, stages: int, computes: Sequence[Compute]
) -> Iterator[str]:
    """What is wrong on one stage, given that it must run each of ``computes`` once."""
    # Where in the list each thing happens; a sound schedule has one place for each.
    ran: defaultdict[Compute, list[int]] = defaultdict(list)
    sent: defaultdict[Message, list[int]] = defaultdict(list)
    received: defaultdict[Message, list[int]] = defaultdict(list)
    for position, action in enumerate(actions):
        if isinstance(action, Exchange):
            for message in action.sends:
                sent[message].append(position)
            for message in action.receives:
                received[message].append(position)
        else:
            ran[action].append(position)

    for compute in computes:
        here = ran[compute]
        yield from _not_once("runs", str(compute), here)
        if isinstance(compute, Backward) and _precedes(here, ran[Forward(compute.microbatch)]):
            yield f"runs {compute} before F{compute.microbatch}"
        for message in needed_by(compute, stage, stages):
            there = received.pop(message, [])
            yield from _not_once("receives", f"{message} from stage {message.peer}", there)
            if _precedes(here, there):
                yield f"runs {compute} before it receives {message} from stage {message.peer}"
        for message in produced_by(compute, stage, stages):
            there = sent.pop(message, [])
            yield from _not_once("sends", f"{message} to stage {message.peer}", there)
            if _precedes(there, here):
                yield f"sends {message} to stage {message.peer} before {compute} has produced it"

    known = set(computes)
    yield from (f"runs {c}, which does not belong here" for c in ran if c not in known)
    yield from (f"sends {m} to stage {m.peer}, which does not need it" for m in sent)
    yield from (f"receives {m} from stage {m.peer}, which it does not need" for m in received)


def _not_once(verb: str, what: str, positions: Sequence[int]) -> Iterator[str]:
    if not positions:
        yield f"never {verb} {what}"
    elif len(positions) > 1:
        yield f"{verb} {what} {len(positions)} times"


def _precedes(these: Sequence[int], those: Sequence[int]) -> bool:
    """Whether the first of ``these`` comes before the first of ``those``; false if one is empty."""
    return bool(these and those) and these[0] < those[0]


class _Transfer(NamedTuple):
    """A message as seen from neither end, so that its send and its receive are equal."""

    source: int
    target: int
    label: str

    def seen_from(self, stage: int) -> str:
        if stage == self.source:
            return f"send {self.label} to stage {self.target}"
        return f"receive {self.label} from stage {self.source}"


def _sends(exchange: Exchange, stage: int) -> list[_Transfer]:
    return [_Transfer(stage, message.peer, str(message)) for message in exchange.sends]


def _receives(exchange: Exchange, stage: int) -> list[_Transfer]:
    return [_Transfer(message.peer, stage, str(message)) for message in exchange.receives]


def _order_findings(schedule: Schedule) -> Iterator[str]:
    """Where one stage receives another's messages in an order in which they are not sent.

    The transport matches the n-th send between two stages with the n-th receive, unlabelled, so a
    swap would silently train on the wrong data.
    """
    sent: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for stage, actions in enumerate(schedule):
        for exchange in actions:
            if isinstance(exchange, Exchange):
                for transfer in _sends(exchange, stage):
                    sent[transfer[:2]].append(transfer)
                for transfer in _receives(exchange, stage):
                    received[transfer[:2]].append(transfer)
    for (source, target), transfers in sent.items():
        arrivals = received[source, target]
        if sorted(transfers) != sorted(arrivals):
            continue  # something is missing or repeated, which the stage's own findings say
        for transfer, arrival in zip(transfers, arrivals, strict=True):
            if transfer != arrival:
                yield (
                    f"stage {target}: receives {arrival.label} from stage {source} where that "
                    f"sends {transfer.label}"
                )
                break


def _deadlock_findings(schedule: Schedule) -> list[str]:
    """Run the exchanges of all stages until none can go on; the stages that are not done by then.

    Compute always ends, so only exchanges matter. The order in which free stages are taken does
    not: what one stage does never takes away what another waits for.
    """
    exchanges = [
        iter([action for action in actions if isinstance(action, Exchange)]) for actions in schedule
    ]
    # The transfers of each stage's current exchange whose other end is not posted yet.
    waiting: list[set[_Transfer]] = [set() for _ in schedule]
    free = list(range(len(schedule)))
    while free:
        stage = free.pop()
        exchange = next(exchanges[stage], None)
        if exchange is None:
            continue
        for transfer in (*_sends(exchange, stage), *_receives(exchange, stage)):
            peer = transfer.target if stage == transfer.source else transfer.source
            if transfer not in waiting[peer]:
                waiting[stage].add(transfer)
                continue
            waiting[peer].remove(transfer)
            if not waiting[peer]:
                free.append(peer)
        if not waiting[stage]:
            free.append(stage)
    return [
        f"stage {stage}: deadlock, waits to "
        + " and to ".join(transfer.seen_from(stage) for transfer in sorted(transfers))
        for stage, transfers in enumerate(waiting)
        if transfers
    ]
