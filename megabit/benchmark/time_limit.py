"""A limit on what a block of code may take, for benchmarks that promise when they end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """The limit is reached. Not an ``Exception``: what records a contestant's failure and goes on
    must let it through."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises ``OutOfTime`` in the block once ``seconds`` have passed, at the next bytecode of
    Python: a call into a library is not cut short. For the main thread, one at a time."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
