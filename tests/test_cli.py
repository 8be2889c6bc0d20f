"""The command line from outside: what it prints, its exit codes, and what it leaves behind."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabit.config import load_config
from megabit.training.parity import Difference, Layout, Tolerance
from tests.command import called, refused
from tests.training.tiny import SETTINGS, tiny_corpus, write_texts

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "100",
}


def megabit(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megabit", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_commands_are_there_before_torch_is() -> None:
    """Help and refusals need no second of importing it."""
    code = "import sys, megabit.cli.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False)
    assert done.returncode == 0


def test_help_lists_the_commands() -> None:
    result = called("--help")
    assert result.returncode == 0
    assert "Train and serve BitNet b1.58 (ternary) language models" in result.stdout
    for command, does in [
        ("train", "Train a model"),
        ("eval", "Compute the loss"),
        ("bench", "Measure this machine"),
        ("prepare", "Read data.text"),
        ("parity", "Run a configuration at several layouts"),
        ("schedule", "Compare pipeline schedules"),
        ("config", "Merge and check SETTINGS"),
        ("ckpt", "Look at checkpoints"),
        ("import", "Make checkpoints of other tools' models"),
        ("export", "Write a model for other tools"),
    ]:
        assert re.search(rf"{command} +{does}", result.stdout)
        page = called(command, "--help")
        assert page.returncode == 0
        assert "Example: megabit " + command in page.stdout


def test_config_prints_yaml_that_loads_again(tmp_path: Path) -> None:
    settings = ["examples/model/tiny.yaml", "parallel.tp=2", "optim.lr=[1e-3,5e-4]"]
    result = megabit("config", *settings, "--world-size", "4")
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "whole.yaml").write_text(result.stdout)
    assert load_config([str(tmp_path / "whole.yaml")]) == load_config(
        [str(ROOT / settings[0]), *settings[1:]]
    )
    quiet = megabit("config", *settings, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["config", "train", "prepare", "parity"])
def test_an_unknown_key(command: str) -> None:
    layouts = ["--layouts", "tp=2"] if command == "parity" else []
    message = refused(command, "model.hiden_size=32", *layouts)
    assert message == "model.hiden_size: unknown key 'hiden_size'; did you mean 'hidden_size'?"


def test_all_mistakes_are_told_at_once() -> None:
    result = megabit("config", "model.hiden_size=32", "train.steps=many", "nothing.yaml")
    assert result.returncode == 2
    keys = [line.split(":")[1].strip() for line in result.stderr.splitlines()]
    assert keys == ["model.hiden_size", "train.steps", "nothing.yaml"]


def test_a_number_without_a_point_is_a_number() -> None:
    result = megabit("config", "optim.min_lr=0", "optim.clip_grad_norm=1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "clip_grad_norm: 1" in result.stdout


# Training that is refused: exit code 2, one line, nothing written.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a corpus in ``corpus`` that fits ``SETTINGS``, and its text in ``text``."""
    folder = tmp_path_factory.mktemp("cli")
    tiny_corpus(folder)
    return folder


