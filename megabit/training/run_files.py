"""What a run keeps in its folder."""

from dataclasses import dataclass
from pathlib import Path

from megabit.checkpoint.folder import CHECKPOINTS, SNAPSHOTS


@dataclass(frozen=True)
class RunFiles:
    """The files in ``run.dir``."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.folder / "loss_curve.png"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def assets(self) -> Path:
        return self.folder / "assets"

    @property
    def snapshots(self) -> Path:
        return self.folder / SNAPSHOTS

    @property
    def timeline(self) -> Path:
        return self.folder / "timeline"

    @property
    def measures(self) -> Path:
        return self.folder / "measures.json"

    @property
    def faults(self) -> Path:
        """Who the ranks are, which drills are done, and what is written about a rank that hangs."""
        return self.folder / "faults"
