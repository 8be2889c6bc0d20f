"""Try again what fails in passing: storage and the rendezvous, and nothing else.

Only what is idempotent may be tried again, and never a collective: ranks that are not in step any
more cannot be brought back by one of them. Errors that another try cannot mend (a full disk, a
missing file, no permission) are not tried again.
"""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

TRANSIENT = frozenset(
    {
        # What networked file systems say while a server is away or has been restarted.
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY),
        *(errno.EREMOTEIO, errno.ENOLCK),
        # What a network says.
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN),
    }
)
"""Numbers of errors that may be gone after a pause."""


def is_transient(error: BaseException) -> bool:
    """Whether what raised ``error``, or the error that it was raised from, may work later."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True  # of the rendezvous: nobody to meet, yet
    if isinstance(error, socket.gaierror):
        return True  # the name of a host that has not started yet
    if isinstance(error, OSError):
        return error.errno in TRANSIENT
    return error.__cause__ is not None and is_transient(error.__cause__)


def retrying(
    do: Callable[[], T],
    what: str,
    retries: int,
    pause_s: float,
    alert: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What ``do`` returns, if need be after up to ``retries`` more tries, ``pause_s`` apart.

    Args:
        do: idempotent; not a collective.
        what: for people, such as ``writing run/checkpoints/…``.
        alert: told of each retry, in one line.

    Raises:
        Exception: the last one of ``do``, or the first that another try cannot mend.
    """
    for retry in range(1, retries + 1):
        try:
            return do()
        except Exception as error:
            if not is_transient(error):
                raise
            reason = getattr(error, "strerror", None) or str(error).split("\n", 1)[0]
            alert(f"{what} failed ({reason}); retry {retry} of {retries} in {pause_s:g} s")
            sleep(pause_s)
    return do()


@dataclass(frozen=True)
class Retry:
    """How often and how patiently, for whoever reads or writes files."""

    retries: int = 0
    pause_s: float = 0.0
    alert: Callable[[str], None] = lambda line: None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What each try is made in: where a drill breaks storage."""
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, do: Callable[[], T], what: str) -> T:
        """``do``, by ``retrying``."""

        def attempt() -> T:
            with self.around():
                return do()

        return retrying(attempt, what, self.retries, self.pause_s, self.alert, self.sleep)
