"""The Triton kernels as machine code of GPUs that are not here.

The inspector runs in a process of its own, for Triton decides when it is imported whether it
compiles or interprets; and with a cache of its own, so that nothing in it is from another day.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KERNELS = Path(__file__).parents[2] / "kernels" / "megabit_kernels" / "triton"

MULTIPLYING = (
    "_packed_gemm_kernel",
    "_split_k_kernel",
    "_int8_gemm_kernel",
    "_input_gradient_kernel",
    "_weight_gradient_kernel",
    "_dense_linear_kernel",
    "_paged_attention_kernel",
)
"""Kernels that use tensor cores."""
ALSO_IN_FP32 = ("_dense_linear_kernel", "_paged_attention_kernel")
"""Those that multiply fp32 as well, without them."""


def inspector(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
    }
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "megabit_kernels.triton.inspect", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def kernel_functions() -> Iterator[str]:
    """Names of all kernels of the package, read from its sources."""
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield node.name


@pytest.mark.slow
@pytest.mark.parametrize(
    # The matrix instructions of each generation, and what full tiles of integers must use of them.
    # Triton gives integers on Blackwell, and tiles too narrow for Hopper's own, to Ampere's.
    ("arch", "int8", "half", "full"),
    [
        ("sm_80", {"IMMA"}, {"HMMA"}, {"IMMA"}),
        ("sm_90", {"IGMMA", "IMMA"}, {"HGMMA", "HMMA"}, {"IGMMA"}),
        ("sm_100", {"UTCIMMA", "IMMA"}, {"UTCHMMA", "HMMA"}, {"UTCIMMA", "IMMA"}),
    ],
)
def test_every_kernel_compiles_to_what_its_specification_says(
    arch: str, int8: set[str], half: set[str], full: set[str], tmp_path: Path
) -> None:
    done = inspector(tmp_path, "--arch", arch, "--json")
    assert done.stderr == ""
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    problems = {report["kernel"]: report["problems"] for report in reports if report["problems"]}
    assert problems == {}
    assert done.returncode == 0
    functions = [report["function"] for report in reports]
    assert set(functions) == set(kernel_functions()) > set(MULTIPLYING)
    found: dict[str, set[str]] = {function: set() for function in functions}
    for function, report in zip(functions, reports, strict=True):
        assert report["arch"] == arch
        assert report["spills"] == 0
        assert 0 < report["registers"] <= 255
        without = function in ALSO_IN_FP32 and "fp32" in report["kernel"]
        assert bool(report["tensor_cores"]) == (function in MULTIPLYING and not without)
        if function in MULTIPLYING:
            assert report["loop_instructions"] > 0
        found[function] |= report["tensor_cores"].keys()
    assert found["_int8_gemm_kernel"] <= int8
    for function in ("_packed_gemm_kernel", "_split_k_kernel"):
        assert found[function] & full
        assert found[function] <= int8 | half
    for function in ("_input_gradient_kernel", "_weight_gradient_kernel", *ALSO_IN_FP32):
        assert found[function] <= half


# The expectations can fail: kernels that break each of them.

BROKEN = """
import triton
import triton.language as tl

from megabit_kernels.triton.compile_spec import CompileSpec


@triton.jit
def scale(x_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x / tl.sum(x))


@triton.jit
def square(x_ptr, y_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, tl.trans(x)))


def spec(name, kernel, dtypes, size, tensor_cores, num_warps=1):
    signature = dict(zip(("x_ptr", "y_ptr"), dtypes))
    return CompileSpec(name, kernel, signature, {"SIZE": size}, num_warps, 1, tensor_cores)


def compile_specs():
    return (
        spec("sound", scale, ("*fp32", "*fp32"), 128, None),
        spec("spilling", scale, ("*fp32", "*fp32"), 16384, None),
        spec("without products", scale, ("*fp32", "*fp32"), 128, "int8"),
        spec("of another type", square, ("*bf16", "*fp32"), 64, "int8", 4),
        spec("with products", square, ("*i8", "*i32"), 64, None, 4),
        spec("too large", square, ("*bf16", "*fp32"), 256, "bf16", 16),
    )
"""


def test_what_is_not_as_specified_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    done = inspector(tmp_path, "--module", "broken", "--arch", "sm_89", "--json")
    assert done.returncode == 1
    problems = {
        report["kernel"]: " ".join(report["problems"]) for report in json.loads(done.stdout)
    }
    assert problems.pop("sound") == ""
    assert "spill registers" in problems["spilling"]
    assert problems["without products"] == "no int8 tensor-core instruction"
    assert "no int8 tensor-core instruction" in problems["of another type"]
    assert "unexpected tensor-core instructions" in problems["with products"]
    assert "bytes of shared memory, but a program can have 101376" in problems["too large"]


def test_the_table_shows_one_kernel_and_saves_its_code(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    arguments = ("--module", "broken", "--kernel", "products", "--arch", "sm_80", "--sass")
    done = inspector(tmp_path, *arguments, str(tmp_path / "code"))
    assert done.returncode == 1
    header, without, with_products = done.stdout.splitlines()
    assert header.split()[:3] == ["kernel", "arch", "registers"]
    assert without.startswith("without products  sm_80")
    assert without.endswith("-; PROBLEM: no int8 tensor-core instruction")
    assert "IMMA; PROBLEM: unexpected tensor-core instructions: IMMA" in with_products
    code = tmp_path / "code" / "with_products_sm_80.sass"
    assert "IMMA" in code.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "hopper"), "argument --arch: invalid choice: 'hopper' (choose from 'sm_80', "),
        (("--module", "nope"), "argument --module: No module named 'nope'"),
        (("--module", "json"), "argument --module: json has no compile_specs()"),
        (
            ("--kernel", "fft"),
            "--kernel fft: no kernel's name holds this; there are cross_",
        ),
    ],
)
def test_a_mistake_is_named(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = inspector(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
