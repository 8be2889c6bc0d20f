"""Any slice of any tensor, however it was cut up; and parts that do not make up what is wanted."""

import json
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megabit.checkpoint import DamagedCheckpoint, TensorReader
from megabit.checkpoint.source import Index
from megabit.checkpoint.tensor_file import SHARDING_INFO, LazyTensor, write_tensors
from tests.checkpoint.stored import parts_of, tensors_of, write_checkpoint

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8)
Tree = tuple[int, int, Any, Any] | None
"""How a tensor is cut: dimension, place, and the cuts of what lies before and behind it."""


def whole_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """No two elements are equal, if the dtype has so many values."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Index:
    """A slice of each dimension, which may be empty."""
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple(slice(begin, end) for begin, end in bounds)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], depth: int = 3) -> list[Index]:
    """Boxes that make up a tensor: it is cut in two along some dimension, and each half again."""
    whole = tuple(slice(0, size) for size in shape)

    def divide(box: Index, depth: int) -> Iterator[Index]:
        dims = [dim for dim, part in enumerate(box) if part.stop - part.start > 1]
        if not dims or depth == 0 or draw(st.integers(0, 3)) == 0:
            yield box
            return
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(box[dim].start + 1, box[dim].stop - 1))
        for half in (slice(box[dim].start, at), slice(at, box[dim].stop)):
            yield from divide((*box[:dim], half, *box[dim + 1 :]), depth - 1)

    return list(divide(whole, depth))


def write_boxes(folder: Path, whole: Tensor, files: dict[int, list[Index]]) -> None:
    """Each file has one tensor beside ``x``, and may have one part of ``x`` only."""
    for number, boxes in files.items():
        parts = [LazyTensor.of(f"y{number}", torch.full((2,), number), (0,))]
        parts += [LazyTensor.of("x", whole[b], tuple(p.start for p in b)) for b in boxes]
        write_tensors(folder / f"{number}.safetensors", parts)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_slice_is_a_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    whole = whole_of(shape, data.draw(st.sampled_from(DTYPES)))
    boxes = data.draw(st.permutations(data.draw(cuts(shape))))
    folder = tmp_path_factory.mktemp("reader")
    write_boxes(folder, whole, {number: [box] for number, box in enumerate(boxes)})
    with TensorReader(folder) as reader:
        assert reader.shape("x") == shape
        assert reader.dtype("x") == whole.dtype
        assert torch.equal(reader.read("x"), whole)
        for _ in range(3):
            index = data.draw(indices(shape))
            read = reader.read("x", index)
            assert read.dtype == whole.dtype
            assert torch.equal(read, whole[index])
        for number in range(len(boxes)):
            assert reader.read(f"y{number}").tolist() == [number, number]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_is_missing_is_missed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Without one part, a slice can be read if, and only if, no element of it was there."""
    shape = tuple(data.draw(st.lists(st.integers(2, 7), min_size=1, max_size=3)))
    whole = whole_of(shape)
    # The corner stays, since it tells the shape.
    corner = tuple(slice(size - 1, size) for size in shape)
    boxes = [box for box in data.draw(cuts(shape)) if not contains(box, corner)]
    lost = data.draw(st.sampled_from(boxes)) if boxes else corner
    kept = [box for box in boxes if box != lost]
    is_kept = torch.zeros(shape, dtype=torch.bool)
    for box in (*kept, corner):
        is_kept[box] = True
    folder = tmp_path_factory.mktemp("reader")
    write_boxes(folder, whole, dict(enumerate([[box] for box in (*kept, corner)])))
    with TensorReader(folder) as reader:
        for index in (data.draw(indices(shape)), lost, tuple(slice(0, n) for n in shape)):
            if is_kept[index].all():
                assert torch.equal(reader.read("x", index), whole[index])
            else:
                with pytest.raises(DamagedCheckpoint, match=r"x has .* that are wanted"):
                    reader.read("x", index)


