"""``LayerContext``: what every layer of a stage needs to know beside its own sizes."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import (
    Pending,
    Purpose,
    start_all_reduce,
    start_reduce_scatter,
    start_tree_all_reduce,
    start_tree_reduce_scatter,
)
from megabit.tensor_parallel.lossy_sums import LossySums
from megabit.tensor_parallel.weight_scale import WeightScale

HuggingFaceForm = Literal["online", "autobitlinear", "bitlinear"]
"""Which ternary layers of ``transformers`` are meant: ``online`` quantizes master weights, the
others have codes and a scale, by which ``autobitlinear`` multiplies and ``bitlinear`` divides."""


@dataclass(frozen=True)
class LayerContext:
    """How the layers of a stage compute, and with whom."""

    tp: Axis
    device: torch.device
    compute_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    ternary_backward_dtype: torch.dtype = torch.float32
    """Of the operands of a ternary layer's backward products; int8 is the quantized backward."""
    sequence_parallel: bool = False
    row_reduce: Literal["int32", "exact16", "int8"] = "int32"
    """How a row-parallel ternary layer adds products over TP (``row_sums``)."""
    lossy_sums: LossySums | None = None
    """For ``row_reduce="int8"``, and only for that."""
    tree_blocks: int | None = None
    """Layout-exact training: the number of fixed blocks, a power of two that TP divides, over which
    each floating-point sum of the backward pass is defined. None: sums are as they come."""
    weight_scale: WeightScale = field(default_factory=WeightScale)
    """What γ of a ternary weight is."""
    huggingface: HuggingFaceForm | None = None
    """Inference with the roundings of ``transformers``, for comparisons: modules have other
    classes then (``model.huggingface_linear``). None: exact integer products."""

    def __post_init__(self) -> None:
        if self.huggingface is not None and self.sequence_parallel:
            raise ValueError("hf mode is for inference, which has no sequence parallelism")
        if (self.row_reduce == "int8") != (self.lossy_sums is not None):
            raise ValueError("int8 sums need lossy_sums, and other sums have no use for them")
        if self.row_reduce == "int8" and self.sequence_parallel:
            raise ValueError("int8 sums are for inference, which has no sequence parallelism")

    @staticmethod
    def single(dtype: torch.dtype = torch.float32) -> "LayerContext":
        """One process on the CPU, all in ``dtype``."""
        return LayerContext(Axis.single("tp"), torch.device("cpu"), dtype, dtype, dtype)

    @property
    def own_tree_blocks(self) -> int:
        """Of ``tree_blocks``, those of this rank: consecutive, in rank order. 1 without them."""
        return 1 if self.tree_blocks is None else self.tree_blocks // self.tp.size

    def start_sum(self, x: Tensor, purpose: Purpose = "activation gradients") -> Pending:
        """Begin to sum a gradient over TP, every rank to have the result."""
        if self.tree_blocks is None:
            return start_all_reduce(x, self.tp, purpose)
        return start_tree_all_reduce(x, self.tp, purpose)

    def start_sum_of_tokens(self, x: Tensor) -> Pending:
        """Begin to sum an activation gradient ``[T, …]`` over TP, for the ``[t, …]`` that this rank
        has between the layers: all tokens, or its own under sequence parallelism."""
        if not self.sequence_parallel:
            return self.start_sum(x)
        if self.tree_blocks is None:
            return start_reduce_scatter(x, self.tp, "activation gradients")
        return start_tree_reduce_scatter(x, self.tp, "activation gradients")
