"""``data.cache: ram``: a split's tokens, read into memory once, from the first byte to the last.

Samples are read all over a file. A disk that is slow to seek, or a network file system, makes
training wait for each of them until the system has cached the file; one sequential read does not.
Each rank has a copy of its own, and refuses before it reads if they would not all fit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabit.data.indexed import Tokens, check_size
from megabit.errors import UserError

CHUNK_BYTES = 2**26
REPORT_S = 5.0
"""Between two lines that say how far it is."""
GB = 1e9
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryCache:
    """How ``IndexedDataset`` gets its tokens: read into memory.

    Args:
        copies: ranks of this host that read the same file.
        say: told how far a long read has come.
    """

    copies: int
    say: Callable[[str], None]

    def __call__(self, path: Path, dtype: np.dtype[Any], count: int) -> Tokens:
        """All ``count`` tokens of ``path``.

        Raises:
            UserError: they do not fit the host's memory, or cannot be read.
        """
        check_size(path, dtype, count)
        needed, available = count * dtype.itemsize, available_bytes()
        if available is not None and needed * self.copies > available:
            raise UserError(
                f"data.cache: ram needs {self.copies} × {needed / GB:.1f} GB for {path}, but "
                f"{available / GB:.1f} GB are available on this host; use none"
            )
        tokens = np.empty(count, dtype=dtype)
        try:
            self._fill(tokens.view(np.uint8).data, path)
        except OSError as error:
            raise UserError(f"{path}: cannot read it ({error.strerror})") from error
        tokens.flags.writeable = False
        return tokens

    def _fill(self, target: memoryview, path: Path) -> None:
        told_at = time.monotonic()
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < len(target):
                read = file.readinto(target[done : done + CHUNK_BYTES])
                if not read:
                    raise UserError(f"{path}: became shorter while it was read")
                done += read
                if time.monotonic() - told_at > REPORT_S:
                    told_at = time.monotonic()
                    self.say(f"{path}: {done / GB:.1f} of {len(target) / GB:.1f} GB in memory")


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Memory that can be had on this host, or in this container; None where nobody tells."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        available = 1024 * int(kib)
    except (OSError, ValueError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit
        return available
    return max(0, min(available, limit - used))
