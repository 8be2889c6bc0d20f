"""Proof that a schedule computes everything once and cannot hang, before any rank runs it.

A rank is taken to wait in each exchange until all of its messages are over, and a send to be over
only when its receiver has posted the receive (rendezvous, as in gloo). An executor that goes on at
once, or a transport that buffers, only waits less, so what passes here passes there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from megabit.pipeline.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    InputGradient,
    Message,
    Schedule,
    WeightGradient,
    needed_by,
    produced_by,
)
from megabit.pipeline.placement import Placement
from megabit.pipeline.simulate import Stuck, simulate


class ScheduleError(ValueError):
    """A schedule is wrong; each finding is one line that names the rank."""

    def __init__(self, *findings: str) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


def validate(schedule: Schedule, *, forward_only: bool = False) -> None:
    """Check that the schedule is complete, consistent between ranks and free of deadlock.

    Deadlock is looked for only in a schedule without other findings: a message that is missing or
    out of order hangs the pipeline anyway, and the finding about it says more.

    Raises:
        ScheduleError: with every finding.
    """
    findings = _form_findings(schedule)
    if not findings:
        for rank, actions in enumerate(schedule.ranks):
            found = [
                *_rank_findings(schedule.computes(rank), rank, schedule, forward_only),
                *_message_findings(actions, rank, schedule, forward_only),
            ]
            findings += [f"rank {rank}: {finding}" for finding in found]
        findings += _order_findings(schedule)
    findings = findings or _stuck_findings(schedule) or _deadlock_findings(schedule)
    if findings:
        raise ScheduleError(*findings)


def compute_findings(schedule: Schedule, *, forward_only: bool = False) -> list[str]:
    """What is wrong with the computes alone, of a schedule that communicates nothing yet."""
    findings = _form_findings(schedule) or [
        f"rank {rank}: {finding}"
        for rank in range(schedule.placement.ranks)
        for finding in _rank_findings(schedule.computes(rank), rank, schedule, forward_only)
    ]
    return findings or _stuck_findings(schedule)


def _form_findings(schedule: Schedule) -> list[str]:
    """What makes the schedule impossible to read: then nothing else can be said about it."""
    placement, ranks = schedule.placement, schedule.ranks
    if problem := placement.problem:
        return [f"placement: {problem}"]
    if len(ranks) != placement.ranks:
        return [f"has actions for {len(ranks)} ranks, but its placement has {placement.ranks}"]
    if schedule.microbatches < 1:
        return [f"has {schedule.microbatches} microbatches, needs one or more"]
    known = Forward | Backward | InputGradient | WeightGradient
    return [
        f"rank {rank}: {finding}"
        for rank, actions in enumerate(ranks)
        for action in actions
        if not isinstance(action, Exchange)
        for finding in (
            [f"{action!r} is no action"]
            if not isinstance(action, known)
            else _number_findings(action, placement, schedule.microbatches)
        )
    ]


def _number_findings(compute: Compute, placement: Placement, microbatches: int) -> Iterator[str]:
    if not 0 <= compute.chunk < placement.chunks:
        yield f"runs {compute}, but its chunks are 0 to {placement.chunks - 1}"
    if not 0 <= compute.microbatch < microbatches:
        yield f"runs {compute}, but microbatches are 0 to {microbatches - 1}"


def _rank_findings(
    computes: Sequence[Compute], rank: int, schedule: Schedule, forward_only: bool
) -> Iterator[str]:
    """What is wrong in what one rank computes, whatever the others do."""
    ran = _places(computes)
    for chunk in range(schedule.placement.chunks):
        for i in range(schedule.microbatches):
            forward = ran[Forward(i, chunk)]
            yield from _not_once("runs", Forward(i, chunk), forward)
            if not forward_only:
                yield from _backward_findings(ran, i, chunk)
        yield from _microbatch_order_findings(
            [compute for compute in computes if compute.chunk == chunk]
        )
    if forward_only:
        yield from (
            f"runs {compute}, which does not belong in a forward pass"
            for compute in computes
            if not isinstance(compute, Forward)
        )
    yield from _own_stage_findings(ran, rank, schedule.placement)


def _backward_findings(ran: dict[Compute, list[int]], microbatch: int, chunk: int) -> Iterator[str]:
    """Whether a stage goes back once over a microbatch: BW, or B and then W."""
    forward = Forward(microbatch, chunk)
    both = Backward(microbatch, chunk)
    first, second = InputGradient(microbatch, chunk), WeightGradient(microbatch, chunk)
    parts = [part for part in (first, second) if ran[part]]
    if ran[both]:
        yield from (f"runs {both} and also {part}, which is part of it" for part in parts)
        yield from _not_once("runs", both, ran[both])
    elif parts:
        yield from _not_once("runs", first, ran[first])
        yield from _not_once("runs", second, ran[second])
        if _precedes(ran[second], ran[first]):
            yield f"runs {second} before {first}"
    else:
        yield f"never runs {both}, nor {first} and {second}"
    for backward in (both, first):
        if _precedes(ran[backward], ran[forward]):
            yield f"runs {backward} before {forward}"


def _microbatch_order_findings(computes: Sequence[Compute]) -> Iterator[str]:
    """Where microbatches don't come in order, in what one stage computes."""
    found: list[tuple[Compute, Compute]] = []
    for kinds in (Forward, InputGradient | Backward, WeightGradient | Backward):
        sequence = [compute for compute in computes if isinstance(compute, kinds)]
        pairs = ((a, b) for a, b in pairwise(sequence) if b.microbatch < a.microbatch)
        found += [pair for pair in islice(pairs, 1) if pair not in found]
    for earlier, later in found:
        yield (
            f"runs {earlier} before {later}; microbatches must come in order, else gradients "
            "would add up in another order"
        )


