"""Signs of life: what each rank writes down about itself every ``faults.heartbeat_s``.

A thread of each rank → ``Board.write`` → the store that ranks met at (``mesh.store``), under
``heartbeat/{rank}``. Nobody reads while all goes well; a rank that is stuck reads all of them, and
``Listener`` notes *by its own clock* when a count last went up. So no clocks are compared across
hosts, and the work is linear in the number of ranks until something is wrong.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

MAX_BYTES = 2000
"""Of a sign."""
MAX_TEXT = 300
"""Characters of why a rank ends, as it tells others."""


@dataclass(frozen=True)
class Sign:
    """What a rank says about itself."""

    rank: int
    host: str
    pid: int
    beat: int = 0
    """Counts up for as long as the rank lives."""
    step: int = 0
    """Steps done."""
    doing: str = "starting"
    begun: int = 0
    """Collectives that it has begun to wait for."""
    done: int = 0
    """Those that are over."""
    ended: str | None = None
    """Why it ends: ``""`` if it has finished, ``LOST`` if it lost another rank."""

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        return self.begun > self.done

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    def encode(self) -> str:
        """As it is stored."""
        ended = None if self.ended is None else self.ended[:MAX_TEXT]
        return json.dumps(asdict(replace(self, ended=ended)))

    @staticmethod
    def decode(data: bytes) -> "Sign | None":
        """A sign, or None for what is not one."""
        try:
            fields = json.loads(data[:MAX_BYTES])
            sign = Sign(**fields)
        except (ValueError, TypeError):
            return None
        numbers = (sign.rank, sign.pid, sign.beat, sign.step, sign.begun, sign.done)
        texts = (sign.host, sign.doing, sign.ended or "")
        is_one = all(type(n) is int for n in numbers) and all(type(t) is str for t in texts)
        return sign if is_one else None


LOST = "lost another rank"


class Board:
    """Where signs are; each instance has a connection of its own, for one thread.

    Args:
        patience_s: how long a read waits for the store.
    """

    def __init__(self, store: Store, size: int, patience_s: float) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        self._store.set_timeout(timedelta(seconds=patience_s))
        self._keys = [_key(rank) for rank in range(size)]
        self._present: set[str] = set()

    def write(self, sign: Sign) -> None:
        """Put up a rank's sign.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(_key(sign.rank), sign.encode())

    def read(self) -> dict[int, Sign]:
        """The signs of all ranks that have ever put one up.

        Raises:
            RuntimeError: the store is gone, or silent.
        """
        missing = [key for key in self._keys if key not in self._present]
        self._present.update(key for key in missing if self._store.check([key]))
        keys = [key for key in self._keys if key in self._present]
        if not keys:
            return {}
        signs = (Sign.decode(data) for data in self._store.multi_get(keys))
        return {sign.rank: sign for sign in signs if sign is not None}


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


@dataclass
class Listener:
    """When a rank heard of the others, by its own clock."""

    since: float = field(default_factory=time.monotonic)
    """When it began to listen."""
    signs: dict[int, Sign] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    """When a rank's count last went up; not there until it does."""

    def hear(self, signs: Mapping[int, Sign]) -> None:
        """Take note of what was read just now."""
        now = time.monotonic()
        for rank, sign in signs.items():
            before = self.signs.get(rank)
            if before is not None and sign.beat > before.beat:
                self.heard_at[rank] = now
            self.signs[rank] = sign

    def silent_s(self, rank: int) -> float:
        """Seconds in which nothing was heard of ``rank``, at least."""
        return time.monotonic() - self.heard_at.get(rank, self.since)

    def silent(self, ranks: Iterable[int], for_s: float) -> list[int]:
        """Those of ``ranks`` that are silent for longer than that, and have not said goodbye."""
        return [
            rank
            for rank in ranks
            if self.silent_s(rank) > for_s
            and (rank not in self.signs or self.signs[rank].ended is None)
        ]
