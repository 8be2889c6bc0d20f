"""The benchmark of one GPU, on this CPU with tiny shapes: the code is the same."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megabit.benchmark.dense_generation import DenseGenerator
from megabit.benchmark.document import Document, Row, Sample
from megabit.benchmark.gpu_findings import Findings
from megabit.benchmark.gpu_suite import _part
from megabit.benchmark.render import QUICK
from megabit.benchmark.time_limit import OutOfTime, time_limit
from megabit.config import ModelConfig
from tests.command import megabit, refused

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
ROW = Row("x", Sample.of("a", [1.0]), Sample.of("b", [2.0]))


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--quick", "--examples", EXAMPLES, "--out", tmp_path)
    code, lines, errors = megabit("bench", "gpu", *options)
    assert (code, errors) == (0, [])
    assert "1 of 5: Ternary products, 2B4T shapes" in lines
    document = Document.read(tmp_path / "results.json")
    names = ["products", "elementwise", "attention", "train", "decode"]
    assert [part.name for part in document.parts] == names
    rows = {part.name: len(part.rows) for part in document.parts}
    assert rows == {"products": 6, "elementwise": 9, "attention": 2, "train": 2, "decode": 2}
    left_out = [reason for part in document.parts for reason in part.left_out]
    assert left_out == ["dense bf16 PyTorch, torch.compile: not in a quick run"]
    train = next(part for part in document.parts if part.name == "train")
    assert {"MFU_share", "baseline_MFU_share"} <= train.rows[0].also.keys()
    assert QUICK in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_card_there_is_one_line() -> None:
    line = refused("bench", "gpu")
    assert line.startswith("--device: torch finds no CUDA device; on a CPU, megabit bench all ")
    alone = subprocess.run(
        [sys.executable, "-m", "megabit.benchmark.gpu"], capture_output=True, text=True, check=False
    )
    assert (alone.returncode, alone.stderr) == (2, f"error: {line}\n")


def test_options_that_cannot_be() -> None:
    cpu = ["bench", "gpu", "--device", "cpu"]
    assert refused("bench", "gpu", "--device", "tpu") == "--device: tpu is not cuda or cpu"
    assert refused(*cpu, "--minutes", "0") == "--minutes: 0 is not a positive number"


def test_a_part_whose_time_is_over_keeps_what_it_found() -> None:
    def never_ends(findings: Findings) -> None:
        findings.rows.append(ROW)
        while True:
            time.sleep(0.01)

    part = _part("x", "X", 0.05, never_ends, torch.device("cpu"))
    assert part.rows == (ROW,)
    assert part.left_out == ("what is not above: no time left after 0 s",)


def test_a_part_that_fails_keeps_what_it_found() -> None:
    def fails(findings: Findings) -> None:
        findings.rows.append(ROW)
        raise RuntimeError("out of memory\nlong story")

    part = _part("x", "X", 60, fails, torch.device("cpu"))
    assert (part.rows, part.left_out) == ((ROW,), ("what is not above: out of memory",))


def test_a_limit_goes_through_what_catches_failures() -> None:
    caught = []

    def keep_trying() -> None:
        with time_limit(0.05):
            while True:
                try:
                    time.sleep(0.01)
                except Exception as error:
                    caught.append(error)

    with pytest.raises(OutOfTime):
        keep_trying()
    assert not caught
    with time_limit(0.05):
        time.sleep(0)
    time.sleep(0.1)  # nothing rings any more


def test_a_dense_model_generates_as_without_a_cache() -> None:
    """The likeliest token after a prompt is the same whether the prompt comes at once or a token at
    a time; sums over one token have another order, and logits of random weights are far apart."""
    model = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    generator = DenseGenerator(model, 3, 8, torch.device("cpu"))
    prompts = torch.randint(64, (3, 5))
    assert generator.generate(prompts, 4) == 12
    with torch.inference_mode():
        at_once = generator._likeliest(prompts, 0)
        for position in range(5):
            one_by_one = generator._likeliest(prompts[:, position : position + 1], position)
    assert torch.equal(at_once, one_by_one)
