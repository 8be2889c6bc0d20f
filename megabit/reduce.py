"""Every collective that spans ranks of an axis, and the order of every sum that does.

Four kinds of sum, by what they promise:

- **integer** sums are exact, so no order matters (``all_reduce`` and ``reduce_scatter`` of
  integers, ``tensor_parallel.row_sums``);
- **block** sums (``sum_blocks``, ``gather_blocks``) are defined over fixed blocks of the axis that
  do not depend on its degree: every rank gathers all blocks' values and adds them in block order,
  so that the degree cannot change a bit;
- **tree** sums (``tree_sum``, ``start_tree_reduce_scatter``, ``start_tree_all_reduce``) add the
  terms of fixed blocks in a balanced binary tree. A rank that owns 1, 2, 4, … consecutive blocks
  owns a subtree, so that each such degree gives the same bits. Gradients over DP are always added
  so; what is added over TP backward is in layout-exact training;
- **plain** floating-point sums (``all_reduce``, ``reduce_scatter`` of floats) follow the back end's
  order. They occur in backward passes over TP only, never in the forward pass of a ternary model.

Every collective counts its bytes under a purpose, by the ring algorithms' volume, whatever the back
end really does, and the time that the rank was blocked in it. Where the axis has a ``check``, ranks
compare what they call before it begins (``faults.collective_check``).
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megabit.mesh import Axis

Purpose = Literal[
    "activations",
    "activation gradients",
    "statistics",
    "weight gradients",
    "weights",
    "scales",
    "updates",
    "outer",
    "control",
]
"""What bytes are sent for. *Statistics* are those of tokens (norms, ranges, the loss), *weights*
are codes and dense replicas, *scales* the sums that make γ, *updates* what is orthogonalised on one
rank for all (Muon), *outer* what islands tell each other of their weights, *control* what ranks
agree on."""

PROBLEM_BYTES = 2000
"""As much of a message as ranks tell each other."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Pending:
    """A collective under way: other work may be done before ``wait``."""

    axis: Axis
    work: dist.Work | None
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result; blocks until it is there. To be called once."""
        if self.work is not None:
            with self.axis.waiting():
                self.work.wait()
        return self.finish()

    @property
    def is_here(self) -> bool:
        """Whether ``wait`` would not block for what others send."""
        # What ranks compare before they begin must not begin when a clock says so.
        return self.work is None or (self.axis.check is None and self.work.is_completed())

    @staticmethod
    def done(x: Tensor) -> "Pending":
        """What a collective over one rank gives."""
        return Pending(Axis.single(""), None, lambda: x)


@dataclass
class Chain:
    """Collectives that follow each other: each begins when what it needs of the one before is here.

    ``go_on`` and ``wait`` begin them. Who holds several chains over the same axes has to let them
    go on in one order on all ranks (``Line``).
    """

    pending: Pending
    following: deque[Callable[[Tensor], Pending]]

    @staticmethod
    def of(first: Pending, *following: Callable[[Tensor], Pending]) -> "Chain":
        return Chain(first, deque(following))

    def go_on(self, blocks: bool) -> bool:
        """Begin what follows, as far as it can be without waiting, or all; whether all is begun."""
        while self.following and (blocks or self.pending.is_here):
            self.pending = self.following.popleft()(self.pending.wait())
        return not self.following

    def wait(self) -> Tensor:
        """The last result; blocks until it is there. To be called once."""
        self.go_on(blocks=True)
        return self.pending.wait()


@dataclass
class Line:
    """Chains over the same axes: what follows in one begins after all of those before it, so that
    all ranks begin the collectives of an axis in the same order, whenever they look.

    Collectives of *different* axes begin in different orders on different ranks then, if they begin
    as soon as they can. gloo does not mind; NCCL's communicators on one device may wait for each
    other for ever.
    """

    begins_when_here: bool = True
    """Whether what follows begins as soon as somebody looks and it can; else only in ``wait``,
    which all ranks call in the same order."""
    _begun: deque[Chain] = field(default_factory=deque)

    def join(self, chain: Chain) -> Chain:
        """Stand at the end, if anything follows in it."""
        if chain.following:
            self._begun.append(chain)
        return chain

    def is_here(self, chain: Chain) -> bool:
        """Whether ``wait`` would not block; lets all go on as far as they can without."""
        while self.begins_when_here and self._begun and self._begun[0].go_on(blocks=False):
            self._begun.popleft()
        return not chain.following and chain.pending.is_here

    def wait(self, chain: Chain) -> Tensor:
        """The result of ``chain``; blocks until it is there. To be called once."""
        while chain.following:
            self._begun.popleft().go_on(blocks=True)
        return chain.wait()


def start_all_reduce(
    x: Tensor, axis: Axis, purpose: Purpose = "control", op: Literal["sum", "max"] = "sum"
) -> Pending:
    """Begin to reduce ``x`` over ``axis`` in place; ``x`` is contiguous, the same shape on every
    rank."""
    if axis.group is None:
        return Pending.done(x)
    _begin(axis, f"all_reduce {op}", x, purpose, 2 * _others_share(axis) * _num_bytes(x))
    work = dist.all_reduce(x, _OPS[op], group=axis.group, async_op=True)
    return Pending(axis, work, lambda: x)


def all_reduce(
    x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum", purpose: Purpose = "control"
) -> Tensor:
    """Reduce ``x`` over ``axis`` in place and return it."""
    return start_all_reduce(x, axis, purpose, op).wait()


def start_all_gather(
    x: Tensor, axis: Axis, purpose: Purpose = "control", is_counted: bool = False
) -> Pending:
    """Begin ``[n, …]`` of each rank → ``[n · size, …]`` in rank order, on every rank.

    Args:
        is_counted: whether its bytes are counted already (``count_all_gather``).
    """
    if axis.group is None:
        return Pending.done(x)
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    sent = 0.0 if is_counted else _others_share(axis) * _num_bytes(gathered)
    _begin(axis, "all_gather", x, purpose, sent)
    work = _all_gather_single(gathered, x.contiguous(), group=axis.group, async_op=True)
    return Pending(axis, work, lambda: gathered)


def count_all_gather(num_bytes: int, axis: Axis, purpose: Purpose) -> None:
    """Count an all-gather of so many bytes from each rank now, which begins later: it belongs to
    the step that asked for it."""
    if axis.group is not None:
        axis.count((axis.size - 1) * num_bytes, purpose)


def all_gather(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Tensor:
    """``[n, …]`` of each rank → ``[n · size, …]`` in rank order, on every rank."""
    return start_all_gather(x, axis, purpose).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Pending:
    """Begin to sum ``[n · size, …]`` over ``axis``; each rank gets its ``[n, …]`` of the result."""
    if axis.group is None:
        return Pending.done(x)
    own = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _begin(axis, "reduce_scatter", x, purpose, _others_share(axis) * _num_bytes(x))
    work = _reduce_scatter_single(own, x.contiguous(), group=axis.group, async_op=True)
    return Pending(axis, work, lambda: own)


def reduce_scatter(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Tensor:
    """Sum ``[n · size, …]`` over ``axis``; each rank gets its ``[n, …]`` of the result."""
    return start_reduce_scatter(x, axis, purpose).wait()


def start_all_to_all(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Pending:
    """Begin to swap: row ``r`` of ``[size, …]`` goes to rank ``r``, and row ``r`` of the result is
    what that rank had for this one."""
    if axis.group is None:
        return Pending.done(x)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    _begin(axis, "all_to_all", x, purpose, _others_share(axis) * _num_bytes(x))
    work = dist.all_to_all_single(received, x.contiguous(), group=axis.group, async_op=True)
    return Pending(axis, work, lambda: received)


def start_exchange(
    x: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    axis: Axis,
    purpose: Purpose = "control",
) -> Pending:
    """``start_all_to_all`` of unequal parts: ``sent[r]`` elements of the flat ``x``, in the order
    of ranks, go to rank ``r``; the result is flat, with ``received[r]`` elements from each."""
    if axis.group is None:
        return Pending.done(x)
    arrived = x.new_empty(sum(received))
    if axis.check is not None:
        axis.check(f"exchange {x.dtype} for {purpose}", sent, received)
    axis.count((sum(sent) - sent[axis.rank]) * x.element_size(), purpose)
    work = dist.all_to_all_single(
        arrived, x.contiguous(), [*received], [*sent], group=axis.group, async_op=True
    )
    return Pending(axis, work, lambda: arrived)


def tree_sum(terms: Tensor) -> Tensor:
    """Sum over the first dimension in a balanced binary tree of neighbours: ``[b, …]`` → ``[…]``.

    With ``b`` a power of two, each run of 1, 2, 4, … terms that begins at a multiple of its length
    is a subtree: ranks can add their own terms and then each other's sums. An odd term moves up
    alone.
    """
    while len(terms) > 1:
        even = len(terms) // 2 * 2
        sums = terms[0:even:2] + terms[1:even:2]
        terms = sums if even == len(terms) else torch.cat([sums, terms[-1:]])
    return terms[0]


def start_tree_reduce_scatter(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Pending:
    """``start_reduce_scatter`` in tree order: terms travel to the rank that adds them."""
    if axis.group is None:
        return Pending.done(x)
    swap = start_all_to_all(x.unflatten(0, (axis.size, -1)), axis, purpose)
    return Pending(axis, swap.work, lambda: tree_sum(swap.finish()))


def start_tree_all_reduce(x: Tensor, axis: Axis, purpose: Purpose = "control") -> Pending:
    """``start_all_reduce`` in tree order, not in place: a reduce-scatter of equal parts, padded
    with zeros where need be, and an all-gather."""
    if axis.group is None:
        return Pending.done(x)
    part = -(-x.numel() // axis.size)
    padded = x.new_zeros(axis.size * part)
    padded[: x.numel()] = x.flatten()
    scatter = start_tree_reduce_scatter(padded, axis, purpose)

    def gather() -> Tensor:
        return all_gather(scatter.finish(), axis, purpose)[: x.numel()].view_as(x)

    return Pending(axis, scatter.work, gather)


def gather_uncounted(row: Tensor, axis: Axis) -> Tensor:
    """``[n]`` of each rank → ``[size, n]``, outside of all accounts and checks: for what ranks tell
    each other about their collectives."""
    assert axis.group is not None
    gathered = row.new_empty(axis.size * len(row))
    _all_gather_single(gathered, row, group=axis.group)
    return gathered.view(axis.size, -1)


def own_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of ``[n · size, …]`` along the first dimension; sends nothing."""
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank]


