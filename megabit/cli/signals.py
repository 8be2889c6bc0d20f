"""Signals that a command has its own way with, for the length of a block."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def on_signals(numbers: Sequence[signal.Signals], act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with the number of each of these signals, in place of what they do elsewhere.

    What was there before is back afterwards: a process may run more than one command, and what it
    forks has its handlers. To be called in the main thread.
    """
    before = [(number, signal.signal(number, lambda n, _: act(n))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
