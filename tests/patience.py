"""Waiting for what happens soon, for as long as only a hang takes: busy machines pass, too."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0


def eventually(look: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """What ``look`` gives once it is something."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.02)
