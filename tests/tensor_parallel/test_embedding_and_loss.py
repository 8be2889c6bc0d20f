"""The two ends of the model, whose vocabulary is split, against torch's unsplit functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import (
    BlockPartition,
    LayerContext,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

T = TypeVar("T")
TOKENS, HIDDEN = 24, 6
DEGREES = (1, 2, 4)
VOCAB = BlockPartition(70, 4)  # blocks of 16, 16, 16 and 22
EIGHT_BLOCKS = BlockPartition(331, 8)


def on_axis(degree: int, function: Callable[[Axis], T]) -> list[T]:
    def rank_main() -> T:
        mesh = ParallelMesh.create(degree, 1, torch.device("cpu")) if degree > 1 else ParallelMesh()
        return function(mesh.tp)

    return run_ranks(rank_main, degree)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def all_tokens(size: int) -> Tensor:
    """Random ones, and the first and last of the vocabulary."""
    tokens = torch.randint(0, size, (TOKENS,), generator=generator())
    tokens[0], tokens[-1] = 0, size - 1
    return tokens


# Embedding


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(sequence_parallel: bool) -> None:
    table = torch.randn(VOCAB.size, HIDDEN, generator=generator())
    tokens = all_tokens(VOCAB.size)
    # Multiples of 1/64: a row's gradient is an exact sum, whatever the order of its tokens.
    grad = (torch.randn(TOKENS, HIDDEN, generator=generator()) * 64).round() / 64

    def run(axis: Axis) -> tuple[Tensor, Tensor]:
        rows = VOCAB.span(axis.rank, axis.size)
        context = replace(LayerContext.single(), tp=axis, sequence_parallel=sequence_parallel)
        embedding = VocabParallelEmbedding(rows, HIDDEN, context)
        with torch.no_grad():
            embedding.weight.copy_(table[rows.start : rows.stop])
        x = embedding(tokens)
        x.backward(grad.chunk(axis.size)[axis.rank] if sequence_parallel else grad)
        assert embedding.weight.grad is not None
        return x.detach(), embedding.weight.grad

    leaf = table.clone().requires_grad_()
    expected = F.embedding(tokens, leaf)
    expected.backward(grad)
    assert leaf.grad is not None
    for degree in DEGREES[1:] if sequence_parallel else DEGREES:
        xs, grads = zip(*on_axis(degree, run), strict=True)
        for x in [torch.cat(xs)] if sequence_parallel else xs:
            assert torch.equal(x, expected)
        assert torch.equal(torch.cat(grads), leaf.grad)


def test_embedding_in_the_compute_dtype() -> None:
    context = replace(LayerContext.single(), compute_dtype=torch.bfloat16)
    embedding = VocabParallelEmbedding(VOCAB.span(0, 1), HIDDEN, context)
    tokens = all_tokens(VOCAB.size)
    with torch.no_grad():
        embedding.weight.normal_()
    assert torch.equal(embedding(tokens), F.embedding(tokens, embedding.weight).bfloat16())


def test_the_gradient_of_a_bf16_replica_is_added_up_in_fp32() -> None:
    """300 tokens of one row: in bf16 a sum of ones would stop at 256."""
    context = replace(
        LayerContext.single(), compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16
    )
    embedding = VocabParallelEmbedding(VOCAB.span(0, 1), HIDDEN, context)
    collected: list[Tensor] = []
    embedding.weight.collect(collected.append)
    x = embedding(torch.full((300,), 7))
    assert x.dtype == torch.bfloat16
    x.sum(dtype=torch.float32).backward()
    (gradient,) = collected
    assert embedding.weight.grad is None
    assert gradient.dtype == torch.float32
    expected = torch.zeros(VOCAB.size, HIDDEN)
    expected[7] = 300
    assert torch.equal(gradient, expected)


# Cross-entropy


def losses_at(
    degree: int, vocab: BlockPartition, logits: Tensor, targets: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses, which all ranks agree on, and the gradient of the whole logits."""

    def run(axis: Axis) -> tuple[Tensor, Tensor]:
        rows = vocab.span(axis.rank, axis.size)
        own = logits[:, rows.start : rows.stop].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(own, targets, rows, axis).objective
        losses.backward(grad.to(losses.dtype))
        assert own.grad is not None
        return losses.detach(), own.grad

    losses, grads = zip(*on_axis(degree, run), strict=True)
    assert all(torch.equal(other, losses[0]) for other in losses)
    return losses[0], torch.cat(grads, 1)


