"""``megabit bench engine`` on a model that is quick to measure, and what it says."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megabit.benchmark.document import Document
from megabit.benchmark.engine import MEGABIT, ONE_BY_ONE, TRANSFORMERS, Load, Speeds, measure
from megabit.benchmark.random_model import save_random_model
from megabit.config import ModelConfig
from megabit.errors import UserError
from megabit.interop.huggingface import HuggingFaceSource
from tests.command import refused
from tests.test_cli import ENVIRONMENT, ROOT

SMALL = ("model.vocab_size=300", "model.hidden_size=64", "model.intermediate_size=96")
FEW = (
    *("--requests", "3", "--prompt-tokens", "5", "--new-tokens", "4", "--turns", "2"),
    *("--threads", "1", "--dtype", "float32"),
)


def test_ratios_are_those_of_turns() -> None:
    speeds = Speeds(2, 8, {MEGABIT: [1.0, 2.0, 4.0], TRANSFORMERS: [2.0, 8.0, 8.0]})
    assert speeds.tokens_per_s(MEGABIT) == 4
    assert speeds.tokens_per_s(TRANSFORMERS) == 1
    assert speeds.ratio(TRANSFORMERS) == 2  # of 2, 4 and 2


def test_a_random_model_is_one_of_transformers(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=300, hidden_size=64, intermediate_size=96)
    save_random_model(tmp_path / "model", model, 32, "float32")
    source = HuggingFaceSource(tmp_path / "model")
    source.verify()
    assert (source.model, source.max_length, source.dtype) == (model, 32, torch.float32)


def test_it_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs transformers, .* pip install transformers"):
        measure(tmp_path, Load(), 1, "float32")


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.touch()
    assert refused("bench", "engine", "--dtype", "int8") == (
        "--dtype: must be bfloat16 or float32, not int8"
    )
    assert refused("bench", "engine", "--json", there) == (
        f"--json: {there} exists already; name a new file"
    )
    assert "model.norm_placement" in refused("bench", "engine", "model.norm_placement=per_proj")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "speeds.json"
    result = subprocess.run(
        [sys.executable, "-m", "megabit", "bench", "engine", *SMALL, *FEW, "--json", str(out)],
        cwd=ROOT,
        # Compiling takes longer than all the rest.
        env={**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "4 tokens after prompts of 5, median of 2 turns after one" in result.stdout
    (part,) = Document.read(out).parts
    assert [(row.what, row.baseline.name) for row in part.rows] == [
        ("1 request", TRANSFORMERS),
        ("3 requests", TRANSFORMERS),
        ("3 requests", ONE_BY_ONE),
    ]
    for row in part.rows:
        assert row.ours.name == MEGABIT
        assert len(row.ours.seconds) == len(row.baseline.seconds) == 2
        assert min(*row.ours.seconds, *row.baseline.seconds) > 0
    one, three, _ = part.rows
    assert (one.ours.amount, three.ours.amount) == (4, 12)
    assert f"{12 / three.ours.timing.median_s:,.1f} tokens/s" in result.stdout
