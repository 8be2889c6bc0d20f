"""A rank's file: what other tools read in it, its hash, and what is in memory meanwhile."""

import hashlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from megabit.checkpoint.tensor_file import (
    CHUNK_BYTES,
    DTYPES,
    SHARDING_INFO,
    LazyTensor,
    in_files,
    write_tensors,
)
from megabit.files import describe_file
from tests.checkpoint.stored import parts_of, tensors_of, write_checkpoint


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits, but no NaN, which is not equal to itself."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    top = 2 if dtype is torch.bool else 256
    values = torch.randint(top, (size,), dtype=torch.uint8, generator=generator)
    tensor = values.view(dtype).view(shape)
    return tensor.nan_to_num() if dtype.is_floating_point else tensor


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    write_tensors(path, [LazyTensor.of(name, tensor) for name, tensor in tensors.items()])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_reads_every_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = {"none": (), "one": (1,), "odd": (3, 5, 7), "empty": (0,), "flat": (4, 0, 2)}
    tensors = {name: random(dtype, *shape) for name, shape in shapes.items()}
    tensors["transposed"] = random(dtype, 6, 9).t()
    tensors["every other"] = random(dtype, 10)[::2]
    write(tmp_path / "a", tensors)
    assert_same(load_file(tmp_path / "a"), tensors)


def test_mixed_dtypes_are_aligned(tmp_path: Path) -> None:
    """Whatever the order in which they are given: readers map the file and view it."""
    tensors = {
        f"{number} {dtype}": random(dtype, 2 * number + 1)
        for number, dtype in enumerate([*DTYPES, *reversed(DTYPES)])
    }
    write(tmp_path / "a", tensors)
    assert_same(load_file(tmp_path / "a"), tensors)
    content = (tmp_path / "a").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name


def test_a_file_of_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", {})
    assert load_file(tmp_path / "a") == {}


def test_metadata_and_names_of_any_letters(tmp_path: Path) -> None:
    tensor = LazyTensor.of('γ/"x"\n', torch.ones(2))
    write_tensors(tmp_path / "a", [tensor], {"note": "ä", "version": "1"})
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"note": "ä", "version": "1"}
        assert list(file.keys()) == ['γ/"x"\n']


def test_size_and_hash_are_those_of_the_file(tmp_path: Path) -> None:
    """With a tensor of more than one chunk, whose last one is not whole."""
    tensors = [LazyTensor.of("small", torch.ones(3)), LazyTensor.of("view", torch.eye(5)[1:4])]
    large = random(torch.uint8, 2 * CHUNK_BYTES + 5)
    info = write_tensors(tmp_path / "a", [*tensors, LazyTensor.of("large", large)])
    assert info == describe_file(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (info.bytes, info.sha256)
    assert torch.equal(load_file(tmp_path / "a")["large"], large)


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, tensors_of(3))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", {"x": torch.ones(1)})
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(3), r"^x is torch.float32 \(3,\), not torch.float32 \(2, 2\)$"),
        (torch.ones(4), r"^x is torch.float32 \(4,\), not torch.float32 \(2, 2\)$"),
        (torch.ones(2, 2).double(), r"^x is torch.float64 \(2, 2\), not torch.float32 \(2, 2\)$"),
        (torch.ones(2, 2).int(), r"^x is torch.int32 \(2, 2\), not torch.float32 \(2, 2\)$"),
    ],
)
def test_values_that_are_not_as_announced(values: Tensor, message: str, tmp_path: Path) -> None:
    """As many bytes as announced, or more, or fewer."""
    with pytest.raises(ValueError, match=message):
        write_tensors(tmp_path / "a", [LazyTensor("x", torch.float32, (2, 2), lambda: values)])


