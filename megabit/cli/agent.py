"""The ranks of one host, from their start to the job's exit code.

torch's elastic agent starts ranks, meets other hosts, and starts all ranks again after a failure or
when hosts come; here is what a training job needs beyond that, by the documented way of extending
it:

- **A stop is not a failure.** SIGTERM, SIGHUP and Ctrl-C are passed on to the ranks, which save
  together and leave word (``environment.leave``); the launcher waits for them, and for no restart.
- **New hosts wait for a checkpoint.** Ranks are asked to save before they start again with more.
- **What would fail again is not started again**: wrong settings, a run that its guard has ended.
- **Who hangs is ended.** When one rank has failed, the others have a few seconds to say what they
  saw; a stopped (SIGSTOP) or hanging one is killed then.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from megabit.cli.environment import LAUNCHER_PID, OUTCOME
from megabit.cli.exit_codes import FAILED, FINISHED, INTERRUPTED, REFUSED, REGROUP, STOPPED
from megabit.cli.launcher import LaunchOptions
from megabit.cli.meeting import open_meeting
from megabit.retry import Retry

STOPS = {signal.SIGTERM: STOPPED, signal.SIGHUP: STOPPED, signal.SIGINT: INTERRUPTED}
REGROUP_SIGNAL = signal.SIGUSR2
"""Asks ranks to save and end because hosts have come (``training.stop``)."""
LAST_WORDS_S = 10.0
"""How long ranks may go on once one of them has failed: they find out who is missing."""
EXIT_BARRIER_S = 60.0
"""How long a launcher whose ranks have finished waits for those of other hosts."""
POLL_S = 0.1


class Ended(Exception):
    """The job ends here; ``code`` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_agent(command: list[str], options: LaunchOptions, folder: Path, retry: Retry) -> int:
    """Run ``command`` on every rank of this host; returns the exit code.

    Args:
        folder: for the launcher's own files.

    Raises:
        Ended: asked to stop while no rank was running, or twice.
    """
    os.environ[OUTCOME] = str(folder / "outcome")
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # Ranks of each round meet at a port of their own: torch would keep the first round's store,
    # whose keys are old, and whose host may be the one that was lost.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are the agent's own
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # see set_flight_recorder
    stop = Stop(options.stop_grace_s)
    with stop:
        handler = open_meeting(options, retry, say)
        spec = WorkerSpec(
            role="rank",
            local_world_size=options.nproc_per_node,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=handler,
            max_restarts=options.max_restarts,
            monitor_interval=POLL_S,
        )
        agent = Agent(spec, stop, folder)
        stop.agent = agent
        try:
            result = agent.run()
        finally:
            # Else others would wait for this host.
            handler.shutdown()
        return agent.exit_code(result)


