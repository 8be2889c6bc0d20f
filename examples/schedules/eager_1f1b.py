"""A schedule of your own, to begin with: 1F1B that runs forwards early, to hide slow links.

    python -m megabit train ... parallel.schedule=examples/schedules/eager_1f1b.py:eager_1f1b

In 1F1B a rank waits in every round for a message to go to the next rank and one to come back. Here
each rank has run one more forward for every hop to the last rank, so that a message can take up to
half as long as a forward and a backward pass before anyone waits for it. With 4 ranks, 64
microbatches and messages half as long as a forward pass, ranks are idle for 0.06 of the time that
they compute, in 1F1B for 0.31 (F = B = W). It costs memory: rank 0 keeps the activations of 2p − 1
microbatches instead of p.

What the function returns is proved before a rank runs it: if something is missing, twice, in a
wrong order, or would hang, you are told which rank and what.
"""

from megabit.pipeline.actions import Backward, Compute, Forward, Schedule
from megabit.pipeline.placement import Placement


def eager_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """The order in which each rank computes; the messages between ranks follow from it.

    Args:
        ranks: parallel.pp.
        microbatches: of a step, on each data-parallel rank.
        chunks: parallel.vpp, the stages (runs of layers) that each rank has.
    """
    if chunks != 1:
        raise ValueError("needs parallel.vpp=1")
    orders = []
    for rank in range(ranks):
        # How many forwards a rank is ahead of its backwards. 1F1B has ranks - 1 - rank here.
        ahead = min(2 * (ranks - 1 - rank), microbatches)
        order: list[Compute] = [Forward(i) for i in range(ahead)]
        for i in range(microbatches):
            if i + ahead < microbatches:
                order.append(Forward(i + ahead))
            # Both gradients at once. InputGradient(i), and WeightGradient(i) at any time after it,
            # would let the rank before go on sooner.
            order.append(Backward(i))
        orders.append(order)
    # Stage s on rank s. With more chunks there are Placement.loop(ranks, chunks) and Placement.v.
    return Schedule(Placement.loop(ranks), microbatches, orders)
