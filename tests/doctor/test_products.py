"""Arithmetic of real ranks: one that is wrong, one that is slow; and the words."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megabit.doctor import products
from megabit.doctor.products import Products
from megabit.doctor.ranks import Ranks
from tests.doctor.clusters import cluster_of, on_ranks

GOOD = Products("CPU avx2 with 1 threads", 30e9, "aa", is_exact=True, is_repeatable=True)


def words(*everyone: Products) -> list[str]:
    found = products.judge(everyone, cluster_of(len(everyone)))
    return [f"{finding.severity}: {finding.what}" for finding in found]


def test_healthy_ranks_have_the_same_bits() -> None:
    for everyone in on_ranks(lambda ranks: products.measure(ranks, 0.05), 3):
        assert len({found.digest for found in everyone}) == 1
        assert all(found.is_exact and found.is_repeatable for found in everyone)
        assert all(found.flops > 0 for found in everyone)


def test_the_rank_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ranks: Ranks) -> list[Products]:
        if ranks.rank == 1:  # its matrices are not those of the others
            monkeypatch.setattr(products, "SEED", 21)
        return products.measure(ranks, 0.02)

    for everyone in on_ranks(run, 3):
        odd = list(products.judge(everyone, cluster_of(3)))
        assert "rank 1: other bits than 2 ranks of the same kind have" in [f.what for f in odd]


def test_who_is_right_is_not_known_of_two() -> None:
    (said,) = words(GOOD, replace(GOOD, digest="bb"))
    assert said == (
        "wrong: ranks of the same kind have different bits, and no majority tells who is right: "
        "rank 0; rank 1"
    )


def test_other_devices_may_have_other_bits() -> None:
    assert not words(GOOD, GOOD, replace(GOOD, kind="CPU avx512", digest="bb"))


def test_wrong_and_fickle_ranks() -> None:
    assert words(GOOD, replace(GOOD, is_exact=False), replace(GOOD, is_repeatable=False)) == [
        "wrong: rank 1: gets wrong results in integer products",
        "wrong: rank 2: gets another result when it computes the same again",
    ]


def test_a_slow_rank_is_compared_with_its_likes() -> None:
    slow = replace(GOOD, flops=20e9)
    assert words(GOOD, GOOD, slow) == [
        "warning: rank 2: 20 GFLOP/s, typical of its kind (CPU avx2 with 1 threads) is 30 GFLOP/s"
    ]
    assert not words(GOOD, GOOD, replace(slow, kind="CPU avx512"))


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2,
    reason="cannot bind processes to one of several cores here",
)
def test_a_rank_whose_core_is_busy_is_named() -> None:
    """Seven other processes have the core of rank 1, so that it has an eighth of it."""
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def run(ranks: Ranks) -> list[Products]:
        os.sched_setaffinity(0, {second if ranks.rank == 1 else first})
        return products.measure(ranks, 1.2)

    burn = f"import os; os.sched_setaffinity(0, {{{second}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(7)]
    try:
        everyone = on_ranks(run, 2)[0]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    (said,) = words(*everyone)
    assert said.startswith("warning: rank 1: ")
