"""What a pipeline rank does after its last backward pass: gradients, update, new weights.

Tensors travel in buckets of ``parallel.bucket_mb``, at more than 8 DP ranks in proportion larger.
Bytes and work add up over tensors, and layers are alike; so a rank with n layers has what is not of
layers, and n times what one more layer makes. A search looks at thousands of ranks.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from megabit.data_parallel.layout import bucket_limit
from megabit.pipeline.actions import Schedule
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import StagePlan
from megabit.plan.compute import update_work
from megabit.plan.machine import Rates, Term
from megabit.plan.messages import Message, step_messages
from megabit.training.shapes import RankShape

Key = TypeVar("Key")
Lane = tuple[str, Message]
"""What messages are for, and one of them without its size: others that are alike can be added to
it."""


@dataclass(frozen=True)
class RankEnd:
    """Seconds of a rank."""

    gradients: float
    """Over DP, whether anything hides it or not."""
    weights: float
    agreement: float
    """On numbers such as the norm."""
    update: float
    """Of a core of its own."""


@dataclass
class _Sums:
    """Bytes and work of some tensors."""

    elements: int = 0
    """Of gradients, of all DP ranks."""
    sent: dict[Lane, float] = field(default_factory=dict)
    work: dict[Term, float] = field(default_factory=dict)

    def plus(self, other: "_Sums", times: int) -> "_Sums":
        return _Sums(
            self.elements + times * other.elements,
            _plus(self.sent, other.sent, times),
            _plus(self.work, other.work, times),
        )


class RankEnds:
    """Those of ranks of one model, batch, world and machine."""

    def __init__(self) -> None:
        self._sums: dict[tuple[object, ...], _Sums] = {}

    def of(self, shape: RankShape, rates: Rates, seconds: Callable[[Message], float]) -> RankEnd:
        """Of a rank.

        Args:
            seconds: what a message takes.
        """
        sums = self._sums_of(shape)
        sent = dict.fromkeys(("gradients", "weights", "agreement"), 0.0)
        limit = bucket_limit(shape.config.parallel.bucket_mb, shape.dp)
        buckets = max(1, math.ceil(sums.elements / limit))
        for (what, message), num_bytes in sums.sent.items():
            sent[what] += seconds(_as_sent(message, num_bytes, buckets))
        return RankEnd(sent["gradients"], sent["weights"], sent["agreement"], rates.of(sums.work))

    def _sums_of(self, shape: RankShape) -> _Sums:
        count = len(shape.layers)
        if shape.config.optim.name == "muon":  # which shares out whole matrices, not rows
            return _sums(shape)
        none, one = (self._few(shape, layers) for layers in (0, 1))
        return none.plus(one.plus(none, -1), count)

    def _few(self, shape: RankShape, layers: int) -> _Sums:
        parallel, optim = shape.config.parallel, shape.config.optim
        rounds = shape.microbatches if shape.sums_travel_each_microbatch else 1
        key = (
            *(layers, parallel.tp, shape.dp, shape.dp_intra, parallel.sequence_parallel),
            *(optim.zero_stage, rounds, shape.has_embedding, shape.has_head, len(shape.layouts)),
        )
        if key not in self._sums:
            self._sums[key] = _sums(_with_layers(shape, layers))
        return self._sums[key]


def _with_layers(shape: RankShape, layers: int) -> RankShape:
    """A rank with the ends of the model that ``shape`` has, as if it were the only stage."""
    chunks = len(shape.layouts)
    layouts = [StageLayout(range(layers), shape.has_embedding, chunks == 1 and shape.has_head)]
    layouts += [StageLayout(range(layers, layers), False, False)] * max(0, chunks - 2)
    if chunks > 1:
        layouts.append(StageLayout(range(layers, layers), False, shape.has_head))
    schedule = Schedule(Placement.loop(1, chunks), 1, [[]])
    plan = StagePlan(schedule, tuple(layouts), shape.plan.costs)
    return dataclasses.replace(shape, rank=shape.rank % shape.tp, plan=plan)


def _sums(shape: RankShape) -> _Sums:
    sums = _Sums(sum(held.part(shape.dp) for held in shape.parameters()) * shape.dp)
    for what, messages in step_messages(shape).items():
        for message in messages:
            lane = what, dataclasses.replace(message, num_bytes=0)
            sums.sent[lane] = sums.sent.get(lane, 0.0) + message.num_bytes
    sums.work.update(update_work(shape))
    return sums


def _plus(mine: Mapping[Key, float], others: Mapping[Key, float], times: int) -> dict[Key, float]:
    return {key: mine.get(key, 0.0) + times * others.get(key, 0.0) for key in {**mine, **others}}


def _as_sent(message: Message, num_bytes: float, buckets: int) -> Message:
    """``num_bytes`` in messages of a bucket each, where tensors travel in buckets."""
    count = buckets if message.axis in ("dp", "dp_inter") and message.purpose != "control" else 1
    return dataclasses.replace(message, num_bytes=num_bytes / count, times=message.times * count)
