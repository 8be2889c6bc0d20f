"""What a model learns from another one: the divergence of their distributions over the vocabulary,
whose logits are split over tensor-parallel ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megabit.mesh import Axis
from megabit.reduce import all_reduce, gather_blocks
from megabit.tensor_parallel.partition import Span, block_sums
from megabit_kernels import numerics


def vocab_parallel_kl(
    student_logits: Tensor, teacher_logits: Tensor, rows: Span, tp: Axis, temperature: float
) -> Tensor:
    """τ² · KL(teacher ‖ student) of each token, the same bits at every TP degree.

    Both distributions are softmax(logits / τ). The factor τ² keeps gradients as large as those of a
    cross-entropy, whatever the temperature (arXiv 1503.02531). Only the student gets a gradient.

    Sends two maxima and three sums per block of the vocabulary for each token over TP; backward
    sends nothing.

    Args:
        student_logits: ``[T, v]``, this rank's columns of the vocabulary.
        teacher_logits: likewise; its dtype may be another.
        rows: which part of the vocabulary the columns are.
        temperature: τ > 0.

    Returns:
        ``[T]`` in fp32 (fp64 for fp64 student logits), on every rank.
    """
    return _VocabParallelKL.apply(student_logits, teacher_logits, rows, tp, temperature)


class _VocabParallelKL(Function):
    """With s and t the logits less their maxima, over τ, and Z the sums of their exponentials:
    KL = Σ exp(t)·(t − s) / Z_t − log Z_t + log Z_s."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: Tensor,
        teacher_logits: Tensor,
        rows: Span,
        tp: Axis,
        temperature: float,
    ) -> Tensor:
        dtype = numerics.stats_dtype(student_logits.dtype)
        both = [student_logits.to(dtype), teacher_logits.to(dtype)]
        largest = all_reduce(torch.stack([x.amax(-1) for x in both]), tp, "max", "statistics")
        student, teacher = (
            (x - most.unsqueeze(-1)) / temperature for x, most in zip(both, largest, strict=True)
        )
        difference = teacher - student
        student, teacher = student.exp_(), teacher.exp_()
        own = [block_sums(x, rows) for x in (student, teacher, difference.mul_(teacher))]
        blocks = gather_blocks(torch.cat(own, -1), tp).unflatten(-1, (tp.size, 3, -1))
        # Contiguous, in block order: see ``gather_blocks``.
        z_student, z_teacher, weighted = (
            blocks[..., i, :].flatten(-2).contiguous().sum(-1) for i in range(3)
        )
        # d KL / d logits is their difference over τ: all that backward needs.
        student /= z_student.unsqueeze(-1)
        student -= teacher / z_teacher.unsqueeze(-1)
        ctx.save_for_backward(student)
        ctx.temperature, ctx.logits_dtype = temperature, student_logits.dtype
        kl = weighted / z_teacher - z_teacher.log() + z_student.log()
        return kl * temperature**2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (difference,) = ctx.saved_tensors
        grad = difference * (grads[0] * ctx.temperature).unsqueeze(-1)
        return grad.to(ctx.logits_dtype), None, None, None, None
