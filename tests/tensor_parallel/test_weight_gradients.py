"""Backward in two pieces, B and W: the same gradients, each product once, nothing kept for long."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.model.recompute import recomputed
from megabit.reduce import own_rows
from megabit.tensor_parallel import (
    BlockPartition,
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    ForwardPass,
    LayerContext,
    Noise,
    RowParallelBitLinear,
    RowParallelLinear,
    Shard,
    ShardedParameter,
    Span,
    TernaryLayer,
    VocabParallelEmbedding,
    WeightGradientQueue,
    enter_column_parallel,
    vocab_parallel_logits,
    whole,
)

CPU = torch.device("cpu")
# 52 in 4 blocks: 12, 12, 12, 16. No weight, nor part of one, has as many rows as there are tokens.
TOKENS, WIDE, NARROW, BLOCKS = 20, 52, 24, 4
NOISE = Noise(1, 2, 3)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def context_of(
    axis: Axis | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> LayerContext:
    """Weights in fp32; ``dtype`` is that of activations and of ternary backward products, for
    which int8 means the quantized backward."""
    compute = torch.float32 if dtype == torch.int8 else dtype
    changes = {"compute_dtype": compute, "ternary_backward_dtype": dtype, **changes}
    return replace(LayerContext.single(), tp=axis or Axis.single("tp"), **changes)


def between_layers(seed: int, context: LayerContext) -> Tensor:
    """``[t, NARROW]`` of a logical ``[T, NARROW]``."""
    x = randn(TOKENS, NARROW, seed=seed).to(context.compute_dtype)
    return own_rows(x, context.tp).clone() if context.sequence_parallel else x


def own_columns(seed: int, span: Span, context: LayerContext) -> Tensor:
    """``[T, n]`` of a logical ``[T, N]``."""
    x = randn(TOKENS, span.size, seed=seed).to(context.compute_dtype)
    return x.narrow(1, span.start, span.width).clone()


def fill(weight: ShardedParameter, seed: int) -> None:
    """This rank's part of a logical tensor."""
    shard, span = weight.shard, weight.shard.span
    weight.data.copy_(randn(*shard.shape, seed=seed).narrow(shard.dim, span.start, span.width))


