"""All benchmarks in a row: every one of them runs, and one that fails does not cost the others."""

import shutil
from pathlib import Path

import pytest

from megabit.benchmark import suite
from megabit.benchmark.document import Document
from megabit.benchmark.render import render
from megabit.benchmark.suite import NAMES, PAGE, RESULTS, run_suite
from tests.command import refused

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples" / "benchmarks"


@pytest.mark.slow
def test_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than all the rest
    lines: list[str] = []
    document = run_suite(tmp_path, EXAMPLES, NAMES, is_quick=True, told=lines.append)
    assert not document.failed
    assert [part.name for part in document.parts] == [*NAMES]
    assert [line for line in lines if " of " in line] == [
        f"{number} of {len(NAMES)}: {name}" for number, name in enumerate(NAMES, 1)
    ]
    for part in document.parts:
        assert part.rows, part.name
        assert part.command.startswith("megabit bench ")
        assert part.elapsed_s > 0
        for row in part.rows:
            assert row.ratio > 0
            assert row.ours.name != row.baseline.name
    assert Document.read(tmp_path / RESULTS) == document
    assert (tmp_path / PAGE).read_text(encoding="utf-8") == render([document])


@pytest.mark.slow
def test_one_that_fails_is_named(tmp_path: Path) -> None:
    """Its settings are missing here; the last line that it said is the reason."""
    examples = tmp_path / "examples"
    examples.mkdir()
    shutil.copy(EXAMPLES / "small.yaml", examples)
    lines: list[str] = []
    names = ("checkpoint", "train-one-process")
    document = run_suite(tmp_path / "out", examples, names, is_quick=True, told=lines.append)
    assert [part.name for part in document.parts] == ["train-one-process"]
    assert list(document.failed) == ["checkpoint"]
    assert document.failed["checkpoint"].startswith("ended with 2: ")
    assert "checkpoint.yaml" in document.failed["checkpoint"]
    assert Document.read(tmp_path / "out" / RESULTS) == document


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LIMIT_S", 0.05)
    document = run_suite(tmp_path, EXAMPLES, ("engine",), is_quick=True, told=lambda line: None)
    assert document.failed["engine"].startswith("took more than 0")


def test_what_cannot_be_measured() -> None:
    assert refused("bench", "all", "--only", "nothing").startswith(
        "--only: nothing is not one of kernels, train-wide, "
    )
    assert refused("bench", "all", "--examples", "nowhere").startswith(
        "--examples: nowhere has no small.yaml; run it in megabit's repository"
    )
