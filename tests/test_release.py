"""The wheel: what is in it, that it runs without the repository, and what type checkers see of it.

It is built from a copy of the files that a build needs, and installed into a new environment far
from the repository. What megabit depends on comes from the environment that runs the tests, all but
megabit itself.
"""

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megabit import __version__
from megabit_kernels import native_abi
from tests.public_api import PUBLIC

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("megabit", "kernels", "examples", "setup.py", "pyproject.toml", "MANIFEST.in")
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
MADE = shutil.ignore_patterns("*.so", "__pycache__", "build", "dist", "*.egg-info")
PIP = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

MULTIPLY = """
import megabit, sys, torch
from megabit_kernels import TernaryWeight, native, ternary_matmul
from megabit.tensor_parallel import BitLinear

x_q = torch.arange(-60, 60, dtype=torch.int8).view(3, 40)
codes = (torch.arange(200) % 3 - 1).to(torch.int8).view(5, 40)
weight = TernaryWeight.from_codes(codes, torch.tensor(1.0))
assert torch.equal(ternary_matmul(x_q, weight), x_q.int() @ codes.int().t())
assert BitLinear(64, 32)(torch.ones(2, 64)).shape == (2, 32)
print(megabit.__file__, *native.isas())
"""


def run(*command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints on stdout and stderr; it must end well."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **PIP, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build_wheel(source: Path, target: Path, **environment: str) -> Path:
    """The wheel of ``source``; ``pip wheel . --no-deps`` with the build tools at hand."""
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", target)
    pip = (sys.executable, "-m", "pip", "wheel", "--verbose", *options, ".")
    (target.parent / "said.txt").write_text(run(*pip, cwd=source, environment=environment))
    (wheel,) = target.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a build needs, nothing built."""
    folder = tmp_path_factory.mktemp("source") / "megabit"
    folder.mkdir()
    for name in (*BUILD, *TEXTS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=MADE)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_wheel(source, tmp_path_factory.mktemp("built") / "dist")
    for left in (source / "build", source / "megabit.egg-info"):
        shutil.rmtree(left, ignore_errors=True)
    return built


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed here but megabit and pip, as links in one folder."""
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("megabit", "__editable__", "pip", "__pycache__")):
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def python(wheel: Path, dependencies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    there = {"PYTHONPATH": str(dependencies)}
    run(python, "-m", "pip", "install", wheel, cwd=folder, environment=there)
    return python


# What is in it.


def test_the_wheel_has_all_files_of_the_packages_and_the_examples(wheel: Path) -> None:
    expected = set()
    for folder, inside in [
        (ROOT / "megabit", "megabit"),
        (ROOT / "kernels" / "megabit_kernels", "megabit_kernels"),
        (ROOT / "examples", "megabit/examples"),
    ]:
        expected |= {
            f"{inside}/{path.relative_to(folder).as_posix()}"
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
        }
    found = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert found == expected | {"megabit_kernels/libmegabit_kernels.so"}


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"megabit-{__version__}-py3-none-{platform}.whl"
    (about,) = importlib.metadata.distributions(path=[str(wheel)])
    said = about.metadata
    assert (said["Name"], said["Version"]) == ("megabit", __version__)
    assert said["Requires-Python"] == ">=3.11"
    assert "Apache-2.0" in (said["License-Expression"], said["License"])
    assert said["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert {"serve", "telemetry", "lm-eval"} <= set(said.get_all("Provides-Extra", []))
    assert any(name.endswith("licenses/LICENSE") for name in names_in(wheel))
    (command,) = about.entry_points
    assert (command.name, command.value) == ("megabit", "megabit.cli.main:main")


def test_a_source_distribution_makes_the_same_wheel_without_a_compiler_less_the_library(
    source: Path, wheel: Path, dependencies: Path, tmp_path: Path
) -> None:
    """And what is in that computes, through torch, and says so."""
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {path.name for path in unpacked.iterdir()} >= {*BUILD, *TEXTS}
    kernels = Path("kernels", "csrc")
    sources = {path.name for path in (ROOT / kernels).glob("*.[ch]")}
    assert sources <= {path.name for path in (unpacked / kernels).iterdir()}

    plain = build_wheel(unpacked, tmp_path / "dist", CC="false")
    assert names_in(wheel) - names_in(plain) == {"megabit_kernels/libmegabit_kernels.so"}
    assert names_in(plain) <= names_in(wheel)
    assert "kernels were not built" in (tmp_path / "said.txt").read_text()
    with zipfile.ZipFile(plain) as files:
        files.extractall(tmp_path / "installed")
    path = os.pathsep.join([str(tmp_path / "installed"), str(dependencies)])
    said = run(sys.executable, "-S", "-c", MULTIPLY, cwd=tmp_path, environment={"PYTHONPATH": path})
    assert "megabit_kernels has no native CPU kernels here" in said
    assert said.splitlines()[-1] == str(tmp_path / "installed" / "megabit" / "__init__.py")


# Without the repository.


def test_what_is_installed_is_used_and_has_the_kernels(
    python: Path, dependencies: Path, tmp_path: Path
) -> None:
    there = {"PYTHONPATH": str(dependencies)}
    said = run(python, "-c", MULTIPLY, cwd=tmp_path, environment=there)
    where, *isas = said.split()
    assert Path(where).is_relative_to(python.parents[1])
    assert isas == list(native_abi.load().isas)
    command = python.with_name("megabit")
    assert run(command, "--version", cwd=tmp_path, environment=there) == f"megabit {__version__}\n"


def test_examples_are_written_once_and_take_settings(
    python: Path, dependencies: Path, tmp_path: Path
) -> None:
    there = {"PYTHONPATH": str(dependencies)}
    command = python.with_name("megabit")
    run(command, "examples", cwd=tmp_path, environment=there)
    written = sorted(p.relative_to(tmp_path) for p in (tmp_path / "examples").rglob("*"))
    assert written == sorted(
        path.relative_to(ROOT)
        for path in (ROOT / "examples").rglob("*")
        if "__pycache__" not in path.parts
    )
    settings = ["examples/model/tiny.yaml", "examples/parallel/tp2_pp2.yaml"]
    run(command, "config", "--quiet", *settings, cwd=tmp_path, environment=there)
    assert os.access(tmp_path / "examples" / "quickstart.sh", os.X_OK)
    again = subprocess.run(
        [command, "examples"],
        cwd=tmp_path,
        env={**os.environ, **there},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2
    assert again.stderr == "error: examples: exists already; name a new folder\n"


def test_the_newcomers_way(wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    """``examples/newcomer.sh``, from the wheel to an answer; less training than on its page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The interpreter itself, not that of an environment, makes the new one.
    shutil.copy(ROOT / "examples" / "newcomer.sh", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    there = {"PYTHONPATH": str(dependencies), "PATH": path, "STEPS": "4", "PORT": str(port)}
    said = run("./newcomer.sh", wheel, "here", cwd=tmp_path, environment=there)
    assert "Traceback" not in said
    here = tmp_path / "here"
    assert f"Successfully installed megabit-{__version__}" in said
    assert "Layout: TP 2 × PP 2 × DP 1" in said
    assert re.search(r"Layout: TP 1 × PP 1 × DP 4.*Resuming after step 4\b", said, re.DOTALL)
    assert (here / "runs" / "mine" / "checkpoints" / "latest").read_text() == "step_00000008\n"
    assert (here / "exported" / "model.safetensors").exists()
    assert '"object":"chat.completion"' in said
    assert said.splitlines()[-1].endswith("Stopped")
    installed = next((here / "fresh" / "lib").glob("python3*")) / "site-packages" / "megabit"
    assert (installed / "__init__.py").exists()


def lines_of(shell: str) -> Iterator[str]:
    """Its lines, less what only the page or only the script has, with the page's numbers."""
    for line in shell.splitlines():
        if line and not re.match(r"(say|if|fi|pip wheel|megabit chat)\b", line):
            plain = line.replace("$((2 * steps))", "200").replace("$steps", "100")
            yield plain.replace("$port", "8000")


def test_the_page_and_the_script_have_the_same_commands() -> None:
    page = (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = (ROOT / "examples" / "newcomer.sh").read_text(encoding="utf-8")
    body = script[script.index('say "1.') :]
    assert list(lines_of(body)) == list(lines_of("\n".join(blocks)))


# What type checkers see.


@pytest.fixture(scope="module")
def seen(python: Path, dependencies: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ``mypy --strict`` says of a program that uses the public names of the wheel."""
    folder = tmp_path_factory.mktemp("consumer")
    site = next((python.parents[1] / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    shutil.copy(ROOT / "tests" / "consumer.py", folder)
    lines = [f"import {module}" for module in {name.rpartition(".")[0] for name in PUBLIC}]
    lines += [f"reveal_type({name})" for name in PUBLIC]
    (folder / "names.py").write_text("\n".join(lines) + "\n")
    options = ("--strict", "--no-error-summary", "--python-executable", str(python))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "consumer.py", "names.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_program_that_uses_the_public_names_is_strictly_typed(seen: list[str]) -> None:
    assert [line for line in seen if ": error:" in line] == []


def test_no_public_name_is_any(seen: list[str]) -> None:
    revealed = [line for line in seen if line.startswith("names.py")]
    assert len(revealed) == len(PUBLIC)
    assert [line for line in revealed if 'is "Any"' in line] == []
