"""Is a checkpoint what was saved: damage of every kind is found, and the file or tensor named."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megabit.checkpoint import DamagedCheckpoint, Manifest, TensorReader
from megabit.checkpoint.manifest import Kind
from megabit.checkpoint.verify import any_overlap, check_file, expected_tensors, verify
from megabit.errors import UserError
from megabit.files import FileInfo
from tests.checkpoint.damage import (
    DAMAGES,
    EMBEDDING,
    FIRST,
    LAST,
    NAMES,
    STRUCTURE,
    Damage,
    flip,
    written,
)
from tests.checkpoint.stored import (
    MODEL,
    contents,
    manifest,
    sign,
    tensors_of,
    write_checkpoint,
)


def problems_of(folder: Path) -> tuple[str, ...]:
    """What ``verify`` says is wrong."""
    with pytest.raises(UserError) as caught:
        [*verify(folder)]
    assert all(problem.startswith(str(folder)) for problem in caught.value.problems)
    return caught.value.problems


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
    flip(folder / FIRST)
    files = verify(folder)
    assert [next(files), next(files)] == ["assets/tokenizer.json", FIRST]
    with pytest.raises(DamagedCheckpoint, match=FIRST):
        next(files)


# One file or another.


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
    "name", ["extra.txt", "rank_00002.safetensors", "assets/extra", "assets/assets/", "sub/"]
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


@pytest.mark.parametrize(("damage", "message"), STRUCTURE.values(), ids=STRUCTURE.keys())
def test_tensors_that_are_not_the_models(damage: Damage, message: str, folder: Path) -> None:
    """Hashes are right: this is what a bug, or another tool, would have saved."""
    damage(folder)
    problems = problems_of(folder)
    assert 1 <= len(problems) <= 10
    assert any(message in problem for problem in problems), problems
    assert all(problem.isprintable() for problem in problems)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_parts_of_any_form(data: st.DataObject) -> None:
    """Boxes in a matrix or a vector: elements are counted one by one."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    counts = torch.zeros(shape, dtype=torch.int)
    parts = []
    for _ in range(data.draw(st.integers(0, 5))):
        begins = [data.draw(st.integers(0, n - 1)) for n in shape]
        sizes = [data.draw(st.integers(1, n - b)) for n, b in zip(shape, begins, strict=True)]
        counts[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))] += 1
        parts.append(ChunkStorageMetadata(torch.Size(begins), torch.Size(sizes)))
    assert any_overlap(parts) == bool((counts > 1).any())


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