def by_torch(logits: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    losses = F.cross_entropy(leaf, targets, reduction="none")
    losses.backward(grad.to(losses.dtype))
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def ordinary_logits(size: int, dtype: torch.dtype) -> Tensor:
    return 3 * torch.randn(TOKENS, size, generator=generator(), dtype=torch.float64).to(dtype)


def extreme_logits(size: int, dtype: torch.dtype) -> Tensor:
    """Up to ±1e4, where exp() of the logits themselves would overflow; one token has equal ones."""
    logits = ordinary_logits(size, dtype)
    logits[::2] *= 3e3
    logits[1] = -1e4
    logits[3, 5] = 1e4
    return logits


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("make", [ordinary_logits, extreme_logits])
def test_losses_and_gradients(degree: int, make: Callable[[int, torch.dtype], Tensor]) -> None:
    logits, targets = make(VOCAB.size, torch.float64), all_tokens(VOCAB.size)
    grad = torch.randn(TOKENS, generator=generator())
    losses, d_logits = losses_at(degree, VOCAB, logits, targets, grad)
    expected, d_expected = by_torch(logits, targets, grad)
    # fp64 with 70 terms added in another order; losses reach 2e4.
    torch.testing.assert_close(losses, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(d_logits, d_expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("make", [ordinary_logits, extreme_logits])
@pytest.mark.parametrize(
    ("degree", "dtype"),
    [(2, torch.float32), (4, torch.float32), (8, torch.float32), (4, torch.bfloat16)],
)
def test_the_degree_does_not_change_a_bit(
    make: Callable[[int, torch.dtype], Tensor], degree: int, dtype: torch.dtype
) -> None:
    """Also where each rank has one block of the vocabulary (degree 8)."""
    logits, targets = make(EIGHT_BLOCKS.size, dtype), all_tokens(EIGHT_BLOCKS.size)
    grad = torch.randn(TOKENS, generator=generator())
    losses, d_logits = losses_at(1, EIGHT_BLOCKS, logits, targets, grad)
    assert losses.dtype == torch.float32
    assert d_logits.dtype == dtype
    other_losses, other_d_logits = losses_at(degree, EIGHT_BLOCKS, logits, targets, grad)
    assert torch.equal(other_losses, losses)
    assert torch.equal(other_d_logits, d_logits)


def test_the_loss_of_torch_distributed() -> None:
    """``loss_parallel`` cuts a vocabulary evenly, and gives the mean only."""
    vocab = BlockPartition(64, 4)
    logits, targets = ordinary_logits(64, torch.float64), all_tokens(64)

    def theirs() -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        own = logits.chunk(2, 1)[mesh.get_rank()].clone()
        leaf = DTensor.from_local(own, mesh, [DTensorShard(1)]).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(leaf, targets)
            loss.backward()
        assert isinstance(loss, DTensor)
        assert isinstance(leaf.grad, DTensor)
        return loss.to_local().detach(), leaf.grad.to_local()

    mean = torch.full((TOKENS,), 1 / TOKENS, dtype=torch.float64)
    losses, d_logits = losses_at(2, vocab, logits, targets, mean)
    (loss, d_first), (same_loss, d_last) = run_ranks(theirs, 2)
    assert torch.equal(loss, same_loss)
    # fp64, with sums of 64 and of 24 terms in another order.
    torch.testing.assert_close(losses.mean(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(d_logits, torch.cat([d_first, d_last], 1), rtol=1e-13, atol=1e-15)
