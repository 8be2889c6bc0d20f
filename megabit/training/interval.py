"""From the reports of single steps on each rank to one line for all of them."""

import math
import time
from collections import defaultdict
from itertools import product
from typing import get_args

import torch

from megabit.data.corpus import SplitInfo
from megabit.reduce import Purpose, all_reduce
from megabit.telemetry import IntervalMetrics
from megabit.training.evaluate import bits_per_byte
from megabit.training.step import StepReport, TrainingState

MB = 1e6
SENT = [*product(("tp", "pp", "dp", "world"), get_args(Purpose))]
"""(axis, purpose) of what is counted."""


class Interval:
    """Collects the steps since the last log line."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._reports: list[StepReport] = []
        self._seconds = 0.0
        self._sent: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._started = 0.0
        self._sent_before: dict[tuple[str, str], float] = {}

    @property
    def steps(self) -> int:
        """How many have been collected."""
        return len(self._reports)

    def begin_step(self) -> None:
        """Before the step's data is waited for; what happens between steps is not counted."""
        self._started = time.perf_counter()
        self._sent_before = self._state.mesh.sent()

    def end_step(self, report: StepReport) -> None:
        """After the update."""
        self._reports.append(report)
        self._seconds += time.perf_counter() - self._started
        for key, total in self._state.mesh.sent().items():
            self._sent[key] += total - self._sent_before.get(key, 0.0)

    def metrics(self, step: int, split: SplitInfo) -> IntervalMetrics:
        """The means over the interval; collective over the world.

        Args:
            step: steps done.
            split: the training split, for bits per byte.
        """
        mesh, count = self._state.mesh, self.steps
        # Every DP rank has the same codes; the others' may still be on their way.
        zeros, codes = self._state.stages.zero_fraction() if mesh.dp.rank == 0 else (0, 0)
        own = [
            *(self._sent[key] for key in SENT),
            sum(report.pipeline.seconds - report.pipeline.wait_s for report in self._reports),
            zeros,
            codes,
        ]
        *all_sent, busy_s, zeros, codes = all_reduce(
            torch.tensor(own, dtype=torch.float64, device=mesh.device), mesh.world
        ).tolist()
        pipeline_s = sum(report.pipeline.seconds for report in self._reports)
        longest_s = all_reduce(
            torch.tensor(pipeline_s, dtype=torch.float64, device=mesh.device), mesh.world, "max"
        ).item()
        sent = {
            f"{axis} {purpose}": total / count / MB
            for (axis, purpose), total in zip(SENT, all_sent, strict=True)
            if total
        }
        by_axis = dict.fromkeys(("tp", "pp", "dp", "world"), 0.0)
        for name, megabytes in sent.items():
            by_axis[name.split()[0]] += megabytes
        updates = [report for report in self._reports if not report.is_skipped]
        loss = grad_norm = math.nan
        if updates:
            tokens = sum(report.num_tokens for report in updates)
            loss = sum(report.loss * report.num_tokens for report in updates) / tokens
            grad_norm = sum(report.grad_norm for report in updates) / len(updates)
        return IntervalMetrics(
            step=step,
            loss=loss,
            bits_per_byte=bits_per_byte(loss, split),
            grad_norm=grad_norm,
            skipped=count - len(updates),
            lr=self._reports[-1].lr,
            tokens_per_s=sum(report.num_tokens for report in self._reports) / self._seconds,
            zero_fraction=zeros / codes if codes else 0.0,
            sent_mb=by_axis,
            sent_by_purpose_mb=sent,
            bubble=mesh.world.size * longest_s / busy_s - 1 if mesh.pp.size > 1 else 0.0,
        )
