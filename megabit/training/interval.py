"""From the reports of single steps on each rank to one line for all of them."""

import torch

from megabit.data.corpus import SplitInfo
from megabit.reduce import all_reduce
from megabit.telemetry import IntervalMetrics
from megabit.training.evaluate import bits_per_byte
from megabit.training.step import StepReport, TrainingState

MB = 1e6


class Interval:
    """Collects the steps since the last log line."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._reports: list[StepReport] = []
        self._seconds = 0.0
        self._sent_before = state.mesh.sent_bytes()

    def add(self, report: StepReport, seconds: float) -> None:
        """``seconds``: wall time of the step, with the wait for its data."""
        self._reports.append(report)
        self._seconds += seconds

    def metrics(self, step: int, split: SplitInfo) -> IntervalMetrics:
        """The means over the interval; collective over the world.

        Args:
            step: steps done.
            split: the training split, for bits per byte.
        """
        mesh, count = self._state.mesh, len(self._reports)
        sent = mesh.sent_bytes()
        zeros, codes = self._state.stage.zero_fraction()
        if mesh.dp.rank:  # every DP rank has the same codes
            zeros = codes = 0
        own = [
            *(sent[axis] - self._sent_before[axis] for axis in sent),
            sum(report.pipeline_s for report in self._reports),
            sum(report.wait_s for report in self._reports),
            zeros,
            codes,
        ]
        *all_sent, pipeline_s, wait_s, zeros, codes = all_reduce(
            torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world
        ).tolist()
        tokens = sum(report.num_tokens for report in self._reports)
        loss = sum(report.loss * report.num_tokens for report in self._reports) / tokens
        return IntervalMetrics(
            step=step,
            loss=loss,
            bits_per_byte=bits_per_byte(loss, split),
            grad_norm=sum(report.grad_norm for report in self._reports) / count,
            lr=self._reports[-1].lr,
            tokens_per_s=tokens / self._seconds,
            zero_fraction=zeros / codes if codes else 0.0,
            sent_mb={axis: total / count / MB for axis, total in zip(sent, all_sent, strict=True)},
            bubble=wait_s / pipeline_s,
        )
