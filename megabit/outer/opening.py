"""What training asks of an outer optimizer, and the one that a configuration asks for."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from megabit.config import Config
from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.data_parallel.codecs import BlockCodec
from megabit.outer.diloco import DiLoCo
from megabit.outer.gossip import Gossip
from megabit.outer.mean import CastCodec, CodedMean, Mean, PlainMean
from megabit.outer.stale import Stale

SHARED_KINDS = ("outer_anchor", "outer_momentum")
"""What a checkpoint has of a tensor, ``kind/name``: the same on all islands."""
OWN_KINDS = ("outer_error",)
"""And what is each island's own."""


class Outer(Protocol):
    """Brings islands together. Every method but ``pieces`` and ``expected_bytes`` is called on all
    ranks of all islands, after the same steps; a step that an island skips is one, too."""

    def begin(self) -> None:
        """A first round begins with the present masters, the same on all islands."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this island beside ``pieces``, as JSON."""
        ...

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Go on where a checkpoint was saved, whose ``pieces`` are restored; ``state`` is empty if
        it has none. Returns whether masters have changed and are published."""
        ...

    def after_step(self, step: int) -> bool:
        """Meet, if a meeting is due after ``step`` steps; whether it was: then masters have changed
        and are published."""
        ...

    def conclude(self, step: int) -> bool:
        """After the last step, and its ``after_step``: make one model of the islands'. Returns
        whether masters have changed and are published."""
        ...

    def pieces(self, owned: bool = False) -> Iterator[Piece]:
        """What must be kept for the rounds that are under way, by tensor and rows, as views to save
        and to restore. With it, and the masters and moments of each island, a run goes on with the
        same bits, in the middle of a round and at another layout of the islands.

        Args:
            owned: of an island's ranks, every element once.
        """
        ...

    def meeting(self) -> str:
        """What there is to say of the last meeting, for people; empty if there is nothing."""
        ...

    def expected_bytes(self, step: int, is_last: bool = False) -> float:
        """What this rank sends over islands in ``after_step(step)``, by formula, and in
        ``conclude`` if the run ends there."""
        ...


def open_outer(config: Config, optimizer: ZeroOptimizer) -> Outer | None:
    """The outer optimizer of this rank, at the beginning of a round; None where ranks train
    together. Collective over the mesh."""
    outer, islands = config.outer, optimizer.mesh.outer
    match outer.method:
        case "diloco":
            means: dict[str, Mean] = {
                "float32": PlainMean(islands),
                "bfloat16": CodedMean(islands, CastCodec(torch.bfloat16)),
                "int8": CodedMean(islands, BlockCodec(config.communication.block, bits=8)),
            }
            is_coded = outer.wire != "float32"
            return DiLoCo.create(outer, optimizer, means[outer.wire], is_coded)
        case "gossip":
            return Gossip.create(optimizer, outer.inner_steps, config.train.seed)
        case "stale":
            return Stale(config, optimizer)
        case _:
            return None
