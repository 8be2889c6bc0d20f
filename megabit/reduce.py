"""Every collective that spans ranks of an axis, and the order of every sum that does.

Three kinds of sum, by what they promise:

- **integer** sums are exact, so no order matters (``all_reduce`` and ``reduce_scatter`` of int32);
- **block** sums (``sum_blocks``, ``gather_blocks``) are defined over fixed blocks of the axis that
  do not depend on its degree: every rank gathers all blocks' values and adds them in block order,
  so that the degree cannot change a bit;
- **plain** floating-point sums (``all_reduce``, ``reduce_scatter`` of floats) follow the back end's
  order. They occur in backward passes and over DP only, never in the forward pass of a ternary
  model. Layout-exact training is to give them a fixed order, here.

Sent bytes are counted by the ring algorithms' volume, whatever the back end really does.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.mesh import Axis

PROBLEM_BYTES = 2000
"""As much of a message as ranks tell each other."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Reduce ``x`` over ``axis`` in place and return it; ``x`` is contiguous, the same shape on
    every rank."""
    if axis.group is not None:
        axis.sent_bytes += 2 * _others_share(axis) * _num_bytes(x)
        dist.all_reduce(x, _OPS[op], group=axis.group)
    return x


def start_all_reduce(x: Tensor, axis: Axis) -> dist.Work | None:
    """Begin to sum ``x`` over ``axis`` in place; wait on what is returned before reading it."""
    if axis.group is None:
        return None
    axis.sent_bytes += 2 * _others_share(axis) * _num_bytes(x)
    return dist.all_reduce(x, group=axis.group, async_op=True)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """``[n, …]`` of each rank → ``[n · size, …]`` in rank order, on every rank."""
    if axis.group is None:
        return x
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    axis.sent_bytes += _others_share(axis) * _num_bytes(gathered)
    _all_gather_single(gathered, x.contiguous(), group=axis.group)
    return gathered


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum ``[n · size, …]`` over ``axis``; each rank gets its ``[n, …]`` of the result."""
    if axis.group is None:
        return x
    own = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    axis.sent_bytes += _others_share(axis) * _num_bytes(x)
    _reduce_scatter_single(own, x.contiguous(), group=axis.group)
    return own


def own_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of ``[n · size, …]`` along the first dimension; sends nothing."""
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank]


def gather_blocks(values: Tensor, axis: Axis) -> Tensor:
    """Values of this rank's blocks ``[…, b]`` → of all blocks ``[…, b · size]``, in block order."""
    if axis.group is None:
        return values
    by_rank = all_gather(values.unsqueeze(0), axis)  # [size, …, b]
    # Contiguous for one block a rank too: torch sums along other strides in another order.
    return by_rank.movedim(0, -2).flatten(-2).contiguous()


def sum_blocks(values: Tensor, axis: Axis) -> Tensor:
    """Sum of all blocks' values: ``[…, b]`` of each rank → ``[…]``, the same bits at any degree."""
    return gather_blocks(values, axis).sum(-1)


def broadcast(x: Tensor, source: int, axis: Axis) -> Tensor:
    """Give every rank of ``axis`` the ``x`` that its rank ``source`` has, in place."""
    if axis.group is not None:
        if axis.rank == source:
            axis.sent_bytes += (axis.size - 1) * _num_bytes(x)
        dist.broadcast(x, src=axis.global_rank(source), group=axis.group)
    return x


def any_rank(flag: bool, axis: Axis, device: torch.device) -> bool:
    """Whether ``flag`` is set on any rank of ``axis``: how ranks agree on what to do next."""
    return bool(all_reduce(torch.tensor(int(flag), device=device), axis, "max"))


def is_same(value: bytes, axis: Axis, device: torch.device) -> bool:
    """Whether all ranks of ``axis`` have the same ``value``, which is equally long on all."""
    own = torch.frombuffer(bytearray(value), dtype=torch.uint8).unsqueeze(0).to(device)
    values = all_gather(own, axis)
    return bool((values == values[0]).all())


def first_problem(problem: str | None, axis: Axis, device: torch.device) -> str | None:
    """What went wrong on the lowest rank of ``axis`` on which something did, or None: the same on
    every rank, so that all of them go on or all of them stop."""
    if not any_rank(problem is not None, axis, device):
        return None
    text = (problem or "").encode()[:PROBLEM_BYTES]
    own = torch.zeros(1, PROBLEM_BYTES, dtype=torch.uint8, device=device)
    own[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    texts = (bytes(row).rstrip(b"\0") for row in all_gather(own, axis).tolist())
    return next(text for text in texts if text).decode(errors="replace")


def _others_share(axis: Axis) -> float:
    return (axis.size - 1) / axis.size


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# torch 2.13 renamed the single-tensor collectives; 2.11 has the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
