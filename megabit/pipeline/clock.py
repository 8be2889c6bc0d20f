"""When something happened on the device that computes."""

import time

import torch


class Clock:
    """Takes marks that cost nothing, and says later when they were, in seconds.

    On a CPU they are on the host's monotonic clock. A GPU works behind the host's back, so there a
    mark is an event in its stream of work; to read one waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started = self.mark()
        self._started_s = time.perf_counter()

    def mark(self) -> "float | torch.cuda.Event":
        """Now, or when the device gets here."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: "float | torch.cuda.Event") -> float:
        """When ``mark`` was, on this host's monotonic clock."""
        if isinstance(mark, float):
            return mark
        assert not isinstance(self._started, float)
        mark.synchronize()
        return self._started_s + self._started.elapsed_time(mark) / 1000
