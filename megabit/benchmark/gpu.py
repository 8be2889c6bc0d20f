"""``python -m megabit.benchmark.gpu``, ``megabit bench gpu``: what one GPU does, in eight minutes.

Options in, ``results.json`` and ``benchmarks.md`` in a folder out.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megabit.benchmark.gpu_suite import run_gpu_suite
from megabit.benchmark.render import render
from megabit.benchmark.suite import PAGE, RESULTS
from megabit.errors import UserError
from megabit.files import write_text

MINUTES = 8.0


def main(arguments: Sequence[str], program: str) -> int:
    """Run the command that the user knows as ``program``; its exit code.

    Raises:
        UserError: an option cannot be.
        SystemExit: after ``--help``, or for an option that there is not.
    """
    options = _parser(program).parse_args(arguments)
    device = _device(options.device)
    if not 0 < options.minutes < math.inf:
        raise UserError(f"--minutes: {options.minutes:g} is not a positive number")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    document = run_gpu_suite(
        device,
        options.examples,
        options.minutes,
        options.quick,
        lambda line: print(line, flush=True),
    )
    document.write(out / RESULTS)
    write_text(out / PAGE, render([document]))
    print(f"wrote {out / RESULTS} and {out / PAGE}")
    return 0 if all(part.rows for part in document.parts) else 1


def _device(name: str) -> torch.device:
    if name not in ("cuda", "cpu"):
        raise UserError(f"--device: {name} is not cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device: torch finds no CUDA device; on a CPU, megabit bench all measures, and "
            "--device cpu --quick shows that this one runs"
        )
    return torch.device(name)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Measure kernels, a training step (700M) and decoding (2B4T) on one CUDA "
        "device, beside bf16 PyTorch in the same run. What does not fit the time is named.",
        epilog=f"Example: {program} --out runs/h100",
        allow_abbrev=False,
    )
    parser.add_argument("--device", metavar="NAME", default="cuda", help="cuda (default) or cpu")
    parser.add_argument(
        "--minutes", metavar="NUMBER", type=float, default=MINUTES, help="for all (default: 8)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: no speed is measured")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/bench-gpu"),
        help="where results go; earlier ones are replaced (default: runs/bench-gpu)",
    )
    parser.add_argument(
        "--examples",
        metavar="FOLDER",
        type=Path,
        default=Path("examples"),
        help="that of the repository (default: examples)",
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], "python -m megabit.benchmark.gpu"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
