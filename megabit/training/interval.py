"""From the reports of single steps on each rank to one line for all of them."""

import time

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
        self._sent = dict.fromkeys(state.mesh.sent_bytes(), 0.0)
        self._started = 0.0
        self._sent_before: dict[str, float] = {}

    def begin_step(self) -> None:
        """Before the step's data is waited for; what happens between steps is not counted."""
        self._started = time.perf_counter()
        self._sent_before = self._state.mesh.sent_bytes()

    def end_step(self, report: StepReport) -> None:
        """After the update."""
        self._reports.append(report)
        self._seconds += time.perf_counter() - self._started
        for axis, total in self._state.mesh.sent_bytes().items():
            self._sent[axis] += total - self._sent_before[axis]

    def metrics(self, step: int, split: SplitInfo) -> IntervalMetrics:
        """The means over the interval; collective over the world.

        Args:
            step: steps done.
            split: the training split, for bits per byte.
        """
        mesh, count = self._state.mesh, len(self._reports)
        zeros, codes = self._state.stage.zero_fraction()
        if mesh.dp.rank:  # every DP rank has the same codes
            zeros = codes = 0
        own = [
            *self._sent.values(),
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
            sent_mb={
                axis: total / count / MB for axis, total in zip(self._sent, all_sent, strict=True)
            },
            bubble=wait_s / pipeline_s,
        )
