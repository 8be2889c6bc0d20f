"""Cross-entropy over logits that are read once forward and once backward.

Forward goes over a token's logits in blocks and keeps a running maximum and the running sum of
exponentials relative to it ("Online normalizer calculation for softmax", arXiv 1805.02867).
Backward makes ``(softmax − one-hot) · grad`` out of the logits and these two numbers.

A target outside the vocabulary gives NaN, as loss and as gradient: a host that checks would wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabit_kernels.triton.arithmetic import is_interpreted, rounded
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.launch import check_float, on_one_device, shaped
from megabit_kernels.triton.limits import FLOATS

MAX_BLOCK = 4096
"""Logits that a program works on at a time: 16 for each thread of 8 warps."""


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of each token, and what its gradient needs.

    Args:
        logits: fp32 or bf16 ``[T, V]``.
        targets: int64 or int32 ``[T]``, each in ``[0, V)``.

    Returns:
        Loss, fp32 ``[T]``, and normalizer, fp32 ``[T, 2]``: the largest logit of each token, and
        the sum of all exponentials relative to it.
    """
    logits, targets = _checked(logits, targets)
    t, v = logits.shape
    loss = torch.empty(t, dtype=torch.float32, device=logits.device)
    normalizer = torch.empty(t, 2, dtype=torch.float32, device=logits.device)
    if t > 0:
        with torch.cuda.device_of(logits):
            _cross_entropy_kernel[(t,)](
                logits, targets, loss, normalizer, v, logits.stride(0), _block(v), num_warps=8
            )
    return loss, normalizer


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, normalizer: Tensor
) -> Tensor:
    """The gradient of the logits, contiguous, in their dtype.

    Args:
        grad: fp32 ``[T]``, of the loss.
        normalizer: from ``cross_entropy_forward``.
    """
    logits, targets = _checked(logits, targets)
    t, v = logits.shape
    if grad.dtype != torch.float32:
        raise TypeError(f"grad is {grad.dtype}: torch.float32 is wanted")
    grad, normalizer = shaped("grad", grad, t), shaped("normalizer", normalizer, t, 2)
    on_one_device(logits=logits, grad=grad, normalizer=normalizer)
    out = torch.empty(t, v, dtype=logits.dtype, device=logits.device)
    if t > 0:
        with torch.cuda.device_of(logits):
            _cross_entropy_gradient_kernel[(t, triton.cdiv(v, _block(v)))](
                logits,
                targets,
                normalizer,
                grad,
                out,
                v,
                logits.stride(0),
                _block(v),
                is_interpreted(),
                num_warps=8,
            )
    return out


def _checked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: [T, V], V > 0, is wanted")
    check_float("logits", logits)
    if targets.shape != logits.shape[:1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}: [{len(logits)}] is wanted")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets is {targets.dtype}: torch.int64 or torch.int32 is wanted")
    on_one_device(logits=logits, targets=targets)
    return logits if logits.stride(1) == 1 else logits.contiguous(), targets.contiguous()


@triton.jit
def _cross_entropy_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    normalizer_ptr: tl.tensor,
    V: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    largest = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x))
        # While there are only logits of −∞, which have no difference: take them relative to 0.
        reference = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(x - reference))
        largest = larger
    target = tl.load(targets_ptr + row)
    is_valid = (target >= 0) & (target < V)
    chosen = tl.load(logits_ptr + target, mask=is_valid, other=float("nan")).to(tl.float32)
    total = tl.where(is_valid, total, float("nan"))
    tl.store(loss_ptr + row, tl.log(total) - (chosen - largest))
    tl.store(normalizer_ptr + 2 * row, largest)
    tl.store(normalizer_ptr + 2 * row + 1, total)


@triton.jit
def _cross_entropy_gradient_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    normalizer_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    out_ptr: tl.tensor,
    V: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(normalizer_ptr + 2 * row)
    total = tl.load(normalizer_ptr + 2 * row + 1)
    grad = tl.load(grad_ptr + row)
    gradient = tl.exp(x - largest) * (grad / total)
    gradient = tl.where(columns == tl.load(targets_ptr + row), gradient - grad, gradient)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gradient = rounded(gradient, dtype, INTERPRETED).to(dtype)
    tl.store(out_ptr + row * V + columns, gradient, mask=inside)


def _block(v: int) -> int:
    return min(max(triton.next_power_of_2(v), 256), MAX_BLOCK)


def compile_specs() -> tuple[CompileSpec, ...]:
    """Both passes for both dtypes, at blocks of a large vocabulary."""
    return tuple(
        spec for dtype in FLOATS.values() for spec in (_forward_spec(dtype), _backward_spec(dtype))
    )


def _forward_spec(dtype: str) -> CompileSpec:
    return CompileSpec(
        name=f"cross_entropy forward {dtype[1:]}",
        kernel=_cross_entropy_kernel,
        signature={
            "logits_ptr": dtype,
            "targets_ptr": "*i64",
            "loss_ptr": "*fp32",
            "normalizer_ptr": "*fp32",
            "V": "i32",
            "stride": "i32",
        },
        constants={"BLOCK": MAX_BLOCK},
        num_warps=8,
        num_stages=1,
        tensor_cores=None,
        aligned=("V", "stride"),
    )


def _backward_spec(dtype: str) -> CompileSpec:
    return CompileSpec(
        name=f"cross_entropy backward {dtype[1:]}",
        kernel=_cross_entropy_gradient_kernel,
        signature={
            "logits_ptr": dtype,
            "targets_ptr": "*i64",
            "normalizer_ptr": "*fp32",
            "grad_ptr": "*fp32",
            "out_ptr": dtype,
            "V": "i32",
            "stride": "i32",
        },
        constants={"BLOCK": MAX_BLOCK, "INTERPRETED": False},
        num_warps=8,
        num_stages=1,
        tensor_cores=None,
        aligned=("V", "stride"),
    )
