"""Alerts that the server judges itself, about once a second, so that they need no Prometheus.

Each compares with how it was in the beginning of this server: the first requests, the first
collectives. ``examples/serving/alerts.yaml`` has the same as rules of Prometheus.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from megabit.config.serving import ServerConfig
from megabit.inference.messages import Stats
from megabit.serving.server_metrics import ServerMetrics

_STAYS = 0.9
"""Share of its limit that an alert stays on above, so that it does not come and go."""
_RECENT_S = 60.0
_FEWEST_REQUESTS = 5
_COMM_WINDOW_S = 10.0
_COMM_WINDOW_CALLS = 500
"""Of a window that is busy: reports alone, of which there is one a second, say nothing."""
_COMM_BASELINE_WINDOWS = 3

logger = logging.getLogger("megabit.serving")


class Alerts:
    """Judges, and says once when something begins and once when it is over."""

    def __init__(self, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._latency = LatencyAlert(config.latency_baseline_requests)
        self._comm: dict[str, CallAlert] = {}
        self.active: dict[str, str] = {}
        """Those that are on, and why."""
        self._seen_at = 0.0
        for name in ("latency", "memory"):
            metrics.alert(name, False, None)

    def judge(self, stats: Stats | None) -> None:
        """Look at what has happened since the last call."""
        new = [r for r in self._metrics.recent_requests if r[0] > self._seen_at]
        if new:
            self._seen_at = new[-1][0]
        ratio = self._latency.ratio(new, time.monotonic()) or 0.0
        text = f"end-to-end latency is {ratio:.1f} × its baseline"
        self._set("latency", ratio, self._config.latency_factor, text, self._latency.baseline)
        if stats is not None:
            self._judge_memory(stats)
        seconds = self._metrics.engine.get("comm_seconds", {})
        calls = self._metrics.engine.get("comm_calls", {})
        for axis, count in calls.items():
            self._judge_calls(axis, seconds.get(axis, 0.0), count)

    def _judge_memory(self, stats: Stats) -> None:
        shares = [
            used / limit
            for used, limit in zip(stats.rank_memory, stats.rank_memory_limit, strict=False)
            if limit
        ]
        share = max(shares, default=0.0)
        rank = shares.index(share) if shares else 0
        text = f"rank {rank} uses {share:.0%} of the memory that it can have"
        self._set("memory", share, self._config.memory_limit, text, None)

    def _judge_calls(self, axis: str, seconds: float, calls: float) -> None:
        alert = self._comm.setdefault(axis, CallAlert())
        ratio = alert.ratio(seconds, calls, time.monotonic())
        if ratio is not None:
            text = f"a collective of {axis} takes {ratio:.1f} × its baseline"
            self._set(f"comm_{axis}", ratio, self._config.comm_factor, text, alert.baseline)

    def _set(
        self, name: str, value: float, limit: float, text: str, baseline: float | None
    ) -> None:
        is_on = value > (limit * _STAYS if name in self.active else limit)
        self._metrics.alert(name, is_on, baseline)
        if is_on and name not in self.active:
            logger.warning("ALERT %s: %s", name, text)
        elif not is_on and name in self.active:
            logger.info("Alert %s is over", name)
        if is_on:
            self.active[name] = text
        else:
            self.active.pop(name, None)


class LatencyAlert:
    """The median latency of the last minute against that of the first requests."""

    def __init__(self, baseline_requests: int) -> None:
        self._wanted = baseline_requests
        self._first: list[float] = []
        self._recent: deque[tuple[float, float]] = deque()
        self.baseline: float | None = None

    def ratio(self, ended: Sequence[tuple[float, float]], now: float) -> float | None:
        """Of recent to first; None as long as there is too little of either.

        Args:
            ended: when requests ended that are new, and how long they took.
        """
        for at, latency in ended:
            if self.baseline is None:
                self._first.append(latency)
                if len(self._first) == self._wanted:
                    self.baseline = median(self._first)
            else:
                self._recent.append((at, latency))
        while self._recent and self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()
        if not self.baseline or len(self._recent) < _FEWEST_REQUESTS:
            return None
        return median(latency for _, latency in self._recent) / self.baseline


class CallAlert:
    """The mean time of an axis' collectives in the last two busy windows against the first ones."""

    def __init__(self) -> None:
        self._begin: tuple[float, float, float] | None = None
        self._first: list[float] = []
        self._before = 0.0
        self.baseline: float | None = None

    def ratio(self, seconds: float, calls: float, now: float) -> float | None:
        """The lower one of the last two windows, so that a single slow one is no alert; 0 where
        there was little to send. None if no window has ended or the baseline is not known.

        Args:
            seconds, calls: counters.
        """
        if self._begin is None:
            self._begin = (now, seconds, calls)
            return None
        since, old_seconds, old_calls = self._begin
        if now - since < _COMM_WINDOW_S:
            return None
        self._begin = (now, seconds, calls)
        if calls - old_calls < _COMM_WINDOW_CALLS:
            self._before = 0.0
            return 0.0 if self.baseline else None
        mean = (seconds - old_seconds) / (calls - old_calls)
        if not self.baseline:
            self._first.append(mean)
            if len(self._first) == _COMM_BASELINE_WINDOWS:
                self.baseline = median(self._first)
            return None
        before, self._before = self._before, mean / self.baseline
        return min(before, self._before)
