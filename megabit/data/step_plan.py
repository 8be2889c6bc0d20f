"""Which samples each step of a run takes: the batch ramp, and samples that are left out.

A run is a stream of samples. Step s takes the next ``batch_size(s)`` of them; everything that
changes over a run is a function of the tokens consumed, ``tokens_before(s)``, so none of it depends
on how many steps they made. Samples that are left out, after a rollback or by the user's wish, are
not in the stream: those behind them move up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megabit.config import Config


@dataclass(frozen=True)
class StepPlan:
    """The batch sizes of a run: those of the ramp, then always the same.

    Args:
        ramp: samples in each of the first steps.
        global_batch_size: in every later one.
        seq_length: tokens in a sample.
        steps: of the run.
    """

    ramp: tuple[int, ...]
    global_batch_size: int
    seq_length: int
    steps: int

    @staticmethod
    def of(config: Config) -> "StepPlan":
        """As configured."""
        train, length = config.train, config.data.seq_length
        ramp = tuple(_ramp(config))
        plan = StepPlan(ramp, train.global_batch_size, length, train.steps)
        if train.tokens is None:
            return plan
        return StepPlan(ramp, train.global_batch_size, length, plan.steps_for(train.tokens))

    def batch_size(self, step: int) -> int:
        """Samples that step ``step`` (0-based) takes, over all ranks."""
        return self.ramp[step] if step < len(self.ramp) else self.global_batch_size

    def samples_before(self, step: int) -> int:
        """Samples of the stream that the steps before ``step`` take."""
        ramped = sum(self.ramp[:step])
        return ramped + max(step - len(self.ramp), 0) * self.global_batch_size

    def tokens_before(self, step: int) -> int:
        """The same in tokens."""
        return self.samples_before(step) * self.seq_length

    @property
    def total_tokens(self) -> int:
        """Of the whole run."""
        return self.tokens_before(self.steps)

    def steps_for(self, tokens: int) -> int:
        """The least number of steps that consume ``tokens``."""
        samples = -(-tokens // self.seq_length)
        taken = 0
        for step, size in enumerate(self.ramp):
            if taken >= samples:
                return step
            taken += size
        return len(self.ramp) + max(0, -(-(samples - taken) // self.global_batch_size))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All that occur, growing."""
        return tuple(sorted({*self.ramp, self.global_batch_size}))


def _ramp(config: Config) -> Iterable[int]:
    """Batch sizes while the ramp lasts: it is cut into equally long parts, one for each size."""
    train = config.train
    if train.batch_ramp_start is None:
        return
    start, end = train.batch_ramp_start, train.global_batch_size
    sizes = range(start, end, train.batch_ramp_increment)
    tokens = 0
    while tokens < train.batch_ramp_tokens:
        size = sizes[tokens * len(sizes) // train.batch_ramp_tokens]
        yield size
        tokens += size * config.data.seq_length


@dataclass(frozen=True)
class SampleWindows:
    """Samples that are left out: ``[start, stop)`` in the sampler's numbers; sorted, apart."""

    windows: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(pairs: Sequence[int]) -> "SampleWindows":
        """From ``[a, b, c, d, …]``."""
        return SampleWindows().adding(zip(pairs[::2], pairs[1::2], strict=True))

    def adding(self, windows: Iterable[tuple[int, int]]) -> "SampleWindows":
        """These and others; what touches or overlaps becomes one."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.windows, *windows]):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return SampleWindows(tuple(merged))

    def before(self, sample: int) -> "SampleWindows":
        """What of them is below the sampler's number ``sample``."""
        return SampleWindows(
            tuple((start, min(stop, sample)) for start, stop in self.windows if start < sample)
        )

    def sample(self, position: int) -> int:
        """The sampler's number of what is at ``position`` of the stream."""
        for start, stop in self.windows:
            if position < start:
                break
            position += stop - start
        return position
