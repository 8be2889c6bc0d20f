"""Ternary layers with the roundings of ``transformers``, for comparing with it token by token.

They hold codes as numbers of the compute dtype, as it does, and multiply in floats, whose sums may
depend on the shape of a product. So sequences that are computed together are multiplied one by one.
That is slow, but at TP 1 each is bit-equal to what ``transformers`` makes of it alone, where its
compiler is off. At more, what is quantized is still the same on every rank, and a row-parallel
layer adds terms in floats.
"""

from collections.abc import Sequence
from itertools import pairwise

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
from megabit.tensor_parallel.forward_pass import AttentionCache
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
        return tuple(
            by_sequence(_of_huggingface(layer).product, x, forward_pass) for layer in layers
        )


class HuggingFaceRowLinear(HuggingFaceLayer, RowParallelBitLinear):
    """``x [T, k]`` → ``[T, N]``, summed over TP in the compute dtype."""

    def forward(
        self, x: Tensor, absmax: Tensor | None = None, forward_pass: ForwardPass = PLAIN
    ) -> Tensor:
        """``absmax`` is not used."""
        tp = self.context.tp
        x = whole_columns(x, self.weight.shard.span, tp)
        term = by_sequence(self.product, x, forward_pass)
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


def by_sequence(product: Linear, x: Tensor, forward_pass: ForwardPass) -> Tensor:
    """``product`` of ``x [T, K]``: of each sequence by itself, where it is of several with a cache;
    else they are of one shape, as in ``transformers``."""
    if forward_pass.cache is None:
        return product(x)
    return torch.cat([product(x[rows]) for rows in sequences(forward_pass.cache)])


def sequences(cache: AttentionCache) -> list[slice]:
    """The rows of each sequence that has some."""
    edges = pairwise(cache.query_starts.tolist())
    return [slice(start, stop) for start, stop in edges if start < stop]


def _of_huggingface(layer: torch.nn.Module) -> HuggingFaceLayer:
    if not isinstance(layer, HuggingFaceLayer):
        raise TypeError(f"{type(layer).__name__} among layers of hf mode")
    return layer