def contains(box: Index, other: Index) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(box, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_ranks_write_is_read_whole(size: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", 3, size)
    with TensorReader(path) as reader:
        for name, values in tensors_of(3).items():
            assert torch.equal(reader.read(name), values), name
    # With 5, some have nothing of some tensors.
    assert (len(parts_of(tensors_of(3), 0, size)) < len(tensors_of(3))) == (size == 5)


def test_a_grid_of_parts(tmp_path: Path) -> None:
    """As tensor- and data-parallel ranks cut a matrix: both ways."""
    whole, rows, columns = whole_of((7, 9)), (0, 3, 4, 7), (0, 1, 8, 9)
    for number, (r, c) in enumerate(product(pairwise(rows), pairwise(columns))):
        part = LazyTensor.of("x", whole[slice(*r), slice(*c)], (r[0], c[0]))
        write_tensors(tmp_path / f"{number}.safetensors", [part])
    with TensorReader(tmp_path) as reader:
        assert torch.equal(reader.read("x"), whole)
        assert torch.equal(reader.read("x", (slice(2, 5), slice(0, 9))), whole[2:5])


def test_reading_writes_into_views_only(tmp_path: Path) -> None:
    """What lies around the target stays as it is."""
    whole = whole_of((6, 4))
    write_boxes(tmp_path, whole, {0: [(slice(0, 2), slice(0, 4))], 1: [(slice(2, 6), slice(0, 4))]})
    around = torch.full((5, 6), -1.0)
    with TensorReader(tmp_path) as reader:
        reader.read_into(around[1:4, 2:4], "x", (slice(1, 4), slice(1, 3)))
    expected = torch.full((5, 6), -1.0)
    expected[1:4, 2:4] = whole[1:4, 1:3]
    assert torch.equal(around, expected)


def test_files_of_others_have_no_offsets(tmp_path: Path) -> None:
    """What ``safetensors`` wrote is read as it is, each tensor whole."""
    tensors = {"a": whole_of((3, 4)), "b": torch.tensor(2.5), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        for name, values in tensors.items():
            assert torch.equal(reader.read(name), values)
        assert torch.equal(reader.read("a", (slice(1, 3), slice(2, 3))), tensors["a"][1:, 2:3])


@pytest.fixture
def two_parts(tmp_path: Path) -> Path:
    """``x [4, 4]``, rows 0–2 and row 3."""
    whole = whole_of((4, 4))
    write_boxes(tmp_path, whole, {0: [(slice(0, 3), slice(0, 4))], 1: [(slice(3, 4), slice(0, 4))]})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "dtype", "index", "message"),
    [
        ("z", torch.float32, (slice(0, 4), slice(0, 4)), "z is missing"),
        (
            "x",
            torch.bfloat16,
            (slice(0, 4), slice(0, 4)),
            "x is torch.float32, not torch.bfloat16",
        ),
        ("x", torch.float32, (slice(0, 5), slice(0, 4)), r"x is \(4, 4\) and has no \[0:5, 0:4\]"),
        ("x", torch.float32, (slice(0, 4),), r"x is \(4, 4\) and has no \[0:4\]"),
        ("x", torch.float32, (), r"x is \(4, 4\) and has no \[\]"),
    ],
)
def test_what_is_not_there_is_named(
    name: str, dtype: torch.dtype, index: Index, message: str, two_parts: Path
) -> None:
    target = torch.zeros([part.stop - part.start for part in index], dtype=dtype)
    with TensorReader(two_parts) as reader:
        with pytest.raises(DamagedCheckpoint, match=message) as caught:
            reader.read_into(target, name, index)
        assert str(two_parts) in str(caught.value)
        assert not target.any()


def test_a_tensor_without_one_of_its_files(two_parts: Path) -> None:
    (two_parts / "0.safetensors").unlink()
    with TensorReader(two_parts) as reader:
        assert reader.read("x", (slice(3, 4), slice(0, 4))).tolist() == [[12, 13, 14, 15]]
        with pytest.raises(DamagedCheckpoint, match="x has 4 of the 16 elements that are wanted"):
            reader.read("x")


def test_a_file_that_disappears_meanwhile(two_parts: Path) -> None:
    with TensorReader(two_parts) as reader:
        (two_parts / "1.safetensors").unlink()
        with pytest.raises(DamagedCheckpoint, match=r"1\.safetensors: cannot read x"):
            reader.read("x")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="missing: cannot read its tensors"):
        TensorReader(tmp_path / "missing")


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 100, (10).to_bytes(8, "little") + b'{"a": [}  '],
    ids=["empty", "short", "large header", "not JSON"],
)
def test_what_is_no_safetensors_file(content: bytes, two_parts: Path) -> None:
    (two_parts / "1.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="cannot read its tensors"):
        TensorReader(two_parts)


def add_file(folder: Path, tensors: dict[str, Tensor], info: object) -> None:
    """One whose offsets are ``info``, if it is given."""
    metadata = {} if info is None else {SHARDING_INFO: json.dumps(info)}
    save_file(tensors, folder / "2.safetensors", metadata)


def at(offset: object) -> object:
    return {"x": {"saved_offsets": offset}}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ([], "cannot read its tensors"),
        ("x", "cannot read its tensors"),
        ({}, "cannot read its tensors"),
        ({"x": []}, "cannot read its tensors"),
        ({"x": {}}, "cannot read its tensors"),
        (at(None), "cannot read its tensors"),
        (at("ab"), "cannot read its tensors"),
        (at([0.5, 0]), "cannot read its tensors"),
        (at([0]), "cannot read its tensors"),
        (at([0, 0, 0]), "x has a part"),
        (at([-1, 4]), "x has a part"),
        (at([3, 0]), "x has parts that overlap"),  # two at the same place
        (None, "x has parts that overlap"),
    ],
)
def test_offsets_that_mean_nothing(info: object, message: str, two_parts: Path) -> None:
    add_file(two_parts, {"x": torch.ones(1, 4)}, info)
    with pytest.raises(DamagedCheckpoint, match=message):
        TensorReader(two_parts)