def _own_stage_findings(
    ran: dict[Compute, list[int]], rank: int, placement: Placement
) -> Iterator[str]:
    """Where a stage runs before another one of the same rank has computed what it needs."""
    made = {
        message: (compute, places)
        for compute, places in ran.items()
        if places and (message := produced_by(compute, rank, placement)) and message.peer == rank
    }
    for compute, places in ran.items():
        needed = needed_by(compute, rank, placement)
        if needed in made and _precedes(places, made[needed][1]):
            yield f"runs {compute} before {made[needed][0]}, whose result it needs"


def _message_findings(
    actions: Sequence[Action], rank: int, schedule: Schedule, forward_only: bool
) -> Iterator[str]:
    """Whether a rank sends what it has computed, and receives what it needs, once and in time."""
    placement = schedule.placement
    ran: defaultdict[Compute, list[int]] = defaultdict(list)
    sent: defaultdict[Message, list[int]] = defaultdict(list)
    received: defaultdict[Message, list[int]] = defaultdict(list)
    for place, action in enumerate(actions):
        if isinstance(action, Exchange):
            for message in action.sends:
                sent[message].append(place)
            for message in action.receives:
                received[message].append(place)
        elif isinstance(action, InputGradient):
            # To its neighbours it is the same as both gradients at once.
            ran[Backward(action.microbatch, action.chunk)].append(place)
        else:
            ran[action].append(place)

    for kind in [Forward] if forward_only else [Forward, Backward]:
        for chunk in range(placement.chunks):
            for i in range(schedule.microbatches):
                compute = kind(i, chunk)
                places = ran[compute]
                name = str(actions[places[0]]) if places else str(compute)
                needed = needed_by(compute, rank, placement)
                if needed is not None and needed.peer != rank:
                    there = received.pop(needed, [])
                    yield from _not_once("receives", f"{needed} from rank {needed.peer}", there)
                    if _precedes(places, there):
                        yield f"runs {name} before it receives {needed} from rank {needed.peer}"
                made = produced_by(compute, rank, placement)
                if made is not None and made.peer != rank:
                    there = sent.pop(made, [])
                    yield from _not_once("sends", f"{made} to rank {made.peer}", there)
                    if _precedes(there, places):
                        yield f"sends {made} to rank {made.peer} before {name} has computed it"
    # What is left was not expected.
    yield from (f"sends {m} to rank {m.peer}, which does not need it" for m in sent)
    yield from (f"receives {m} from rank {m.peer}, which it does not need" for m in received)


