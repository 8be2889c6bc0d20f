"""The benchmark as a command: options in, exit code out.

``megabit bench kernels`` and ``python -m megabit_kernels.benchmark`` both are this one.
"""

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from megabit_kernels.allocator import keep_freed_memory
from megabit_kernels.benchmark.run import Benchmark, Settings
from megabit_kernels.benchmark.shapes import QUICK_TOKENS, TOKENS, layers_of

DESCRIPTION = """\
Time ternary products beside torch's fp32, bf16, int8 and fake-quantized ones.

Measures what the machine can do at best, then lets all of them take turns, with weights that come
from memory and with weights that stay in the cache. Prints tables; writes kernels.json, kernels.csv
and roofline.png. Ctrl-C keeps what was measured by then."""
NEEDS = ("rich", "matplotlib")
"""What the package itself can do without."""


def main(arguments: Sequence[str], program: str) -> int:
    """Run the command that the user knows as ``program``.

    Returns:
        The exit code: 0; 1 if nothing could be measured; 130 after Ctrl-C, as a shell has it.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 and a line on stderr for a wrong option.
    """
    parser = _parser(program)
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        parser.error(f"{missing[0]} is not installed: pip install {' '.join(missing)}")
    from megabit_kernels.benchmark.console import run_and_report

    try:
        settings = settings_from(
            options.shapes,
            options.m,
            options.device,
            options.threads,
            options.implementations,
            options.minutes,
            options.quick,
        )
        keep_freed_memory()  # as training does; else the system clears each large result anew
        benchmark = Benchmark(settings)
        options.out.mkdir(parents=True, exist_ok=True)  # better refused now than after an hour
    except ValueError as error:
        parser.error(f"--{error}")
    except OSError as error:
        parser.error(f"--out: {options.out}: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    if not run_and_report(benchmark, options.out):
        return 130
    return 0 if benchmark.result.finishes else 1


def settings_from(
    shapes: str | None = None,
    m: str | None = None,
    device: str = "cpu",
    threads: str | None = None,
    implementations: str | None = None,
    minutes: float | None = None,
    quick: bool = False,
) -> Settings:
    """Settings from options as they are written, lists with commas; None is the default.

    Raises:
        ValueError: what an option says cannot be; one line that begins with its name.
    """
    on_card = device == "cuda"
    if minutes is None:
        minutes = 7 if on_card else 90
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes: {minutes:g} is not a positive number")
    return Settings(
        layers=layers_of(_words(shapes) or (("2b4t",) if quick else ("2b4t", "3b", "70b"))),
        tokens=_numbers("m", m) or (QUICK_TOKENS if quick else TOKENS),
        device=device,
        threads=_numbers("threads", threads),
        implementations=_words(implementations),
        budget_s=(0.06 if quick else 0.3) / (6 if on_card else 1),
        limit_s=60 * minutes,
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",")) if text else ()


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    words = _words(text)
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{option}: {word!r} is not a number; write it like --{option} 1,2")
    return tuple(sorted({int(word) for word in words}))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage, in which the line that matters gets lost."""
        self.exit(2, f"error: {message}\n")


def _parser(program: str) -> _Parser:
    parser = _Parser(
        prog=program,
        description=DESCRIPTION,
        epilog=f"Example: {program} --shapes 2b4t --m 1,16,256 --threads 1,2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shapes",
        metavar="LIST",
        help="models whose layers are measured, of 2b4t, 3b, 70b and trainer "
        "(default: 2b4t,3b,70b; with --quick 2b4t)",
    )
    parser.add_argument(
        "--m",
        metavar="LIST",
        help="numbers of tokens (default: powers of two up to 4096; with --quick 1,16,256)",
    )
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--threads",
        metavar="LIST",
        help="numbers of threads on the CPU; with several, tables also say how much faster than "
        "with the fewest (default: as many as torch takes)",
    )
    parser.add_argument(
        "--implementations",
        metavar="LIST",
        help="which of ours take part: default (as dispatch decides), bitlinear (the whole layer), "
        "or by name: native, native:avx2, triton, … (default: all for the device)",
    )
    parser.add_argument(
        "--minutes",
        metavar="NUMBER",
        type=float,
        help="leave out what does not fit into so many (default: 90; on cuda 7)",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/bench-kernels"),
        help="where the results go (default: runs/bench-kernels)",
    )
    parser.add_argument("--quick", action="store_true", help="one model, short runs")
    return parser
