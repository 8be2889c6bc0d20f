"""``megabit ckpt``: what it prints and finds, and its exit codes."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabit.checkpoint import Manifest
from megabit.checkpoint.diagnose import diagnose
from megabit.checkpoint.source import logical_tensors
from megabit.files import describe_file
from tests.checkpoint.saved import save_run
from tests.command import megabit, refused
from tests.training.tiny import tiny

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved_run, tmp_path / "run")
    return tmp_path / "run"


# What is in a checkpoint.


def test_show_lists_the_checkpoints_of_a_run(run: Path) -> None:
    code, out, err = megabit("ckpt", "show", run)
    assert (code, err) == (0, [])
    rows = [line.split() for line in out if re.match(r" \d", line)]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1", "training", "1"),  # of DP 1
        ("2", "training", "latest"),
        ("1", "ternary", "1"),
        ("2", "ternary", "latest"),
    ]
    assert all("TP 2 × PP 1 × DP 1" in " ".join(row) for row in rows)
    assert megabit("ckpt", "show", run / "snapshots")[1] == out[len(out) // 2 :]


def test_show_lists_damaged_checkpoints_too(run: Path) -> None:
    (run / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    code, out, _ = megabit("ckpt", "show", run / "checkpoints")
    assert code == 0
    (line,) = [line for line in out if line.startswith(" 1")]
    assert re.search(r"damaged .*step_00000001/manifest.json: is not the manifest", line)


def test_show_says_what_a_checkpoint_is(run: Path) -> None:
    code, out, err = megabit("ckpt", "show", run / "checkpoints" / "step_00000002")
    assert (code, err) == (0, [])
    text = "\n".join(out)
    for expected in (
        r"kind +training: masters and moments",
        r"step +2, 2 updates",
        r"model +0.03 M parameters, ternary, 2 layers × 32, 4 heads \(2 of keys and values\), feed",
        r"saved by +TP 2 × PP 1 × DP 1",
        r"settings .*parallel.tp=2 .*data.seq_length=16",
        r"rank_00001.safetensors +\d+.\d kB +[0-9a-f]{16}",
        r"assets/tokenizer.json",
        r"master +24 +float32 +101.1 kB",
    ):
        assert re.search(expected, text), expected
    assert UP not in text
    _, out, _ = megabit("ckpt", "show", run / "snapshots" / "step_00000002")
    text = "\n".join(out)
    assert "it cannot resume a run" in text
    assert re.search(r"codes, four to a byte +14 +uint8 +3.8 kB", text)
    assert re.search(r"scale +14 +float32 +56 B", text)
    assert re.search(r"dense +10 +float32", text)


def test_show_lists_tensors_in_the_order_of_the_model(run: Path) -> None:
    _, out, _ = megabit("ckpt", "show", run / "snapshots", "--tensors")  # of the latest
    rows = [line.split() for line in out if line.startswith(" model.")]
    names = [row[0].removesuffix(".codes").removesuffix(".scale") for row in rows]
    assert [*dict.fromkeys(names)] == [*logical_tensors(tiny().model)]
    assert [f"{UP}.codes", "uint8", "[48,", "8]", "2"] in rows
    assert [f"{UP}.scale", "float32", "[]", "1"] in rows


# Is it what was saved?


def test_checkpoints_in_order(run: Path) -> None:
    code, out, err = megabit("ckpt", "verify", run)
    assert (code, err) == (0, [])
    assert len(out) == 4
    for line in out:
        assert re.fullmatch(
            r"in order: \S+/step_0000000\d, (training|ternary), step \d, 4 files, [\d.]+ kB", line
        )
    one = run / "snapshots" / "step_00000001"
    assert megabit("ckpt", "verify", one)[1] == [line for line in out if str(one) in line]
    assert len(megabit("ckpt", "verify", run / "checkpoints")[1]) == 2


def flip(path: Path, position: float) -> None:
    """A bit, at a share of the file's length."""
    content = bytearray(path.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= 0x10
    path.write_bytes(content)


def rewrite(folder: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors in a rank's file, and hashes that fit them: who does so is not found by a hash.

    Where parts belong stays as it was.
    """
    path = folder / file
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {key: value for key, value in metadata.items() if tensors})
    manifest = Manifest.read(folder)
    replace(manifest, files={**manifest.files, file: describe_file(path)}).write(folder)


def in_other_dtype(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].half()


def cut_rows(tensors: dict[str, Tensor]) -> None:
    tensors[f"master/{UP}"] = tensors[f"master/{UP}"][:-1].clone()


RANK_1 = "rank_00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda c: (c / RANK_1).write_bytes((c / RANK_1).read_bytes()[:-100]),
        rf"{RANK_1}: has \d+ bytes, but \d+ were saved",
    ),
    "longer": (
        lambda c: (c / RANK_1).write_bytes((c / RANK_1).read_bytes() + b"\0"),
        rf"{RANK_1}: has \d+ bytes",
    ),
    "bit of a shard": (lambda c: flip(c / RANK_1, 0.9), rf"{RANK_1}: is not what was saved"),
    "bit of a header": (lambda c: flip(c / RANK_1, 0.001), rf"{RANK_1}: is not what was saved"),
    "bit of the tokenizer": (
        lambda c: flip(c / "assets" / "tokenizer.json", 0.5),
        r"assets/tokenizer.json: is not what was saved",
    ),
    "bit of the manifest": (lambda c: flip(c / "manifest.json", 0.5), r"manifest.json: "),
    "manifest cut": (
        lambda c: (c / "manifest.json").write_bytes((c / "manifest.json").read_bytes()[:-9]),
        r"manifest.json: cannot read it",
    ),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest.json: cannot read it"),
    "no shard": (lambda c: (c / RANK_1).unlink(), rf"{RANK_1}: is missing"),
    "no tokenizer": (
        lambda c: (c / "assets" / "tokenizer.json").unlink(),
        r"assets/tokenizer.json: is missing",
    ),
    "extra file": (
        lambda c: (c / "rank_00002.safetensors").write_bytes(b""),
        r"rank_00002.safetensors: is not part of the checkpoint",
    ),
    "extra tensor": (
        lambda c: add_file(c, {"master/extra": torch.zeros(2)}),
        r"step_00000002: master/extra is none of the model's tensors",
    ),
    "another dtype": (
        lambda c: [rewrite(c, f"rank_0000{i}.safetensors", in_other_dtype) for i in (0, 1)],
        r"step_00000002: master/\S+ is torch.float16, not torch.float32",
    ),
    "another dtype on a rank": (
        lambda c: rewrite(c, RANK_1, in_other_dtype),
        r"step_00000002: .* is torch.float32 in one file and torch.float16 in another",
    ),
    "not all rows": (
        lambda c: rewrite(c, RANK_1, cut_rows),
        rf"step_00000002: master/{UP} has shape \[47, 32\], the model needs \[48, 32\]",
    ),
    "a shard of another step": (
        lambda c: shutil.copy(c.with_name("step_00000001") / RANK_1, c / RANK_1),
        rf"{RANK_1}: ",
    ),
}


def add_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "rank_00002.safetensors"
    save_file(tensors, path)
    manifest = Manifest.read(folder)
    replace(manifest, files={**manifest.files, path.name: describe_file(path)}).write(folder)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(run: Path, damage: str) -> None:
    """Of the checkpoint that is damaged, and of no other."""
    spoil, message = DAMAGES[damage]
    checkpoint = run / "checkpoints" / "step_00000002"
    spoil(checkpoint)
    code, out, err = megabit("ckpt", "verify", run)
    assert code == 2
    assert err
    assert all(line.startswith(f"error: {checkpoint}") for line in err)
    assert re.search(message, err[0]), err[0]
    if "dtype" not in damage:  # which all tensors have
        assert len(err) == 1
    assert len(out) == 3
    assert not any(str(checkpoint) in line for line in out)
    assert megabit("ckpt", "verify", checkpoint.with_name("step_00000001"))[0] == 0


@pytest.mark.parametrize("kind", ["checkpoints", "snapshots"])
def test_a_flipped_bit_is_found_wherever_it_is(run: Path, kind: str) -> None:
    checkpoint = run / kind / "step_00000001"
    for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for position in [i / 13 for i in range(14)]:
            flip(path, position)
            problems = diagnose(checkpoint)
            assert len(problems) == 1, (path, position)
            assert problems[0].startswith(str(path))
            path.write_bytes(content)
    assert diagnose(checkpoint) == []


def test_all_problems_are_told(run: Path) -> None:
    first, second = (run / "checkpoints" / f"step_0000000{step}" for step in (1, 2))
    flip(first / RANK_1, 0.9)
    (first / "assets" / "tokenizer.json").unlink()
    (second / "manifest.json").write_text("{")
    code, out, err = megabit("ckpt", "verify", run / "checkpoints")
    assert (code, out) == (2, [])
    assert sorted(line.split(":")[1].strip() for line in err) == [
        f"{first}/assets/tokenizer.json",
        f"{first}/{RANK_1}",
        f"{second}/manifest.json",
    ]


def test_a_latest_that_is_not_there(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_00000009\n")
    code, out, err = megabit("ckpt", "verify", run)
    assert (code, len(out), len(err)) == (2, 4, 1)
    assert "step_00000009/manifest.json: cannot read it" in err[0]


@pytest.mark.parametrize("command", [("show",), ("verify",)])
def test_a_folder_without_a_checkpoint(tmp_path: Path, command: tuple[str]) -> None:
    assert "holds no checkpoint" in refused("ckpt", *command, tmp_path)
    assert "does not exist" in refused("ckpt", *command, tmp_path / "none")
