"""Silent corruption: do all DP replicas compute with the same weights?

DP replicas of a stage hold the same bits: codes and γ of ternary weights, dense weights. Memory
that fails, or a product that went wrong, can make one of them differ, and nothing else would tell.
Each rank hashes every tensor where it is, the hashes are gathered over DP, and who differs from the
majority is named. Of two replicas either may be the wrong one.

    tensors → hash, int64 each → all-gather over dp → Difference → all ranks learn of all of them

Not seen is what replicas do not share: masters and moments of ``zero_stage`` 1 and 2 are on one
rank only. Nor does it undo what wrong codes have done to the steps before.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import all_gather, all_problems
from megabit.tensor_parallel import TernaryLayer, sharded_parameters

CHUNK = 2**16
"""Words that are hashed at once: temporaries stay in a CPU's cache, however large a tensor is."""
NAMED = 5
"""Tensors that a difference names; of the others it gives the number."""
_GOLDEN = -0x61C8864680B583EB
"""2⁶⁴ over the golden ratio, as int64: odd, and its multiples are spread evenly."""
_LOW_HALF = 0xFFFF_FFFF


@dataclass(frozen=True)
class Difference:
    """Ranks with other weights than their replicas."""

    ranks: tuple[int, ...]
    """Of the world. Without a majority, all replicas."""
    tensors: tuple[str, ...]
    """The first few that differ."""
    count: int
    """How many do."""
    has_majority: bool

    def text(self, names: Sequence[str]) -> str:
        """For people; ``names`` are of all ranks of the world."""
        who = ", ".join(names[rank] for rank in self.ranks)
        more = self.count - len(self.tensors)
        what = ", ".join(self.tensors) + (f" and {more} more" if more else "")
        if self.has_majority:
            return f"{who} has other weights than its replicas: {what}"
        return f"{who} have different weights, and nothing tells which are right: {what}"


def compare_replicas(stages: nn.Module, mesh: ParallelMesh) -> list[Difference]:
    """All differences over DP, the same on every rank; collective over the world.

    Waits for weights that are on their way.
    """
    tensors = dict(replicated_tensors(stages))
    own = torch.stack([content_hash(x) for x in tensors.values()])
    by_rank = all_gather(own.unsqueeze(0), mesh.dp).cpu()
    found = _difference(by_rank, [*tensors], mesh.dp)
    told = None if found is None else json.dumps(asdict(found))
    differences = [json.loads(text) for text in all_problems(told, mesh.world, mesh.device)]
    return [
        Difference(tuple(d["ranks"]), tuple(d["tensors"]), d["count"], d["has_majority"])
        for d in differences
    ]


def replicated_tensors(stages: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a rank computes with, by name; its DP replicas have the same."""
    for name, layer in stages.named_modules():
        if isinstance(layer, TernaryLayer):
            mixed = layer.mixed
            if mixed is None:
                ternary = layer.ternary()
                yield f"codes of {name}.weight", ternary.data
                yield f"γ of {name}.weight", ternary.scale
            else:
                yield f"{name}.weight", mixed.values
    for name, parameter in sharded_parameters(stages).items():
        if not parameter.is_meta:
            yield name, parameter.ready().detach()


@torch.no_grad()
def content_hash(x: Tensor) -> Tensor:
    """A hash of the bytes of ``x``: int64 ``[]`` on its device.

    In a chunk of words w_i of 64 bits it is Σ (w_i ⊕ ⌊w_i / 2³²⌋) · o_i with an odd o_i for each
    place, modulo 2⁶⁴, and chunks are joined as a polynomial in an odd number. Every factor has an
    inverse, so a change of one word always changes the hash; and so does, all but certainly, any
    other change that nobody has made up to be missed.
    """
    data = x.contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    odd = torch.arange(min(CHUNK, -(-len(data) // 8)), device=x.device).mul_(_GOLDEN).bitwise_or_(1)
    for part in data.split(8 * CHUNK):
        if len(part) % 8 or part.storage_offset() % 8:  # int64 needs whole, aligned words
            whole = part.new_zeros(-(-len(part) // 8) * 8)
            whole[: len(part)] = part
            part = whole
        words = part.view(torch.int64)
        mixed = (words >> 32).bitwise_and_(_LOW_HALF).bitwise_xor_(words)
        total = total * _GOLDEN + mixed.mul_(odd[: len(words)]).sum()
    return total


def _difference(by_rank: Tensor, names: Sequence[str], dp: Axis) -> Difference | None:
    """What hashes ``[dp, tensors]`` say of this DP group."""
    is_other = (by_rank != by_rank[0]).any(0)
    if not is_other.any():
        return None
    different = [name for name, other in zip(names, is_other.tolist(), strict=True) if other]
    rows = [tuple(row) for row in by_rank.tolist()]
    usual, votes = Counter(rows).most_common(1)[0]
    has_majority = 2 * votes > len(rows)
    places = [i for i, row in enumerate(rows) if row != usual or not has_majority]
    return Difference(
        tuple(dp.global_rank(place) for place in places),
        tuple(different[:NAMED]),
        len(different),
        has_majority,
    )
