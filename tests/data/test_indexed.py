"""The indexed dataset: its exact bytes, round trips, and everything that can be wrong with it."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabit.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from megabit.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [65_535], [7, 8]]


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def test_the_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + struct.pack("<4i", 3, 0, 1, 2)
        + struct.pack("<4q", 0, 6, 6, 8)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 65_535, 7, 8)


def test_reads_documents_of_several_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<4i", 10, 11, 12, 13))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 1, 2, 1)
        + struct.pack("<3q", 0, 4, 12)
        + struct.pack("<3q", 0, 2, 3)
    )
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == [[10, 11, 12], [13]]


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(st.integers(0, 65_535), max_size=20), max_size=8), st.data())
def test_round_trip(tmp_path: Path, documents: list[list[int]], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.uint16, np.int32, np.int64]))
    dataset = write(tmp_path / "a.b", documents, dtype)
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents
    assert dataset.document_lengths.tolist() == [len(document) for document in documents]
    joined = [token for document in documents for token in document]
    assert dataset.num_tokens == len(joined)
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    assert dataset.tokens(start, stop).tolist() == joined[start:stop]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "<u2"), (65_499, "<u2"), (65_500, "<i4"), (200_000, "<i4")]
)
def test_dtype_follows_from_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("bad", [65_536, -1, 2**40])
def test_refuses_tokens_that_do_not_fit(tmp_path: Path, bad: int) -> None:
    with pytest.raises(UserError, match=f"token {bad} .*vocabulary is larger than the dtype"):
        write(tmp_path / "a", [[1, bad]])
    assert list(tmp_path.iterdir()) == []


def test_refuses_dtypes_that_hold_no_tokens(tmp_path: Path) -> None:
    for dtype in (np.float32, np.uint64):
        with pytest.raises(ValueError, match="no indexed dataset holds tokens"):
            IndexedDatasetWriter(tmp_path / "a", dtype)
    with pytest.raises(TypeError), IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_document(np.array([1.5]))


def write_and_fail(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add_document([1])
        raise KeyError


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_and_fail(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(KeyError):
        write_and_fail(tmp_path / "a")
    assert IndexedDataset(tmp_path / "a").num_tokens == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_document([1])
        assert not (tmp_path / "a.bin").exists()
        assert not (tmp_path / "a.idx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_out_of_range_is_an_index_error(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a", DOCUMENTS)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            dataset.document(index)
    for start, stop in ((-1, 2), (0, 7), (3, 2)):
        with pytest.raises(IndexError):
            dataset.tokens(start, stop)


def test_refuses_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.idx: cannot read it \(No such file"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a\.bin: cannot read it \(No such file"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"MMXX", "magic bytes"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\x07", "dtype code 7"),
        (18, struct.pack("<Q", 2**63), "has 122 bytes but its counts demand"),
        (26, struct.pack("<Q", 4), "has 122 bytes but its counts demand 114"),
        (34, struct.pack("<i", -3), "negative sequence length"),
        (34, struct.pack("<i", 4), "pointers are not contiguous"),
        (50, struct.pack("<q", 2), "pointers are not contiguous"),
        (82, struct.pack("<q", 1), "document indices"),
        (90, struct.pack("<q", 3), "document indices"),
        (114, struct.pack("<q", 9), "document indices"),
    ],
)
def test_refuses_a_damaged_index(
    tmp_path: Path, offset: int, replacement: bytes, message: str
) -> None:
    write(tmp_path / "a", DOCUMENTS)
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[offset : offset + len(replacement)] = replacement
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.idx: .*{message}"):
        IndexedDataset(tmp_path / "a")


def test_refuses_a_truncated_bin_and_names_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.bin").write_bytes(b"\x00" * 11)
    with pytest.raises(UserError, match=r"a\.bin: has 11 bytes but its \.idx demands 12"):
        IndexedDataset(tmp_path / "a")


def test_refuses_the_index_of_another_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", [[1, 2]])
    (tmp_path / "b.idx").replace(tmp_path / "a.idx")
    with pytest.raises(UserError, match=r"a\.bin: has 12 bytes but its \.idx demands 4"):
        IndexedDataset(tmp_path / "a")


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_damage_to_an_index_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "a.idx").exists():
        write(tmp_path / "a", DOCUMENTS)
        (tmp_path / "good").write_bytes((tmp_path / "a.idx").read_bytes())
    content = bytearray((tmp_path / "good").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "a.idx").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        dataset = IndexedDataset(tmp_path / "a")
    except UserError:
        return
    assert [len(dataset.document(i)) for i in range(4)] == dataset.document_lengths.tolist()
