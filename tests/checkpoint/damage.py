"""What can happen to a checkpoint on disk, or be wrong with it from the beginning."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megabit.checkpoint.tensor_file import LazyTensor, write_tensors
from tests.checkpoint.stored import parts_of, sign, tensors_of, write_checkpoint

Damage = Callable[[Path], object]
FIRST, LAST = "rank_00000.safetensors", "rank_00001.safetensors"
EMBEDDING = "master/model.embed_tokens.weight"
NORM = "exp_avg/model.norm.weight"


def written(folder: Path) -> Path:
    """A checkpoint of step 2 by two ranks, with a tokenizer."""
    write_checkpoint(folder, 2, 2)
    (folder / "assets").mkdir()
    (folder / "assets" / "tokenizer.json").write_text('{"version": 1}\n')
    sign(folder)
    return folder


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


NAMES = ("manifest.json", FIRST, LAST, "assets/tokenizer.json")
DAMAGES = (
    *(cut_short, lengthen, flip, flip_in_header, make_empty, Path.unlink),
    *(make_folder, make_dangling, make_circle),
)


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
    "missing tensor": (drop(EMBEDDING), f"{EMBEDDING} is not complete"),
    "missing file": (remove_file, " has shape ["),
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
    "longer part": (put(EMBEDDING, lambda x: x.repeat(2, 1)), f"{EMBEDDING} is not complete"),
    "part twice": (add_part_again, "overlap"),
    "gap and overlap": (add_overlap, f"{EMBEDDING} has parts that overlap"),
    "overlap of columns": (cover_with_overlap, f"{EMBEDDING} has parts that overlap"),
    "offsets": (spoil_offsets, "cannot read its tensors"),
}
