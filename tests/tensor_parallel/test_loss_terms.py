"""z-loss, label smoothing and distillation over a split vocabulary, against torch's functions."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.tensor_parallel import (
    BlockPartition,
    vocab_parallel_cross_entropy,
    vocab_parallel_kl,
)

TOKENS = 24
VOCAB = BlockPartition(331, 8)  # blocks of 40 and 44, and one of 47
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (1e-2, 0.1)]
"""z-loss and label smoothing."""
TEMPERATURES = (1.0, 5.0, 0.7)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(seed: int, dtype: torch.dtype) -> Tensor:
    """Of ordinary size, but of one token, whose exponentials would overflow."""
    x = 3 * torch.randn(TOKENS, VOCAB.size, generator=generator(seed), dtype=torch.float64)
    x[3] *= 100
    return x.to(dtype)


def targets() -> Tensor:
    ids = torch.randint(0, VOCAB.size, (TOKENS,), generator=generator(9))
    ids[0], ids[-1] = 0, VOCAB.size - 1
    return ids


def d_losses() -> Tensor:
    """Gradients of losses; some count nothing."""
    grad = torch.randn(TOKENS, generator=generator(8), dtype=torch.float64)
    grad[::5] = 0
    return grad


class Result(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    grad: Tensor


Loss = Callable[[Tensor, slice, Axis], tuple[Tensor, ...]]


def both_losses(dtype: torch.dtype) -> list[Loss]:
    """Cross-entropies with all terms, and divergences at all temperatures."""

    def cross_entropy(z: float, s: float, own: Tensor, part: slice, tp: Axis) -> tuple[Tensor, ...]:
        rows = VOCAB.span(tp.rank, tp.size)
        return vocab_parallel_cross_entropy(own, targets(), rows, tp, z, s)

    def divergence(temperature: float, own: Tensor, part: slice, tp: Axis) -> tuple[Tensor, ...]:
        rows, teacher = VOCAB.span(tp.rank, tp.size), logits_of(2, dtype)[:, part]
        kl = vocab_parallel_kl(own, teacher, rows, tp, temperature)
        return kl, kl.detach()

    losses: list[Loss] = [functools.partial(cross_entropy, *terms) for terms in TERMS]
    losses += [functools.partial(divergence, temperature) for temperature in TEMPERATURES]
    return losses


@functools.cache
def run(degree: int) -> dict[torch.dtype, list[Result]]:
    """All losses; ranks agree on them, and their gradients are put together."""

    def one(loss: Loss, dtype: torch.dtype, tp: Axis) -> Result:
        rows = VOCAB.span(tp.rank, tp.size)
        part = slice(rows.start, rows.stop)
        own = logits_of(1, dtype)[:, part].clone().requires_grad_()
        value, cross_entropy = loss(own, part, tp)
        value.backward(d_losses().to(value.dtype))
        assert own.grad is not None
        assert not cross_entropy.requires_grad
        return Result(value.detach(), cross_entropy, own.grad)

    def rank_main() -> dict[torch.dtype, list[Result]]:
        mesh = ParallelMesh.create(degree, 1, torch.device("cpu")) if degree > 1 else ParallelMesh()
        return {
            dtype: [one(loss, dtype, mesh.tp) for loss in both_losses(dtype)] for dtype in DTYPES
        }

    ranks = run_ranks(rank_main, degree)
    results: dict[torch.dtype, list[Result]] = {}
    for dtype, firsts in ranks[0].items():
        results[dtype] = []
        for number, first in enumerate(firsts):
            others = [rank[dtype][number] for rank in ranks]
            assert all(torch.equal(other.loss, first.loss) for other in others)
            assert all(torch.equal(o.cross_entropy, first.cross_entropy) for o in others)
            grad = torch.cat([other.grad for other in others], 1)
            results[dtype].append(Result(first.loss, first.cross_entropy, grad))
    return results


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_the_degree_does_not_change_a_bit(degree: int) -> None:
    for dtype, results in run(1).items():
        for own, reference in zip(run(degree)[dtype], results, strict=True):
            assert own.loss.dtype == torch.promote_types(dtype, torch.float32)
            assert own.grad.dtype == dtype
            assert all(map(torch.equal, own, reference))


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_torchs_cross_entropy(terms: tuple[float, float]) -> None:
    z_loss, smoothing = terms
    leaf = logits_of(1, torch.float64).requires_grad_()
    expected = F.cross_entropy(leaf, targets(), reduction="none", label_smoothing=smoothing)
    expected = expected + z_loss * leaf.logsumexp(-1).square()
    expected.backward(d_losses())
    own = run(1)[torch.float64][TERMS.index(terms)]
    # fp64 with 331 terms added in another order; losses reach 1e3, squares of them 1e6.
    torch.testing.assert_close(own.loss, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(own.grad, leaf.grad, rtol=1e-12, atol=1e-14)
    plain = F.cross_entropy(leaf.detach(), targets(), reduction="none")
    torch.testing.assert_close(own.cross_entropy, plain, rtol=1e-13, atol=1e-13)
    if terms == (0.0, 0.0):
        assert torch.equal(own.loss, own.cross_entropy)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_torchs_divergence(temperature: float) -> None:
    leaf, teacher = logits_of(1, torch.float64).requires_grad_(), logits_of(2, torch.float64)
    student = F.log_softmax(leaf / temperature, -1)
    target = F.log_softmax(teacher / temperature, -1)
    expected = F.kl_div(student, target, reduction="none", log_target=True).sum(-1)
    expected = expected * temperature**2
    expected.backward(d_losses())
    own = run(1)[torch.float64][len(TERMS) + TEMPERATURES.index(temperature)]
    # fp64 as above.
    torch.testing.assert_close(own.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, leaf.grad, rtol=1e-12, atol=1e-14)
    in_fp32 = run(1)[torch.float32][len(TERMS) + TEMPERATURES.index(temperature)]
    # fp32: two logarithms of about 6, and logits up to 1e3 over the temperature, by its square.
    torch.testing.assert_close(in_fp32.loss.double(), own.loss, rtol=1e-5, atol=1e-4)


def test_a_student_that_equals_its_teacher_has_nothing_to_learn() -> None:
    tp, rows = Axis.single("tp"), VOCAB.span(0, 1)
    teacher = logits_of(1, torch.float32).requires_grad_()
    student = (teacher.detach() + 7).requires_grad_()  # a softmax does not see that
    kl = vocab_parallel_kl(student, teacher, rows, tp, 5.0)
    kl.sum().backward()
    assert student.grad is not None
    # fp32: logits of up to 1e3 that 7 was added to, of which 1e-4 is left in the logarithms.
    assert kl.abs().max() < 5e-3
    assert student.grad.abs().max() < 1e-3
    assert teacher.grad is None
