"""How often, and how soon, a failed engine is started again."""

from collections import deque

from megabit.config.serving import ServerConfig


class Restarts:
    """Counts failures within ``server.restart_window_s``."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque()

    def pause(self, now: float) -> float | None:
        """An engine has failed: seconds until the next one; None if there have been too many.

        Args:
            now: of a monotonic clock.
        """
        self._failures.append(now)
        while self._failures[0] < now - self._config.restart_window_s:
            self._failures.popleft()
        if len(self._failures) > self._config.max_restarts:
            return None
        return self._config.restart_backoff_s * 2.0 ** (len(self._failures) - 1)
