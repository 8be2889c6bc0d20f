"""The grid of ranks: who shares which axis, and which groups exist."""

import pytest
import torch
import torch.distributed as dist

from megabit.launch import run_ranks
from megabit.mesh import Axis, ParallelMesh
from megabit.reduce import all_reduce

CPU = torch.device("cpu")


def members(axis: Axis) -> list[int]:
    """The world's numbers of the ranks along ``axis``, as its group has them."""
    return dist.get_process_group_ranks(axis.group) if axis.group is not None else []


def describe(mesh: ParallelMesh) -> dict[str, tuple[int, int, list[int]]]:
    axes = (mesh.tp, mesh.pp, mesh.dp, mesh.world, mesh.embedding)
    return {axis.name: (axis.size, axis.rank, members(axis)) for axis in axes}


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (2, 2, 2), (2, 4, 1), (1, 4, 2)],
)
def test_the_grid(tp: int, pp: int, dp: int) -> None:
    """Neighbours share a TP group; then come DP and, with the largest stride, PP."""
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


def test_one_process_has_no_groups() -> None:
    mesh = ParallelMesh()
    assert all(axis == (1, 0, []) for axis in describe(mesh).values())
    assert mesh.is_main
    assert mesh.sent_bytes() == {"tp": 0, "pp": 0, "dp": 0}
    assert not dist.is_initialized()


def test_single_meshes_share_nothing() -> None:
    one, other = ParallelMesh(), ParallelMesh()
    one.tp.sent_bytes += 1
    assert other.tp.sent_bytes == 0
    assert one.dp.sent_bytes == 0


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
        (first, [6], {"tp": 8, "pp": 0, "dp": 0}) for first in ([1], [1], [5], [5])
    ]


def test_embedding_bytes_count_as_pipeline_bytes() -> None:
    def sent() -> dict[str, float]:
        mesh = ParallelMesh.create(tp=1, pp=2, device=CPU)
        all_reduce(torch.zeros(10), mesh.embedding)
        return mesh.sent_bytes()

    assert run_ranks(sent, 2) == [{"tp": 0, "pp": 40, "dp": 0}] * 2
