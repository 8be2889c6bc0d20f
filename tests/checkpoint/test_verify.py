"""Damage of every kind: each is found, named, and either refused or stepped back from."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megabit.checkpoint import CheckpointStore, DamagedCheckpoint, Manifest, TensorReader
from megabit.checkpoint.manifest import Kind
from megabit.checkpoint.tensor_file import LazyTensor, write_tensors
from megabit.checkpoint.verify import check_file, expected_tensors, verify
from megabit.errors import UserError
from megabit.files import FileInfo
from megabit.launch import run_ranks
from tests.checkpoint.stored import (
    MODEL,
    contents,
    make_store,
    manifest,
    parts_of,
    save,
    sign,
    tensors_of,
    write_checkpoint,
)

Damage = Callable[[Path], object]
FIRST, LAST = "rank_00000.safetensors", "rank_00001.safetensors"
EMBEDDING = "master/model.embed_tokens.weight"
NORM = "exp_avg/model.norm.weight"


def problems_of(folder: Path) -> tuple[str, ...]:
    """What ``verify`` says is wrong."""
    with pytest.raises(UserError) as caught:
        [*verify(folder)]
    assert all(problem.startswith(str(folder)) for problem in caught.value.problems)
    return caught.value.problems


def written(folder: Path) -> Path:
    """A checkpoint of step 2 by two ranks, with a tokenizer."""
    write_checkpoint(folder, 2, 2)
    (folder / "assets").mkdir()
    (folder / "assets" / "tokenizer.json").write_text('{"version": 1}\n')
    sign(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "step_00000002")


@pytest.mark.parametrize("kind", ["training", "ternary"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_is_in_order(kind: Kind, size: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", 1, size, kind)
    before = contents(path)
    assert [*verify(path)] == sorted(before.keys() - {"manifest.json"})
    assert contents(path) == before


def test_before_the_first_update_there_are_no_moments(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", 0, tensors=tensors_of(0, updates=0))
    sign(path, manifest(0, updates=0))
    assert [*verify(path)] == [FIRST]
    sign(path, manifest(0, updates=1))
    assert problems_of(path)[0] == f"{path}: exp_avg/model.embed_tokens.weight is missing"


def test_fp64_is_in_order_too(tmp_path: Path) -> None:
    doubles = {name: values.double() for name, values in tensors_of(1).items()}
    assert [*verify(write_checkpoint(tmp_path / "a", 1, tensors=doubles))]
    codes = tensors_of(1, "ternary")
    half = {n: v.bfloat16() if n.endswith("weight") else v for n, v in codes.items()}
    assert [*verify(write_checkpoint(tmp_path / "b", 1, kind="ternary", tensors=half))]


def test_verify_goes_file_by_file(folder: Path) -> None:
    """What is yielded is about to be read; a damaged file ends it."""
    flip(folder / LAST)
    seen = []
    with pytest.raises(DamagedCheckpoint):
        seen.extend(name for name in verify(folder) if seen.append(name) is None)
    assert seen == [FIRST, "assets/tokenizer.json", LAST] or seen[-1] == LAST


# One file or another.


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])  # the last one of a manifest means nothing


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_in_header(path: Path) -> None:
    flip(path, 10)


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def make_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES = (
    *(cut_short, lengthen, flip, flip_in_header, make_empty, Path.unlink),
    *(make_folder, make_dangling, make_circle),
)
NAMES = ("manifest.json", FIRST, LAST, "assets/tokenizer.json")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_named(name: str, damage: Damage, folder: Path) -> None:
    damage(folder / name)
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{folder / name}: ")
    assert problem.isprintable()


def test_what_is_wrong_with_a_file_is_told(folder: Path) -> None:
    """Size before content, which takes long to read."""
    name, size = FIRST, (folder / FIRST).stat().st_size
    info = Manifest.read(folder).files[name]
    assert info.bytes == size
    check_file(folder, name, info)
    for expected, message in (
        (FileInfo(size + 1, info.sha256), f"has {size} bytes, but {size + 1} were saved"),
        (FileInfo(size, "0" * 64), "is not what was saved: its SHA-256 differs"),
    ):
        with pytest.raises(DamagedCheckpoint) as caught:
            check_file(folder, name, expected)
        assert caught.value.problems == (f"{folder / name}: {message}",)


@pytest.mark.parametrize(
    "name", ["extra.txt", "rank_00002.safetensors", "assets/extra", "assets/assets/", "sub/", ".x"]
)
def test_what_does_not_belong_is_named(name: str, folder: Path) -> None:
    path = folder / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    assert problems_of(folder) == (f"{path}: is not part of the checkpoint",)


def test_all_names_are_told_at_once(folder: Path) -> None:
    (folder / FIRST).rename(folder / "rank_00003.safetensors")
    (folder / "assets" / "tokenizer.json").unlink()
    assert problems_of(folder) == (
        f"{folder / 'assets/tokenizer.json'}: is missing",
        f"{folder / FIRST}: is missing",
        f"{folder / 'rank_00003.safetensors'}: is not part of the checkpoint",
    )


def test_files_that_changed_places(folder: Path) -> None:
    """Well-formed, but each in another's place."""
    first, last = (folder / FIRST).read_bytes(), (folder / LAST).read_bytes()
    (folder / FIRST).write_bytes(last)
    (folder / LAST).write_bytes(first)
    assert str(folder / FIRST) in problems_of(folder)[0]


