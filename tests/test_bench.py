"""``megabit bench`` from outside: what it prints, its exit codes, and what it leaves behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import ENVIRONMENT, megabit, refused

FILES = ["kernels.csv", "kernels.json", "roofline.png"]


def test_help_shows_examples() -> None:
    assert "Example: megabit bench kernels --quick" in megabit("bench", "--help").stdout
    assert "Example: megabit bench kernels --shapes" in megabit("bench", "kernels", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "7b"], "--shapes: '7b' is not one; choose from 2b4t, 3b, 70b, trainer"),
        (["--m", "1,two"], "--m: 'two' is not a number; write it like --m 1,16,256"),
        (["--m", "0"], "--m: 0 is not from 1 to 65536"),
        (["--device", "tpu"], "--device: 'tpu' is not cpu or cuda"),
        (["--implementations", "nativ"], "--implementations: 'nativ' is not one of default, "),
        (["--threads", "99999"], "--threads: 99999 is more than the "),
        (["--m", "1", "--out", "file"], "--out: file: File exists"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_options_that_cannot_be(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused("bench", "kernels", *arguments, cwd=tmp_path).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"trainer q, o: 256" in output
    assert b"Traceback" not in errors
    whole = json.loads((tmp_path / "runs" / "bench-kernels" / "kernels.json").read_text())
    assert not whole["is_complete"]
    assert whole["rows"]