def present(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    found = list(gradients)
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit by bit, and of the same dtype."""
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


# Layers


@dataclass
class Case:
    """Some layers with one input, and the gradients of their outputs on this rank."""

    x: Tensor
    weights: list[ShardedParameter]
    outputs: Callable[[Tensor, ForwardPass], Sequence[Tensor]]
    grads: list[Tensor]
    entries: int = 1
    """Of the queue."""

    def forward(self, queue: WeightGradientQueue | None = None) -> Callable[[], None]:
        """Returns the backward pass; without a queue it adds to the gradients of weights too."""
        outputs = self.outputs(self.x, ForwardPass(NOISE, weight_gradients=queue))
        return lambda: torch.autograd.backward(outputs, self.grads)

    def backward(self, queue: WeightGradientQueue | None = None) -> None:
        self.forward(queue)()

    def dws(self) -> list[Tensor]:
        """The gradients of all weights, once they are there."""
        return present(weight.grad for weight in self.weights)


def split_span(context: LayerContext) -> Span:
    return BlockPartition(WIDE, BLOCKS).span(context.tp.rank, context.tp.size)


def columns(kind: type[ColumnParallelLinear], context: LayerContext) -> Case:
    """Two layers, and a third one whose rows all ranks hold and the first one owns: a KV head."""
    split, shared = split_span(context), BlockPartition(8, 1).blocks(0, 1)
    if context.tp.size > 1:
        shared = shared.owning(0, 0 if context.tp.rank else 8)
    layers = [kind(NARROW, span, context) for span in (split, split, shared)]
    for seed, layer in enumerate(layers):
        fill(layer.weight, seed)
    grads = [own_columns(20 + i, span, context) for i, span in enumerate((split, split, shared))]

    def outputs(x: Tensor, forward_pass: ForwardPass) -> Sequence[Tensor]:
        return kind.forward_together(layers, x, None, forward_pass)

    # Ternary layers compute their gradients together.
    entries = 1 if kind is ColumnParallelBitLinear else 3
    x, weights = between_layers(9, context), [layer.weight for layer in layers]
    return Case(x.requires_grad_(), weights, outputs, grads, entries)


def row(kind: type[RowParallelLinear], context: LayerContext) -> Case:
    span = split_span(context)
    layer = kind(span, NARROW, context)
    fill(layer.weight, 5)

    def outputs(x: Tensor, forward_pass: ForwardPass) -> Sequence[Tensor]:
        return (layer(x, None, forward_pass),)

    x, grad = own_columns(9, span, context), between_layers(20, context)
    return Case(x.requires_grad_(), [layer.weight], outputs, [grad])


def head(context: LayerContext) -> Case:
    span = split_span(context)
    weight = ShardedParameter(Shard((WIDE, NARROW), 0, span), context.master_dtype, CPU)
    fill(weight, 1)

    def outputs(x: Tensor, forward_pass: ForwardPass) -> Sequence[Tensor]:
        x = enter_column_parallel(x, context)
        return (vocab_parallel_logits(x, weight, span, context, forward_pass),)

    x, grad = between_layers(9, context), own_columns(20, span, context)
    return Case(x.requires_grad_(), [weight], outputs, [grad])


def embedding(context: LayerContext) -> Case:
    layer = VocabParallelEmbedding(split_span(context), NARROW, context)
    fill(layer.weight, 1)
    tokens = torch.randint(WIDE, (TOKENS,), generator=torch.Generator().manual_seed(0))

    def outputs(tokens: Tensor, forward_pass: ForwardPass) -> Sequence[Tensor]:
        return (layer(tokens, forward_pass),)

    return Case(tokens, [layer.weight], outputs, [between_layers(20, context)])


Make = Callable[[LayerContext], Case]
CASES: dict[str, Make] = {
    "ternary columns": partial(columns, ColumnParallelBitLinear),
    "ternary row": partial(row, RowParallelBitLinear),
    "dense columns": partial(columns, ColumnParallelLinear),
    "dense row": partial(row, RowParallelLinear),
    "head": head,
    "embedding": embedding,
}


def for_cases(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", [CASES[name] for name in names], ids=names)


every_case = for_cases(*CASES)
with_an_input = for_cases(*(name for name in CASES if name != "embedding"))


class Products(TorchDispatchMode):
    """Counts the products of backward passes: those of weights, and others (``dX``)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        is_mm = name == "mm"  # of dense layers; those inside ternary operations are not seen
        if "input_gradient" in name or (is_mm and result.shape[0] == TOKENS):
            self.counts["dX"] += 1
        elif "weight_gradient" in name or is_mm or name == "embedding_dense_backward":
            self.counts["dW"] += 1
        return result


def count(function: Callable[[], None]) -> Counter[str]:
    with Products() as products:
        function()
    return products.counts


def sent_by(function: Callable[[], None], axis: Axis) -> dict[str, float]:
    axis.sent.clear()
    function()
    return dict(axis.sent)


# The same gradients, and each product once


def check(make: Make, context: LayerContext) -> None:
    at_once, split, queue = make(context), make(context), WeightGradientQueue()
    at_once.backward()
    split.backward(queue)
    assert len(queue) == split.entries
    assert all(weight.grad is None for weight in split.weights)
    if split.x.requires_grad:
        assert all_equal(present([split.x.grad]), present([at_once.x.grad]))
    queue.run()
    assert len(queue) == 0
    assert all_equal(split.dws(), at_once.dws())
    assert all(dw.any() for dw in split.dws())

    products = count(at_once.forward())
    assert count(split.forward(queue)) == Counter({"dX": products["dX"]})
    assert count(queue.run) == Counter({"dW": products["dW"]})

    sent = sent_by(at_once.forward(), context.tp)
    assert sent_by(split.forward(queue), context.tp) == sent
    assert sent_by(queue.run, context.tp) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("trees", [None, BLOCKS])
@every_case
def test_gradients_are_the_same(make: Make, trees: int | None, dtype: torch.dtype) -> None:
    check(make, context_of(dtype=dtype, tree_blocks=trees))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("trees", [None, BLOCKS])
def test_gradients_are_the_same_on_two_ranks(trees: int | None, sequence_parallel: bool) -> None:
    """W sends nothing, and B what a whole backward pass does."""

    def run() -> None:
        axis = ParallelMesh.create(2, 1, CPU).tp
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            changes = {"tree_blocks": trees, "sequence_parallel": sequence_parallel}
            for make in CASES.values():
                check(make, context_of(axis, dtype, **changes))

    run_ranks(run, 2)


@every_case
def test_the_products_of_a_backward_pass(make: Make) -> None:
    """So the counts above are not all zero."""
    case = make(context_of())
    inputs = len(case.weights) if case.x.requires_grad else 0
    assert count(case.forward()) == Counter({"dX": inputs, "dW": len(case.weights)})


# Recomputation


Kinds = tuple[type[ColumnParallelLinear], type[RowParallelLinear]]
TERNARY: Kinds = ColumnParallelBitLinear, RowParallelBitLinear
DENSE: Kinds = ColumnParallelLinear, RowParallelLinear


def feed_forward(
    kinds: Kinds, context: LayerContext
) -> tuple[Callable[[Tensor, ForwardPass], Tensor], list[ShardedParameter]]:
    """``down(relu(gate) · up)``, as the layers of a model are recomputed."""
    (column, row), span = kinds, split_span(context)
    gate, up = (column(NARROW, span, context) for _ in range(2))
    down = row(span, NARROW, context)
    for seed, layer in enumerate((gate, up, down)):
        fill(layer.weight, seed)

    def function(x: Tensor, forward_pass: ForwardPass) -> Tensor:
        a, b = column.forward_together([gate, up], x, None, forward_pass)
        return down(a.relu() * b, None, forward_pass)

    return function, [gate.weight, up.weight, down.weight]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kinds", [TERNARY, DENSE], ids=["ternary", "dense"])
def test_gradients_are_the_same_with_recomputation(
    kinds: Kinds, tp: int, sequence_parallel: bool
) -> None:
    def run() -> None:
        axis = ParallelMesh.create(tp, 1, CPU).tp if tp > 1 else Axis.single("tp")
        context = context_of(axis, sequence_parallel=sequence_parallel)

        def gradients(
            is_recomputed: bool, queue: WeightGradientQueue | None
        ) -> tuple[list[Tensor], Counter[str], Counter[str]]:
            """dX and dWs; the products of B and of W."""
            function, weights = feed_forward(kinds, context)
            x, grad = between_layers(9, context).requires_grad_(), between_layers(20, context)
            forward_pass = ForwardPass(NOISE, weight_gradients=queue)
            part = partial(recomputed, function, (x,)) if is_recomputed else partial(function, x)
            in_b = count(partial(part(forward_pass).backward, grad))
            assert (queue is None) == all(weight.grad is not None for weight in weights)
            in_w = Counter() if queue is None else count(queue.run)
            return present([x.grad, *(weight.grad for weight in weights)]), in_b, in_w

        expected, products, _ = gradients(False, None)
        all_products = gradients(True, None)[1]
        found, in_b, in_w = gradients(True, WeightGradientQueue())
        assert all_equal(found, expected)
        # Dense forward products are repeated in B; they look like those of dX.
        assert in_w == Counter({"dW": products["dW"]}) == Counter({"dW": 3})
        assert in_b == Counter({"dX": all_products["dX"]})

    run_ranks(run, tp)


# What is wanted


@with_an_input
def test_what_is_not_wanted_is_not_computed(make: Make) -> None:
    case, queue = make(context_of()), WeightGradientQueue()
    case.x.requires_grad_(False)
    assert count(case.forward(queue)) == Counter()
    assert case.x.grad is None
    assert count(queue.run) == Counter({"dW": len(case.weights)})
    case.x.requires_grad_()
    for weight in case.weights:
        weight.requires_grad_(False)
    for each in (None, queue):
        assert count(case.forward(each)) == Counter({"dX": len(case.weights)})
    assert len(queue) == 0
    assert case.x.grad is not None


@for_cases("ternary columns", "dense columns")
def test_a_frozen_layer_among_others(make: Make) -> None:
    context, queue = context_of(dtype=torch.int8), WeightGradientQueue()
    at_once, split = make(context), make(context)
    for case in (at_once, split):
        case.weights[1].requires_grad_(False)
    at_once.backward()
    split.backward(queue)
    frozen = weakref.ref(split.grads[1].untyped_storage())
    split.grads.clear()
    assert frozen() is None
    assert count(queue.run)["dW"] == min(2, split.entries)  # in int8, one call for all
    assert split.weights[1].grad is None
    for case in (at_once, split):
        del case.weights[1]
    assert all_equal(split.dws(), at_once.dws())


# Order and release


def test_entries_run_in_the_order_in_which_they_were_put() -> None:
    queue, ran = WeightGradientQueue(), list[int]()
    for number in range(4):
        queue.put(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert (len(queue), ran) == (4, [])
    queue.run()
    assert (len(queue), ran) == (0, [0, 1, 2, 3])


def test_no_entry_builds_a_graph() -> None:
    queue, x, results = WeightGradientQueue(), torch.ones(2, requires_grad=True), list[Tensor]()
    queue.put(lambda: results.append(x * 2))
    with torch.enable_grad():
        queue.run()
    assert not results[0].requires_grad


class _Before(Function):
    """Stands for what computed a layer's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Those of the graph that are ours: torch's own cannot be watched."""
    for node in roots:
        if isinstance(node, BackwardCFunction):
            yield node
        yield from nodes_of(before for before, _ in getattr(node, "next_functions", ()))


@with_an_input
def test_an_entry_holds_its_tensors_only_and_frees_them(make: Make) -> None:
    """Not the graph that it was put from, and what it multiplied no longer than until it ran."""
    case, queue, is_held = make(context_of()), WeightGradientQueue(), list[bool]()
    x = _Before.apply(case.x)
    outputs = case.outputs(x, ForwardPass(NOISE, weight_gradients=queue))
    nodes = [weakref.ref(node) for node in nodes_of(y.grad_fn for y in outputs)]
    torch.autograd.backward(outputs, case.grads)
    gradients = [weakref.ref(grad.untyped_storage()) for grad in case.grads]
    del x, outputs
    case.grads.clear()
    assert len(queue) == case.entries
    assert [node() for node in nodes] == [None] * len(nodes) != []
    assert all(gradient() is not None for gradient in gradients)
    queue.put(lambda: is_held.extend(gradient() is not None for gradient in gradients))
    queue.run()
    assert is_held == [False] * len(gradients)


# To whom gradients go


@every_case
def test_gradients_of_microbatches_are_added(make: Make) -> None:
    at_once, split = make(context_of(dtype=torch.bfloat16)), make(context_of(dtype=torch.bfloat16))
    queues = [WeightGradientQueue() for _ in range(2)]
    for queue in queues:
        for case, its_queue in ((at_once, None), (split, queue)):
            case.backward(its_queue)
            case.grads = [3 * grad for grad in case.grads]
    for queue in queues:
        queue.run()
    assert all_equal(split.dws(), at_once.dws())
    assert all(dw.dtype == torch.float32 for dw in split.dws())


@every_case
def test_a_collector_gets_gradients_when_they_are_computed(make: Make) -> None:
    """The same tensors as at once, of the same dtype."""

    def collected(queue: WeightGradientQueue | None) -> list[Tensor]:
        case, received = make(context_of(dtype=torch.bfloat16)), list[Tensor]()
        for weight in case.weights:
            weight.collect(received.append)
        case.backward(queue)
        if queue is not None:
            assert received == []
            queue.run()
        assert all(weight.grad is None for weight in case.weights)
        return received

    assert all_equal(collected(WeightGradientQueue()), collected(None))


def test_a_ternary_layer_without_its_latent_weight() -> None:
    """As in training."""
    layer: TernaryLayer = ColumnParallelBitLinear(NARROW, whole(8, True), context_of())
    fill(layer.weight, 0)
    ternary, collected, queue = layer.ternary(), list[Tensor](), WeightGradientQueue()
    layer.give_up_latent()
    layer.receive(ternary)
    layer.weight.collect(collected.append)
    layer(randn(TOKENS, NARROW, seed=9), None, ForwardPass(weight_gradients=queue)).sum().backward()
    assert collected == []
    queue.run()
    (gradient,) = collected
    assert gradient.shape == (8, NARROW)
    assert layer.weight.grad is None


def test_a_parameter_takes_a_gradient_after_the_backward_pass() -> None:
    weight = ShardedParameter(Shard((2, 3), 0, whole(2, True)), torch.bfloat16, CPU)
    given = randn(2, 3, seed=0)
    for _ in range(2):
        weight.add_gradient(given)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, 2 * given.bfloat16())
    assert torch.equal(given, randn(2, 3, seed=0))  # not written to
    weight.grad = None
    weight.requires_grad_(False)
    weight.add_gradient(given)
    assert weight.grad is None
