"""The straight-through products of a ternary layer's backward pass.

dX = dY · (γ·code) and dW = (dY·s)ᵀ · x_q (``megabit_kernels.numerics``), with floating-point
operands or, for ``precision.ternary_backward: int8``, with integers that are rounded
stochastically.

In layout-exact training (``LayerContext.tree_blocks``) every product is taken in fixed parts of the
weight's split dimension, so that its shape is the same at every TP degree, and the terms of dX are
added over the tree's blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megabit.reduce import tree_sum
from megabit.tensor_parallel.context import LayerContext
from megabit.tensor_parallel.partition import Span
from megabit_kernels import (
    TernaryWeight,
    input_gradient,
    int8_input_gradient,
    int8_weight_gradients,
    weight_gradients,
)


@dataclass(frozen=True)
class Part:
    """A run of rows (or columns) of this rank's weight."""

    number: int
    """The same at every layout, unlike the position."""
    local: slice

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The part of ``x``, whose dimension ``dim`` is the weight's split one."""
        return x.narrow(dim, self.local.start, self.local.stop - self.local.start).contiguous()


@dataclass(frozen=True)
class Parts:
    """The split dimension of this rank's weight, as backward products take it."""

    all: tuple[Part, ...]
    """What dW is computed in."""
    terms: tuple[Part, ...]
    """What dX is summed over: of each of this rank's tree blocks, the rows that it owns. Rows that
    several ranks hold are owned by one of them."""

    @staticmethod
    def of(span: Span, context: LayerContext) -> "Parts":
        """The parts of ``span``: one, or fixed ones in layout-exact training."""
        trees = context.tree_blocks
        if trees is None:
            owned = slice(span.owned_start - span.start, span.owned_stop - span.start)
            return Parts((Part(0, slice(0, span.width)),), (Part(0, owned),))
        edges = [*accumulate(span.block_widths, initial=0)]
        blocks = [Part(span.first_block + i, slice(*e)) for i, e in enumerate(pairwise(edges))]
        first = context.tp.rank * context.own_tree_blocks
        terms = []
        for tree in range(first, first + context.own_tree_blocks):
            # A block belongs to the tree block in which it begins; there may be fewer KV heads.
            held = [b.local for b in blocks if b.number * trees // span.num_blocks == tree]
            start = held[0].start if held else 0
            terms.append(Part(tree, slice(start, held[-1].stop if held else start)))
        # Where tree blocks are made of whole blocks, TP never tears one.
        return Parts(tuple(terms if span.num_blocks % trees == 0 else blocks), tuple(terms))


@dataclass(frozen=True)
class TernaryBackward:
    """What the backward pass of layers with one input needs to know, from their forward pass."""

    context: LayerContext
    ternary: Sequence[TernaryWeight]
    parts: Sequence[Parts]
    seed: int
    """Of stochastic rounding."""

    def input_gradient_of_columns(self, grads: Sequence[Tensor]) -> Tensor:
        """This rank's term of dX ``[T, K]``, from dY ``[T, n]`` of each column-parallel layer."""
        if self.context.tree_blocks is None:
            layers = range(len(grads))
            terms = (self._term(i, self.parts[i].terms[0], grads[i], None) for i in layers)
            return self._summed(terms, grads[0].shape[0])
        codes = [weight.codes() for weight in self.ternary]
        blocks = []
        for b in range(self.context.own_tree_blocks):
            terms = (
                self._term(i, p.terms[b], grads[i], codes[i]) for i, p in enumerate(self.parts)
            )
            blocks.append(self._summed(terms, grads[0].shape[0]))
        return tree_sum(torch.stack(blocks))

    def weight_gradients_of_columns(
        self, grads: Sequence[Tensor], x_q: Tensor, x_scale: Tensor, wanted: Sequence[bool]
    ) -> Iterator[tuple[int, Tensor]]:
        """(layer, dW ``[n, K]``) of those layers for which it is ``wanted``."""
        chosen = [i for i, is_wanted in enumerate(wanted) if is_wanted]
        if self.context.tree_blocks is None:
            dws = self._weight_gradients([grads[i] for i in chosen], x_q, x_scale, self.seed)
            yield from zip(chosen, dws, strict=True)
            return
        for i in chosen:
            parts = self.parts[i].all
            own = [part.of(grads[i], 1) for part in parts]
            # One at a time: the seed of each is that of its number.
            dws = [
                self._weight_gradients([g], x_q, x_scale, self._seed(i, p.number))[0]
                for g, p in zip(own, parts, strict=True)
            ]
            yield i, torch.cat(dws)

    def input_gradient_of_rows(self, grad: Tensor) -> Tensor:
        """dX ``[T, k]`` of a row-parallel layer from the whole dY ``[T, N]``."""
        (weight,), (parts,) = self.ternary, self.parts
        if self.context.tree_blocks is None:
            return self._input_gradient(grad, weight, self.seed)
        codes = weight.codes()
        blocks = [_weight(part.of(codes, 1), weight.scale) for part in parts.all]
        return torch.cat([self._input_gradient(grad, b, self.seed) for b in blocks], dim=1)

    def weight_gradient_of_rows(self, grad: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
        """dW ``[N, k]`` of a row-parallel layer from the whole dY ``[T, N]``."""
        if self.context.tree_blocks is None:
            return self._weight_gradients([grad], x_q, x_scale, self.seed)[0]
        blocks = [part.of(x_q, 1) for part in self.parts[0].all]
        dws = [self._weight_gradients([grad], b, x_scale, self.seed)[0] for b in blocks]
        return torch.cat(dws, dim=1)

    def _term(self, layer: int, part: Part, grad: Tensor, codes: Tensor | None) -> Tensor | None:
        """What the rows of ``part`` contribute to dX; None if there are none."""
        weight = self.ternary[layer]
        if part.local.start == part.local.stop:
            return None
        if part.local != slice(0, weight.shape[0]) or codes is not None:
            rows = part.of(weight.codes() if codes is None else codes, 0)
            weight, grad = _weight(rows, weight.scale), part.of(grad, 1)
        return self._input_gradient(grad, weight, self._seed(layer, part.number))

    def _summed(self, terms: Iterator[Tensor | None], tokens: int) -> Tensor:
        """The sum, in the given order, of those terms that are there. There are none where a rank
        owns no rows of the only layer: of a KV head that another rank counts."""
        total: Tensor | None = None
        for term in terms:
            if term is not None:
                total = term if total is None else total.add_(term)
        if total is None:
            weight = self.ternary[0]
            return weight.scale.new_zeros(tokens, weight.shape[1])
        return total

    def _input_gradient(self, grad: Tensor, weight: TernaryWeight, seed: int) -> Tensor:
        dtype = self.context.ternary_backward_dtype
        if dtype == torch.int8:
            return int8_input_gradient(grad, weight, seed)
        return input_gradient(grad, weight, dtype)

    def _weight_gradients(
        self, grads: Sequence[Tensor], x_q: Tensor, x_scale: Tensor, seed: int
    ) -> list[Tensor]:
        dtype = self.context.ternary_backward_dtype
        if dtype == torch.int8:
            return int8_weight_gradients(grads, x_q, x_scale, seed)
        return weight_gradients(grads, x_q, x_scale, dtype)

    def _seed(self, layer: int, part: int) -> int:
        """Another one for each layer and part."""
        return (self.seed + 0x9E3779B97F4A7C15 * (4096 * layer + part)) % 2**63


def _weight(codes: Tensor, scale: Tensor) -> TernaryWeight:
    n, k = codes.shape
    return TernaryWeight(codes, "int8", (n, k), scale)
