"""Measure the tiles of a model's layers on this card, and keep what was fastest.

    python -m megabit_kernels.triton.tune --layer 2560x6912 6912x2560 --tokens 1 16 256 2048

Products look their tiles up in what is kept (``tuning``), also in later runs. With ``--folder``,
which is ``megabit_kernels/triton/tuned`` in a checkout, the card's file can be shipped to others.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from megabit_kernels.numerics import MAX_EXACT_K
from megabit_kernels.triton import products, tuning
from megabit_kernels.triton.config import Kernel
from megabit_kernels.triton.limits import DECODE_ROWS


def main(
    arguments: Sequence[str] | None = None,
    device: torch.device | None = None,
    timer: tuning.Timer = tuning.gpu_seconds,
) -> int:
    """Runs the command; the exit status, 2 where there is nothing to measure on.

    Args:
        device: to measure on; None is the current GPU.
        timer: what measures.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if "split_k" in (options.kernel or ()) and max(options.tokens) > DECODE_ROWS:
        parser.error(f"--tokens {max(options.tokens)}: split_k takes at most {DECODE_ROWS}")
    if device is None and not torch.cuda.is_available():
        print("error: torch finds no GPU, and tiles are measured on one", file=sys.stderr)
        return 2
    device = device or torch.device("cuda", torch.cuda.current_device())
    for n, k in options.layer:
        for m in options.tokens:
            for kernel in options.kernel or _forward(m):
                choice = products.tune(kernel, m, n, k, device, timer, options.folder)
                print(f"{kernel} {n} × {k}, {m} tokens: {choice}", flush=True)
    return 0


def _forward(m: int) -> tuple[Kernel, ...]:
    return ("split_k",) if m <= DECODE_ROWS else ("packed_gemm",)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megabit_kernels.triton.tune",
        description="Measure tile sizes on this card and keep the fastest.",
    )
    parser.add_argument(
        "--layer", type=_layer, nargs="+", required=True, metavar="NxK", help="e.g. 2560x6912"
    )
    parser.add_argument(
        "--tokens", type=_tokens, nargs="+", required=True, metavar="M", help="rows of the product"
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        choices=get_args(Kernel),
        help=f"default: split_k up to {DECODE_ROWS} tokens, packed_gemm beyond",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the card's file is kept (default: your cache)"
    )
    return parser


def _layer(text: str) -> tuple[int, int]:
    sizes = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write it like 2560x6912")
    n, k = int(sizes[1]), int(sizes[2])
    if k > MAX_EXACT_K:
        raise argparse.ArgumentTypeError(f"{text!r}: products are exact up to K = {MAX_EXACT_K}")
    return n, k


def _tokens(text: str) -> int:
    if re.fullmatch(r"[1-9][0-9]*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of at least 1 is wanted")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
