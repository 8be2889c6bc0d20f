"""From updated masters to what layers compute with: γ, 2-bit codes, dense replicas.

γ is one of whole logical tensors: integers that are added over all ranks of the stage tell it to
all of them (``tensor_parallel.weight_scale``). Each rank then ternarizes and packs its rows, and
the buckets are gathered over DP in the order of the forward pass, while the next forward pass
begins: a layer waits for its bucket when it first needs it (``ShardedParameter.ready``). Matrices
travel in the dtype that is computed in, gains as they are.

While a λ ramp lasts, ternary weights travel as W̃ = W + λ(γ·code − W), in the dtype that is computed
in: no layer has the W that W̃ is made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megabit.data_parallel.layout import BucketLayout
from megabit.data_parallel.masters import Master
from megabit.data_parallel.reduction import gather_parts
from megabit.mesh import ParallelMesh
from megabit.reduce import Chain
from megabit.tensor_parallel import OwnedElements, TernaryLayer, WeightScale
from megabit_kernels import TernaryWeight, numerics


@dataclass
class Publisher:
    """Gives a stage's parameters the values of the masters.

    Args:
        layers: ternary layers by the names of their weights.
        dtype: of dense matrices in use.
        weight_scale: what γ is.
    """

    mesh: ParallelMesh
    layers: Mapping[str, TernaryLayer]
    dtype: torch.dtype
    is_sharded: bool
    weight_scale: WeightScale = field(default_factory=WeightScale)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """γ of what was published last, by the names of weights, in the masters' dtype."""
    _arrivals: list["_Arrival"] = field(default_factory=list)

    @torch.no_grad()
    def publish(self, masters: Sequence[Master], share: float = 1.0) -> None:
        """Start to give all parameters their values; collective over the stage's ranks.

        Args:
            share: λ of the next forward pass. Below 1, ternary layers get W̃ and no codes.
        """
        self.settle()
        self.scales = self._scales(masters)
        for master in reversed(masters):  # buckets are in the order of the backward pass
            layout = master.bucket.layout
            if layout.kind == "second use":
                continue
            if not self.is_sharded:
                self._give(layout, self._local_values(master, share), share)
                continue
            own = self._own_values(master, share)
            gather = gather_parts(own, self.mesh.weights, self.mesh.weights_levels, "weights")
            arrival = _Arrival(self, layout, gather, share)
            self._arrivals.append(arrival)
            for slot in layout.slots:
                slot.parameter.expect(arrival.complete)
        for arrival in self._arrivals:
            # Of two levels, the second begins here, on all ranks, and not when somebody looks at a
            # weight: who does that alone would wait for the others.
            assert arrival.values is not None
            arrival.values.go_on(blocks=True)

    def settle(self) -> None:
        """Wait until all parameters have their newest values."""
        for arrival in self._arrivals:
            arrival.complete()
        self._arrivals.clear()

    def nbytes(self, masters: Sequence[Master]) -> dict[str, int]:
        """Bytes of what layers compute with: codes, and dense weights, W̃ among them."""
        self.settle()
        dense = [
            slot.parameter.nbytes
            for master in masters
            if master.bucket.layout.kind not in ("ternary", "second use")
            for slot in master.bucket.layout.slots
        ]
        codes = 0
        for layer in self.layers.values():
            if layer.mixed is None:
                codes += layer.ternary().nbytes
            else:
                dense.append(layer.mixed.values.nbytes)
        return {"codes": codes, "dense weights": sum(dense)}

    def _scales(self, masters: Sequence[Master]) -> dict[str, Tensor]:
        """γ of each ternary weight, in the masters' dtype."""
        owned = {
            slot.name: OwnedElements(
                [x for _, x in master.held(slot, master.weights.detach(), owned=True)],
                slot.parameter.shard.numel,
            )
            for master in masters
            if master.bucket.layout.kind == "ternary"
            for slot in master.bucket.layout.slots
        }
        # Where every DP rank has all rows, TP ranks are the only others with different ones.
        axis = self.mesh.stage if self.is_sharded else self.mesh.tp
        dtype = masters[0].weights.dtype
        scales = self.weight_scale.of_tensors([*owned.values()], axis, dtype, self.mesh.device)
        return dict(zip(owned, scales, strict=True))

    def _own_values(self, master: Master, share: float) -> Tensor:
        """What travels: ``[1, bytes]`` of packed codes, or values."""
        layout, weights = master.bucket.layout, master.weights.detach()
        if layout.kind != "ternary":
            return weights.to(self.dtype) if layout.kind == "matrix" else weights
        if share < 1:
            return self._mixed(master, share)
        packed = weights.new_zeros((1, layout.code_part), dtype=torch.uint8)
        for slot in layout.slots:
            for _, rows in master.held(slot, weights):
                scale = self.scales[slot.name]
                codes = TernaryWeight.from_latent(rows, scale, "packed").data.flatten()
                packed[0, slot.code_offset : slot.code_offset + len(codes)] = codes
        return packed

    def _local_values(self, master: Master, share: float) -> Tensor:
        """Of a rank that has all parts: ``[ranks, part]``, of which ``_give`` makes the rest."""
        if master.bucket.layout.kind == "ternary" and share < 1:
            return self._mixed(master, share)
        return master.weights.detach()

    def _mixed(self, master: Master, share: float) -> Tensor:
        """W̃ of the parts that are held, ``[held parts, part]``."""
        weights = master.weights.detach()
        mixed = torch.zeros_like(weights, dtype=self.dtype)
        for slot in master.bucket.layout.slots:
            places = master.held(slot, mixed)
            for (_, rows), (_, place) in zip(master.held(slot, weights), places, strict=True):
                place.copy_(numerics.mixed_weight(rows, self.scales[slot.name], share))
        return mixed

    def _give(self, layout: BucketLayout, parts: Tensor, share: float) -> None:
        """Give each parameter of a bucket its values: from packed codes, or from values."""
        for slot in layout.slots:
            if layout.kind != "ternary":
                slot.parameter.data.copy_(layout.local(parts, slot).view(slot.parameter.shape))
                continue
            layer, scale = self.layers[slot.name], self.scales[slot.name]
            if share < 1:
                # A view would keep all of the bucket.
                layer.receive_mixed(layout.local(parts, slot).clone(), share)
            elif parts.dtype == torch.uint8:
                packed = layout.local_codes(parts, slot)
                layer.receive(TernaryWeight.from_packed(packed, slot.columns, scale))
            else:
                layer.receive(TernaryWeight.from_latent(layout.local(parts, slot), scale))


@dataclass
class _Arrival:
    """A bucket on its way to the layers."""

    publisher: Publisher
    layout: BucketLayout
    values: Chain | None
    share: float

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the bucket and give each parameter its part."""
        if self.values is not None:
            values, self.values = self.values.wait(), None
            self.publisher._give(self.layout, values, self.share)
