"""Weight gradients apart from the rest of a backward pass.

A pipeline's other stages wait for the gradients of activations (B), nobody before the update for
those of weights (W). So a backward pass whose forward pass carried a queue computes the former only
and puts the products of the latter into the queue, to be run at any time later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megabit.tensor_parallel.parameter import ShardedParameter


class WeightGradientQueue:
    """The weight-gradient products of one microbatch on one stage, put off until the pipeline's W.

    They hold the tensors that they multiply, and communicate nothing.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        """How many are put off; layers with one input count as one."""
        return len(self._waiting)

    def put(self, compute: Callable[[], None]) -> None:
        """Put off ``compute``, which hands over what it computes (``add_gradient``)."""
        self._waiting.append(compute)

    @torch.no_grad()
    def run(self) -> None:
        """Compute all, in the order in which they were put; each frees what it held."""
        while self._waiting:
            self._waiting.popleft()()


def weight_gradient(
    weight: ShardedParameter, compute: Callable[[], Tensor], queue: WeightGradientQueue | None
) -> Tensor | None:
    """What an autograd function's backward returns for ``weight``, whose gradient is ``compute()``.

    With a queue that is None: the gradient is computed, and handed over, when the queue runs.
    """
    return weight_gradients([weight], lambda: [(0, compute())], queue)[0]


def weight_gradients(
    weights: Sequence[ShardedParameter],
    compute: Callable[[], Iterable[tuple[int, Tensor]]],
    queue: WeightGradientQueue | None,
) -> list[Tensor | None]:
    """The same of several weights at once: ``compute`` gives numbers of weights and gradients."""
    returned: list[Tensor | None] = [None] * len(weights)
    if queue is None:
        for i, gradient in compute():
            returned[i] = weights[i].give_gradient(gradient)
        return returned

    def hand_over() -> None:
        for i, gradient in compute():
            weights[i].add_gradient(gradient)

    queue.put(hand_over)
    return returned