class Stop:
    """While in use, signals that ask for a stop go to the ranks; a second one ends them at once.

    Args:
        grace_s: how long ranks may take.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.agent: Agent | None = None
        self.code: int | None = None
        """The exit code that the stop asks for, once it was asked for."""
        self.deadline = 0.0
        self._asked_at = 0.0
        self._previous: list[tuple[signal.Signals, Callable[..., object] | int | None]] = []

    def __enter__(self) -> "Stop":
        self._previous = [(number, signal.signal(number, self._on_signal)) for number in STOPS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        running = self.agent is not None and self.agent.is_running
        if self.code is not None:
            if now - self._asked_at < 1:  # sent twice at once: to the launcher and to its group
                return
            if self.agent is not None:
                self.agent.kill()
            raise Ended(self.code)
        self.code, self._asked_at = STOPS[signal.Signals(number)], now
        self.deadline = now + self.grace_s
        if not running or self.agent is None:
            raise Ended(self.code)
        self.agent.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


class Agent(LocalElasticAgent):
    """torch's agent with megabit's rules for how ranks end; see the module."""

    def __init__(self, spec: WorkerSpec, stop: Stop, folder: Path) -> None:
        logs = folder / "logs"
        logs.mkdir()
        logs_specs = DefaultLogsSpecs(log_dir=str(logs))
        super().__init__(spec, logs_specs, exit_barrier_timeout=EXIT_BARRIER_S)
        self._stop = stop
        self._outcome_file = folder / "outcome"
        self._cause: tuple[int, int] | None = None
        """World rank and exit code of the rank that failed first."""

    @property
    def is_running(self) -> bool:
        """Whether a rank of this host is alive."""
        return len(self._ended()) < len(self._pids())

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that is alive; a stopped one goes on, to hear it."""
        ended = self._ended()
        for local_rank, pid in self._pids().items():
            if local_rank not in ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """End every rank that is alive, and what it has started, at once."""
        ended = self._ended()
        for local_rank, pid in self._pids().items():
            if local_rank not in ended:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each rank leads a group of its own
        self._wait(LAST_WORDS_S)

    def exit_code(self, result: RunResult | None) -> int:
        """Of the job as this host has seen it; says which rank died, if one did.

        Args:
            result: None if the job has ended without having needed this host.
        """
        outcome, asked = self._outcome(), self._stop.code
        if outcome is not None:
            return outcome
        if asked is not None and self._cause is None:
            return asked
        if result is None or not result.is_failed():
            return FINISHED
        if self._cause is None:
            return FAILED
        _, code = self._cause
        if code > 0:
            return code  # the rank has said why
        print(f"error: {self._describe_cause()}", file=sys.stderr)
        return 128 - code

    # What torch's agent calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._outcome_file.unlink(missing_ok=True)
        self._cause = None
        pids: dict[int, int] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended()
        are_alive = len(ended) < len(self._pids())
        if self._stop.code is not None:
            self._remaining_restarts = 0
            if are_alive and time.monotonic() < self._stop.deadline:
                return RunResult(state=WorkerState.HEALTHY)
            if are_alive:
                say(f"ranks have not stopped within {self._stop.grace_s:g} s; ending them")
        elif any(ended.values()):
            self._note_cause(ended, worker_group)
            self._wait(LAST_WORDS_S)
        elif are_alive:
            return RunResult(state=WorkerState.HEALTHY)
        self.kill()
        self._note_cause(self._ended(), worker_group)
        # torch looks only now, when all have ended: where one has failed it would give the others
        # 30 s, and end who is still saving then.
        result = super()._monitor_workers(worker_group)
        outcome = self._outcome()
        if result.is_failed() and (outcome is not None or self._has_code(REFUSED)):
            self._remaining_restarts = 0  # starting again would end the same way
        if result.state == WorkerState.SUCCEEDED and outcome == REGROUP:
            # Another host's launcher has seen that hosts have come before this one has.
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._stop.code is not None:
            return
        if self._cause is None:
            say("hosts have come; saving, and starting again with them")
        else:
            maximum = worker_group.spec.max_restarts
            number = maximum - self._remaining_restarts
            say(
                f"{self._describe_cause()}; starting again from the newest checkpoint "
                f"(restart {number} of {maximum})"
            )
        self._stop_workers(worker_group)
        if self._stop.code is not None:  # meanwhile
            return
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self.is_running:
            self.send(REGROUP_SIGNAL)
            self._wait(self._stop.grace_s)
        self._shutdown()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.kill()
        super()._shutdown(*args, **kwargs)

    # How ranks are.

    def _pids(self) -> dict[int, int]:
        return {} if self._pcontext is None else self._pcontext.pids()

    def _ended(self) -> dict[int, int]:
        """Exit code (−n: ended by signal n) of each local rank that has ended; they stay as they
        are, for torch to find."""
        codes = {}
        for local_rank, pid in self._pids().items():
            try:
                status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch has found it already
                codes[local_rank] = 0
                continue
            if status is not None:
                is_exit = status.si_code == os.CLD_EXITED
                codes[local_rank] = status.si_status if is_exit else -status.si_status
        return codes

    def _wait(self, seconds: float) -> None:
        """Until all ranks have ended, or for so long."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _outcome(self) -> int | None:
        """The exit code that a rank has asked for (``environment.leave``)."""
        try:
            return int(self._outcome_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    # Who failed, and why.

    def _note_cause(self, ended: dict[int, int], worker_group: WorkerGroup) -> None:
        """Remember who failed first, unless that is known or ranks ended because they were asked
        to before they could do so in order."""
        codes = {code for code in ended.values() if code}
        asked = self._stop.code is not None and codes & {-signal.SIGTERM, -signal.SIGINT}
        if self._cause is not None or asked or not codes:
            return
        # Those that lose a peer fail as well; who was ended by a signal is rather the cause.
        code, local_rank = min((code, rank) for rank, code in ended.items() if code)
        self._cause = (worker_group.workers[local_rank].global_rank, code)

    def _describe_cause(self) -> str:
        assert self._cause is not None
        rank, code = self._cause
        if code < 0:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
        return f"rank {rank} has ended with code {code}"

    def _has_code(self, code: int) -> bool:
        return self._cause is not None and self._cause[1] == code


def say(text: str) -> None:
    """Tell the user of this host, in one line."""
    print(f"megabit: {text}", file=sys.stderr, flush=True)
