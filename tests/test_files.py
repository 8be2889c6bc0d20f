"""Files that are whole or not there, whatever happens while they are written."""

import hashlib
import resource
from pathlib import Path

import pytest

from megabit.errors import UserError
from megabit.files import FileInfo, describe_file, replacing, sync, write_text
from tests.checkpoint.stored import dies_before, names_in


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_a_file_is_described_by_its_size_and_hash(size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "a").write_bytes(content)
    expected = FileInfo(size, hashlib.sha256(content).hexdigest())
    assert describe_file(tmp_path / "a") == expected


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        describe_file(tmp_path / "a")
    expected = f"{tmp_path / 'a'}: cannot read it (No such file or directory)"
    assert caught.value.problems == (expected,)
    with pytest.raises(UserError, match="cannot read it"):
        describe_file(tmp_path)


@pytest.mark.parametrize("durable", [False, True])
def test_text_replaces_what_was_there(durable: bool, tmp_path: Path) -> None:
    for text in ("γ = 1\n", "", "shorter\r\n"):
        write_text(tmp_path / "a", text, durable)
        assert (tmp_path / "a").read_bytes() == text.encode()
    assert names_in(tmp_path) == {"a"}


def fail_in_replacing(path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text("half of the n")
        raise KeyError


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fail_in_replacing(tmp_path / "a")
    assert names_in(tmp_path) == set()
    write_text(tmp_path / "a", "old")
    with pytest.raises(KeyError):
        fail_in_replacing(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old"
    assert names_in(tmp_path) == {"a"}


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as draft:
        draft.write_text("new")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_text() == "new"


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_leaves_the_old_text(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_text(tmp_path / "a", "x" * 101, durable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a").read_text() == "old"
    assert names_in(tmp_path) == {"a"}


@pytest.mark.parametrize("durable", [False, True])
def test_a_kill_at_any_instant_leaves_one_text_or_the_other(durable: bool, tmp_path: Path) -> None:
    path, found, kills = tmp_path / "a", [], 0
    while True:
        path.write_text("old" * 10_000)
        if not dies_before(kills + 1, lambda: write_text(path, "new" * 10_000, durable)):
            break
        kills += 1
        found.append(path.read_text()[:3])
        assert path.read_text() == found[-1] * 10_000
    assert path.read_text() == "new" * 10_000
    assert found == sorted(found, reverse=True)  # once new, always new
    # Opened, written, replaced, and what may be left of the draft removed; synced twice.
    assert kills >= (8 if durable else 4)


def test_what_is_not_there_cannot_be_synced(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "a")