def test_offsets_that_are_nested_too_deeply(two_parts: Path) -> None:
    save_file(
        {"x": torch.ones(1, 4)},
        two_parts / "2.safetensors",
        {SHARDING_INFO: "[" * 100_000 + "]" * 100_000},
    )
    with pytest.raises(DamagedCheckpoint, match="cannot read its tensors"):
        TensorReader(two_parts)


def test_offsets_beyond_all_memory(two_parts: Path) -> None:
    """A part far away makes the tensor large and incomplete; nothing is made for what is not
    there."""
    add_file(two_parts, {"x": torch.ones(1, 4)}, at([1 << 40, 0]))
    with TensorReader(two_parts) as reader:
        assert reader.shape("x") == ((1 << 40) + 1, 4)
        with pytest.raises(DamagedCheckpoint, match="x has 16 of the 20 elements"):
            reader.read("x", (slice(0, 5), slice(0, 4)))


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1), ()])
def test_parts_of_another_number_of_dimensions(shape: tuple[int, ...], two_parts: Path) -> None:
    add_file(two_parts, {"x": torch.ones(shape)}, at([4] * len(shape)))
    with pytest.raises(DamagedCheckpoint, match=r"x has a part|cannot read its tensors"):
        TensorReader(two_parts)


def test_parts_of_another_dtype(two_parts: Path) -> None:
    """They would be converted in silence."""
    add_file(two_parts, {"x": torch.ones(1, 4).double()}, at([4, 0]))
    with pytest.raises(DamagedCheckpoint, match=r"x is torch.float(32|64) in one file and torch"):
        TensorReader(two_parts)
