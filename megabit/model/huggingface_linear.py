"""Ternary layers with the roundings of ``transformers``, for comparing with it token by token.

They hold codes as numbers of the compute dtype, as it does, and multiply in floats: slower than
integers, and a token's bits may depend on what else is in the batch. At TP 1 a forward pass over
whole sequences is bit-equal to ``transformers`` where its compiler is off. At more, what is
quantized is still the same on every rank, and a row-parallel layer adds terms in floats.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megabit.checkpoint.source import Index, ModelSource
from megabit.errors import UserError
from megabit.interop.expressible import check_expressible
from megabit.interop.huggingface import HuggingFaceSource, arithmetic
from megabit.interop.huggingface.arithmetic import Linear
from megabit.interop.huggingface.scales import stored_scale
from megabit.model.norm import whole_columns
from megabit.reduce import all_reduce
from megabit.tensor_parallel import (
    PLAIN,
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    ForwardPass,
    HuggingFaceForm,
    LayerContext,
    RowParallelBitLinear,
    TernaryLayer,
)
from megabit_kernels.packing import unpack


class HuggingFaceLayer(TernaryLayer):
    """A ternary layer whose weight is a function (``read_product``)."""

    product: Linear


class HuggingFaceColumnLinear(HuggingFaceLayer, ColumnParallelBitLinear):
    """``x [T, K]`` → ``[T, n]``."""

    @staticmethod
    def forward_together(
        layers: Sequence[ColumnParallelLinear],
        x: Tensor,
        absmax: Tensor | None = None,
        forward_pass: ForwardPass = PLAIN,
    ) -> tuple[Tensor, ...]:
        """The outputs of layers with the same input; ``absmax`` is not used."""
        return tuple(_of_huggingface(layer).product(x) for layer in layers)


class HuggingFaceRowLinear(HuggingFaceLayer, RowParallelBitLinear):
    """``x [T, k]`` → ``[T, N]``, summed over TP in the compute dtype."""

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """``absmax`` is not used."""
        tp = self.context.tp
        term = self.product(whole_columns(x, self.weight.shard.span, tp))
        return term if tp.size == 1 else all_reduce(term, tp, purpose="activations")


def form_of(source: ModelSource) -> HuggingFaceForm:
    """The form in which a checkpoint has its ternary layers; ``autobitlinear``, which is what
    ``megabit export`` writes, where it is not one of ``transformers``.

    Raises:
        UserError: it is a dense checkpoint of ``transformers``.
    """
    if not isinstance(source, HuggingFaceSource):
        return "autobitlinear"
    if source.quantization is None:
        raise UserError(
            f"{source.path}: is a dense {source.architecture}; hf mode is for ternary models"
        )
    quantization = source.quantization
    return "online" if quantization.mode == "online" else quantization.linear_class


def check_huggingface(source: ModelSource, form: HuggingFaceForm) -> None:
    """Refuse what ``transformers`` has no layers for.

    Raises:
        UserError: one line for each thing.
    """
    if source.model.linear != "ternary":
        raise UserError(f"{source.path}: is a dense model; hf mode is for ternary ones")
    derives = "use another form" if form == "online" else None
    check_expressible(source, "hf mode", has_prenorm=True, derives_scales=derives)


def read_product(source: ModelSource, name: str, index: Index, context: LayerContext) -> Linear:
    """The product with part ``index`` of a ternary weight, in the form of ``context``.

    Raises:
        UserError: ``online`` needs master weights, and ``source`` has none.
    """
    dtype, device, form = context.compute_dtype, context.device, context.huggingface
    assert form is not None
    rows, columns = index
    if form == "online":
        # All of it, since its scale is a mean in floats over the whole weight.
        weight = source.values(name).to(device, dtype)
        return arithmetic.online_linear(weight, compiled=False, part=(rows, columns))
    packed = source.codes(name, index)
    codes = unpack(packed, columns.stop - columns.start).to(device, dtype)
    scale = stored_scale(source, name, form).to(device, dtype)
    linear = arithmetic.auto_linear if form == "autobitlinear" else arithmetic.bit_linear
    return linear(codes, scale, compiled=False, columns=columns)


def _of_huggingface(layer: torch.nn.Module) -> HuggingFaceLayer:
    if not isinstance(layer, HuggingFaceLayer):
        raise TypeError(f"{type(layer).__name__} among layers of hf mode")
    return layer
