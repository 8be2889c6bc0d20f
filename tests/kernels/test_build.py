"""How the native kernels get into an install: built where a compiler is, else left out."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megabit_kernels import native_abi

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

MULTIPLY = """
import warnings
import torch
from megabit_kernels import TernaryWeight, native, ternary_matmul

x_q = torch.arange(-60, 60, dtype=torch.int8).view(3, 40)
codes = (torch.arange(200) % 3 - 1).to(torch.int8).view(5, 40)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        weight = TernaryWeight.from_codes(codes, torch.tensor(1.0))
        assert torch.equal(ternary_matmul(x_q, weight), (x_q.int() @ codes.int().t()))
for warning in caught:
    print("warned:", warning.message)
print("native:", *native.isas())
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package's own folder as a checkout has it: nothing built."""
    copy = tmp_path / "kernels"
    shutil.copytree(
        ROOT / "kernels", copy, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info")
    )
    return copy


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def install(source: Path, target: Path, **environment: str) -> str:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--verbose"]
    return run(
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        target,
        source,
        cwd=target.parent,
        **environment,
    )


def multiply(target: Path) -> list[str]:
    return run("-c", MULTIPLY, cwd=target.parent, PYTHONPATH=str(target)).splitlines()


def test_an_install_with_a_compiler_has_the_kernels(package: Path, tmp_path: Path) -> None:
    install(package, tmp_path / "installed")
    (line,) = multiply(tmp_path / "installed")
    assert line.split() == ["native:", *native_abi.load().isas]


def test_an_install_without_a_compiler_says_so_and_computes(package: Path, tmp_path: Path) -> None:
    printed = install(package, tmp_path / "installed", CC="false")
    (said,) = [line for line in printed.splitlines() if "kernels were not built" in line]
    assert "through torch" in said
    assert "gcc or clang" in said
    warned, used = multiply(tmp_path / "installed")
    assert warned.startswith("warned: megabit_kernels has no native CPU kernels here")
    assert "gcc or clang" in warned
    assert used == "native:"


def test_an_instruction_set_unknown_to_the_compiler_is_left_out(
    package: Path, tmp_path: Path
) -> None:
    """An old compiler, played by one that refuses a flag."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *vnni*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    install(package, tmp_path / "installed", CC=str(compiler))
    (line,) = multiply(tmp_path / "installed")
    need_vnni = {"avx512bf16", "avx512vnni", "avxvnni"}
    expected = [isa for isa in native_abi.load().isas if isa not in need_vnni]
    assert line.split() == ["native:", *expected]


def test_a_source_distribution_holds_what_the_build_needs(package: Path, tmp_path: Path) -> None:
    run("setup.py", "-q", "sdist", "--dist-dir", tmp_path, cwd=package)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    sources = {path.name for path in (ROOT / "kernels" / "csrc").glob("*.[ch]")}
    assert sources <= {path.name for path in (unpacked / "csrc").iterdir()}
    install(unpacked, tmp_path / "installed")
    assert multiply(tmp_path / "installed") == [f"native: {' '.join(native_abi.load().isas)}"]


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int megabit_abi(void) { return -1; }\n")
    library = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(OSError, match="belongs to another version"):
        native_abi.load(library)
    with pytest.raises(OSError, match="not built"):
        native_abi.load(tmp_path / "none.so")
