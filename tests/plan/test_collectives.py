"""α–β formulas: a ring, a tree, several ranks of a node, and links that were measured."""

from dataclasses import replace

import pytest

from megabit.plan.catalog import known_machine
from megabit.plan.collectives import ranks_on_node, ring_s, seconds, tree_s
from megabit.plan.machine import AlphaBeta, GroupLink, Machine, Network
from megabit.training.messages import Kind, Message

INTRA, INTER = AlphaBeta(1e-6, 400e9), AlphaBeta(5e-6, 50e9)
KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


def cluster(nodes_of: int = 8) -> Machine:
    network = Network(dict.fromkeys(KINDS, INTRA), dict.fromkeys(KINDS, INTER))
    return replace(known_machine("h100", nodes_of, "ib400"), network=network)


def message(kind: Kind, num_bytes: float, ranks: int, times: int = 1) -> Message:
    return Message("dp", "weights", kind, num_bytes, ranks, times)


def took(kind: Kind, num_bytes: float, ranks: int, stride: int, nodes_of: int = 8) -> float:
    return seconds(message(kind, num_bytes, ranks), cluster(nodes_of), ranks, stride)


def test_inside_a_node_messages_take_what_a_ring_takes() -> None:
    n = 1e9
    assert took("all_gather", n, 4, 1) == pytest.approx(3e-6 + 0.75 * n / 400e9)
    assert took("reduce_scatter", n, 4, 1) == took("all_gather", n, 4, 1)
    assert took("all_reduce", n, 4, 1) == pytest.approx(2 * took("all_gather", n, 4, 1))
    assert took("all_to_all", n, 4, 2) == took("all_gather", n, 4, 1)
    assert took("send", n, 2, 4) == pytest.approx(1e-6 + n / 400e9)


def test_over_nodes_a_ring_has_the_adapters_of_its_ranks_on_a_node() -> None:
    n = 8e9
    alone, four = took("all_gather", n, 16, 8), took("all_gather", n, 16, 2)
    assert alone == pytest.approx(15 * 5e-6 + 15 / 16 * n / 50e9)
    assert four == pytest.approx(15 * 5e-6 + 15 / 16 * n / 200e9)
    # All eight have as much as the links inside.
    assert took("all_gather", n, 16, 1) == pytest.approx(15 * 5e-6 + 15 / 16 * n / 400e9)


def test_what_is_swapped_between_nodes_goes_through_each_ranks_own_adapter() -> None:
    n = 8e9
    assert took("all_to_all", n, 16, 1) == pytest.approx(15 * 5e-6 + 8 / 16 * n / 50e9)


def test_stages_on_other_nodes_are_sent_to_between_nodes() -> None:
    assert took("send", 1e6, 4, 8) == pytest.approx(5e-6 + 1e6 / 50e9)
    assert ranks_on_node(cluster(), 4, 8) == 1


def test_many_ranks_agree_on_a_number_in_a_tree() -> None:
    assert took("all_reduce", 8, 1024, 1) == pytest.approx(tree_s(8, 1024, INTER), rel=1e-3)
    assert took("all_reduce", 8, 1024, 1) < ring_s("all_reduce", 8, 1024, INTER)


def test_times_count_and_one_rank_sends_nothing() -> None:
    once = message("all_reduce", 1e6, 4)
    thrice = replace(once, times=3)
    assert seconds(thrice, cluster(), 4, 1) == pytest.approx(3 * seconds(once, cluster(), 4, 1))
    assert seconds(once, cluster(), 1, 1) == 0


def test_measured_groups_are_preferred_and_crowding_counts_most() -> None:
    links = tuple(
        GroupLink("all_reduce", ranks, groups, AlphaBeta(alpha, 1e9))
        for ranks, groups, alpha in ((2, 1, 1e-5), (2, 2, 2e-5), (4, 1, 3e-5))
    )
    network = Network(dict.fromkeys(KINDS, INTRA), measured=links)
    machine = replace(cluster(), network=network)

    def alpha(ranks: int, groups: int) -> float:
        return seconds(message("all_reduce", 0, ranks), machine, ranks, 1, groups) / 2 / (ranks - 1)

    assert alpha(2, 1) == pytest.approx(1e-5)
    assert alpha(2, 2) == pytest.approx(2e-5)
    assert alpha(4, 1) == pytest.approx(3e-5)
    assert alpha(4, 2) == pytest.approx(3e-5)  # eight ranks: nearest to four in one group
    assert alpha(2, 4) == pytest.approx(2e-5)
    # What was not measured in groups is as between two.
    assert seconds(message("send", 0, 2), machine, 2, 1, 2) == pytest.approx(1e-6)
