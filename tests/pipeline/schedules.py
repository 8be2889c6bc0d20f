"""Every schedule, and orders that no schedule has; a look at what a rank computes."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabit.pipeline.actions import (
    Backward,
    Compute,
    InputGradient,
    Schedule,
    WeightGradient,
)
from megabit.pipeline.catalog import make_schedule
from megabit.pipeline.communicate import with_communication
from megabit.pipeline.execute import _Run
from megabit.pipeline.validate import validate
from tests.pipeline.cases import random_placement, random_schedule

EXAMPLES = Path(__file__).parents[2] / "examples" / "schedules"


class Named(NamedTuple):
    """A schedule as it is configured."""

    name: str
    chunks: int = 1

    def __str__(self) -> str:
        """For messages."""
        return f"{self.name.rpartition(':')[2]}, v={self.chunks}"

    def settings(self) -> list[str]:
        return [f"parallel.schedule={self.name}", f"parallel.vpp={self.chunks}"]

    def make(self, ranks: int, microbatches: int) -> Schedule:
        return make_schedule(self.name, ranks, microbatches, self.chunks)


ONE_F_ONE_B = Named("1f1b")
SCHEDULES = (
    ONE_F_ONE_B,  # first: others are compared with it
    Named("gpipe"),
    Named("interleaved", 2),
    Named("interleaved", 3),
    Named("zb-h1"),
    Named("zb-v", 2),
    Named("v-half", 2),
    Named("v-min", 2),
    *(Named(f"{path}:{path.stem}") for path in sorted(EXAMPLES.glob("*.py"))),
)


def counts(ranks: int) -> list[int]:
    """Numbers of microbatches: one, too few to fill the pipeline, just enough, an odd many."""
    return sorted({1, max(ranks - 1, 1), ranks, 2 * ranks + 1})


def spread(layers: int, stages: int) -> list[int]:
    """Layers for each stage, the first ones have more; the last ones none if there are too few."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def any_schedule(seed: int, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Any order that can be run, on any placement, with backward passes in one piece and in two,
    and with messages that are posted earlier or later."""
    rng = random.Random(seed)
    placement = random_placement(ranks, chunks, rng)
    split = random_schedule(placement, microbatches, is_fused=False, rng=rng)
    orders = [_fuse_some(split.computes(rank), rng) for rank in range(ranks)]
    schedule = with_communication(Schedule(placement, microbatches, orders), lookahead=seed % 4)
    validate(schedule)
    return schedule


def _fuse_some(computes: Sequence[Compute], rng: random.Random) -> list[Compute]:
    """Some B's become BW's; not after a W that was put off, since gradients add up in order."""
    fused: set[tuple[int, int]] = set()
    put_off: Counter[int] = Counter()
    order: list[Compute] = []
    for compute in computes:
        microbatch, chunk = compute.microbatch, compute.chunk
        if isinstance(compute, InputGradient) and not put_off[chunk] and rng.random() < 0.5:
            fused.add((microbatch, chunk))
            order.append(Backward(microbatch, chunk))
        elif not isinstance(compute, WeightGradient) or (microbatch, chunk) not in fused:
            put_off[chunk] += isinstance(compute, InputGradient)
            put_off[chunk] -= isinstance(compute, WeightGradient)
            order.append(compute)
    return order


Look = Callable[[Compute], object]


@contextmanager
def watched(before: Look = lambda _: None, after: Look = lambda _: None) -> Iterator[None]:
    """Meanwhile the calling rank says what it is about to compute, and what it has computed."""
    compute = _Run.compute

    def watching(run: _Run, action: Compute, received: Tensor | None) -> Tensor | None:
        before(action)
        made = compute(run, action, received)
        after(action)
        return made

    with patch.object(_Run, "compute", watching):
        yield


class Products(TorchDispatchMode):
    """Counts the products of backward passes by what is computed meanwhile.

    Args:
        tokens: of a microbatch; no weight has as many rows.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.now: Compute | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        """By letters of the compute, and ``dX`` or ``dW``"""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, of = func.name().partition("::")[2], None
        if name == "mm":  # of dense layers and the head; those inside ternary ones are not seen
            of = "dX" if result.shape[0] == self.tokens else "dW"
        elif "weight_gradient" in name or name == "embedding_dense_backward":
            of = "dW"
        elif "input_gradient" in name:
            of = "dX"
        if of is not None:
            self.counts["outside" if self.now is None else self.now.letters, of] += 1
        return result
