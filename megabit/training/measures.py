"""What a run does about the stability guard's verdicts.

``train_step`` has left the weights alone already where a verdict says ``skip`` or ``rollback``.
Here the rest is done, on all ranks alike: log each verdict with its evidence, lower the rate, go
over to full-precision activations, go back, stop. What is done is durable before training goes on
(``progress.MeasuresFile``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megabit.errors import RunError
from megabit.telemetry import Event, MetricsLog
from megabit.training import resume
from megabit.training.guard import Verdict
from megabit.training.progress import MeasuresFile
from megabit.training.run_files import RunFiles
from megabit.training.saver import Saver
from megabit.training.step import StepReport, TrainingState


class Stopped(RunError):
    """A rule has ended the run; ``step`` steps are done."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step


@dataclass
class Measures:
    """Takes them; every method is collective over the mesh."""

    state: TrainingState
    saver: Saver
    log: MetricsLog
    files: RunFiles

    def take(self, report: StepReport, step: int) -> bool:
        """Do what the verdicts on step ``step`` (0-based) ask for; whether to roll back.

        Raises:
            Stopped: one of them ends the run.
        """
        progress = self.state.progress
        if report.overflowed:
            self.log.say(
                f"step {step + 1:>6}  skipped: fp16 overflow, loss scale now "
                f"{progress.loss_scale.value:g}"
            )
        elif report.is_skipped and not report.verdicts:
            self.log.say(f"step {step + 1:>6}  skipped: loss or gradient is not finite")
        for verdict in report.verdicts:
            if verdict.action != "rollback":  # which is told with what came of it
                self.log.event(_event(verdict, step, verdict.evidence, verdict.text))
            if verdict.action == "lower_lr":
                progress.lr_factor *= verdict.rule.factor
            elif verdict.action == "a16":
                progress.full_precision_activations = True
        actions = {verdict.action for verdict in report.verdicts}
        if "stop" in actions:
            reasons = "; ".join(v.text for v in report.verdicts if v.action == "stop")
            raise Stopped(
                step,
                f"step {step + 1}: {reasons}; the weights stay those after {step} steps. Lower "
                "optim.lr, look at the data of these steps (data.skip_samples leaves some out), or "
                "change guard.rules",
            )
        if actions & {"lower_lr", "a16"} and "rollback" not in actions:
            self._keep()
        return "rollback" in actions

    def roll_back(self, report: StepReport, step: int) -> int:
        """Go back to the newest checkpoint, and leave out the data from there to step ``step``
        (0-based); returns the steps done."""
        state, steps = self.state, self.state.steps
        self.saver.finish()
        checkpoint = self.saver.newest()
        good = resume.restore(state, checkpoint, self.saver.store.retry)
        left_out = state.progress.left_out
        first = left_out.sample(steps.samples_before(good))
        last = left_out.sample(steps.samples_before(step + 1) - 1)
        state.progress.left_out = left_out.adding([(first, last + 1)])
        self._keep()
        self.log.rewind(good)
        for verdict in report.verdicts:
            if verdict.action == "rollback":
                text = f"{verdict.text} to step {good}; samples {first} to {last} are left out"
                where = {"back_to": good, "first_sample": first, "last_sample": last}
                self.log.event(_event(verdict, step, {**verdict.evidence, **where}, text))
        return good

    def _keep(self) -> None:
        """Write the measures down, so that a run that is killed now knows of them."""
        file = MeasuresFile(self.files.measures)
        if self.state.mesh.is_main:
            self.log.try_to_write(file.path, lambda: file.write(self.state.progress))


def _event(verdict: Verdict, step: int, evidence: Mapping[str, float | int], text: str) -> Event:
    return Event(
        step=step + 1,
        kind="guard",
        name=verdict.rule.watch,
        action=verdict.action,
        evidence=dict(evidence),
        text=text,
    )
