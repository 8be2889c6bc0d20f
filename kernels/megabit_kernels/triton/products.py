"""The products with tiles chosen for them: by measurement, by default, or by the caller."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megabit_kernels.epilogue import Epilogue
from megabit_kernels.layouts import to_planes
from megabit_kernels.triton import fallback, tuning
from megabit_kernels.triton import input_gradient as input_gradients
from megabit_kernels.triton import weight_gradient as weight_gradients
from megabit_kernels.triton.candidates import candidates
from megabit_kernels.triton.config import Choice, Kernel
from megabit_kernels.triton.int8_gemm import int8_gemm
from megabit_kernels.triton.packed_gemm import packed_gemm
from megabit_kernels.triton.split_k import split_k
from megabit_kernels.triton.table import Key


def packed_product(
    x_q: Tensor, planes: Tensor, epilogue: Epilogue | None = None, choice: Choice | None = None
) -> Tensor:
    """int8 ``x_q [M, K]`` times ternary ``planes`` of ``[N, K]``; see ``packed_gemm``."""
    choice = choice or _choose("packed_gemm", x_q, planes.shape[0])
    if choice == "cublas":
        return fallback.packed_product(x_q, planes, epilogue)
    return packed_gemm(x_q, planes, choice, epilogue)


def decode_product(
    x_q: Tensor, planes: Tensor, epilogue: Epilogue | None = None, choice: Choice | None = None
) -> Tensor:
    """``packed_product`` for M ≤ 16; see ``split_k``."""
    choice = choice or _choose("split_k", x_q, planes.shape[0])
    if choice == "cublas":
        return fallback.packed_product(x_q, planes, epilogue)
    return split_k(x_q, planes, choice, epilogue)


def int8_product(
    x_q: Tensor, weight: Tensor, epilogue: Epilogue | None = None, choice: Choice | None = None
) -> Tensor:
    """int8 ``x_q [M, K]`` times int8 ``weight [N, K]``; see ``int8_gemm``."""
    choice = choice or _choose("int8_gemm", x_q, weight.shape[0])
    if choice == "cublas":
        return fallback.int8_product(x_q, weight, epilogue)
    return int8_gemm(x_q, weight, choice, epilogue)


def input_gradient(
    dy: Tensor, weight: Tensor, k: int, w_scale: Tensor, choice: Choice | None = None
) -> Tensor:
    """bf16 ``dy [M, N]`` times int8 codes ``[N, K]``, or planes of them, and γ."""
    if choice is None:
        packed = weight.dtype == torch.uint8
        kernel: Kernel = "packed_input_gradient" if packed else "input_gradient"
        choice = tuning.choose(kernel, dy.shape[0], dy.shape[1], k, dy.device)
    if choice == "cublas":
        return fallback.input_gradient(dy, weight, k, w_scale)
    return input_gradients.input_gradient(dy, weight, k, w_scale, choice)


def weight_gradient(
    dy: Tensor,
    x_q: Tensor,
    x_scale: Tensor,
    dtype: torch.dtype = torch.float32,
    choice: Choice | None = None,
) -> Tensor:
    """bf16 ``dy [M, N]``, scaled and transposed, times int8 ``x_q [M, K]``."""
    choice = choice or _choose("weight_gradient", x_q, dy.shape[1])
    if choice == "cublas":
        return fallback.weight_gradient(dy, x_q, x_scale, dtype)
    return weight_gradients.weight_gradient(dy, x_q, x_scale, choice, dtype)


def tune(
    kernel: Kernel,
    m: int,
    n: int,
    k: int,
    device: torch.device,
    timer: tuning.Timer = tuning.gpu_seconds,
    folder: Path | None = None,
) -> Choice:
    """Measures a product of these sizes and keeps what was fastest (``tuning.record``)."""
    card = tuning.card_of(device)
    tiles = candidates(kernel, m, n, k, card)
    choice = tuning.tune(tiles, _example(kernel, m, n, k, device), timer)
    tuning.record(card.name, {Key.of(kernel, m, n, k): choice}, folder)
    return choice


def _choose(kernel: Kernel, x_q: Tensor, n: int) -> Choice:
    m, k = x_q.shape
    return tuning.choose(kernel, m, n, k, x_q.device)


def _example(
    kernel: Kernel, m: int, n: int, k: int, device: torch.device
) -> Callable[[Choice], Tensor]:
    """A product of random operands, to be run with any choice."""
    x_q = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, device=device)
    dy = torch.randn(m, n, device=device).bfloat16()
    x_scale = torch.rand(m, 1, device=device)
    w_scale = torch.rand((), device=device)
    epilogue = Epilogue(x_scale, w_scale, torch.bfloat16)
    if kernel == "int8_gemm":
        return lambda choice: int8_product(x_q, codes, epilogue, choice)
    if kernel == "input_gradient":
        return lambda choice: input_gradient(dy, codes, k, w_scale, choice)
    if kernel == "weight_gradient":
        return lambda choice: weight_gradient(dy, x_q, x_scale, torch.float32, choice)
    planes = to_planes(codes)
    if kernel == "packed_input_gradient":
        return lambda choice: input_gradient(dy, planes, k, w_scale, choice)
    product = decode_product if kernel == "split_k" else packed_product
    return lambda choice: product(x_q, planes, epilogue, choice)
