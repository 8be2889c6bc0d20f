"""Stopping early, together: a signal on any rank lets all ranks finish the step they are in."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from megabit.mesh import Axis
from megabit.reduce import any_rank


class StopSignal:
    """While in use, SIGINT (Ctrl-C) and SIGTERM ask for a stop instead of ending the process.

    Asked again, they end it where it is.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, world: Axis, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._asked_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
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
        return any_rank(self._asked_at is not None, self._world, self._device)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Ctrl-C arrives twice at once: from the terminal, and passed on by the launcher.
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at > 1:
            raise KeyboardInterrupt
        self._asked_at = now
