"""The sum over TP behind a row-parallel ternary layer: integers first, then one scaling.

Each rank has int32 products of its own input columns. Their sum is exact in any order, and only
then it is scaled and rounded, so the result has the same bits at every TP degree. Two exact ways,
by ``parallel.row_reduce``:

- ``int32``: an all-reduce (under sequence parallelism a reduce-scatter) of int32;
- ``exact16``: rank r adds up the r-th part of the tokens. Terms travel to it as int16, and the
  scaled result back in the output's dtype: with a bf16 output the bytes of a bf16 all-reduce. A
  rank of which a term does not fit into int16 says so in the message that it sends to every other
  rank, so all of them know before anyone acts on it, and all send int32 instead.

And one that rounds what is sent, for inference: ``int8`` (``lossy_sums``), or ``exact16`` where
that would cost too much or gain too little.
"""

import torch
from torch import Tensor

from megabit.mesh import Axis
from megabit.reduce import (
    all_gather,
    all_reduce,
    own_rows,
    reduce_scatter,
    start_all_to_all,
    tree_sum,
)
from megabit.tensor_parallel.context import LayerContext
from megabit_kernels import numerics

INT16 = torch.iinfo(torch.int16)


def sum_products(
    acc: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, context: LayerContext
) -> Tensor:
    """``Σ_ranks acc · (s·γ)``: int32 ``[T, N]``, s ``[T, 1]`` → ``[t, N]`` in ``dtype``.

    ``acc`` is used up: it may be summed in place. What is sent is counted by how it is sent, too:
    ``int32``, ``exact16`` (in vain also where a term did not fit) or ``int8``.
    """
    tp = context.tp
    if context.row_reduce == "int32":
        with tp.coded("int32"):
            if context.sequence_parallel:
                total = reduce_scatter(acc, tp, "activations")
                return numerics.dequantize_product(total, own_rows(x_scale, tp), w_scale, dtype)
            total = all_reduce(acc, tp, purpose="activations")
        return numerics.dequantize_product(total, x_scale, w_scale, dtype)
    if context.lossy_sums is not None and tp.size > 1:
        y = context.lossy_sums.sum_products(acc, x_scale, w_scale, dtype, tp)
        if y is not None:
            return y
    tokens = acc.shape[0]
    acc, x_scale = _padded(acc, tp.size), _padded(x_scale, tp.size)
    total = scatter_products(acc, tp)
    y = numerics.dequantize_product(total, own_rows(x_scale, tp), w_scale, dtype)
    if context.sequence_parallel:
        return y
    with tp.coded("exact16"):
        return all_gather(y, tp, "activations")[:tokens]


def scatter_products(acc: Tensor, tp: Axis) -> Tensor:
    """Sum int32 ``[n · tp, N]`` over TP and keep own ``[n, N]``, sent as int16 where all fit."""
    parts = acc.unflatten(0, (tp.size, -1)).flatten(1)  # [tp, n·N]
    smallest, largest = torch.aminmax(acc) if acc.numel() else (acc.new_zeros(()),) * 2
    message = acc.new_empty((tp.size, parts.shape[1] + 1), dtype=torch.int16)
    message[:, :-1] = parts
    message[:, -1] = (largest > INT16.max) | (smallest < INT16.min)
    # As bytes: neither gloo nor NCCL has an int16.
    with tp.coded("exact16"):
        sent = start_all_to_all(message.view(torch.uint8), tp, "activations")
    received = sent.wait().view(torch.int16)
    # Every rank has every rank's flag, so all of them agree. (A GPU's host waits for it here.)
    if received[:, -1].any():
        with tp.coded("int32"):
            received = start_all_to_all(parts, tp, "activations").wait()
        return tree_sum(received).view(-1, acc.shape[1])
    return tree_sum(received[:, :-1].int()).view(-1, acc.shape[1])


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -len(x) % multiple
    return x if not missing else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
