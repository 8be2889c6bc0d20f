"""The linear layers of the model, with what ``ModelConfig`` puts in front of them.

Column-parallel layers (q, k, v, gate, up) read what goes from layer to layer, which is normalized
already; with ``norm_placement: per_proj`` each has one more norm of its own. Row-parallel ones (o,
down) read what column-parallel layers made, with a SubLN before them unless ``norm_placement`` is
``prenorm``, and behind that a Hadamard transform if ``hadamard``.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from megabit.config import ModelConfig
from megabit.model.hadamard import hadamard, transform_width
from megabit.model.huggingface_linear import HuggingFaceColumnLinear, HuggingFaceRowLinear
from megabit.model.norm import Normalized, RMSNorm, hidden_norm, rms_norm
from megabit.tensor_parallel import (
    BlockPartition,
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    ForwardPass,
    LayerContext,
    RowParallelBitLinear,
    RowParallelLinear,
    Span,
    TernaryLayer,
)
from megabit.tensor_parallel.activations import ActivationKind, ActivationQuantizer

Place = Literal["column", "o", "down"]

QUANTIZERS: dict[str, dict[Place, ActivationKind]] = {
    "int8": {"column": "int8", "o": "int8", "down": "int8"},
    "full": {"column": "none", "o": "none", "down": "none"},
    "a4.8": {"column": "int4", "o": "top_half", "down": "int8"},
}
"""For each ``model.activations``, how the input of a layer is quantized."""


def has_gains(model: ModelConfig) -> bool:
    """Whether norms have gains; the last one, before the head, has one in any case."""
    return model.norm_placement != "in_linear"


def column_linear(model: ModelConfig, rows: Span, context: LayerContext) -> ColumnParallelLinear:
    """A layer ``[t, H]`` → ``[T, n]``; as ``rms_norm`` it has the norm of its own, if any."""
    layer_type: type[ColumnParallelLinear] = ColumnParallelLinear
    if model.linear == "ternary":
        is_own = context.huggingface is None
        layer_type = ColumnParallelBitLinear if is_own else HuggingFaceColumnLinear
    layer = layer_type(model.hidden_size, rows, context)
    _set_quantizer(layer, model, "column")
    if model.norm_placement == "per_proj":
        layer.rms_norm = hidden_norm(model, context)
    return layer


def project(
    layers: Sequence[ColumnParallelLinear], x: Normalized, forward_pass: ForwardPass
) -> tuple[Tensor, ...]:
    """The outputs of layers of ``column_linear`` with one input ``[t, H]``.

    It is quantized, gathered and its gradient summed once, or once for each layer where each has a
    norm of its own.
    """
    outputs: list[Tensor] = []
    for layer in layers:
        norm = getattr(layer, "rms_norm", None)
        if norm is None:
            return layer.forward_together(layers, *x, forward_pass)
        outputs.append(layer(*norm(x.values, forward_pass), forward_pass))
    return tuple(outputs)


def row_linear(
    model: ModelConfig, columns: Span, place: Place, context: LayerContext
) -> RowParallelLinear:
    """A layer ``[T, k]`` → ``[t, H]``."""
    layer_type: type[RowParallelLinear] = RowParallelLinear
    if model.linear == "ternary":
        is_own = context.huggingface is None
        layer_type = RowParallelBitLinear if is_own else HuggingFaceRowLinear
    layer = layer_type(columns, model.hidden_size, context)
    _set_quantizer(layer, model, place)
    return layer


def sub_norm(model: ModelConfig, columns: Span, context: LayerContext) -> RMSNorm | None:
    """The norm before a row-parallel layer, if there is one."""
    if model.norm_placement == "prenorm":
        return None
    return rms_norm(columns, model.rms_norm_eps, context, has_gains(model))


class RowInput:
    """What is done to ``[T, k]`` before a row-parallel layer: SubLN, then the transform."""

    def __init__(self, model: ModelConfig, partition: BlockPartition, norm: RMSNorm | None) -> None:
        self.norm = norm
        self.width = transform_width(partition) if model.hadamard else None

    def __call__(self, x: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, Tensor | None]:
        """Values and their absmax over all columns, if that is known here; else the layer has to
        exchange one over TP."""
        absmax: Tensor | None = None
        if self.norm is not None:
            x, absmax = self.norm(x, forward_pass)
        if self.width is None:
            return x, absmax
        return hadamard(x, self.width), None


def _set_quantizer(layer: nn.Module, model: ModelConfig, place: Place) -> None:
    if isinstance(layer, TernaryLayer):
        layer.quantizer = ActivationQuantizer(QUANTIZERS[model.activations][place])