def test_a_name_that_is_given_twice(tmp_path: Path) -> None:
    tensor = LazyTensor.of("x", torch.ones(1))
    with pytest.raises(ValueError, match="x is given twice"):
        write_tensors(tmp_path / "a", [tensor, tensor])
    assert not (tmp_path / "a").exists()


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each is loaded when its turn comes, and the one before is gone by then."""
    loaded: list[tuple[str, int]] = []
    values: list[weakref.ref[Tensor]] = []

    def loader(name: str, dtype: torch.dtype, columns: int) -> Callable[[], Tensor]:
        def load() -> Tensor:
            assert [ref for ref in values if ref() is not None] == []
            # What is written so far: the tensors before it.
            loaded.append((name, (tmp_path / "a").stat().st_size))
            tensor = torch.ones(columns, 1000, dtype=dtype)
            values.append(weakref.ref(tensor))
            return tensor.t()  # must be copied if there are several columns

        return load

    lazy = [
        LazyTensor(name, dtype, (1000, columns), loader(name, dtype, columns))
        for name, dtype, columns in (
            ("half", torch.bfloat16, 50),
            ("first", torch.float32, 50),
            ("second", torch.float32, 1),
            ("bytes", torch.uint8, 50),
        )
    ]
    write_tensors(tmp_path / "a", lazy)
    # Wider ones first, else in the order given.
    assert [name for name, _ in loaded] == ["first", "second", "half", "bytes"]
    begins = [size for _, size in loaded]
    assert begins == sorted(begins)
    assert begins[0] == 0
    assert begins[1] >= 200_000
    assert begins[3] >= 300_000


def test_a_loader_that_fails_is_heard(tmp_path: Path) -> None:
    def load() -> Tensor:
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        write_tensors(tmp_path / "a", [LazyTensor("x", torch.float32, (2,), load)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by no_dist
@pytest.mark.parametrize("size", [1, 3])
def test_torchs_distributed_checkpoint_reads_it(size: int, tmp_path: Path) -> None:
    """``torch.distributed.checkpoint.load`` puts the parts of all ranks together."""
    path = write_checkpoint(tmp_path / "checkpoint", 7, size)
    assert len([*path.glob("*.safetensors")]) == size
    expected = tensors_of(7)
    found = {name: torch.full_like(values, -1) for name, values in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert_same(found, expected)


def test_offsets_are_where_torch_looks_for_them(tmp_path: Path) -> None:
    tensors = [
        LazyTensor.of("cut", torch.ones(2, 3), (4, 6)),
        LazyTensor.of("whole", torch.ones(2, 3)),
        LazyTensor.of("scale", torch.ones(()), ()),
    ]
    write_tensors(tmp_path / "parts", tensors)
    write_tensors(tmp_path / "wholes", tensors[1:2])
    with safe_open(tmp_path / "parts", framework="pt") as file:
        assert json.loads(file.metadata()[SHARDING_INFO]) == {
            "cut": {"saved_offsets": [4, 6]},
            "whole": {"saved_offsets": [0, 0]},
            "scale": {"saved_offsets": []},
        }
    with safe_open(tmp_path / "wholes", framework="pt") as file:
        assert not file.metadata()


def test_parts_are_cut_in_both_directions() -> None:
    """Of what these tests read: else they would prove less than they say."""
    tensors = tensors_of(1)
    cut = {
        dim
        for part in parts_of(tensors, 1, 3)
        for dim, (length, whole) in enumerate(zip(part.values.shape, part.shape, strict=True))
        if length < whole
    }
    assert cut == {0, 1}


def test_tensors_in_files_of_bounded_size() -> None:
    tensors = [LazyTensor.of(str(i), torch.zeros(size)) for i, size in enumerate((10, 5, 30, 1))]
    assert in_files(tensors) == {"model.safetensors": tensors}
    found = in_files(tensors, max_bytes=60)
    assert (
        found
        == {
            "model-00001-of-00003.safetensors": tensors[:2],
            "model-00002-of-00003.safetensors": tensors[2:3],  # larger, and alone
            "model-00003-of-00003.safetensors": tensors[3:],
        }
    )
