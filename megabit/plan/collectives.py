"""How long a message takes on a machine: rings and pairs of α–β links.

For n bytes over r ranks, of which k are on a node, with α and β of the link:

    all-gather, reduce-scatter   (r − 1)·α + (r − 1)/r · n/β
    all-reduce                   twice that, or, where it is sooner, a double binary tree:
                                 2·log₂(r)·α + 2·n/β
    all-to-all                   (r − 1)·α + the longer of what stays, (k − 1)/r · n/β inside, and
                                 what leaves, (r − k)/r · n/β between nodes
    send                         α + n/β

Rings follow nodes, so over several nodes a ring's bytes pass through the network adapters of its k
ranks on a node together: β is the smaller of a link's inside and k links' between nodes, as if NCCL
laid a ring through each adapter. A double tree reaches the same β (Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). α is that between
nodes as soon as there are several. Nobody else uses the network.

Where ranks share the cores of a host, α and β are those that were measured for as many ranks in as
many groups at a time; of numbers that were not measured, the nearest.
"""

import math

from megabit.plan.machine import AlphaBeta, GroupLink, Machine
from megabit.training.messages import Kind, Message


def seconds(
    message: Message, machine: Machine, ranks_of_axis: int, stride: int, groups: int = 1
) -> float:
    """Of ``message``, all the times that it is sent.

    Args:
        ranks_of_axis: that take part.
        stride: between them, in ranks of the world: 1 for TP, TP for DP, TP · DP for the pipeline.
        groups: of so many ranks that send the like at the same time.
    """
    if ranks_of_axis < 2 or not message.times:
        return 0.0
    once = _once(message.kind, message.num_bytes, machine, ranks_of_axis, stride, groups)
    return message.times * once


def ring_s(kind: Kind, num_bytes: float, ranks: int, link: AlphaBeta) -> float:
    """Of one message over equal links."""
    match kind:
        case "send":
            return link.alpha_s + num_bytes / link.bytes_per_s
        case "all_reduce":
            return 2 * _steps(num_bytes, ranks, link)
        case _:
            return _steps(num_bytes, ranks, link)


def tree_s(num_bytes: float, ranks: int, link: AlphaBeta) -> float:
    """Of an all-reduce in a double binary tree."""
    return 2 * (math.log2(ranks) * link.alpha_s + num_bytes / link.bytes_per_s)


def ranks_on_node(machine: Machine, ranks: int, stride: int) -> int:
    """How many of a group are on each node, where they are ``stride`` ranks apart."""
    return max(1, min(ranks, machine.nodes_of // stride))


def _steps(num_bytes: float, ranks: int, link: AlphaBeta) -> float:
    return (ranks - 1) * (link.alpha_s + num_bytes / ranks / link.bytes_per_s)


def _once(
    kind: Kind, num_bytes: float, machine: Machine, ranks: int, stride: int, groups: int
) -> float:
    network = machine.network
    if network.measured:
        return ring_s(kind, num_bytes, ranks, _nearest(machine, kind, ranks, groups))
    on_node = ranks_on_node(machine, ranks, stride)
    intra = network.intra[kind]
    if on_node == ranks or not network.inter:
        one_way = ring_s(kind, num_bytes, ranks, intra)
        return min(one_way, tree_s(num_bytes, ranks, intra)) if kind == "all_reduce" else one_way
    inter = network.inter[kind]
    match kind:
        case "send":
            return ring_s(kind, num_bytes, ranks, inter)
        case "all_to_all":
            stays = (on_node - 1) / ranks * num_bytes / intra.bytes_per_s
            leaves = (ranks - on_node) / ranks * num_bytes / inter.bytes_per_s
            return (ranks - 1) * inter.alpha_s + max(stays, leaves)
    rate = min(intra.bytes_per_s, on_node * inter.bytes_per_s)
    link = AlphaBeta(inter.alpha_s, rate)
    one_way = ring_s(kind, num_bytes, ranks, link)
    return min(one_way, tree_s(num_bytes, ranks, link)) if kind == "all_reduce" else one_way


def _nearest(machine: Machine, kind: Kind, ranks: int, groups: int) -> AlphaBeta:
    """The measured link for such groups."""
    alike = [each for each in machine.network.measured if each.kind == kind]
    if not alike:
        return machine.network.intra[kind]

    def distance(measured: GroupLink) -> tuple[float, float, float]:
        total, wanted = measured.ranks * measured.groups, ranks * groups
        return (
            abs(math.log2(total / wanted)),  # how crowded the cores are counts most
            abs(math.log2(measured.ranks / ranks)),
            measured.groups,
        )

    return min(alike, key=distance).link
