"""From a kernel to a GPU's machine code and what it says of itself, with no GPU at hand.

Triton compiles for any architecture and brings NVIDIA's disassembler along. Its text tells what a
correctness test cannot see: whether a product runs on tensor cores, whether registers spill to
memory, and how many instructions a turn of the main loop takes.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megabit_kernels.triton.compile_spec import CompileSpec

INT8_INSTRUCTIONS = frozenset({"IMMA", "IGMMA", "UTCIMMA"})
"""Integer products of tensor cores: of a warp, of four (Hopper), of a whole SM (Blackwell)."""
HALF_INSTRUCTIONS = frozenset({"HMMA", "HGMMA", "UTCHMMA"})
"""The same for bf16 and fp16."""
TENSOR_INSTRUCTIONS = INT8_INSTRUCTIONS | HALF_INSTRUCTIONS
SPILLS = ("STL", "LDL")
"""Stores to and loads from a thread's own memory, where registers go that find no room."""

_LABEL = re.compile(r"^(\.L\w*):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L\w*)\)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)")


@dataclass(frozen=True)
class MachineCode:
    """One kernel, compiled for one architecture."""

    registers: int
    """Of a thread."""
    shared_bytes: int
    """Of a program."""
    instructions: Counter[str]
    """How often each instruction stands in the code, without its modifiers."""
    loop: Counter[str]
    """The same for the main loop, see ``main_loop``."""
    text: str

    @property
    def tensor_instructions(self) -> dict[str, int]:
        return {
            name: count
            for name, count in sorted(self.instructions.items())
            if name in TENSOR_INSTRUCTIONS
        }

    @property
    def spills(self) -> int:
        return sum(self.instructions[name] for name in SPILLS)


def compile_for(spec: CompileSpec, architecture: int) -> MachineCode:
    """Compiles ``spec.kernel`` as a launch with well-aligned arguments would.

    Args:
        architecture: compute capability times ten, such as 90.
    """
    names = spec.kernel.arg_names
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    divisible_by_16 = [["tt.divisibility", 16]]
    attributes = {
        (position,): divisible_by_16
        for position, name in enumerate(names)
        if signature[name].startswith("*") or name in spec.aligned
    }
    compiled = triton.compile(
        ASTSource(spec.kernel, signature, constexprs=spec.constants, attrs=attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": spec.num_warps, "num_stages": spec.num_stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        text = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(binary))
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary))
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise RuntimeError(f"cuobjdump says nothing of registers:\n{usage}")
    lines = text.splitlines()
    return MachineCode(
        registers=int(registers[1]),
        shared_bytes=compiled.metadata.shared,
        instructions=count_instructions(lines),
        loop=main_loop(lines),
        text=text,
    )


def count_instructions(lines: list[str]) -> Counter[str]:
    """Counts opcodes (``IMMA`` of ``@P0 IMMA.16832.S8.S8 ...``) in disassembled ``lines``."""
    return Counter(match[1] for line in lines if (match := _INSTRUCTION.match(line)))


def main_loop(lines: list[str]) -> Counter[str]:
    """The instructions of the shortest loop that multiplies matrices.

    Where none does, of the longest loop without another one in it; empty without loops. A loop is
    what lies between a label and a later branch to it; the single branch to itself that ends every
    kernel is none.
    """
    bodies = []
    labels: dict[str, int] = {}
    for end, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = end
        elif (branch := _BRANCH.search(line)) and branch[1] in labels:
            bodies.append(range(labels[branch[1]], end + 1))
    counted = [(body, count_instructions(lines[body.start : body.stop])) for body in bodies]
    counted = [(body, count) for body, count in counted if count.total() > 1]
    multiplying = [count for _, count in counted if not TENSOR_INSTRUCTIONS.isdisjoint(count)]
    if multiplying:
        return min(multiplying, key=Counter.total)
    innermost = [
        count
        for body, count in counted
        if not any(other != body and _holds(body, other) for other in bodies)
    ]
    return max(innermost, key=Counter.total, default=Counter())


def _holds(outer: range, inner: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done.stdout
