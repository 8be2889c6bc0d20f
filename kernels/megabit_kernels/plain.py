"""The operations in plain torch: for every device, and the oracle of the kernels.

Weights are int8 codes ``[N, K]`` here. An integer product may go through floating point as long as
no sum leaves the range in which the dtype counts exactly.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megabit_kernels import numerics, stochastic
from megabit_kernels.conversion import Layout, lay_out, unpack
from megabit_kernels.epilogue import Epilogue, finish


def int_mm_product(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """``torch._int_mm``: oneDNN on the CPU, cuBLAS on CUDA.

    Not for a single column: oneDNN reads strides of dimensions of size one (pytorch#195066).
    """
    if x_q.shape[1] < 2:
        return fp32_product(x_q, weight, n, epilogue)
    acc = torch._int_mm(_plain_strides(x_q), _plain_strides(weight).t())
    return finish(acc, epilogue)


def fp32_product(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """An fp32 product of integers: exact for ternary codes while 128 · K ≤ 2^24."""
    return finish(torch.mm(x_q.float(), weight.float().t()).to(torch.int32), epilogue)


def fp32_int8_product(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """The same for int8 weights, in parts of K that fp32 sums exactly: 128 · 128 · part ≤ 2^24."""
    acc = torch.zeros(x_q.shape[0], n, dtype=torch.int32, device=x_q.device)
    parts = zip(x_q.split(1024, dim=1), weight.split(1024, dim=1), strict=True)
    for x_part, w_part in parts:
        acc += torch.mm(x_part.float(), w_part.float().t()).to(torch.int32)
    return finish(acc, epilogue)


def bf16_product(x_q: Tensor, weight: Tensor, n: int, epilogue: Epilogue | None) -> Tensor:
    """bf16 tensor cores, fp32 accumulators and output: exact by the bound of ``fp32_product``.

    For cards without int8 tensor cores.
    """
    acc = torch.mm(x_q.bfloat16(), weight.bfloat16().t(), out_dtype=torch.float32)
    return finish(acc.to(torch.int32), epilogue)


def quantize_activation(x: Tensor, absmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition: ``numerics.activation_scale``, then ``numerics.quantize_activation``."""
    if absmax is None:
        absmax = numerics.absmax(x)
    scale = numerics.activation_scale(absmax)
    return numerics.quantize_activation(x, scale).contiguous(), scale


def rms_norm_quantize(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``quantize_activation(rms_norm(x))``."""
    return quantize_activation(numerics.rms_norm(x, gain, eps), None)


def glu_rms_norm_quantize(
    gate: Tensor, up: Tensor, gain: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    """``rms_norm_quantize(act(gate) · up)``."""
    return rms_norm_quantize(numerics.gated_linear_unit(gate, up, activation), gain, eps)


def ternarize(weight: Tensor, scale: Tensor, layout: Layout) -> Tensor:
    """``numerics.ternarize`` of a latent ``weight [N, K]`` under γ, in ``layout``."""
    return lay_out(numerics.ternarize(weight, scale), layout)


def input_gradient(
    grad: Tensor, data: Tensor, layout: Layout, k: int, w_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """dX = (dY · code) · γ, with operands in ``dtype``."""
    codes = unpack(data, layout, grad.shape[1], k, dtype)
    product = torch.mm(grad.to(dtype), codes)
    return product.to(numerics.stats_dtype(grad.dtype)).mul_(w_scale)


def weight_gradient(grad: Tensor, x_q: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """dW = (dY · s)ᵀ · x_q, with operands in ``dtype``."""
    scaled = (grad * x_scale).to(dtype)
    return torch.mm(scaled.t(), x_q.to(dtype))


Int8Product = Callable[[Tensor, Tensor, int, Epilogue | None], Tensor]
"""int8 ``[M, K]`` × int8 ``[N, K]`` → ``[M, N]``, as the functions above."""


def int8_input_gradient(
    grad: Tensor,
    data: Tensor,
    layout: Layout,
    k: int,
    w_scale: Tensor,
    seed: int,
    product: Int8Product = fp32_int8_product,
) -> Tensor:
    """dX of dY rounded to int8, one scale for each token."""
    grad_q, scale = stochastic.quantize_rows(grad, stochastic.key_of(seed, 0))
    codes_t = unpack(data, layout, grad.shape[1], k, torch.int8).t().contiguous()
    return product(grad_q, codes_t, k, Epilogue(scale, w_scale, scale.dtype))


def int8_weight_gradients(
    grads: Sequence[Tensor],
    x_q: Tensor,
    x_scale: Tensor,
    seed: int,
    product: Int8Product = fp32_int8_product,
) -> list[Tensor]:
    """dW of each dY · s rounded to int8, one scale for each of its columns."""
    x_t, results = x_q.t().contiguous(), []
    one = x_scale.new_ones(())
    for i, grad in enumerate(grads):
        key = stochastic.key_of(seed, 1 + i)
        z_t, scale = stochastic.quantize_columns(grad, x_scale, key)
        results.append(product(z_t, x_t, x_q.shape[1], Epilogue(scale, one, scale.dtype)))
    return results


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token ``[T]``, and ``[T, 2]``: its largest logit, Σ exp relative to that."""
    wide = logits.to(numerics.stats_dtype(logits.dtype))
    largest = wide.amax(-1)
    total = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
    target = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return total.log() - (target - largest), torch.stack([largest, total], -1)


def cross_entropy_gradient(
    grad: Tensor, logits: Tensor, targets: Tensor, normalizer: Tensor
) -> Tensor:
    """(softmax − one-hot) · grad, in the dtype of ``logits``."""
    largest, total = normalizer.unsqueeze(-1).unbind(1)
    result = (logits.to(normalizer.dtype) - largest).exp_().mul_(grad.unsqueeze(-1) / total)
    result.scatter_add_(-1, targets.unsqueeze(-1), -grad.unsqueeze(-1))
    return result.to(logits.dtype).contiguous()


def _plain_strides(x: Tensor) -> Tensor:
    """``x`` with the strides of a fresh tensor; a copy only if it is not contiguous.

    oneDNN reads the strides of dimensions of size one, which mean nothing (pytorch#195066).
    """
    return x.contiguous().flatten().view(x.shape)
