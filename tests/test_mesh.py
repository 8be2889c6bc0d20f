"""The grid of ranks: who shares which axis, and which groups exist."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabit.errors import UserError
from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh, Topology
from megabit.reduce import all_gather, all_reduce, start_all_reduce

CPU = torch.device("cpu")
NOTHING = dict.fromkeys(("tp", "pp", "dp", "dp_inter", "outer", "world"), 0)


def members(axis: Axis) -> list[int]:
    """The world's numbers of the ranks along ``axis``, as its group has them."""
    return dist.get_process_group_ranks(axis.group) if axis.group is not None else []


def describe(mesh: ParallelMesh) -> dict[str, tuple[int, int, list[int]]]:
    names = ("tp", "pp", "dp", "weights", "world", "stage", "embedding")
    axes: list[Axis] = [getattr(mesh, name) for name in names]
    return {n: (a.size, a.rank, members(a)) for n, a in zip(names, axes, strict=True)}


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 4, 1), (1, 4, 2)],
)
def test_the_grid(tp: int, pp: int, dp: int) -> None:
    """Neighbours share a TP group; then come DP and, with the largest stride, PP. A stage is TP and
    DP together; weights travel where gradients do, in a group of their own."""
    ranks = run_ranks(lambda: describe(ParallelMesh.create(tp, pp, CPU)), tp * pp * dp)

    def rank_of(pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        return (pp_rank * dp + dp_rank) * tp + tp_rank

    def listed(of_axis: list[int]) -> list[int]:
        return of_axis if len(of_axis) > 1 else []  # a single rank needs no group

    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                own = rank_of(p, d, t)
                found = ranks[own]
                assert found["tp"] == (tp, t, listed([rank_of(p, d, i) for i in range(tp)]))
                assert found["dp"] == (dp, d, listed([rank_of(p, i, t) for i in range(dp)]))
                assert found["weights"] == found["dp"]
                stage = [rank_of(p, i, j) for i in range(dp) for j in range(tp)]
                assert found["stage"] == (tp * dp, stage.index(own), listed(stage))
                assert found["pp"] == (pp, p, listed([rank_of(i, d, t) for i in range(pp)]))
                assert found["world"] == (len(ranks), own, list(range(len(ranks))))
                if pp > 1 and p in (0, pp - 1):
                    ends = [rank_of(0, d, t), rank_of(pp - 1, d, t)]
                    assert found["embedding"] == (2, ends.index(own), ends)
                else:
                    assert found["embedding"] == (1, 0, [])


def test_stages_and_global_ranks() -> None:
    def facts() -> tuple[int, bool, list[int]]:
        mesh = ParallelMesh.create(tp=1, pp=3, device=CPU)
        ranks = [mesh.pp.global_rank(i) for i in range(3)]
        return mesh.pp.rank, mesh.is_main, ranks

    assert run_ranks(facts, 3) == [
        (0, True, [0, 1, 2]),
        (1, False, [0, 1, 2]),
        (2, False, [0, 1, 2]),
    ]


def test_every_group_has_the_given_timeout() -> None:
    """That of the world is torch's default group, whose timeout is ``process_group``'s."""

    def timeouts() -> dict[str, timedelta]:
        mesh = ParallelMesh.create(tp=2, pp=2, device=CPU, timeout=timedelta(seconds=77))
        names = ("tp", "pp", "dp", "weights", "stage", "embedding", "world")
        groups = {name: getattr(mesh, name).group for name in names}
        assert all(groups.values())
        return {name: g._get_backend(CPU).options._timeout for name, g in groups.items()}

    for found in run_ranks(timeouts, 8, timeout_s=88):
        assert found.pop("world") == timedelta(seconds=88)
        assert {*found.values()} == {timedelta(seconds=77)}


def test_one_process_has_no_groups() -> None:
    mesh = ParallelMesh()
    assert all(axis == (1, 0, []) for axis in describe(mesh).values())
    assert mesh.is_main
    assert mesh.sent_bytes() == NOTHING
    assert mesh.waited_s() == NOTHING
    assert mesh.sent() == {}
    assert not dist.is_initialized()


def test_single_meshes_share_nothing() -> None:
    one, other = ParallelMesh(), ParallelMesh()
    one.tp.sent["control"] += 1
    with one.tp.waiting():
        pass
    assert one.tp.sent_bytes == 1
    assert one.tp.waited_s > 0
    for axis in (other.tp, one.dp):
        assert axis.sent_bytes == axis.waited_s == 0


def test_a_second_mesh_in_the_same_process() -> None:
    """Of another shape; the first still works."""

    def sums() -> tuple[list[int], list[int], dict[str, float]]:
        first = ParallelMesh.create(tp=2, pp=2, device=CPU)
        second = ParallelMesh.create(tp=4, pp=1, device=CPU)
        value = torch.tensor([dist.get_rank()])
        by_first = all_reduce(value.clone(), first.tp).tolist()
        return by_first, all_reduce(value.clone(), second.tp).tolist(), first.sent_bytes()

    # 2 · (2 − 1)/2 of one int64; the second mesh counts its own.
    assert run_ranks(sums, 4) == [
        (first, [6], {**NOTHING, "tp": 8}) for first in ([1], [1], [5], [5])
    ]


def test_bytes_are_counted_for_the_axes_of_the_layout_and_by_purpose() -> None:
    """The ends of a pipeline are on pp, new weights on dp, all ranks of a stage on world."""

    def sent() -> tuple[dict[tuple[str, str], float], dict[str, float]]:
        mesh = ParallelMesh.create(tp=1, pp=2, device=CPU)
        all_reduce(torch.zeros(10), mesh.embedding, purpose="weight gradients")
        all_reduce(torch.zeros(20), mesh.dp, purpose="weight gradients")
        all_gather(torch.zeros(40), mesh.weights, "weights")
        all_reduce(torch.zeros(80), mesh.stage, purpose="scales")
        all_reduce(torch.zeros(160), mesh.stage)
        return mesh.sent(), mesh.sent_bytes()

    # An all-reduce over two ranks sends 2 · (2 − 1)/2 times its 4-byte numbers, an all-gather half
    # of what it gives.
    by_purpose = {
        ("pp", "weight gradients"): 4 * 10,
        ("dp", "weight gradients"): 4 * 20,
        ("dp", "weights"): 4 * 40,
        ("world", "scales"): 4 * 80,
        ("world", "control"): 4 * 160,
    }
    by_axis = {**NOTHING, "pp": 4 * 10, "dp": 4 * 60, "world": 4 * 240}
    assert run_ranks(sent, 4) == [(by_purpose, by_axis)] * 4


def test_time_in_collectives_is_counted_on_their_axis() -> None:

    def waited() -> tuple[dict[str, float], float]:
        mesh = ParallelMesh.create(tp=2, pp=1, device=CPU)
        started = time.perf_counter()
        pending = start_all_reduce(torch.zeros(1), mesh.tp)
        assert mesh.tp.waited_s == 0  # the rank goes on
        pending.wait()
        return mesh.waited_s(), time.perf_counter() - started

    for by_axis, elapsed in run_ranks(waited, 2):
        assert 0 < by_axis.pop("tp") < elapsed
        assert set(by_axis.values()) == {0}


def test_islands_are_grids_of_their_own() -> None:
    """Consecutive ranks; those with the same place in each meet on ``outer``."""

    def facts() -> dict[str, tuple[int, int, list[int]]]:
        mesh = ParallelMesh.create(2, 1, CPU, topology=Topology(islands=2))
        outer, island = mesh.outer, mesh.island
        return {
            **describe(mesh),
            "outer": (outer.size, outer.rank, members(outer)),
            "island": (island.size, island.rank, members(island)),
        }

    for rank, found in enumerate(run_ranks(facts, 8)):
        first, place = rank // 4 * 4, rank % 4
        assert found["world"] == (8, rank, [*range(8)])
        assert found["island"] == (4, place, [first + i for i in range(4)])
        assert found["outer"] == (2, rank // 4, [place, place + 4])
        tp = place // 2 * 2
        assert found["tp"] == (2, place % 2, [first + tp, first + tp + 1])
        assert found["dp"] == (2, place // 2, [first + place % 2, first + place % 2 + 2])


def levels_of(tp: int, dp: int, topology: Callable[[int], Topology]) -> list[Any]:
    """By rank: the world's numbers of the ranks in both levels, or None."""

    def facts() -> Any:
        rank = dist.get_rank()
        levels = ParallelMesh.create(tp, 1, CPU, topology=topology(rank)).dp_levels
        return None if levels is None else (members(levels.intra), members(levels.inter))

    return run_ranks(facts, tp * dp)


def test_levels_as_they_are_named() -> None:
    found = levels_of(2, 4, lambda rank: Topology(dp_intra=2, is_hierarchical=True))
    assert found[0] == ([0, 2], [0, 4])
    assert found[3] == ([1, 3], [3, 7])
    assert found[6] == ([4, 6], [2, 6])


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        ([0, 1, 0, 1], ([0, 1], [0, 2])),  # two hosts of two
        ([0, 1, 2, 0, 1, 2], ([0, 1, 2], [0, 3])),
        ([0, 1, 2, 3], None),  # one host
        ([0, 0, 0, 0], None),  # a host each: nothing is inside
        ([0, 1, 2, 0], None),  # no equal runs
    ],
)
def test_levels_as_hosts_are(local_ranks: list[int], expected: Any) -> None:
    def topology(rank: int) -> Topology:
        return Topology(is_hierarchical=None, local_rank=local_ranks[rank])

    assert levels_of(1, len(local_ranks), topology)[0] == expected


def test_levels_where_tp_shares_a_host() -> None:
    """Two hosts of four ranks: TP 2 leaves each DP group two ranks on a host."""
    found = levels_of(2, 4, lambda rank: Topology(is_hierarchical=None, local_rank=rank % 4))
    assert found[1] == ([1, 3], [1, 5])


def test_levels_that_hosts_do_not_allow() -> None:
    def refused() -> str:
        with pytest.raises(UserError) as caught:
            ParallelMesh.create(1, 1, CPU, topology=Topology(is_hierarchical=True, local_rank=0))
        return str(caught.value)

    (problem, other) = run_ranks(refused, 2)
    assert problem == other
    assert problem.startswith("communication.topology: hierarchical needs DP groups with several")
