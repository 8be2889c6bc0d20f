"""``megabit bench`` from outside: what it prints, its exit codes, and what it leaves behind."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megabit.benchmark.document import Document
from tests.command import called, refused
from tests.test_cli import ENVIRONMENT, ROOT, megabit

TIME = r"[\d.,]+ (?:µs|ms|s)"
FILES = ["kernels.csv", "kernels.json", "roofline.png"]
TINY = [
    *("model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"),
    *("model.vocab_size=300", "data.seq_length=16", "train.global_batch_size=8"),
]


def test_help_shows_examples() -> None:
    assert "Example: megabit bench kernels --quick" in called("bench", "--help").stdout
    assert "Example: megabit bench kernels --shapes" in called("bench", "kernels", "--help").stdout
    page = called("bench", "train", "--help").stdout
    assert "Example: megabit bench train examples/model/tiny.yaml parallel.tp=2 --nproc 2" in page


def test_options_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused("bench", "kernels", "--m", "0") == "--m: 0 is not from 1 to 65536"
    folder = ["--m", "1", "--out", "file"]
    assert refused("bench", "kernels", *folder, cwd=tmp_path) == "--out: file: File exists"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_kernels_alone_have_the_same_command(tmp_path: Path) -> None:
    def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megabit_kernels.benchmark", *arguments],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT / "kernels")},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    page = alone("--help")
    assert page.returncode == 0
    assert "Example: python -m megabit_kernels.benchmark --shapes" in page.stdout
    options = called("bench", "kernels", "--help").stdout.partition("options:")[2]
    assert (
        options.partition("Example")[0]
        == page.stdout.partition("options:")[2].partition("Example")[0]
    )
    result = alone("--m", "0")
    assert (result.returncode, result.stderr) == (2, "error: --m: 0 is not from 1 to 65536\n")


@pytest.mark.slow
def test_bench_kernels(tmp_path: Path) -> None:
    options = ["--quick", "--shapes", "trainer", "--m", "2", "--implementations", "default"]
    result = megabit("bench", "kernels", *options, "--out", "results", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "8 races of 5 contestants, about " in result.stdout
    assert "trainer gate, up: 768 × 256, cold caches" in result.stdout
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == FILES
    whole = json.loads((tmp_path / "results" / "kernels.json").read_text())
    assert (whole["is_complete"], len(whole["rows"])) == (True, 40)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabit", "bench", "kernels", "--shapes", "trainer"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"trainer q, o, 256 ")  # the first race
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"trainer q, o: 256" in output
    assert b"Traceback" not in errors
    whole = json.loads((tmp_path / "runs" / "bench-kernels" / "kernels.json").read_text())
    assert not whole["is_complete"]
    assert whole["rows"]


def test_bench_train(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    result = megabit("bench", "train", *TINY, "--steps", "2", "--breakdown", "--json", str(out))
    assert (result.returncode, result.stderr) == (0, "")
    (measured,) = Document.read(out).parts
    assert [row.baseline.name for row in measured.rows] == [
        f"{name}, one process" for name in ("dense fp32", "dense bf16", "fake fp32", "fake bf16")
    ]
    assert all(row.ours.amount == 8 * 16 and len(row.ours.seconds) == 2 for row in measured.rows)
    for row in ("megabit", "dense fp32", "dense bf16", "fake fp32", "fake bf16"):
        assert re.search(rf"^ {row} +[\d,]+ +{TIME} ", result.stdout, re.MULTILINE)
    assert "×dense fp32   ×dense bf16   ×fake fp32   ×fake bf16" in result.stdout
    for part in ("forward products", "backward products", "attention", "update"):
        assert re.search(rf"^ {part} +([\d.]+ +\d+% *){{5}}$", result.stdout, re.MULTILINE)
    assert "Limited by compute: 100%" in result.stdout


def test_bench_train_at_a_layout() -> None:
    layout = ["parallel.pp=2", "train.micro_batch_size=2", "model.linear=dense"]
    result = megabit("bench", "train", *TINY, *layout, "--nproc", "2", "--steps", "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "megabit: TP 1 × PP 2 × DP 1, in float32" in result.stdout
    assert "megabit computes with 2 threads, each baseline with one" in result.stdout
    for rank in "01":
        assert re.search(rf"^ +{rank} +{TIME} +\d", result.stdout, re.MULTILINE)


def test_bench_train_refuses_what_cannot_be() -> None:
    assert refused("bench", "train", "parallel.tp=2", "--nproc", "3").startswith("world size: 3 ")
    assert refused("bench", "train", "model.hiden_size=4").startswith("model.hiden_size: ")
    assert refused("bench", "train", "run.device=cuda").startswith("run.device: ")
    too_large = ["model.hidden_size=131072", "model.intermediate_size=131072"]
    assert refused("bench", "train", *too_large).startswith("model: 5 of them at a time")
    negative = called("bench", "train", "--steps", "0")
    assert negative.returncode == 2
    assert "--steps" in negative.stderr
