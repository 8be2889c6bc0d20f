"""The size of gradient buckets, found once by measuring: ``communication.tune_buckets``.

Small buckets begin to travel earlier, large ones use the network better; which of them hides more
of the reduction depends on the network. In the first steps the time is measured in which the rank
that waits longest is blocked over DP. Where that is above a tenth of the step, sizes of a quarter
and four times are tried, and further in the direction that was faster, a few steps each. The
fastest one stays, and is kept with the run. To change the size changes no bit of the training.

Ranks agree on every measurement, so all of them come to the same decision.
"""

import math
import statistics
from dataclasses import dataclass, field

import torch

from megabit.errors import UserError
from megabit.mesh import ParallelMesh
from megabit.reduce import all_reduce
from megabit.telemetry import Event, MetricsLog
from megabit.training.step import StepReport, TrainingState

EXPOSED_SHARE = 0.1
"""Of a step: below it nothing is tried."""
FACTOR = 4.0
SMALLEST_MB, LARGEST_MB = 0.25, 1024.0
TRIALS = 4
"""Sizes that are tried at most, beside the configured one."""
WARMUP = 1
"""Steps of each size that do not count."""


@dataclass(frozen=True)
class Trial:
    """What steps were like with one size: medians, of the slowest rank."""

    bucket_mb: float
    step_s: float
    exposed_s: float


def next_size(trials: list[Trial]) -> float | None:
    """What to try after ``trials``, of which the first is as configured; None: nothing more."""
    first, tried = trials[0], {trial.bucket_mb for trial in trials}
    if first.exposed_s <= EXPOSED_SHARE * first.step_s or len(trials) > TRIALS:
        return None
    neighbours = [first.bucket_mb / FACTOR, first.bucket_mb * FACTOR]
    best = fastest(trials).bucket_mb
    if best != first.bucket_mb:
        neighbours.append(best / FACTOR if best < first.bucket_mb else best * FACTOR)
    return next((n for n in neighbours if n not in tried and SMALLEST_MB <= n <= LARGEST_MB), None)


def fastest(trials: list[Trial]) -> Trial:
    """Of equally fast ones, the first."""
    return min(trials, key=lambda trial: trial.step_s)


@dataclass
class BucketTuner:
    """Measures and decides; to be told of each step, on all ranks."""

    state: TrainingState
    log: MetricsLog
    trials: list[Trial] = field(default_factory=list)
    bucket_mb: float = 0.0
    """The size that is measured now; 0 when there is nothing to find out any more."""
    _steps_s: list[float] = field(default_factory=list)
    _exposed_s: list[float] = field(default_factory=list)
    _waited_before: float = 0.0

    @staticmethod
    def of(state: TrainingState, log: MetricsLog) -> "BucketTuner":
        """Takes over what was found before; collective over the mesh.

        Raises:
            UserError: on a GPU, of which the host's clock does not see how long it waits.
        """
        config, progress, dp = state.config, state.progress, state.mesh.dp.size
        if config.communication.tune_buckets and state.mesh.device.type == "cuda":
            raise UserError(
                "communication.tune_buckets: measures by the host's clock, which does not see a "
                "GPU wait; on GPUs set parallel.bucket_mb by hand"
            )
        is_wanted = config.communication.tune_buckets and dp > 1
        if is_wanted and progress.bucket_mb.get(dp) is not None:
            state.optimizer.relayout(progress.bucket_mb[dp])
            is_wanted = False
        return BucketTuner(state, log, bucket_mb=config.parallel.bucket_mb if is_wanted else 0.0)

    def before_step(self) -> None:
        self._waited_before = _waited_over_dp(self.state.mesh)

    def after_step(self, report: StepReport, step: int) -> None:
        """``step`` steps are done; collective over the mesh now and then."""
        if not self.bucket_mb:
            return
        self._steps_s.append(sum(report.phases.values()))
        self._exposed_s.append(_waited_over_dp(self.state.mesh) - self._waited_before)
        if len(self._steps_s) < WARMUP + self.state.config.communication.tune_steps:
            return
        self.trials.append(self._measured())
        self._steps_s.clear()
        self._exposed_s.clear()
        following = next_size(self.trials)
        chosen = fastest(self.trials).bucket_mb
        if (following or chosen) != self.bucket_mb:
            self.state.optimizer.relayout(following or chosen)
        self.bucket_mb = following or 0.0
        if following is None:
            self.state.progress.bucket_mb[self.state.mesh.dp.size] = chosen
            self._tell(chosen, step)

    def _measured(self) -> Trial:
        """The present size's, agreed by all ranks."""
        own = [statistics.median(each[WARMUP:]) for each in (self._steps_s, self._exposed_s)]
        mesh = self.state.mesh
        packed = torch.tensor(own, dtype=torch.float64, device=mesh.device)
        step_s, exposed_s = all_reduce(packed, mesh.world, "max").tolist()
        return Trial(self.bucket_mb, step_s, exposed_s)

    def _tell(self, chosen: float, step: int) -> None:
        tried = "; ".join(
            f"{t.bucket_mb:g} MiB: step {t.step_s * 1e3:.0f} ms, {t.exposed_s * 1e3:.0f} ms exposed"
            for t in self.trials
        )
        evidence = {f"{t.bucket_mb:g}": t.step_s for t in self.trials}
        text = f"buckets of {chosen:g} MiB from now on ({tried})"
        self.log.event(Event(step, "tuning", "bucket_mb", f"{chosen:g}", evidence, text))


def _waited_over_dp(mesh: ParallelMesh) -> float:
    waited = mesh.waited_s()
    return math.fsum(waited[axis] for axis in ("dp", "dp_inter"))