def gather_blocks(values: Tensor, axis: Axis, purpose: Purpose = "statistics") -> Tensor:
    """Values of this rank's blocks ``[…, b]`` → of all blocks ``[…, b · size]``, in block order."""
    if axis.group is None:
        return values
    by_rank = all_gather(values.unsqueeze(0), axis, purpose)  # [size, …, b]
    # Contiguous for one block a rank too: torch sums along other strides in another order.
    return by_rank.movedim(0, -2).flatten(-2).contiguous()


def sum_blocks(values: Tensor, axis: Axis) -> Tensor:
    """Sum of all blocks' values: ``[…, b]`` of each rank → ``[…]``, the same bits at any degree."""
    return gather_blocks(values, axis).sum(-1)


def broadcast(x: Tensor, source: int, axis: Axis) -> Tensor:
    """Give every rank of ``axis`` the ``x`` that its rank ``source`` has, in place."""
    if axis.group is not None:
        num_bytes = (axis.size - 1) * _num_bytes(x) if axis.rank == source else 0
        _begin(axis, f"broadcast from {source}", x, "control", num_bytes)
        with axis.waiting():
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


def gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """``value``, made of what JSON has, of each rank of ``axis``, in rank order."""
    text = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(text)], device=device), axis).tolist()
    own = torch.zeros(1, max(sizes), dtype=torch.uint8)
    own[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(own.to(device), axis).cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def first_problem(problem: str | None, axis: Axis, device: torch.device) -> str | None:
    """What went wrong on the lowest rank of ``axis`` on which something did, or None: the same on
    every rank, so that all of them go on or all of them stop."""
    return next(iter(all_problems(problem, axis, device)), None)


def all_problems(problem: str | None, axis: Axis, device: torch.device) -> list[str]:
    """What went wrong on the ranks of ``axis``, in their order and each once: the same list on
    every rank, empty if nothing did."""
    if not any_rank(problem is not None, axis, device):
        return []
    text = (problem or "").encode()[:PROBLEM_BYTES]
    own = torch.zeros(1, PROBLEM_BYTES, dtype=torch.uint8, device=device)
    own[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    texts = (bytes(row).rstrip(b"\0") for row in all_gather(own, axis).tolist())
    return [text.decode(errors="replace") for text in dict.fromkeys(texts) if text]


def _begin(axis: Axis, kind: str, x: Tensor, purpose: Purpose, num_bytes: float) -> None:
    """Before each collective: compare it with the other ranks', if that is wanted, and count."""
    if axis.check is not None:
        axis.check(f"{kind} {[*x.shape]} {x.dtype} for {purpose}")
    if num_bytes:
        axis.count(num_bytes, purpose)


def _others_share(axis: Axis) -> float:
    return (axis.size - 1) / axis.size


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# torch 2.13 renamed the single-tensor collectives; 2.11 has the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