def test_a_folder_that_is_half_of_another_step(folder: Path, tmp_path: Path) -> None:
    """Half overwritten: each file is in order, and of the size that the manifest says."""
    other = write_checkpoint(tmp_path / "other", 3, 2)
    shutil.copyfile(other / LAST, folder / LAST)
    (problem,) = problems_of(folder)
    assert problem == f"{folder / LAST}: is not what was saved: its SHA-256 differs"


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: cannot read it"):
            [*verify(path)]


# Files that are what the manifest says, and do not hold the model.


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object], name: str = FIRST) -> None:
    """Change the tensors of a rank's file, and sign it."""
    rank = int(name[5:10])
    parts = {part.name: part for part in parts_of(tensors_of(2), rank, 2)}
    values = {part.name: part.values for part in parts.values()}
    change(values)
    (folder / name).unlink()
    tensors = [
        LazyTensor.of(n, v, parts[n].offset if n in parts else (0,) * v.dim())
        for n, v in values.items()
    ]
    write_tensors(folder / name, tensors)
    sign(folder)


def drop(name: str) -> Damage:
    return lambda folder: rewrite(folder, lambda values: values.pop(name))


def put(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Change a tensor in the first file."""
    return lambda folder: rewrite(
        folder, lambda values: values.update({name: change(values[name])})
    )


def put_everywhere(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(folder: Path) -> None:
        for file in (FIRST, LAST):
            rewrite(folder, lambda values: values.update({name: change(values[name])}), file)

    return damage


def remove_file(folder: Path) -> None:
    (folder / LAST).unlink()
    sign(folder)


def add_part_again(folder: Path) -> None:
    shutil.copyfile(folder / LAST, folder / "rank_00002.safetensors")
    sign(folder)


def add_overlap(folder: Path) -> None:
    """As many elements as are wanted, but some of them twice and others not at all."""
    (folder / FIRST).unlink()
    (folder / LAST).unlink()
    whole = tensors_of(2)
    parts = [LazyTensor.of(n, v, (0,) * v.dim()) for n, v in whole.items() if n != EMBEDDING]
    rows = whole[EMBEDDING]
    first, last = rows[:40], rows[24:47]
    write_tensors(folder / FIRST, [*parts, LazyTensor.of(EMBEDDING, first, (0, 0))])
    write_tensors(folder / LAST, [LazyTensor.of(EMBEDDING, last, (24, 0))])
    corner = LazyTensor.of(EMBEDDING, rows[63:, :], (63, 0))
    write_tensors(folder / "rank_00002.safetensors", [corner])
    sign(folder)


def cover_with_overlap(folder: Path) -> None:
    """The sum of elements is right, columns 0–8 are there twice and the last row is not whole."""
    (folder / FIRST).unlink()
    (folder / LAST).unlink()
    whole = tensors_of(2)
    rows = whole[EMBEDDING]  # [64, 16]
    parts = [LazyTensor.of(n, v, (0,) * v.dim()) for n, v in whole.items() if n != EMBEDDING]
    for number, (r, c) in enumerate((((0, 32), (0, 16)), ((16, 48), (0, 8)), ((48, 64), (0, 16)))):
        part = LazyTensor.of(EMBEDDING, rows[slice(*r), slice(*c)], (r[0], c[0]))
        write_tensors(
            folder / f"rank_{number:05d}.safetensors", [part, *(parts if number == 0 else [])]
        )
    sign(folder)


def spoil_offsets(folder: Path) -> None:
    """Changes the header's text only, where torch's reader would fail with an error of its own."""
    path = folder / FIRST
    content = path.read_bytes()
    assert b"saved_offsets" in content
    path.write_bytes(content.replace(b"saved_offsets", b"saved_0ffsets"))
    sign(folder)


STRUCTURE: dict[str, tuple[Damage, str]] = {
    "missing tensor": (drop(EMBEDDING), f"{EMBEDDING} "),
    "missing file": (remove_file, ""),
    "extra tensor": (
        lambda folder: rewrite(folder, lambda values: values.update({"extra": torch.ones(2)})),
        "extra is none of the model's tensors",
    ),
    "dtype": (
        put_everywhere(EMBEDDING, Tensor.bfloat16),
        f"{EMBEDDING} is torch.bfloat16, not torch.float32 or torch.float64",
    ),
    "integers": (put_everywhere(NORM, Tensor.int), f"{NORM} is torch.int32"),
    "dtype of a part": (put(EMBEDDING, Tensor.double), f"{EMBEDDING} is torch.float"),
    "shorter part": (put(EMBEDDING, lambda x: x[:-1]), f"{EMBEDDING} is not complete"),
    "longer part": (put(EMBEDDING, lambda x: x.repeat(2, 1)), f"{EMBEDDING} "),
    "part twice": (add_part_again, "overlap"),
    "gap and overlap": (add_overlap, f"{EMBEDDING} has parts that overlap"),
    "overlap of columns": (cover_with_overlap, f"{EMBEDDING} has parts that overlap"),
    "offsets": (spoil_offsets, "cannot read its tensors"),
}


@pytest.mark.parametrize(("damage", "message"), STRUCTURE.values(), ids=STRUCTURE.keys())
def test_tensors_that_are_not_the_models(damage: Damage, message: str, folder: Path) -> None:
    """Hashes are right: this is what a bug, or another tool, would have saved."""
    damage(folder)
    problems = problems_of(folder)
    assert 1 <= len(problems) <= 10
    assert any(message in problem for problem in problems), problems
    assert all(problem.isprintable() for problem in problems)


def test_a_checkpoint_of_another_model(folder: Path) -> None:
    sign(folder, replace(manifest(2), model=replace(MODEL, vocab_size=65)))
    assert any(
        problem == f"{folder}: {EMBEDDING} has shape [64, 16], the model needs [65, 16]"
        for problem in problems_of(folder)
    )
    sign(folder, replace(manifest(2), model=replace(MODEL, num_hidden_layers=2)))
    assert "layers.1." in problems_of(folder)[0]
    assert len(problems_of(folder)) == 10  # of 33: they all say the same
    sign(folder, replace(manifest(2), model=replace(MODEL, tie_word_embeddings=False)))
    assert len(problems_of(folder)) == 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.0.mlp.up_proj.weight.codes", Tensor.char, "is torch.int8, not torch.uint8"),
        ("model.layers.0.mlp.up_proj.weight.scale", Tensor.half, "is torch.float16, not"),
        (
            "model.layers.0.mlp.up_proj.weight.scale",
            lambda x: x.view(1),
            "has shape [1], the model",
        ),
        ("model.norm.weight", Tensor.double, "is torch.float64, not torch.float32 or torch.bfloat"),
    ],
)
def test_a_ternary_checkpoint_of_other_types(
    name: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    tensors = tensors_of(1, "ternary")
    tensors[name] = change(tensors[name])
    path = write_checkpoint(tmp_path / "a", 1, kind="ternary", tensors=tensors)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: {name} {message}")


def test_a_kind_holds_no_others(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", 1, kind="ternary")
    sign(path, manifest(1, "training"))
    assert problems_of(path)
    assert not {*expected_tensors("training", MODEL)} & {*expected_tensors("ternary", MODEL)}


def test_what_verifies_can_be_read(folder: Path) -> None:
    assert [*verify(folder)]
    with TensorReader(folder) as reader:
        for name, values in tensors_of(2).items():
            assert torch.equal(reader.read(name), values), name


# All ranks together.


def of_another_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))


def step_of_another(folder: Path) -> None:
    """A copy that was put in place of the checkpoint."""
    sign(folder, manifest(1))


FOUND: dict[str, tuple[Damage, str]] = {
    **{
        f"{name} {damage.__name__}": (lambda f, n=name, d=damage: d(f / n), f"/{name}: ")
        for name in NAMES
        for damage in (cut_short, flip, Path.unlink)
    },
    **STRUCTURE,
    "extra file": (lambda folder: (folder / "extra").touch(), "/extra: is not part of the"),
    "another step": (step_of_another, "/manifest.json: is of step 1"),
    "no folder": (shutil.rmtree, "/manifest.json: cannot read it"),
}


def refusal(checkpoints: CheckpointStore, falls_back: bool) -> tuple[type, tuple[str, ...]]:
    with pytest.raises(UserError) as caught:
        checkpoints.find(falls_back, pytest.fail)
    return type(caught.value), caught.value.problems


def test_ranks_refuse_a_damaged_checkpoint_or_take_the_one_before(tmp_path: Path) -> None:
    """All of them, with the same words, whichever of them finds what is wrong."""
    template = tmp_path / "template"
    write_checkpoint(template / "step_00000001", 1, 3)
    written(template / "step_00000002")
    (template / "latest").write_text("step_00000002\n")
    for name, (damage, _) in FOUND.items():
        shutil.copytree(template, tmp_path / name)
        damage(tmp_path / name / "step_00000002")

    def run() -> dict[str, tuple[tuple[type, tuple[str, ...]], list[str], int]]:
        told = {}
        for name in FOUND:
            checkpoints = make_store(tmp_path / name)
            refused, alerts = refusal(checkpoints, falls_back=False), []
            assert checkpoints.durable_step == -1
            found = checkpoints.find(True, alerts.append)
            assert found is not None
            assert (found.path.name, found.manifest.step) == ("step_00000001", 1)
            told[name] = refused, alerts, checkpoints.durable_step
        return told

    ranks = run_ranks(run, 3)
    assert ranks == [ranks[0]] * 3
    for name, ((kind, problems), alerts, durable_step) in ranks[0].items():
        assert kind is DamagedCheckpoint
        assert all(p.startswith(f"{tmp_path / name}/step_00000002") for p in problems)
        assert any(FOUND[name][1] in problem for problem in problems), (name, problems)
        hint = "; --auto-fallback goes on from the checkpoint before"
        assert problems[-1].endswith(hint)
        assert alerts == [problem.removesuffix(hint) for problem in problems]
        assert durable_step == 1


def test_ranks_fall_back_as_far_as_they_must(tmp_path: Path) -> None:
    """But not beyond what is there, nor from what another version wrote."""
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path / f"step_{step:08d}", step, 2)
    (tmp_path / "latest").write_text("step_00000003\n")
    damaged = {step: tmp_path / f"step_{step:08d}" for step in (3, 2)}
    flip(damaged[3] / LAST)
    cut_short(damaged[2] / "manifest.json")

    def run() -> tuple[int, list[str], bool]:
        checkpoints, alerts = make_store(tmp_path), []
        found = checkpoints.find(True, alerts.append)
        assert found is not None
        return found.manifest.step, alerts, checkpoints.mesh.is_main

    for step, alerts, _ in run_ranks(run, 2):
        assert step == 1  # not 4, which latest does not name: it is newer than what was asked for
        assert [alert.split(": ")[0] for alert in alerts] == [
            str(damaged[3] / LAST),
            str(damaged[2] / "manifest.json"),
        ]

    (tmp_path / "step_00000001" / FIRST).unlink()

    def run_out() -> tuple[str, int]:
        checkpoints, alerts = make_store(tmp_path), []
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoints.find(True, alerts.append)
        return str(caught.value), len(alerts)

    expected = f"{tmp_path}: no checkpoint is in order; use another run.dir"
    assert run_ranks(run_out, 2) == [(expected, 3)] * 2


def test_another_version_is_not_stepped_back_from(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step_{step:08d}", step)
    (tmp_path / "latest").write_text("step_00000002\n")
    of_another_version(tmp_path / "step_00000002")
    kind, problems = refusal(make_store(tmp_path), falls_back=True)
    path = tmp_path / "step_00000002" / "manifest.json"
    assert kind is UserError
    assert problems == (f"{path}: is of version 1; this megabit reads version 2",)


@pytest.mark.parametrize("falls_back", [False, True])
@pytest.mark.parametrize("content", ["", "step_1", "step_" + "9" * 40])
def test_latest_that_is_no_name(content: str, falls_back: bool, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step_00000001", 1)
    (tmp_path / "latest").write_text(content)
    _, (problem,) = refusal(make_store(tmp_path), falls_back)
    assert problem.startswith(f"{tmp_path / 'latest'}: must hold the name of a checkpoint")


def test_a_run_goes_on_from_where_it_fell_back_to(tmp_path: Path) -> None:
    """The damaged one is replaced when its step comes again."""
    checkpoints = make_store(tmp_path)
    for step in (1, 2):
        assert save(checkpoints, step) is None
    flip(tmp_path / "step_00000002" / FIRST)
    checkpoints = make_store(tmp_path)
    found = checkpoints.find(True, lambda problem: None)
    assert found is not None
    assert found.manifest.step == 1
    assert save(checkpoints, 2) is None
    assert [*verify(tmp_path / "step_00000002")]
    found = make_store(tmp_path).find(False, pytest.fail)
    assert found is not None
    assert found.manifest.step == 2
    assert os.listdir(tmp_path / "step_00000002") != []
