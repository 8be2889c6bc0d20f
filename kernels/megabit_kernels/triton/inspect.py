"""Compiles every Triton kernel for GPUs that need not be there and reports the machine code.

    python -m megabit_kernels.triton.inspect --arch sm_80 sm_90 sm_100

prints a line for each kernel and architecture: registers, shared memory, spills, the length of the
main loop, tensor-core instructions. It exits with 1 if a kernel spills registers, asks for more
shared memory than there is, or lacks the tensor-core instructions that its ``CompileSpec`` names.
"""

import argparse
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import megabit_kernels.triton
from megabit_kernels.triton.arithmetic import is_interpreted
from megabit_kernels.triton.compile_spec import CompileSpec
from megabit_kernels.triton.machine_code import (
    HALF_INSTRUCTIONS,
    INT8_INSTRUCTIONS,
    MachineCode,
    compile_for,
)

_KIB = 1024
SHARED_BYTES = {
    **dict.fromkeys((80, 87), 163 * _KIB),
    **dict.fromkeys((86, 89, 120), 99 * _KIB),
    **dict.fromkeys((90, 100, 103), 227 * _KIB),
}
"""The most that one program can have, for every architecture that kernels can be compiled for
(CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True)
class Report:
    """A line of the table."""

    kernel: str
    """Name of the compilation, from its ``CompileSpec``."""
    function: str
    """Name of the kernel's function."""
    arch: str
    registers: int
    shared_bytes: int
    spills: int
    tensor_cores: dict[str, int]
    """Tensor-core instructions and how often they stand in the code."""
    loop_instructions: int
    """Of the main loop; 0 without a loop."""
    instructions: int
    problems: tuple[str, ...]
    """What is not as the kernel's specification wants it."""


def inspect(spec: CompileSpec, architecture: int, folder: Path | None = None) -> Report:
    """Compiles and reports; writes the disassembly into ``folder`` if there is one."""
    code = compile_for(spec, architecture)
    arch = f"sm_{architecture}"
    if folder is not None:
        name = "".join(c if c.isalnum() else "_" for c in f"{spec.name} {arch}")
        (folder / f"{name}.sass").write_text(code.text, encoding="utf-8")
    return Report(
        kernel=spec.name,
        function=spec.kernel.__name__,
        arch=arch,
        registers=code.registers,
        shared_bytes=code.shared_bytes,
        spills=code.spills,
        tensor_cores=code.tensor_instructions,
        loop_instructions=code.loop.total(),
        instructions=code.instructions.total(),
        problems=tuple(problems(spec, architecture, code)),
    )


def problems(spec: CompileSpec, architecture: int, code: MachineCode) -> Iterator[str]:
    """Where ``code`` is not what ``spec`` wants, or what the architecture can run."""
    if code.spills:
        yield f"{code.spills} instructions spill registers"
    available = SHARED_BYTES[architecture]
    if code.shared_bytes > available:
        yield f"{code.shared_bytes} bytes of shared memory, but a program can have {available}"
    wanted: frozenset[str] = frozenset()
    if spec.tensor_cores is not None:
        wanted = INT8_INSTRUCTIONS if spec.tensor_cores == "int8" else HALF_INSTRUCTIONS
    found = code.tensor_instructions.keys()
    if wanted and not found & wanted:
        yield f"no {spec.tensor_cores} tensor-core instruction"
    if found - wanted:
        yield f"unexpected tensor-core instructions: {', '.join(sorted(found - wanted))}"


def package_modules() -> tuple[ModuleType, ...]:
    """The modules of this package that have kernels to compile."""
    package = megabit_kernels.triton
    names = [f"{package.__name__}.{entry.name}" for entry in pkgutil.iter_modules(package.__path__)]
    modules = (importlib.import_module(name) for name in names)
    return tuple(module for module in modules if hasattr(module, "compile_specs"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status, 1 where a kernel has problems."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if is_interpreted():
        parser.error("TRITON_INTERPRET is set: then Triton interprets kernels and compiles none")
    everything: list[CompileSpec] = [
        spec for module in options.module or package_modules() for spec in module.compile_specs()
    ]
    specs = [spec for spec in everything if options.kernel in spec.name]
    if not specs:
        known = ", ".join(sorted({re.split("[ ,]", spec.name)[0] for spec in everything}))
        parser.error(f"--kernel {options.kernel}: no kernel's name holds this; there are {known}")
    architectures = [int(name.removeprefix("sm_")) for name in options.arch]
    if options.sass is not None:
        options.sass.mkdir(parents=True, exist_ok=True)
    width = max(len(spec.name) for spec in specs)
    if not options.json:
        print(_HEADER.format("kernel", width=width))
    reports = []
    for spec, architecture in _pairs(specs, architectures):
        reports.append(inspect(spec, architecture, options.sass))
        if not options.json:
            print(_line(reports[-1], width), flush=True)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    return int(any(report.problems for report in reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megabit_kernels.triton.inspect",
        description="Compile the Triton kernels ahead of time and report their machine code.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=[f"sm_{architecture}" for architecture in sorted(SHARED_BYTES)],
        default=["sm_80", "sm_90", "sm_100"],
        metavar="sm_NN",
        help="default: sm_80 sm_90 sm_100",
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this text")
    parser.add_argument(
        "--module",
        nargs="+",
        type=_module,
        help="modules with compile_specs(); default: all of the package",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, not a table")
    parser.add_argument("--sass", type=Path, metavar="FOLDER", help="save disassemblies here")
    return parser


def _pairs(
    specs: Sequence[CompileSpec], architectures: Sequence[int]
) -> Iterator[tuple[CompileSpec, int]]:
    """What to compile for what: as the specs say, but everything for what no spec mentions."""
    mentioned = {architecture for spec in specs for architecture in spec.architectures}
    for spec in specs:
        for architecture in architectures:
            if architecture in spec.architectures or architecture not in mentioned:
                yield spec, architecture


_HEADER = "{:<{width}}  arch    registers  shared B  spills  loop  total  tensor cores"


def _line(report: Report, width: int) -> str:
    found = ", ".join(f"{count} {name}" for name, count in report.tensor_cores.items()) or "-"
    return "  ".join(
        (
            f"{report.kernel:<{width}}",
            f"{report.arch:<6}",
            f"{report.registers:>9}",
            f"{report.shared_bytes:>8}",
            f"{report.spills:>6}",
            f"{report.loop_instructions:>4}",
            f"{report.instructions:>5}",
            "; ".join((found, *(f"PROBLEM: {problem}" for problem in report.problems))),
        )
    )


def _module(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not hasattr(module, "compile_specs"):
        raise argparse.ArgumentTypeError(f"{name} has no compile_specs()")
    return module


if __name__ == "__main__":
    sys.exit(main())
