"""Weights as products want them: ternary codes with γ, and int8 rows with one scale each.

A ternary weight is held once, in the layout that its device computes with (``dispatch``): 2 bits a
weight wherever there is a kernel for it. Storage and wire use the canonical ``packed`` layout; any
layout becomes any other without a change of a code.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megabit_kernels import ops, packing
from megabit_kernels.conversion import Int8Layout, Layout, check_layout, lay_out_int8
from megabit_kernels.dispatch import best_int8_layout, best_layout


@dataclass(frozen=True, eq=False)
class TernaryWeight:
    """A ternary matrix ``γ · code`` of ``[N, K]`` codes; parts of a logical tensor have its γ."""

    data: Tensor
    """The codes, uint8 (int8 in layout ``int8``), in the shape of ``layout``"""
    layout: Layout
    shape: tuple[int, int]
    """(N, K)"""
    scale: Tensor
    """γ, 0-dimensional"""

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if self.scale.dim() != 0 or not self.scale.is_floating_point():
            raise ValueError(
                f"scale is {self.scale.dtype} {tuple(self.scale.shape)}: γ is one number, "
                "a 0-dimensional floating-point tensor"
            )
        if self.scale.device != self.data.device:
            raise ValueError(f"scale is on {self.scale.device}, the codes on {self.data.device}")

    @staticmethod
    def from_latent(
        weight: Tensor, scale: Tensor | None = None, layout: Layout | None = None
    ) -> "TernaryWeight":
        """Ternarize a floating-point ``weight [N, K]``.

        Args:
            scale: γ of the logical tensor; None takes that of ``weight`` itself.
            layout: None is the best one for the weight's device.
        """
        packing.require_matrix("weight", weight, weight.dtype)
        weight = weight.detach()
        if scale is None:
            scale = ops.absmean_scale(weight)
        layout = layout or best_layout(weight.device)
        n, k = weight.shape
        return TernaryWeight(ops.ternarize(weight, scale, layout), layout, (n, k), scale)

    @staticmethod
    def from_codes(codes: Tensor, scale: Tensor, layout: Layout | None = None) -> "TernaryWeight":
        """From int8 codes ``[N, K]``, each −1, 0 or +1."""
        packing.check_codes(codes)
        n, k = codes.shape
        whole = TernaryWeight(codes, "int8", (n, k), scale)
        return whole.to_layout(layout or best_layout(codes.device))

    @staticmethod
    def from_packed(
        packed: Tensor, k: int, scale: Tensor, layout: Layout | None = None
    ) -> "TernaryWeight":
        """From the canonical format, uint8 ``[N, ceil(k/4)]``; code 3 is refused."""
        packing.check_packed(packed, k)
        whole = TernaryWeight(packed, "packed", (packed.shape[0], k), scale)
        return whole.to_layout(layout or best_layout(packed.device))

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it."""
        return self.data.nbytes

    def codes(self) -> Tensor:
        """int8 ``[N, K]``."""
        return self.dense(torch.int8)

    def packed(self) -> Tensor:
        """The canonical format: uint8 ``[N, ceil(K/4)]``."""
        return self.data if self.layout == "packed" else packing.pack(self.codes())

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The codes ``[N, K]`` in ``dtype``, which holds them exactly; without γ."""
        return ops.unpack(self.data, self.layout, *self.shape, dtype)

    def to_layout(self, layout: Layout) -> "TernaryWeight":
        """The same weight, held otherwise."""
        if layout == self.layout:
            return self
        return replace(self, data=ops.lay_out(self.codes(), layout), layout=layout)


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """An int8 matrix with one scale for each row: an output head for inference.

    Embeddings and the head are not ternary; as int8 they are read at half of bf16's bytes.
    """

    data: Tensor
    """The values, in ``layout``"""
    layout: Int8Layout
    shape: tuple[int, int]
    """(N, K)"""
    scale: Tensor
    """fp32 ``[N]``"""

    @staticmethod
    def from_float(weight: Tensor, layout: Int8Layout | None = None) -> "Int8Weight":
        """Round ``weight [N, K]`` to int8: row n has the scale max|w[n]| / 127."""
        packing.require_matrix("weight", weight, weight.dtype)
        n, k = weight.shape
        weight = weight.detach().float()
        values, scale = ops.quantize_activation(weight)  # the same rule, row by row
        layout = layout or best_int8_layout(weight.device)
        data = lay_out_int8(values, layout)
        return Int8Weight(data, layout, (n, k), scale.flatten())
