"""Stopping early, together: a signal on any rank lets all ranks finish the step they are in.

A signal that reaches one rank is enough. All agree on why they stop, so that all processes of a job
end with the same exit code (``cli.exit_codes``).
"""

import signal
import time
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from megabit.mesh import Axis
from megabit.reduce import all_reduce


class StopReason(IntEnum):
    """Why a run stops before its last step; of several the largest counts."""

    NONE = 0
    REGROUP = 1
    """SIGUSR2, from the launcher: hosts have come, and it starts again with them."""
    INTERRUPT = 2
    """SIGINT: Ctrl-C."""
    TERMINATE = 3
    """SIGTERM: the scheduler wants the machine back."""


REASONS = {
    signal.SIGUSR2: StopReason.REGROUP,
    signal.SIGINT: StopReason.INTERRUPT,
    signal.SIGTERM: StopReason.TERMINATE,
}


class StopSignal:
    """While in use, SIGINT (Ctrl-C), SIGTERM and SIGUSR2 ask for a stop instead of ending the
    process.

    Asked again, the first two end it where it is.
    """

    def __init__(self, world: Axis, device: torch.device) -> None:
        self.reason = StopReason.NONE
        """What the ranks have agreed on."""
        self._world = world
        self._device = device
        self._asked = StopReason.NONE
        self._asked_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in REASONS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; collective over the world, so all ranks agree."""
        asked = torch.tensor(int(self._asked), device=self._device)
        self.reason = StopReason(int(all_reduce(asked, self._world, "max")))
        return self.reason != StopReason.NONE

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        reason = REASONS[signal.Signals(number)]
        self._asked = max(self._asked, reason)
        if reason == StopReason.REGROUP:
            return
        # Ctrl-C arrives twice at once: from the terminal, and passed on by the launcher.
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at > 1:
            raise KeyboardInterrupt
        self._asked_at = now
