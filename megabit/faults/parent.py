"""Ranks do not outlive their launcher: they would hold the run's lock, for nobody."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
POLL_S = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """Have this process end when the one that started it does, however that ends.

    On Linux the kernel sees to it; elsewhere a thread looks every second.

    Args:
        parent: process id of who started it, if it is known; it may be gone already.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
