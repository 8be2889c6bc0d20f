"""Every launch script runs as it is, for two steps of a small model on a text of the user's own."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.training.tiny import write_texts

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "PIP_NO_INDEX": "1",  # whoever gives a text of his own needs no network
    "COLUMNS": "200",
}
LAYOUTS = {
    "single_process.sh": {"tp": 1, "pp": 1, "dp": 1},
    "quickstart.sh": {"tp": 2, "pp": 2, "dp": 1},
    "tp2_pp2.sh": {"tp": 2, "pp": 2, "dp": 1},
    "tp2_pp2_dp2.sh": {"tp": 2, "pp": 2, "dp": 2},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def settings(folder: Path) -> list[str]:
    text = write_texts(folder / "text")
    return [
        *(f"data.text={text}", f"data.dir={folder / 'corpus'}", f"run.dir={folder / 'run'}"),
        *("model.vocab_size=300", "model.hidden_size=64", "model.intermediate_size=128"),
        *("model.num_hidden_layers=2", "data.seq_length=32", "run.sample_tokens=4"),
        *("train.global_batch_size=8", "train.micro_batch_size=2", "train.steps=2"),
        *("train.log_interval=1", "train.eval_interval=1", "train.eval_samples=2"),
    ]


@contextmanager
def started(
    script: str, arguments: Sequence[str], **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A script of ``examples``, run from somewhere else: it finds its own files."""
    with running([str(ROOT / "examples" / script), *arguments], Path("/"), environment) as process:
        yield process


@contextmanager
def running(
    command: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        with process:
            yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def output_of(process: subprocess.Popen[str]) -> str:
    """All that it printed; it must have ended well."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def check_run(folder: Path, layout: dict[str, int], steps: int = 2) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["layout"] == layout
    assert summary["steps"] == steps
    assert 0 < summary["held_out_bits_per_byte"] < 100
    assert summary["sample"].startswith("ROMEO:")
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
    assert any("held_out_loss" in row for row in rows)
    # Without a peak, without DP, and where no rank has others of its stage beside it.
    cannot_be_known = {"mfu", "grad_norm_spread"}
    if layout["tp"] == layout["dp"] == 1:
        cannot_be_known |= {"straggler_ratio", "straggler_rank"}
    for row in rows:
        unknown = {key for key, value in row.items() if value is None}
        assert unknown <= cannot_be_known
        numbers = [row[key] for key in row.keys() - unknown if not isinstance(row[key], dict)]
        assert all(map(math.isfinite, [*numbers, *row.get("sent_mb", {}).values()]))


def test_every_script_is_run_here() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.sh")}
    # In test_recipes, test_serving_examples and test_release.
    elsewhere = {"convert.sh", "embedding.sh", "serve.sh", "newcomer.sh"}
    assert scripts == {*LAYOUTS, "fetch_shakespeare.sh", "common.sh", *elsewhere}


@pytest.mark.parametrize("script", LAYOUTS)
def test_script(script: str, tmp_path: Path) -> None:
    with started(script, settings(tmp_path)) as process:
        output = output_of(process)
    assert re.search(r"^step +2  loss \d", output, re.MULTILINE)
    assert "Traceback" not in output
    check_run(tmp_path / "run", LAYOUTS[script])


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    arguments = [*settings(tmp_path), "train.steps=60", "train.eval_interval=0"]
    run = tmp_path / "run"
    with started("quickstart.sh", arguments) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"step +1  loss", line):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        code = process.wait()
    output = "".join(lines)
    assert code == 130, output
    assert "Traceback" not in output
    stopped = re.search(r"Stopped after step (\d+), saved in .*give the same command", output)
    assert stopped, output
    step = int(stopped[1])
    assert (run / "checkpoints" / "latest").read_text() == f"step_{step:08d}\n"
    assert not (run / "summary.json").exists()

    with started("quickstart.sh", arguments) as process:
        assert f"Resuming after step {step}" in output_of(process)
    check_run(run, LAYOUTS["quickstart.sh"], steps=60)