def train(
    folder: Path,
    *settings: str,
    call: Callable[..., subprocess.CompletedProcess[str]] = called,
) -> str:
    """The line with which ``megabit train`` refuses to; it may not leave anything behind."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = call("train", *SETTINGS, "run.dir=run", *settings, cwd=folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.text=nothing.txt", "data.dir=new"], "nothing.txt: "),
        (["data.dir=new"], "data.text: is not set and data.dir=new holds no corpus"),
        (["parallel.tp=3", "--nproc-per-node", "3"], "parallel.tp: 3 does not divide .*use one of"),
        (["data.dir=corpus", "parallel.tp=2"], "world size: 1 ranks do not fit parallel.tp=2"),
        (["data.dir=corpus", "model.vocab_size=270"], "model.vocab_size: 270 is smaller than"),
        (["data.dir=corpus", "data.seq_length=99999"], "data.seq_length: 99999 needs 100000"),
        (["data.dir=corpus", "run.device=cuda"], "run.device: cuda was asked for"),
        (["data.dir=text", "data.text=text"], "data.dir: text holds files that are not part"),
    ],
    ids=["no-text", "no-corpus", "tp", "world-size", "vocab", "length", "no-gpu", "user-files"],
)
def test_settings_that_do_not_fit(folder: Path, settings: list[str], message: str) -> None:
    assert re.match(message, train(folder, *settings))


def test_an_empty_text(folder: Path) -> None:
    (folder / "empty.txt").touch()
    assert train(folder, "data.text=empty.txt", "data.dir=new").startswith("empty.txt: ")


def test_a_corpus_that_was_cut_short(folder: Path, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    file = corpus.dir / "train.bin"
    file.write_bytes(file.read_bytes()[:-2])
    message = train(tmp_path, "data.dir=corpus")
    assert re.match(r"corpus/train.bin: has \d+ bytes but manifest.json demands \d+", message)


def test_the_index_of_another_dataset(folder: Path, tmp_path: Path) -> None:
    """Of the same size, so that only its content gives it away."""
    corpus = tiny_corpus(tmp_path)
    file = corpus.dir / "train.idx"
    data = bytearray(file.read_bytes())
    first = 9 + 8 + 1 + 8 + 8  # after magic, version, dtype and two counts: the first length
    data[first : first + 8] = data[first + 4 : first + 8] + data[first : first + 4]
    data[first] ^= 1
    file.write_bytes(data)
    assert train(tmp_path, "data.dir=corpus").startswith("corpus/train")


def test_ranks_that_are_started_here_tell_a_mistake_once(folder: Path) -> None:
    for settings in (["data.text=nothing.txt"], ["data.dir=corpus", "model.vocab_size=270"]):
        train(folder, *settings, "parallel.tp=2", "--nproc-per-node", "2", call=megabit)


@pytest.mark.slow
def test_a_run_that_cannot_go_on_ends_with_1(folder: Path, tmp_path: Path) -> None:
    result = megabit(
        "train",
        *SETTINGS,
        f"data.dir={folder / 'corpus'}",
        f"run.dir={tmp_path / 'run'}",
        "optim.lr=[1e38,1e38]",
        "optim.warmup_steps=0",
        "train.steps=20",
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert re.match(r"error: step \d+: nonfinite: loss nan, grad_norm inf, time 10: stop; ", line)
    assert "Lower optim.lr" in line


# Parity.


def test_a_damaged_checkpoint_ends_with_2_or_the_one_before_is_taken(
    folder: Path, tmp_path: Path
) -> None:
    corpus = f"data.dir={folder / 'corpus'}"
    command = ["train", *SETTINGS, corpus, "run.dir=run", "checkpoint.save_interval=4"]
    assert megabit(*command, "checkpoint.asynchronous=false", cwd=tmp_path).returncode == 0
    file = tmp_path / "run" / "checkpoints" / "step_00000006" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused(*command, cwd=tmp_path)
    assert "step_00000006/rank_00000.safetensors: is not what was saved" in message
    assert message.endswith("--auto-fallback goes on from the checkpoint before")
    result = megabit(*command, "--auto-fallback", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Resuming after step 4" in result.stdout
    assert "ALERT" in result.stdout


def difference(**changes: Any) -> Difference:
    same = Difference(
        layout=Layout(tp=2),
        forward_is_bit_equal=True,
        logits=0.0,
        loss=0.0,
        gradient=0.0,
        gradient_name="model.norm.weight",
        grad_norm=0.0,
        last_loss=0.0,
        weight=0.0,
        is_identical=True,
        codes_changed=0,
        num_codes=10_000,
    )
    return replace(same, **changes)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("linear", ["ternary", "dense"])
def test_tolerance(compute: str, linear: str) -> None:
    config = load_config([f"precision.compute={compute}", f"model.linear={linear}"])
    tolerance = Tolerance.of(config)
    assert tolerance.allows(difference())
    for name, bound in [
        ("loss", tolerance.loss),
        ("gradient", tolerance.gradient),
        ("grad_norm", tolerance.gradient),
        ("weight", tolerance.weight),
        ("last_loss", tolerance.last_loss),
        ("codes_changed", tolerance.codes * 10_000),
    ]:
        assert tolerance.allows(difference(**{name: bound}))
        assert not tolerance.allows(difference(**{name: bound * 1.01 + 1e-12}))
        assert not tolerance.allows(difference(**{name: float("nan")}))
    assert tolerance.allows(difference(is_identical=False))
    exact = linear == "ternary" and compute != "float64"
    assert tolerance.allows(difference(forward_is_bit_equal=False)) == (not exact)


def test_exact_training_has_no_tolerance() -> None:
    tolerance = Tolerance.of(load_config(["parallel.exact=full"]))
    assert tolerance.allows(difference())
    for changed in ({"is_identical": False}, {"loss": 1e-12}, {"codes_changed": 1}):
        assert not tolerance.allows(difference(**changed))


@pytest.mark.slow
def test_parity(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"data.dir={tmp_path / 'none'}"]
    result = megabit("parity", *settings, "--layouts", "tp=2", "pp=2", "tp=2,sp", "--steps", "2")
    assert (result.returncode, result.stderr) == (0, "")
    rows = result.stdout.splitlines()[2:-1]
    assert [row.split()[:2] for row in rows] == [
        ["tp=2", "bit-equal"],
        ["pp=2", "bit-equal"],
        ["tp=2,sp", "bit-equal"],
    ]
    assert all(row.endswith((" ok", " identical")) for row in rows)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_parity_of_exact_training(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"data.dir={tmp_path / 'none'}", "parallel.exact=full"]
    result = megabit("parity", *settings, "--layouts", "tp=2,sp", "dp=2", "--steps", "2")
    assert (result.returncode, result.stderr) == (0, "")
    *rows, tolerance = result.stdout.splitlines()[2:]
    assert [row.split()[-1] for row in rows] == ["identical", "identical"]
    assert tolerance.startswith("Tolerance: none.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--layouts: name at least one"),
        (["--layouts", "tp=3"], "layout tp=3: parallel.tp: 3 does not divide"),
        (["--layouts", "tp=2", "dp=16"], "layout dp=16: train.global_batch_size: 8 is not"),
        (["--layouts", "tp=two"], "layout 'tp=two': cannot read 'tp=two'; write it like"),
        (["--layouts", "cp=2"], "layout 'cp=2': cannot read 'cp=2'; write it like"),
    ],
)
def test_parity_at_a_layout_that_cannot_be(arguments: list[str], message: str) -> None:
    assert refused("parity", *SETTINGS, *arguments).startswith(message)


def test_prepare(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    settings = ["data.text=text", "data.dir=corpus", "model.vocab_size=300"]
    first = megabit("prepare", *settings, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.endswith("corpus is ready: corpus\n")
    again = megabit("prepare", *settings, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "corpus is up to date: corpus\n")