def _places(actions: Sequence[Compute]) -> defaultdict[Compute, list[int]]:
    """Where in the list each compute is; a sound schedule has one place for each."""
    places: defaultdict[Compute, list[int]] = defaultdict(list)
    for place, action in enumerate(actions):
        places[action].append(place)
    return places


def _not_once(verb: str, what: object, places: Sequence[int]) -> Iterator[str]:
    if not places:
        yield f"never {verb} {what}"
    elif len(places) > 1:
        yield f"{verb} {what} {len(places)} times"


def _precedes(these: Sequence[int], those: Sequence[int]) -> bool:
    """Whether the first of ``these`` comes before the first of ``those``; false if one is empty."""
    return bool(these and those) and these[0] < those[0]


def _stuck_findings(schedule: Schedule) -> list[str]:
    """Ranks that wait for one another, however fast messages are."""
    try:
        simulate(schedule)
    except Stuck as stuck:
        findings = []
        for rank, compute in stuck.waiting.items():
            needed = needed_by(compute, rank, schedule.placement)
            assert needed is not None
            findings.append(
                f"rank {rank}: stuck before {compute}, for which rank {needed.peer} never gets to "
                f"compute {needed}"
            )
        return findings
    return []


class _Transfer(NamedTuple):
    """A message as seen from neither end, so that its send and its receive are equal."""

    source: int
    target: int
    label: str

    def seen_from(self, rank: int) -> str:
        if rank == self.source:
            return f"send {self.label} to rank {self.target}"
        return f"receive {self.label} from rank {self.source}"


def _sends(exchange: Exchange, rank: int) -> list[_Transfer]:
    return [_Transfer(rank, message.peer, str(message)) for message in exchange.sends]


def _receives(exchange: Exchange, rank: int) -> list[_Transfer]:
    return [_Transfer(message.peer, rank, str(message)) for message in exchange.receives]


def _order_findings(schedule: Schedule) -> Iterator[str]:
    """Where one rank receives another's messages in an order in which they are not sent.

    The transport matches the n-th send between two ranks with the n-th receive, unlabelled, so a
    swap would silently train on the wrong data.
    """
    sent: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for exchange in actions:
            if isinstance(exchange, Exchange):
                for transfer in _sends(exchange, rank):
                    sent[transfer[:2]].append(transfer)
                for transfer in _receives(exchange, rank):
                    received[transfer[:2]].append(transfer)
    for (source, target), transfers in sent.items():
        arrivals = received[source, target]
        if sorted(transfers) != sorted(arrivals):
            continue  # something is missing or repeated, which the ranks' own findings say
        for transfer, arrival in zip(transfers, arrivals, strict=True):
            if transfer != arrival:
                yield (
                    f"rank {target}: receives {arrival.label} from rank {source} where that "
                    f"sends {transfer.label}"
                )
                break


def _deadlock_findings(schedule: Schedule) -> list[str]:
    """Run the exchanges of all ranks until none can go on; the ranks that are not done by then.

    Compute always ends, so only exchanges matter. The order in which free ranks are taken does not:
    what one rank does never takes away what another waits for.
    """
    exchanges = [
        iter([action for action in actions if isinstance(action, Exchange)])
        for actions in schedule.ranks
    ]
    # The transfers of each rank's current exchange whose other end is not posted yet.
    waiting: list[set[_Transfer]] = [set() for _ in exchanges]
    free = list(range(len(exchanges)))
    while free:
        rank = free.pop()
        exchange = next(exchanges[rank], None)
        if exchange is None:
            continue
        for transfer in (*_sends(exchange, rank), *_receives(exchange, rank)):
            peer = transfer.target if rank == transfer.source else transfer.source
            if transfer not in waiting[peer]:
                waiting[rank].add(transfer)
                continue
            waiting[peer].remove(transfer)
            if not waiting[peer]:
                free.append(peer)
        if not waiting[rank]:
            free.append(rank)
    return [
        f"rank {rank}: deadlock, waits to "
        + " and to ".join(transfer.seen_from(rank) for transfer in sorted(transfers))
        for rank, transfers in enumerate(waiting)
        if transfers
    ]
