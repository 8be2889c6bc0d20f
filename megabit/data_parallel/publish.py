"""From updated masters to what layers compute with: γ, 2-bit codes, dense replicas.

γ needs Σ|W| of whole logical tensors: one all-reduce of integers over all ranks of the stage tells
all of them. Each rank then ternarizes and packs its rows, and the buckets are gathered over DP in
the order of the forward pass, while the next forward pass begins: a layer waits for its bucket when
it first needs it (``ShardedParameter.ready``). Matrices travel in the dtype that is computed in,
gains as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabit.data_parallel.layout import BucketLayout
from megabit.data_parallel.masters import Master
from megabit.mesh import ParallelMesh
from megabit.reduce import Pending, all_reduce, start_all_gather
from megabit.tensor_parallel import TernaryLayer
from megabit_kernels import TernaryWeight, abs_sum, numerics


@dataclass
class Publisher:
    """Gives a stage's parameters the values of the masters.

    Args:
        layers: ternary layers by the names of their weights.
        dtype: of dense matrices in use.
    """

    mesh: ParallelMesh
    layers: Mapping[str, TernaryLayer]
    dtype: torch.dtype
    is_sharded: bool
    _arrivals: list["_Arrival"] = field(default_factory=list)

    @torch.no_grad()
    def publish(self, masters: Sequence[Master]) -> None:
        """Start to give all parameters their values; collective over the stage's ranks."""
        self.settle()
        scales = self._scales(masters)
        for master in reversed(masters):  # buckets are in the order of the backward pass
            layout = master.bucket.layout
            if layout.kind == "second use":
                continue
            if not self.is_sharded:
                self._give(layout, master.weights.detach(), scales)
                continue
            own = self._own_values(master, scales)
            arrival = _Arrival(
                self, layout, start_all_gather(own, self.mesh.weights, "weights"), scales
            )
            self._arrivals.append(arrival)
            for slot in layout.slots:
                slot.parameter.expect(arrival.complete)

    def settle(self) -> None:
        """Wait until all parameters have their newest values."""
        for arrival in self._arrivals:
            arrival.complete()
        self._arrivals.clear()

    def nbytes(self, masters: Sequence[Master]) -> dict[str, int]:
        """Bytes of what layers compute with: codes, and dense weights."""
        self.settle()
        dense = [
            slot.parameter.nbytes
            for master in masters
            if master.bucket.layout.kind not in ("ternary", "second use")
            for slot in master.bucket.layout.slots
        ]
        codes = sum(layer.ternary().nbytes for layer in self.layers.values())
        return {"codes": codes, "dense weights": sum(dense)}

    def _scales(self, masters: Sequence[Master]) -> dict[str, Tensor]:
        """γ of each ternary weight, in the masters' dtype."""
        names, sums, sizes = [], [], []
        for master in masters:
            if master.bucket.layout.kind != "ternary":
                continue
            for slot in master.bucket.layout.slots:
                numel = slot.parameter.shard.numel
                total = torch.zeros(2, dtype=torch.int64, device=self.mesh.device)
                for _, rows in master.held(slot, master.weights.detach(), owned=True):
                    total += abs_sum(rows, numel)
                names.append(slot.name)
                sums.append(total)
                sizes.append(numel)
        if not names:
            return {}
        # Where every DP rank has all rows, TP ranks are the only others with different ones.
        axis = self.mesh.stage if self.is_sharded else self.mesh.tp
        totals = all_reduce(torch.stack(sums), axis, purpose="scales")
        dtype = masters[0].weights.dtype
        return {
            name: numerics.weight_scale(total, numel, dtype)
            for name, total, numel in zip(names, totals, sizes, strict=True)
        }

    def _own_values(self, master: Master, scales: Mapping[str, Tensor]) -> Tensor:
        """What travels: ``[1, bytes]`` of packed codes, or values."""
        layout, weights = master.bucket.layout, master.weights.detach()
        if layout.kind != "ternary":
            return weights.to(self.dtype) if layout.kind == "matrix" else weights
        packed = weights.new_zeros((1, layout.code_part), dtype=torch.uint8)
        for slot in layout.slots:
            for _, rows in master.held(slot, weights):
                codes = TernaryWeight.from_latent(rows, scales[slot.name], "packed").data.flatten()
                packed[0, slot.code_offset : slot.code_offset + len(codes)] = codes
        return packed

    def _give(self, layout: BucketLayout, parts: Tensor, scales: Mapping[str, Tensor]) -> None:
        """Give each parameter of a bucket its values: from packed codes, or from values."""
        for slot in layout.slots:
            if layout.kind != "ternary":
                slot.parameter.data.copy_(layout.local(parts, slot).view(slot.parameter.shape))
                continue
            scale = scales[slot.name]
            if parts.dtype == torch.uint8:
                packed = layout.local_codes(parts, slot)
                ternary = TernaryWeight.from_packed(packed, slot.columns, scale)
            else:
                ternary = TernaryWeight.from_latent(layout.local(parts, slot), scale)
            self.layers[slot.name].receive(ternary)


@dataclass
class _Arrival:
    """A bucket on its way to the layers."""

    publisher: Publisher
    layout: BucketLayout
    values: Pending | None
    scales: Mapping[str, Tensor]

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the bucket and give each parameter its part."""
        if self.values is not None:
            values, self.values = self.values.wait(), None
            self.publisher._give(self.layout, values, self.scales)
