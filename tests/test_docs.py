"""What the documents say is true: commands run, code runs, links and make targets exist."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabit.config import load_config

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
TRAINING = ROOT / "docs" / "training.md"
SERVING = ROOT / "docs" / "serving.md"
LAUNCHING = ROOT / "docs" / "launching.md"
DOCTOR = ROOT / "docs" / "doctor.md"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

# What makes a README command small enough for a test; each still runs as it is written.
SMALL = {
    "train": "model.vocab_size=300 model.num_hidden_layers=2 train.steps=2 run.sample_tokens=2",
    "parity": "model.num_hidden_layers=2 train.global_batch_size=4 train.micro_batch_size=2",
    "bench kernels": "--shapes trainer --m 1 --implementations default",
    "bench engine": "model.num_hidden_layers=1 model.hidden_size=64 model.vocab_size=300 "
    "model.intermediate_size=96 --new-tokens 2 --requests 2",
    "bench serve": "--requests 4 --prompt-tokens 8 --answer-tokens 4 engine.kv_cache_mb=8",
    "bench train": "model.vocab_size=300 model.num_hidden_layers=1 data.seq_length=16",
    "bench checkpoint": "model.vocab_size=300 model.num_hidden_layers=1 model.hidden_size=48",
    "bench pipeline": "model.vocab_size=300 model.num_hidden_layers=4 data.seq_length=16 --steps 1",
    "prepare": "model.vocab_size=300",
    "ckpt show": "",
    "ckpt verify": "",
    "config": "",
    "doctor": "--quick",
    "chat": "engine.kv_cache_mb=8",
    "eval": "",
    "report": "",
    "export gguf": "",
    "export hf": "",
    "export safetensors": "",
    "generate": "engine.kv_cache_mb=8",
    "import hf": "",
    "inject plan": "",
    "schedule": "",
    "serve": "engine.kv_cache_mb=8 server.port=0",
}
SERVERS = ("chat", "serve")
"""Run until they are ended."""


def code_blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in blocks if name == language]


def commands(*documents: Path) -> list[str]:
    blocks = [block for document in documents for block in code_blocks(document, "")]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("megabit ")))


def command_of(line: str) -> str:
    """``train`` or ``bench train``."""
    _, command, *rest = shlex.split(line)
    grouped = ("bench", "ckpt", "export", "import", "inject")
    return f"{command} {rest[0]}" if command in grouped else command


def run_command(line: str, folder: Path) -> None:
    command = [sys.executable, "-m", *shlex.split(line), *shlex.split(SMALL[command_of(line)])]
    paths = (str(ROOT), str(ROOT / "kernels"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if command_of(line) in SERVERS:
        check_server(command, folder, environment)
        return
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def check_server(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """It becomes ready, and ends when it is told to."""
    with (folder / "server.log").open("w+") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        said = ""
        while "Ready" not in said and server.poll() is None:
            time.sleep(0.1)
            said = (folder / "server.log").read_text()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, said
    assert "http://127.0.0.1:" in said


def test_the_readme_shows_every_command() -> None:
    documents = (README, CHECKPOINTS, TRAINING, SERVING, LAUNCHING, DOCTOR)
    shown = {command_of(line) for line in commands(*documents)}
    assert shown == set(SMALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a small run, and a model of other tools, as the documents suppose."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "examples").symlink_to(ROOT / "examples")
    texts = folder / "my_texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"The text number {number} is short. " * 200)
    run_command(
        "megabit train examples/model/tiny.yaml data.text=my_texts/ run.dir=runs/mine", folder
    )
    run_command("megabit export hf runs/mine exported/ --mode online", folder)
    run_command("megabit import hf exported/ imported/", folder)
    shutil.rmtree(folder / "data")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", commands(README, CHECKPOINTS, TRAINING, SERVING, LAUNCHING, DOCTOR)
)
def test_documented_command_runs(line: str, workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(workplace, folder, symlinks=True)
    if command_of(line).split()[0] in ("export", "import"):
        shutil.rmtree(folder / shlex.split(line)[4], ignore_errors=True)  # what it writes
    run_command(line, folder)


@pytest.mark.parametrize("document", ["README.md", "kernels/README.md"])
def test_readme_code_runs(document: str) -> None:
    blocks = code_blocks(ROOT / document, "python")
    assert blocks
    for block in blocks:
        exec(block, {})


@pytest.mark.slow
def test_serving_code_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    (block,) = code_blocks(SERVING, "python")
    exec(block, found := {})
    assert len(found["answers"]) == 2


@pytest.mark.parametrize("block", code_blocks(TRAINING, "yaml"))
def test_settings_in_the_documents_are_settings(block: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(block)
    load_config([str(file), "checkpoint.save_interval=10"])


def test_nothing_is_left_to_be_filled_in() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        left = re.findall(r"@@|=(?:LR|MOMENTUM)\b|\b(?:TODO|FIXME|TBD|XXX|PERCENT|BENCH)\b", text)
        left += re.findall(r"^(?:FIGURES|RATES|TABLE)$", text, re.MULTILINE)
        assert not left, document.name


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text("utf-8"), re.MULTILINE)
        assert set(named) <= targets, document.name


def test_paths_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)):
        folders = (ROOT / "megabit", ROOT / "kernels", ROOT)
        assert any((folder / path).exists() for folder in folders), path
