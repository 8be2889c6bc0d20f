"""``megabit plan`` as people call it: tables, files, and one line for each mistake."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from megabit.config import load_config, load_serving_config
from megabit.plan.catalog import GPUS, INTERCONNECTS, known_machine
from megabit.plan.search import KEYS
from megabit.plan.step import PARTS
from tests.command import called, refused

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "model" / "tiny.yaml")
SMALL = (TINY, "train.global_batch_size=4", "data.seq_length=64", "precision.compute=bfloat16")
# Few layouts, so that a call takes no second.
FEW = ("--keep", "parallel.schedule", "--keep", "train.recompute")
ONE = ("--keep", "parallel.tp", "--keep", "parallel.pp")


def printed(*arguments: str | Path | int) -> str:
    done = called("plan", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("gpu", ["h100", "b200", "cpu"])
def test_a_plan_is_printed_and_written(gpu: str, tmp_path: Path) -> None:
    out, figures = tmp_path / "layout.yaml", tmp_path / "plan.json"
    files = ("--out", out, "--json", figures)
    text = printed(*SMALL, "--gpus", 4, "--gpu", gpu, "--top", 3, "--tokens", "300B", *FEW, *files)
    assert "Model: 5.25 M parameters" in text
    assert "Batch: 4 × 64 tokens, computed in bfloat16" in text
    assert "for 3e+11 tokens" in text
    assert "layouts were considered" in text
    assert "A prediction" in text
    for word in ("TP×PP×DP", "GPU-hours", "Time of a step", "Memory of a rank", "codes", "masters"):
        assert word in text
    assert f"megabit train SETTINGS {out}" in text

    document = json.loads(figures.read_text())
    assert len(document["candidates"]) == 3
    best = document["candidates"][0]
    assert set(best["settings"]) == {*KEYS}
    assert set(best["seconds"]) == {*PARTS}
    assert best["step_s"] == pytest.approx(sum(best["seconds"].values()))
    assert best["tokens_per_s"] == pytest.approx(4 * 64 / best["step_s"])
    assert (best["mfu"] is None) == (gpu == "cpu")
    assert document["machine"]["is_measured"] is False

    config = load_config([*SMALL, str(out)], 4)
    assert config.parallel.tp == best["settings"]["parallel.tp"]
    assert config.train.micro_batch_size == best["settings"]["train.micro_batch_size"]
    assert "a prediction, never measured" in out.read_text()


def test_tokens_are_those_of_the_settings_unless_said() -> None:
    call = (*SMALL, "--gpus", 1, "--gpu", "h100", *ONE, *FEW)
    assert "for 2e+12 tokens" in printed(*call, "train.tokens=2000000000000")
    assert "for 2.56e+04 tokens" in printed(*call, "train.steps=100")
    assert "for 5e+06 tokens" in printed(*call, "--tokens", "5m")


def test_a_machine_of_a_file(tmp_path: Path) -> None:
    """What was planned for a machine by name is planned for its file; and measured ones are called
    so."""
    machine, path = known_machine("h100", 8, "ib400"), tmp_path / "here.json"
    path.write_text(machine.to_json())
    named = printed(*SMALL, "--gpus", 2, "--gpu", "h100", *FEW)
    assert printed(*SMALL, "--gpus", 2, "--machine", path, *FEW) == named
    path.write_text(dataclasses.replace(machine, is_measured=True).to_json())
    measured = printed(*SMALL, "--gpus", 2, "--machine", path, *FEW)
    assert "A prediction" not in measured
    assert "(measured: " in measured


def machine_of(num_bytes: int, path: Path) -> Path:
    """A file of a GPU with so much memory."""
    machine = known_machine("h100", 8, "ib400")
    device = dataclasses.replace(machine.device, memory_bytes=num_bytes)
    path.write_text(dataclasses.replace(machine, device=device).to_json())
    return path


def test_why_nothing_works(tmp_path: Path) -> None:
    small = machine_of(10**6, tmp_path / "small.json")
    done = called("plan", *SMALL, "--gpus", 2, "--machine", small, *FEW, "--out", tmp_path / "x")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "error: --gpus: no layout on 2 ranks works"
    assert " 0 fit, " in lines[1]
    assert "Too much memory, nearest: TP " in lines[2]
    assert not (tmp_path / "x").exists()
    done = called("plan", *SMALL, "--gpus", 3, "--gpu", "h100", *ONE, *FEW)
    assert done.returncode == 2
    assert "train.global_batch_size" in done.stderr


def test_a_plan_for_serving(tmp_path: Path) -> None:
    out, figures = tmp_path / "serve.yaml", tmp_path / "serve.json"
    asked = ("--serving", "--prompt-tokens", 100, "--answer-tokens", 28)
    files = ("--out", out, "--json", figures)
    text = printed(TINY, "--gpus", 8, "--gpu", "h100", *asked, "--tpot-ms", 5, *files)
    assert "Requests: 100 tokens, answered by 28" in text
    assert "keys and values" in text
    assert "Out: TP 8 × PP 1: " in text  # of four heads
    assert "A prediction" in text
    document = json.loads(figures.read_text())
    best = document["candidates"][0]
    assert best["tpot_s"] <= 5e-3
    assert "TP 8 × PP 1" in document["rejected"]
    serving = load_serving_config([str(out)])
    assert (serving.parallel.tp, serving.parallel.pp) == (best["tp"], best["pp"])
    assert serving.engine.max_model_len == 128
    assert yaml.safe_load(out.read_text())["engine"]["max_sequences"] == best["sequences"]


def test_why_nothing_can_be_served() -> None:
    call = (TINY, "--gpus", 2, "--gpu", "h100", "--serving", "--ttft-ms", 0.001)
    done = called("plan", *call)
    assert done.returncode == 2
    first, *others = done.stderr.splitlines()
    assert first == "error: --gpus: no engine on 2 ranks works"
    assert len(others) == 3
    assert all("too slow with 1: " in line for line in others)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((TINY, "--gpu", "h100"), "--gpus: is missing; say how many ranks there are"),
        ((TINY, "--gpus", 8), "--gpu: is missing; name one, such as --gpu h100, or give --machine"),
        (("--gpus", 8, "--gpu", "h100"), "SETTINGS: are missing; name a model"),
        ((TINY, "--gpus", 8, "--gpu", "h1000"), f"--gpu: h1000 is not known; {', '.join(GPUS)}"),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--interconnect", "string"),
            f"--interconnect: string is not known; {', '.join(INTERCONNECTS)}",
        ),
        (
            (TINY, "--calibrate", "here.json"),
            "--calibrate: measures this machine and nothing else; give it alone",
        ),
        (
            ("--calibrate", "here.json", "--gpus", 8),
            "--calibrate: measures this machine and nothing else; give it alone",
        ),
        (
            (TINY, "--gpus", 8, "--machine", "here.json", "--gpu", "h100"),
            "--gpu: has no effect with --machine; leave it out",
        ),
        ((TINY, "--gpus", 8, "--machine", "none.json"), "none.json: "),
        ((TINY, "--gpus", 8, "--gpu", "h100", "--tokens", "many"), "--tokens: must be a number"),
        ((TINY, "--gpus", 8, "--gpu", "h100", "--tokens", "-3B"), "--tokens: must be a number"),
        ((TINY, "--gpus", 8, "--gpu", "h100", "--tokens", "nan"), "--tokens: must be a number"),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--keep", "parallel.dp"),
            "--keep: parallel.dp is nothing that is chosen",
        ),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--out", "there.yaml"),
            "--out: there.yaml exists already; name a new file",
        ),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--json", "no/plan.json"),
            "--json: no/plan.json cannot be written: there is no folder no",
        ),
        ((TINY, "model.layers=3", "--gpus", 8, "--gpu", "h100"), "model.layers"),
        (
            (TINY, "precision.compute=float64", "--gpus", 8, "--gpu", "h100"),
            "precision.compute: H100 80 GB SXM has no rates for float64; ",
        ),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--serving", "--tokens", "5B"),
            "--tokens: has no effect with --serving; leave it out",
        ),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--ttft-ms", 5),
            "--ttft-ms: has no effect without --serving",
        ),
        (
            (TINY, "--gpus", 4, "--gpu", "cpu", "--interconnect", "ib400"),
            "--interconnect: has no effect with --gpu cpu",
        ),
        (
            (TINY, "--gpus", 16, "--gpu", "cpu"),
            "--gpus: 16 ranks are more than the 8 of the one host",
        ),
        (
            (TINY, "--gpus", 8, "--gpu", "h100", "--out", "new.yaml", "--json", "new.yaml"),
            "--json: new.yaml is the file of --out as well",
        ),
        (
            (TINY, "precision.compute=float64", "--gpus", 8, "--gpu", "h100", "--serving"),
            "precision.compute: H100 80 GB SXM has no rates for float64; ",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str | int, ...], line: str, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("")
    assert refused("plan", *arguments, cwd=tmp_path).startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


def test_no_table_is_cut() -> None:
    """Where nobody looks at a terminal, headings and figures are whole."""
    assert "…" not in printed(*SMALL, "--gpus", 2, "--gpu", "h100", *FEW)
