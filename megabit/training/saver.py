"""When a run saves what, and what it says about it.

A save that fails is an alert, never the end of a run: the checkpoint before stands, and the next
one is tried when it is due.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from megabit.checkpoint import (
    Checkpoint,
    CheckpointStore,
    Manifest,
    Part,
    Retention,
    Saved,
)
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.errors import RunError
from megabit.telemetry import Event, MetricsLog
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of
from megabit.training.snapshot import ternary_parts
from megabit.training.step import TrainingState
from megabit.units import MB


@dataclass
class Saver:
    """The checkpoints and snapshots of a run; every method is collective over the mesh."""

    state: TrainingState
    store: CheckpointStore
    snapshots: CheckpointStore
    corpus: CorpusInfo
    assets: Mapping[str, Path]
    """What travels with the model."""
    log: MetricsLog

    def __enter__(self) -> Self:
        self.store.clean()
        self.snapshots.clean()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.store.close()
        self.snapshots.close()

    def before(self, step: int) -> None:
        """Before the first step of a run: have something that the guard can go back to."""
        rules = self.state.config.guard.rules
        if self.store.durable_step < 0 and any(rule.action == "rollback" for rule in rules):
            self.save_now(step)
            self.finish()

    def after_step(self, step: int) -> None:
        """Begin what is due after ``step`` steps, and go on with what is under way."""
        config = self.state.config.checkpoint
        if config.save_interval and step % config.save_interval == 0:
            self.save_now(step)
        is_ternary = self.state.quantization_of(step).share == 1
        if config.snapshot_interval and step % config.snapshot_interval == 0 and is_ternary:
            self._snapshot(step)
        self._tell(self.store, self.store.poll())
        self._tell(self.snapshots, self.snapshots.poll())

    def conclude(self, step: int) -> None:
        """Wait for what is under way, and have a checkpoint of ``step``, the last one."""
        self.finish()
        if self.store.durable_step < step:
            self.save_now(step)
            self.finish()

    def finish(self) -> None:
        """Wait for what is under way."""
        self._tell(self.snapshots, self.snapshots.finish())
        self._tell(self.store, self.store.finish())

    def newest(self) -> Checkpoint:
        """The newest checkpoint, verified.

        Raises:
            RunError: there is none.
        """
        checkpoint = self.store.find(self.state.config.checkpoint.auto_fallback, self.alert)
        if checkpoint is None:
            raise RunError(f"{self.store.folder.path}: there is no checkpoint to go back to")
        return checkpoint

    def require(self, step: int) -> None:
        """Refuse to pretend that ``step``, the last one, is saved.

        Raises:
            RunError: it is not.
        """
        if self.store.durable_step < step:
            raise RunError(
                f"the weights after step {step} could not be saved in {self.store.folder.path}; "
                "what went wrong is told above"
            )

    def save_now(self, step: int) -> None:
        """Begin a checkpoint of ``step``."""
        manifest = manifest_of(self.state, step, self.corpus.fingerprint)
        self._begin(self.store, manifest, training_parts(self.state))

    def _snapshot(self, step: int) -> None:
        manifest = manifest_of(self.state, step, self.corpus.fingerprint)
        self._begin(self.snapshots, replace(manifest, kind="ternary"), ternary_parts(self.state))

    def _begin(self, store: CheckpointStore, manifest: Manifest, parts: list[Part]) -> None:
        self._tell(store, store.save(manifest, parts, self.assets))
        if not self.state.config.checkpoint.asynchronous:
            self._tell(store, store.finish())

    def _tell(self, store: CheckpointStore, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.problem is not None:
            newest = store.durable_step
            stands = f"that of step {newest} stands" if newest >= 0 else "there is none so far"
            self.alert(f"step {saved.step} is not saved: {saved.problem}; {stands}")
            return
        evidence = {"mb": saved.bytes / MB, "total_s": saved.total_s, "blocked_s": saved.blocked_s}
        text = (
            f"saved in {saved.path}: {saved.bytes / MB:.1f} MB "
            f"in {saved.total_s:.1f} s, for {saved.blocked_s:.2f} s of which training waited"
        )
        self.log.event(
            Event(saved.step, "checkpoint", store.folder.path.name, "saved", evidence, text)
        )

    def alert(self, problem: str) -> None:
        """One line; training goes on."""
        self.log.say(f"ALERT {problem}")


def retention_of(config: Config) -> Retention:
    """As configured."""
    return Retention(config.checkpoint.keep_last, config.checkpoint.keep_every)
