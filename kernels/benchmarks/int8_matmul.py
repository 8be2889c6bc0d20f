"""The integer product against fp32 and bf16 products of the same shape, one thread.

    python kernels/benchmarks/int8_matmul.py

Prints milliseconds (the least of many runs) and the ratio to ``torch.mm`` in fp32, measured in the
same run. ``dispatch`` is what training uses; the others are what it chooses from or competes with.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from megabit_kernels import ternary_matmul

SHAPES = [
    # tokens, in-features, out-features
    (1024, 256, 256),
    (1024, 256, 768),
    (1024, 768, 256),
    (1024, 256, 128),
    (16, 256, 768),
    (512, 2560, 2560),
]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    names = ("dispatch", "_int_mm", "fp32 of int8", "bf16 mm", "fp32 mm")
    print(f"{'M, K, N':<20}" + "".join(f"{name:>20}" for name in names))
    for m, k, n in SHAPES:
        x_q = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
        codes = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
        x, w = x_q.float(), codes.float()
        candidates = [
            partial(ternary_matmul, x_q, codes),
            partial(torch._int_mm, x_q, codes.t()),
            partial(fp32_of_int8, x_q, codes),
            partial(torch.mm, x.bfloat16(), w.bfloat16().t()),
            partial(torch.mm, x, w.t()),
        ]
        times = [least_ms(candidate) for candidate in candidates]
        cells = [f"{ms:>12.3f} {times[-1] / ms:>6.2f}x" for ms in times]
        print(f"{f'{m}, {k}, {n}':<20}" + "".join(cells), flush=True)


def fp32_of_int8(x_q: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The exact product where there are no fast integer instructions."""
    return torch.mm(x_q.float(), codes.float().t()).to(torch.int32)


def least_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds of the fastest of ``repeats`` calls, after one that is not counted."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds) * 1000


if __name__ == "__main__":
    main()
