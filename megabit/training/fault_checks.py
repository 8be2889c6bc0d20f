"""What is done about faults between steps: drills strike, and replicas are compared.

``open_fault_checks`` also writes down who the ranks are, so that alerts can name a host.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from megabit.checkpoint import CheckpointStore
from megabit.config import Config, Drill
from megabit.errors import RunError
from megabit.faults.code_check import compare_replicas
from megabit.faults.drills import Attempt, Drills, described
from megabit.faults.members import Member, gather_members, members_file, write_members
from megabit.mesh import ParallelMesh
from megabit.retry import Retry
from megabit.telemetry import Event, IntervalMetrics, MetricsLog
from megabit.training.run_files import RunFiles
from megabit.training.step import TrainingState


@dataclass
class FaultChecks:
    """Those of a run, on one rank."""

    state: TrainingState
    log: MetricsLog
    members: Sequence[Member]
    """All ranks, in order."""
    drills: Drills

    def where(self, metrics: IntervalMetrics) -> dict[str, str]:
        """Whom metrics are about, for alerts."""
        rank = metrics.straggler_rank
        return {} if rank is None else {"straggler_ratio": self.members[rank].text}

    def before_step(self, step: int) -> None:
        """What is due before step ``step`` (0-based); collective over the mesh.

        Raises:
            RunError: replicas differ, and go on to differ when weights are published anew.
        """
        self.drills.before_step(step)
        interval = self.state.config.faults.check_codes_interval
        if interval and step % interval == 0 and self.state.mesh.dp.size > 1:
            self._compare_replicas(step)

    def in_step(self) -> None:
        """While step is timed, before anything is computed."""
        self.drills.in_step()

    def _compare_replicas(self, step: int) -> None:
        """Compare what DP replicas compute with, and give them their weights anew if it differs."""
        state = self.state
        if not self._tell(step, "repair"):
            return
        state.optimizer.publish(state.quantization_of(step).share)
        remaining = self._tell(step, "stop")
        if remaining:
            raise RunError(
                f"step {step}: {'; '.join(remaining)}. New weights from the masters did not help, "
                "so what they are made of or with is broken; take the host out, and start again "
                "from the newest checkpoint"
            )

    def _tell(self, step: int, action: str) -> list[str]:
        """All differences, as events; what is to be done about them is ``action``."""
        names = [member.text for member in self.members]
        texts = []
        for found in compare_replicas(self.state.stages, self.state.mesh):
            texts.append(found.text(names))
            evidence = {"ranks": [*found.ranks], "tensors": [*found.tensors], "count": found.count}
            event = Event(step, "fault", "weights differ", action, evidence, texts[-1])
            self.log.event(event)
        return texts


def open_fault_checks(
    state: TrainingState, store: CheckpointStore, files: RunFiles, log: MetricsLog
) -> FaultChecks:
    """As configured; collective over the mesh. ``store`` is what drills of storage break."""
    config, mesh = state.config.faults, state.mesh

    def announce(drill: Drill) -> None:
        text = f"drill: {described(drill)}"
        log.event(Event(drill.step, "fault", drill.fault, "drill", {"rank": drill.rank}, text))

    def break_storage(around: Attempt) -> None:
        store.retry = replace(store.retry, around=around)

    drills = Drills(
        config.drills, files.faults, state.stages, mesh.world, mesh.device, announce, break_storage
    )
    # After all ranks have looked which drills are done, and before any is struck.
    members = gather_members(mesh.world, mesh.device)
    if mesh.is_main:
        path = members_file(files.folder)
        log.try_to_write(path, lambda: write_members(path, members))
    return FaultChecks(state, log, members, drills)


def retry_of(config: Config, mesh: ParallelMesh, console: Console) -> Retry:
    """How a rank tries storage again; it says so itself, since only the main one has a console."""

    def alert(problem: str) -> None:
        if mesh.is_main:
            console.print(f"ALERT {problem}", highlight=False, markup=False, soft_wrap=True)
        else:
            print(f"ALERT rank {mesh.world.rank}: {problem}", file=sys.stderr, flush=True)

    return Retry(config.faults.retries, config.faults.retry_pause_s, alert)
