"""RMSNorm: torch's values, exact absmax, and the same bits however it is split."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.model.norm import RMSNorm
from megabit.tensor_parallel import BlockPartition, LayerContext, Span, whole
from megabit_kernels import numerics

EPS = 1e-5
TOKENS = 257
EQUAL, UNEQUAL = BlockPartition(64, 8), BlockPartition(71, 8)  # 8 each; 8, 8, 8, 8, 8, 8, 8, 15


def norm_of(span: Span, gain: Tensor, context: LayerContext) -> RMSNorm:
    norm = RMSNorm(span, EPS, context)
    with torch.no_grad():
        norm.weight.copy_(gain[span.start : span.stop])
    return norm


def inputs(size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, gain and the gradient of the output; magnitudes differ by token and by column."""
    generator = torch.Generator().manual_seed(size)
    x, grad = (
        torch.randn(TOKENS, size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    x = x * torch.logspace(-3, 3, TOKENS)[:, None] * torch.logspace(-1, 1, size)
    x[5] = 0
    gain = torch.randn(size, generator=generator, dtype=torch.float64)
    return x.to(dtype), gain.to(dtype), grad.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # A few roundings in another order; gradients are sums over all tokens.
    [(torch.float32, 1e-5), (torch.float64, 1e-13)],
)
def test_the_norm_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    x, gain, grad = inputs(71, dtype)
    norm = norm_of(whole(71, True), gain, LayerContext.single(dtype))
    x.requires_grad_()
    values, absmax = norm(x)
    found = torch.autograd.grad(values, (x, norm.weight), grad)
    gain.requires_grad_()
    expected = F.rms_norm(x, (71,), gain, EPS)
    wanted = torch.autograd.grad(expected, (x, gain), grad)
    for a, b in zip((values, *found), (expected, *wanted), strict=True):
        # Relative to the largest, because terms cancel (dx is as large as 1/|x|).
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    assert torch.equal(values, numerics.rms_norm(x, gain, EPS))
    assert not absmax.requires_grad


def test_a_norm_without_a_gain() -> None:
    """That of torch and of gains of one; it writes neither to its input nor to its gradient."""
    x, _, grad = inputs(71)
    context = LayerContext.single()
    norm = RMSNorm(whole(71, True), EPS, context, has_gain=False)
    assert not [*norm.parameters()]
    given = x.clone().requires_grad_()
    values, absmax = norm(given)
    kept = grad.clone()
    (dx,) = torch.autograd.grad(values, given, grad)
    assert torch.equal(given, x)
    assert torch.equal(grad, kept)
    x.requires_grad_()
    expected, largest = norm_of(whole(71, True), torch.ones(71), context)(x)
    assert torch.equal(values, expected)
    assert torch.equal(absmax, largest)
    assert torch.equal(dx, *torch.autograd.grad(expected, x, grad))
    torch.testing.assert_close(values, F.rms_norm(x, (71,), None, EPS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_absmax_is_that_of_the_values(dtype: torch.dtype) -> None:
    x, gain, _ = inputs(64, dtype)
    context = replace(LayerContext.single(), compute_dtype=dtype)
    values, absmax = norm_of(EQUAL.span(0, 1), gain, context)(x)
    assert values.dtype == dtype
    assert absmax.dtype == numerics.stats_dtype(dtype)
    assert torch.equal(absmax.to(dtype), values.abs().amax(-1, keepdim=True))


def test_gradients_by_finite_differences() -> None:
    x, gain, _ = inputs(20, torch.float64)
    x = x[125:131].clone().requires_grad_()  # of moderate size
    norm = norm_of(BlockPartition(20, 2).span(0, 1), gain, LayerContext.single(torch.float64))
    assert torch.autograd.gradcheck(lambda x, _gain: norm(x).values, (x, norm.weight))


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("partition", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_norm_has_the_same_bits(
    partition: BlockPartition, degree: int, sequence_parallel: bool
) -> None:
    """Sequence parallelism leaves a split norm alone: its tokens are all there."""
    x, gain, grad = inputs(partition.size)

    def run(axis: Axis) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        span = partition.span(axis.rank, axis.size)
        context = replace(
            LayerContext.single(), tp=axis, sequence_parallel=sequence_parallel and axis.size > 1
        )
        norm = norm_of(span, gain, context)
        assert not norm.weight.shard.grad_is_partial or axis.size == 1
        own = x[:, span.start : span.stop].clone().requires_grad_()
        values, absmax = norm(own)
        values.backward(grad[:, span.start : span.stop])
        assert own.grad is not None
        assert norm.weight.grad is not None
        return values.detach(), absmax, own.grad, norm.weight.grad, axis.sent_bytes

    values, absmax, dx, d_gain, _ = run(Axis.single("tp"))
    device = torch.device("cpu")
    ranks = run_ranks(lambda: run(ParallelMesh.create(degree, 1, device).tp), degree)
    assert torch.equal(torch.cat([r[0] for r in ranks], 1), values)
    assert all(torch.equal(r[1], absmax) for r in ranks)
    # Block sums are ordered too, so that today gradients are equal as well.
    assert torch.equal(torch.cat([r[2] for r in ranks], 1), dx)
    # Sums over tokens of fewer columns: another order of the same terms in fp32.
    torch.testing.assert_close(torch.cat([r[3] for r in ranks]), d_gain, rtol=1e-5, atol=1e-5)
    # Two fp32 numbers for each block and token forward and one backward, of which each rank sends
    # the share that is not its own.
    blocks = 3 * TOKENS * partition.num_blocks * 4
    assert {r[4] for r in ranks} == {blocks * (degree - 1) / degree}


def test_a_replicated_norm_sends_nothing() -> None:
    """Under sequence parallelism each rank has its own tokens, hence a term of the gradient."""

    def run() -> tuple[bool, float]:
        tp = ParallelMesh.create(2, 1, torch.device("cpu")).tp
        context = replace(LayerContext.single(), tp=tp, sequence_parallel=True)
        norm = norm_of(whole(16, tp.rank == 0), torch.ones(16), context)
        norm(torch.randn(4, 16)).values.sum().backward()
        return norm.weight.shard.grad_is_partial, tp.sent_bytes

    assert run_ranks(run, 2) == [(True, 0)] * 2


# Layout-exact training


BLOCKS = 8
EXACT_TOKENS = 40  # 5 in each of 8 blocks


def exact_inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    x, gain, grad = inputs(size)
    return x[100 : 100 + EXACT_TOKENS], gain, grad[100 : 100 + EXACT_TOKENS]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_degree_does_not_change_a_bit_of_the_gain_of_own_tokens(degree: int) -> None:
    """Under sequence parallelism, against all tokens on one process; the sum is done backward."""
    x, gain, grad = exact_inputs(16)

    def run(axis: Axis, trees: int | None = BLOCKS) -> tuple[Tensor, Tensor, dict[str, float]]:
        context = replace(
            LayerContext.single(), tp=axis, sequence_parallel=axis.size > 1, tree_blocks=trees
        )
        norm = norm_of(whole(16, axis.rank == 0), gain, context)
        assert norm.weight.shard.grad_is_partial == (trees is None and axis.size > 1)
        own = x.chunk(axis.size)[axis.rank].clone().requires_grad_()
        norm(own).values.backward(grad.chunk(axis.size)[axis.rank])
        assert own.grad is not None
        assert norm.weight.grad is not None
        return own.grad, norm.weight.grad, dict(axis.sent)

    dx, d_gain, _ = run(Axis.single("tp"))
    device = torch.device("cpu")
    ranks = run_ranks(lambda: run(ParallelMesh.create(degree, 1, device).tp), degree)
    assert torch.equal(torch.cat([r[0] for r in ranks]), dx)
    for _, found, sent in ranks:
        assert torch.equal(found, d_gain)
        assert sent == {"weight gradients": 2 * (degree - 1) / degree * 16 * 4}
    # So it can fail: one sum over all tokens, or ranks' sums added up as they come, are others.
    _, plain, _ = run(Axis.single("tp"), None)
    assert not torch.equal(plain, d_gain)
    torch.testing.assert_close(plain, d_gain, rtol=1e-5, atol=1e-5)  # of 40 terms of size 1


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("partition", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_degree_does_not_change_a_bit_of_a_split_gain(
    partition: BlockPartition, degree: int, sequence_parallel: bool
) -> None:
    """A sum over tokens of fewer columns, in a tree; nothing more is sent for it."""
    x, gain, grad = exact_inputs(partition.size)

    def run(axis: Axis) -> tuple[Tensor, set[str]]:
        span = partition.span(axis.rank, axis.size)
        context = replace(
            LayerContext.single(),
            tp=axis,
            sequence_parallel=sequence_parallel and axis.size > 1,
            tree_blocks=BLOCKS,
        )
        norm = norm_of(span, gain, context)
        own = x[:, span.start : span.stop].clone().requires_grad_()
        norm(own).values.backward(grad[:, span.start : span.stop])
        assert norm.weight.grad is not None
        return norm.weight.grad, set(axis.sent)

    d_gain, _ = run(Axis.single("tp"))
    device = torch.device("cpu")
    ranks = run_ranks(lambda: run(ParallelMesh.create(degree, 1, device).tp), degree)
    assert torch.equal(torch.cat([r[0] for r in ranks]), d_gain)
    assert all(sent == {"statistics"} for _, sent in ranks)
