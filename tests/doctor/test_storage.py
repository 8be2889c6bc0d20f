"""The folder of a run, as real processes see it; and the words."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megabit.doctor import disk, storage
from megabit.doctor.disk import Disk
from megabit.doctor.ranks import Ranks
from megabit.doctor.storage import Storage
from tests.doctor.clusters import cluster_of, on_ranks

MB = 10**6
GOOD = Storage("/shared", [None, None], 100 * MB, [0.0, 0.0])


def said_of(folders: list[Path], hosts: int = 1) -> list[list[tuple[str, str]]]:
    """Severity and words, on each of as many ranks as there are folders."""

    def look(ranks: Ranks) -> list[tuple[str, str]]:
        with storage.examined(ranks, folders[ranks.rank]) as (seen, scratch):
            assert (scratch is not None) == (
                seen.seen_after_s[ranks.rank :][:1] not in ([], [None])
            )
            found = storage.judge(seen, ranks.cluster, checkpoint_bytes=1)
            return [(finding.severity, finding.what) for finding in found]

    return on_ranks(look, len(folders), hosts)


def test_a_shared_folder_is_fine_and_is_left_as_it_was(tmp_path: Path) -> None:
    assert said_of([tmp_path] * 4, hosts=2) == [[]] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_on_one_rank(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for said in said_of([tmp_path, tmp_path, missing]):
        assert said == [("wrong", f"rank 2: {missing} does not exist")]


def test_another_folder_on_one_host(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for said in said_of([tmp_path, tmp_path, other, other], hosts=2):
        ((severity, what),) = said
        assert severity == "wrong"
        assert what.startswith(f"b: has another folder than rank 0 in the place of {tmp_path}")


def test_a_folder_that_the_first_rank_cannot_use(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for said in said_of([file, tmp_path]):
        assert said == [("wrong", f"rank 0: {file} is not a folder")]


def test_a_run_folder_may_be_new_everywhere(tmp_path: Path) -> None:
    new = tmp_path / "runs" / "mine"
    assert on_ranks(lambda ranks: storage.existing(ranks, new), 2) == [tmp_path] * 2
    assert on_ranks(lambda ranks: storage.existing(ranks, tmp_path), 2) == [tmp_path] * 2


def test_room_for_checkpoints() -> None:
    cluster = cluster_of(1, 1)
    assert not list(storage.judge(GOOD, cluster, 50 * MB))
    (tight,) = storage.judge(GOOD, cluster, 60 * MB)
    (full,) = storage.judge(GOOD, cluster, 200 * MB)
    assert (tight.severity, full.severity) == ("warning", "wrong")
    assert full.what == (
        "/shared: 100 MB are free, a checkpoint takes 200 MB, and 2 of them are there at a time"
    )


def test_late_names_and_missing_locks() -> None:
    cluster = cluster_of(1, 1)
    (late,) = storage.judge(replace(GOOD, seen_after_s=[0.0, 2.0]), cluster, 1)
    assert late.what == "b: new files of other hosts appear after 2 s"
    (unlocked,) = storage.judge(replace(GOOD, locks={1: "Function not implemented"}), cluster, 1)
    assert unlocked.what.startswith("b: locks in /shared do not work (Function not implemented)")
    (stale,) = storage.judge(replace(GOOD, renames={1: "Not supported"}), cluster, 1)
    assert (stale.severity, "(Not supported)" in stale.what) == ("wrong", True)


def test_a_disk_is_measured_by_each_host(tmp_path: Path) -> None:
    def look(ranks: Ranks) -> list[Disk]:
        return disk.measure(ranks, tmp_path, 3 * disk.CHUNK)

    for disks in on_ranks(look, 4, hosts=2):
        assert [found.rank for found in disks] == [0, 2]
        for found in disks:
            assert found.written_bytes == found.read_bytes == 3 * disk.CHUNK
            assert min(found.write_s, found.read_s, found.small_file_s) > 0
    assert not list(tmp_path.glob("large*"))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    os.symlink(full, tmp_path / "large-0")
    (disks,) = on_ranks(lambda ranks: disk.measure(ranks, tmp_path, disk.CHUNK), 1)
    (finding,) = disk.judge(disks, cluster_of(1))
    assert finding.severity == "wrong"
    assert finding.what == "a: cannot write there (No space left on device)"


def test_a_slow_disk_is_named() -> None:
    fast = Disk(0, 100 * MB, 1.0, 100 * MB, 1.0, 0.001)
    slow = replace(fast, rank=1, write_s=10.0, small_file_s=0.5)
    found = disk.judge([fast, slow, replace(fast, rank=2)], cluster_of(1, 1, 1))
    assert [finding.what for finding in found] == [
        "b: writes 10 MB/s, typical is 100 MB/s",
        "b: a small file takes 500 ms to write",
    ]
    assert dict(disk.figures([fast, fast], 2000 * MB))["a checkpoint"].startswith(
        "would take about 10 s"
    )


def test_a_file_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "token"

    def look(ranks: Ranks) -> float | None:
        ranks.wait()
        if ranks.rank == 0:
            time.sleep(0.3)
            path.write_text("x")
        seen = storage._look_for(path, "x")
        ranks.wait()
        return seen

    first, second = on_ranks(look, 2)
    assert first is not None
    assert second is not None
    assert second > first
