"""Samples, dealt to data-parallel ranks and stacked into the microbatches of a step.

Letters: m microbatches of a rank, B samples in each, S tokens in a sample, G samples in a step.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megabit.data.sampler import HeldOutWindows, TrainingSampler
from megabit.data.step_plan import SampleWindows, StepPlan


@dataclass(frozen=True)
class Batch:
    """What one rank computes on in one step."""

    inputs: torch.Tensor
    """int64 [m, B, S]"""
    targets: torch.Tensor
    """int64 [m, B, S]: the token after each input."""
    mask: torch.Tensor
    """bool [m, B, S]: which predictions count."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.inputs.to(device), self.targets.to(device), self.mask.to(device))


class BatchSource:
    """The training batches of one data-parallel rank.

    A step takes the next G samples of the run's stream, whatever the layout; rank d gets the d-th
    of ``dp_size`` equal runs of them, in order.

    Args:
        plan: G of each step, each a multiple of ``micro_batch_size · dp_size``.
        micro_batch_size: B.
        left_out: samples that are not in the stream.
    """

    def __init__(
        self,
        sampler: TrainingSampler,
        plan: StepPlan,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        left_out: SampleWindows,
    ) -> None:
        for size in plan.batch_sizes:
            if size % (micro_batch_size * dp_size) or not 0 <= dp_rank < dp_size:
                raise ValueError(
                    f"rank {dp_rank} of {dp_size}: cannot deal {size} samples "
                    f"in microbatches of {micro_batch_size}"
                )
        self.sampler = sampler
        self.plan = plan
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.left_out = left_out

    def batch(self, step: int) -> Batch:
        """This rank's part of step ``step`` (0-based)."""
        count = self.plan.batch_size(step) // self.dp_size
        first = self.plan.samples_before(step) + self.dp_rank * count
        numbers = [self.left_out.sample(first + i) for i in range(count)]
        tokens = self.sampler.samples(numbers)
        return _stack(tokens, np.ones_like(tokens[:, 1:], dtype=np.bool_), self.micro_batch_size)


def held_out_batches(
    windows: HeldOutWindows,
    num_microbatches: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    limit: int | None = None,
) -> Iterator[Batch]:
    """The held-out windows of one data-parallel rank, for forward passes only.

    All ranks get equally many batches of one shape, so that they meet in every collective; what is
    missing at the end is filled with masked windows.

    Args:
        num_microbatches: m.
        micro_batch_size: B.
        limit: use only so many windows, spread evenly over the split.
    """
    count = len(windows) if limit is None else min(limit, len(windows))
    chosen = [i * len(windows) // count for i in range(count)]
    per_batch = num_microbatches * micro_batch_size
    for first in range(0, count, per_batch * dp_size):
        start = first + dp_rank * per_batch
        dealt = [windows.window(i) for i in chosen[start : start + per_batch]]
        dealt += [windows.padding()] * (per_batch - len(dealt))
        tokens, mask = zip(*dealt, strict=True)
        yield _stack(np.stack(tokens), np.stack(mask), micro_batch_size)


class Prefetcher:
    """Reads ahead in a thread, so that a step does not wait for the disk.

    Args:
        first_step: of the first batch.
        depth: batches that are kept ready.
    """

    def __init__(self, source: BatchSource, first_step: int, depth: int) -> None:
        self._source = source
        self._step = first_step
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._closed = False
        # Guards the three above and is notified of every change to them.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """The next batch in order.

        Raises:
            BaseException: whatever reading it raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        """End the thread; at most the batch it is reading is finished first."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _read_ahead(self) -> None:
        try:
            while True:
                batch = self._source.batch(self._step)
                self._step += 1
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                    if self._closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _stack(
    tokens: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], micro_batch_size: int
) -> Batch:
    """Samples [m·B, S + 1] and their mask [m·B, S] as microbatches."""
    shape = (-1, micro_batch_size, mask.shape[1])
    return Batch(
        inputs=torch.from_numpy(tokens[:, :-1].reshape(shape)),
        targets=torch.from_numpy(tokens[:, 1:].reshape(shape)),
        mask=torch.from_numpy(mask.reshape(shape)),
    )
