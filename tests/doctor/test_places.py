"""Who is where, and what does not fit together."""

from dataclasses import replace

import pytest

from megabit.doctor import places
from megabit.doctor.places import Cluster
from tests.doctor.clusters import cluster_of, on_ranks


def words(cluster: Cluster, tp: int = 1) -> str:
    return "\n".join(finding.what for finding in places.judge(cluster, tp))


def test_names_of_ranks() -> None:
    cluster = cluster_of(2, 3, 1)
    assert [host.name for host in cluster.hosts] == ["a", "b", "c"]
    assert cluster.name(3) == "rank 3 on b"
    assert cluster.name(5) == "c"
    assert cluster.names([2, 3, 4]) == "b"
    assert cluster.names([2, 3, 4, 5]) == "b, c"
    assert cluster.names([0, 1, 3]) == "ranks 0–1, 3 on a, b"
    assert cluster_of(4).name(2) == "rank 2"
    assert cluster_of(4).names([0, 2, 3]) == "ranks 0, 2–3"


def test_hosts_of_the_same_name_are_told_apart() -> None:
    same = [replace(place, hostname="localhost") for place in cluster_of(1, 1).places]
    assert [host.name for host in Cluster.of(same).hosts] == ["localhost[0]", "localhost[1]"]


def test_nothing_is_wrong_with_equal_hosts() -> None:
    assert words(cluster_of(2, 2), tp=2) == ""
    assert words(cluster_of(1)) == ""


def test_uneven_hosts() -> None:
    assert words(cluster_of(2, 1)) == "hosts have different numbers of ranks: a 2, b 1"


def test_tensor_parallel_groups_that_span_hosts() -> None:
    assert "parallel.tp=4 does not divide the 2 ranks of a host" in words(cluster_of(2, 2), tp=4)
    assert words(cluster_of(2), tp=4) == ""  # there is one host: the settings are refused for that


def test_ranks_that_the_launcher_has_dealt_out_in_turn() -> None:
    dealt = [
        replace(place, hostname="ab"[place.rank % 2], machine="ab"[place.rank % 2])
        for place in cluster_of(2, 2).places
    ]
    assert "ranks 0, 2 of a are not consecutive" in words(Cluster.of(dealt))


def test_two_launchers_on_a_host() -> None:
    alone = [replace(place, local_rank=0, local_world_size=1) for place in cluster_of(2).places]
    assert "a has 2 ranks, but LOCAL_WORLD_SIZE says 1" in words(Cluster.of(alone))
    unsaid = [replace(place, local_world_size=None) for place in cluster_of(2).places]
    assert words(Cluster.of(unsaid)) == ""


def test_ranks_that_share_a_gpu() -> None:
    (first, second) = cluster_of(2).places
    shared = Cluster.of([replace(first, device="cuda:0"), replace(second, device="cuda:0")])
    (finding,) = places.judge(shared)
    assert finding.severity == "wrong"
    assert finding.what == "several ranks of a are on cuda:0"


@pytest.mark.parametrize(
    ("name", "value", "is_good"),
    [
        ("SLURM_NTASKS", "4", True),  # a process for each rank
        ("SLURM_NTASKS", "2", True),  # one for each host, which starts its ranks
        ("SLURM_NTASKS", "8", False),
        ("SLURM_JOB_NUM_NODES", "2", True),
        ("SLURM_JOB_NUM_NODES", "4", False),
        ("OMPI_COMM_WORLD_SIZE", "3", False),
    ],
)
def test_what_the_scheduler_has_given(name: str, value: str, is_good: bool) -> None:
    told = [replace(place, launcher={name: value}) for place in cluster_of(2, 2).places]
    expected = "" if is_good else f"{name} is {value}, but there are 4 ranks on 2 hosts"
    assert words(Cluster.of(told)) == expected


def test_real_ranks_are_gathered() -> None:
    for cluster in on_ranks(lambda ranks: ranks.cluster, 4, hosts=2):
        assert [(host.name, host.ranks) for host in cluster.hosts] == [("a", (0, 1)), ("b", (2, 3))]
        assert len({place.pid for place in cluster.places}) == 4


def test_what_is_gathered_may_differ_in_length() -> None:
    said = [["ä" * (rank * 40), rank] for rank in range(3)]
    assert on_ranks(lambda ranks: ranks.gather(said[ranks.rank]), 3) == [said] * 3
