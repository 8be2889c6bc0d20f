"""What column- and row-parallel ternary layers share: the codes of their weight, or what stands for
it while a λ ramp lasts, and how their input is quantized.

In training a layer holds codes and γ only (``receive``): the optimizer has the latent weight, and
the parameter is a shape without storage. A layer used alone keeps its latent weight as a parameter
and, beside it, the codes and scale derived from it. They are derived again when the parameter has
changed: for all layers at once (``ternarize_layers``), else by ``forward`` on first use.

While λ < 1, what the optimizer sends is W̃ = W + λ(γ·code − W) itself (``receive_mixed``). A layer
has either, and a forward pass with another λ than that of its weight is an error: never does it
compute the wrong product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.tensor_parallel.activations import ActivationQuantizer
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.forward_pass import PLAIN, ForwardPass
from megabit.tensor_parallel.layers import Values
from megabit.tensor_parallel.parameter import ShardedParameter
from megabit.tensor_parallel.weight_scale import OwnedElements
from megabit_kernels import TernaryWeight, numerics


@dataclass(frozen=True)
class MixedWeight:
    """W̃ ``[n, k]``, in the dtype that is computed in, and its λ."""

    values: Tensor
    share: float


class TernaryLayer(nn.Module):
    """A layer that multiplies with the codes of ``self.weight``."""

    context: LayerContext
    weight: ShardedParameter
    name: str = ""
    """Of the weight in the model; random numbers depend on it."""
    quantizer: ActivationQuantizer = ActivationQuantizer()
    """Of the input."""
    _ternary: TernaryWeight | None = None
    _ternary_source: tuple[int, int] | None = None
    _mixed: MixedWeight | None = None

    def ternary(self) -> TernaryWeight:
        """Codes and scale of the weight as it is now.

        Waits for codes that are on their way; collective over TP where a latent weight of the
        layer's own has changed.

        Raises:
            RuntimeError: the layer has W̃ with λ < 1.
        """
        self.weight.ready()
        if self._mixed is not None:
            raise RuntimeError(
                f"{self._described()} is W + λ(γ·code − W) with λ = {self._mixed.share:g}: it has "
                "no codes before the λ ramp ends"
            )
        if not self.weight.is_meta and self._ternary_source != _version(self.weight):
            ternarize_layers([self], self.context.tp)
        assert self._ternary is not None
        return self._ternary

    @property
    def mixed(self) -> MixedWeight | None:
        """What was received for λ < 1, if it is that and not codes."""
        self.weight.ready()
        return self._mixed

    def receive(self, ternary: TernaryWeight) -> None:
        """Compute with ``ternary`` from now on."""
        self._ternary, self._mixed = ternary, None

    def receive_mixed(self, values: Tensor, share: float) -> None:
        """Compute with W̃ from now on: ``values [n, k]``, made with λ = ``share``, below 1."""
        self._ternary, self._mixed = None, MixedWeight(values, share)

    def give_up_latent(self) -> None:
        """Keep the shape of the weight only: from now on codes are received."""
        self.weight = ShardedParameter(self.weight.shard, self.weight.dtype, "meta")
        self._ternary = self._ternary_source = self._mixed = None

    def adds_integers(self, forward_pass: ForwardPass) -> bool:
        """Whether the product is one of codes, and not one of floating-point numbers."""
        return forward_pass.quantization.share == 1 and self._quantizes(forward_pass)

    def values(self, share: float) -> Values:
        """γ·code or, with λ = ``share`` < 1, W + λ(γ·code − W).

        Raises:
            RuntimeError: the layer has received neither codes nor W̃ with that λ.
        """
        if share == 1:
            ternary = self.ternary()
            return lambda dtype: ternary.dense(dtype).mul_(ternary.scale)
        mixed = self.mixed
        if mixed is None and not self.weight.is_meta:
            ternary, latent = self.ternary(), self.weight.detach()
            effective = ternary.dense(ternary.scale.dtype).mul_(ternary.scale)
            mixed = MixedWeight(numerics.blended(latent, effective, share), share)
        if mixed is None or mixed.share != share:
            held = "codes" if mixed is None else f"W̃ with λ = {mixed.share:g}"
            raise RuntimeError(
                f"{self._described()} is {held}, and the forward pass has λ = {share:g}; publish "
                "weights for the λ of the pass that follows"
            )
        return mixed.values.to

    @torch.no_grad()
    def quantized(
        self, x: Tensor, absmax: Tensor | None, tp: Axis, forward_pass: ForwardPass
    ) -> tuple[Tensor, Tensor]:
        """int8 ``[T, k]`` and scales ``[T, 1]`` of ``x``, as ``ActivationQuantizer.quantize``."""
        x_q, scale = self.quantizer.quantize(x.detach(), absmax, tp, forward_pass)
        is_replay = forward_pass.kept is not None and forward_pass.kept.is_replay
        if forward_pass.probe is not None and not is_replay:
            forward_pass.probe.add(self.name, x_q)
        return x_q, scale

    def blended(
        self, x: Tensor, absmax: Tensor | None, tp: Axis, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """x̃ in the dtype of ``x``: x itself, or x + λ(x̂ − x) straight-through."""
        if not self._quantizes(forward_pass):
            return x
        x_q, scale = self.quantized(x, absmax, tp, forward_pass)
        x_hat = x_q.to(scale.dtype).mul_(scale)
        share = forward_pass.quantization.share
        return _StraightThrough.apply(x, numerics.blended(x.detach(), x_hat, share))

    def _quantizes(self, forward_pass: ForwardPass) -> bool:
        """Whether the input becomes int8."""
        is_full = forward_pass.quantization.full_precision_activations
        return not is_full and self.quantizer.kind != "none"

    def _described(self) -> str:
        return f"the weight of {self.name or type(self).__name__}"


@torch.no_grad()
def ternarize_layers(layers: Sequence[TernaryLayer], tp: Axis) -> None:
    """Derive codes and scales of ``layers`` from their latent weights, with one exchange over TP.

    γ is that of logical tensors, of whose elements ranks own parts (``weight_scale``): the same
    bits at every TP.
    """
    if not layers:
        return
    rule, weights = layers[0].context.weight_scale, [layer.weight for layer in layers]
    if any(layer.context.weight_scale != rule for layer in layers):
        raise ValueError("layers that are ternarized together have different weight scales")
    owned = [OwnedElements([w.shard.owned(w.detach())], w.shard.numel) for w in weights]
    scales = rule.of_tensors(owned, tp, torch.float64, weights[0].device)
    for layer, weight, scale in zip(layers, weights, scales, strict=True):
        layer.receive(TernaryWeight.from_latent(weight.detach(), scale.to(weight.dtype)))
        layer._ternary_source = _version(weight)


def ternary_layers(module: nn.Module) -> Iterator[TernaryLayer]:
    """The ternary layers in ``module``, in the order of its definition."""
    return (layer for layer in module.modules() if isinstance(layer, TernaryLayer))


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes when the values do: in-place writes count versions, ``.to()`` moves the storage."""
    return weight._version, weight.data_ptr()


class _StraightThrough(Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
