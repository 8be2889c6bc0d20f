"""What a run carries from step to step beside its weights: a few numbers, the same on every rank.

Two kinds. *State* belongs to the weights and goes back with them when a run is rolled back: what
the guard remembers of the last steps, the loss scale. *Measures* are what the guard has done, and
stay: samples left out, a lower learning rate, full-precision activations, how often each rule has
acted; and so does the bucket size that was measured to be fastest. Both are in every checkpoint;
measures are in ``run.dir/measures.json``, too, from the moment at which they are taken, so that a
run that is killed right then does not take them again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megabit.config import Config
from megabit.data.step_plan import SampleWindows
from megabit.errors import UserError
from megabit.files import write_text
from megabit.training.guard import Deed, Guard, History
from megabit.training.loss_scale import LossScale


@dataclass
class Progress:
    """State and measures of a run."""

    guard: Guard
    loss_scale: LossScale
    left_out: SampleWindows
    lr_factor: float = 1.0
    full_precision_activations: bool = False
    bucket_mb: dict[int, float] = field(default_factory=dict)
    """The size of gradient buckets that was found to be fastest, by the number of DP ranks."""

    @staticmethod
    def of(config: Config) -> "Progress":
        """At the beginning of a run."""
        return Progress(
            Guard(config.guard.rules),
            LossScale.of(config.precision),
            SampleWindows.of(config.data.skip_samples),
        )

    def state(self) -> dict[str, Any]:
        """What goes back with the weights, as JSON."""
        history, scale = self.guard.history, self.loss_scale
        return {
            "losses": history.losses,
            "norms": history.norms,
            "loss_scale": scale.value,
            "good_steps": scale.good_steps,
        }

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave; what is missing is as at the beginning."""
        self.guard.history = History(list(saved.get("losses", [])), list(saved.get("norms", [])))
        if self.loss_scale.interval is not None:
            self.loss_scale.value = float(saved.get("loss_scale", self.loss_scale.value))
            self.loss_scale.good_steps = int(saved.get("good_steps", 0))

    def measures(self) -> dict[str, Any]:
        """What stays, as JSON."""
        return {
            "left_out": [edge for window in self.left_out.windows for edge in window],
            "lr_factor": self.lr_factor,
            "full_precision_activations": self.full_precision_activations,
            "deeds": {rule: [d.times, d.last_step] for rule, d in self.guard.deeds.items()},
            "bucket_mb": self.bucket_mb,
        }

    def restore_measures(self, saved: Mapping[str, Any]) -> None:
        """Take over what ``measures`` gave, beside what there is: measures only ever add up, so it
        does not matter which of a checkpoint and the file is the newer one."""
        self.left_out = self.left_out.adding(SampleWindows.of(saved.get("left_out", [])).windows)
        self.lr_factor = min(self.lr_factor, float(saved.get("lr_factor", 1.0)))
        self.full_precision_activations |= bool(saved.get("full_precision_activations", False))
        self.bucket_mb |= {int(dp): float(mb) for dp, mb in saved.get("bucket_mb", {}).items()}
        deeds = self.guard.deeds
        for rule, numbers in saved.get("deeds", {}).items():
            deed = Deed(*numbers)
            if rule not in deeds or deed.last_step > deeds[rule].last_step:
                deeds[rule] = deed


@dataclass(frozen=True)
class MeasuresFile:
    """``run.dir/measures.json``."""

    path: Path

    def write(self, progress: Progress) -> None:
        """Replace it, durably. Raises OSError."""
        text = json.dumps(progress.measures(), indent=2) + "\n"
        write_text(self.path, text, durable=True)

    def read(self) -> dict[str, Any] | None:
        """What was written, or None if nothing was.

        Raises:
            UserError: it is damaged.
        """
        if not self.path.exists():
            return None
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(saved, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path}: cannot be read ({error}); it lists what the stability guard has "
                "done. Delete it to go on by what the checkpoint has of that"
            ) from error
        return saved
