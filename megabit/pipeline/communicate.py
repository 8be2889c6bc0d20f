"""From the order in which ranks compute to the messages between them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megabit.pipeline.actions import (
    Action,
    Exchange,
    Message,
    Schedule,
    needed_by,
    produced_by,
)
from megabit.pipeline.simulate import Costs, simulate

LOOKAHEAD = 1
"""A receive is posted so many computes before the one that needs it, and travels meanwhile."""


def lookahead_on(device_type: str) -> int:
    """That of the back end for such a device. NCCL completes an exchange as a whole, and one after
    the other: there a receive that is posted early would hold up the sends behind it."""
    return 0 if device_type == "cuda" else LOOKAHEAD


def with_communication(schedule: Schedule, lookahead: int = LOOKAHEAD) -> Schedule:
    """``schedule`` with an Exchange wherever a rank has something to post between two computes.

    A send is posted right after what computed it; a receive ``lookahead`` computes before it is
    needed. But all messages of the pipeline have one order, that in which a run would compute them
    if each compute took one unit of time, and every rank posts its messages in that order. So a
    receive may be posted later than that (though before what needs it) or, if another message must
    be posted after it, earlier.

    This cannot deadlock, even if an exchange blocks its rank until all of its messages have arrived
    at the other end: of those that have not, consider the first in the order. At both of its ends,
    all that was posted in earlier exchanges comes before it, so it has arrived, and both ends get
    to post this one, too. And every message is posted in time: what a rank sends before it, in that
    order, the rank has computed before it can need it, since every message comes after its causes;
    and a receive can be posted at any earlier time.

    Raises:
        Stuck: the order of computes cannot be run, whatever is communicated.
    """
    # Complete in its computes, as ``validate.compute_findings`` sees to.
    placement = schedule.placement
    orders = [schedule.computes(rank) for rank in range(placement.ranks)]
    consumers = [
        {needed_by(compute, rank, placement): place for place, compute in enumerate(order)}
        for rank, order in enumerate(orders)
    ]
    chunks = placement.chunks  # ``even`` is of a rank, so each of its chunks takes one unit
    timeline = simulate(schedule, Costs.even(placement, chunks, chunks, chunks))
    computed = sorted(
        (span.end, rank, place)
        for rank, spans in enumerate(timeline.ranks)
        for place, span in enumerate(spans)
    )
    posts: list[list[_Post]] = [[] for _ in orders]
    for _, rank, place in computed:
        sent = produced_by(orders[rank][place], rank, placement)
        if sent is not None and sent.peer != rank:
            received = replace(sent, peer=rank)
            needed = consumers[sent.peer][received]
            posts[rank].append(_Post(sent, True, place + 1, place + 1))
            posts[sent.peer].append(_Post(received, False, max(needed - lookahead, 0), needed))
    return replace(schedule, ranks=[*map(_weave, orders, posts)])


class _Post(NamedTuple):
    """A message to post before one of a rank's computes, or after them all."""

    message: Message
    is_send: bool
    wanted: int
    """Which compute to post it before, counted from 0, if the order allows."""
    latest: int
    """Which one at the latest."""


def _weave(computes: Sequence[Action], posts: Sequence[_Post]) -> list[Action]:
    """``computes`` with ``posts`` between them, in the order in which they come."""
    # A post must not come after those that follow it, so their latest places are its own, too.
    latest = [post.latest for post in posts]
    for i in reversed(range(len(posts) - 1)):
        latest[i] = min(latest[i], latest[i + 1])
    exchanges: dict[int, list[_Post]] = {}
    place = 0
    for post, limit in zip(posts, latest, strict=True):
        place = max(place, min(post.wanted, limit))
        exchanges.setdefault(place, []).append(post)
    actions: list[Action] = []
    for place in range(len(computes) + 1):
        if place in exchanges:
            sends = tuple(post.message for post in exchanges[place] if post.is_send)
            receives = tuple(post.message for post in exchanges[place] if not post.is_send)
            actions.append(Exchange(sends, receives))
        actions += computes[place : place + 1]
    return actions
