"""Hosts that know their numbers (``--node-rank``): all of them must be there, and one that was lost
and comes back takes its place again.

They meet in *rounds*: the first, and another one after each failure. All that is known of a round
is in the store of the host where they meet, so a launcher that was started again knows as much as
the others:

    {round}/here/{node}   who waits as host ``node``: a name that each launcher draws for itself,
                          and a count that it raises while it waits
    {round}/members       the names of those that go on, once all are there
    ended                 a launcher has left for good

A launcher waits in the first round that is not complete: where the others wait, or will when their
ranks have failed. Host 0 completes rounds. Where a count stands still, a launcher has died while it
waited: it is not there.
"""

import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from megabit.errors import RunError

POLL_S = 0.1
BEAT_S = 0.5
FRESH_S = 4.0
"""A launcher whose count stands still for so long has died."""
TELL_S = 5.0
"""Who has not come by then is named, while the others go on waiting."""
MEMBERS, ENDED = "members", "ended"


class FixedNodes(RendezvousHandler):
    """The meeting of such hosts; see the module.

    Args:
        store: that of the host where they meet.
        run_id: tells jobs apart.
        node_rank: this host's number.
        nodes: how many there are.
        address: at which the ranks of the others find this host.
        join_s: how long to wait for the others.
        say: tells the user of this host.
    """

    use_agent_store = False

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_rank: int,
        nodes: int,
        address: str,
        join_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._store = PrefixStore(run_id, store)
        self._run_id, self._node_rank, self._nodes = run_id, node_rank, nodes
        self._address, self._join_s, self._say = address, join_s, say
        self._name = uuid.uuid4().hex
        self._is_replaced = False
        self._round = 0

    def get_backend(self) -> str:
        """Its name."""
        return "fixed"

    def get_run_id(self) -> str:
        """Tells jobs apart."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts.

        Raises:
            RunError: some have not come, or another launcher has this host's number.
            RendezvousClosedError: a launcher has left for good.
            DistNetworkError: the host with the store is gone.
        """
        members: list[str] = []
        while self._name not in members:  # else it was complete without this launcher
            store = PrefixStore(str(self._round), self._store)
            self._round += 1
            members = self._wait_in(store)
        place = RendezvousStoreInfo.build(self._node_rank, store, self._address)
        return RendezvousInfo(store, self._node_rank, self._nodes, place)

    def _wait_in(self, store: Store) -> list[str]:
        """The members of a round, once it is complete."""
        keys = [f"here/{node}" for node in range(self._nodes)]
        roll = RollCall(self._nodes)
        own = _Word(store, keys[self._node_rank], self._name)
        began, is_told = time.monotonic(), False
        while not store.check([MEMBERS]):  # not store.wait: it is deaf to signals
            if self._store.check([ENDED]):
                raise RendezvousClosedError
            if not own.stands():
                self._is_replaced = True
                raise RunError(f"--node-rank: another launcher has come as host {self._node_rank}")
            if self._node_rank == 0 and store.check(keys):
                words = [word.decode() for word in store.multi_get(keys)]
                if not roll.absent(words):
                    # Whoever is first has completed it.
                    store.compare_set(MEMBERS, "", " ".join(word.split()[0] for word in words))
                    continue
            waited = time.monotonic() - began
            if waited > min(TELL_S, self._join_s) and not is_told:
                self._say(f"waiting for {self._missing(store, keys, roll)}")
                is_told = True
            if waited > self._join_s:
                raise RunError(
                    f"--nnodes: waited {self._join_s:g} s in vain for "
                    f"{self._missing(store, keys, roll)}"
                )
            time.sleep(POLL_S)
        return store.get(MEMBERS).decode().split()

    def _missing(self, store: Store, keys: Sequence[str], roll: "RollCall") -> str:
        """In words. Only host 0 knows of those that have died while they waited."""
        absent = [node for node, key in enumerate(keys) if not store.check([key])]
        if not absent and self._node_rank == 0:
            absent = roll.absent(word.decode() for word in store.multi_get(list(keys)))
        if not absent:
            return f"host 0 of {self._nodes}" if self._node_rank else "other hosts"
        return f"host {', '.join(map(str, absent[:8]))} of {self._nodes}"

    def is_closed(self) -> bool:
        """Never before it says so itself: ``next_rendezvous`` raises."""
        return False

    def set_closed(self) -> None:
        """No other round is complete without this launcher: tell those that wait."""
        with suppress(DistNetworkError, DistStoreError):  # nobody is left to be told
            self._store.set(ENDED, self._name)

    def num_nodes_waiting(self) -> int:
        """None that ranks would have to be stopped for: they have lost a host that comes back."""
        return 0

    def shutdown(self) -> bool:
        """Leave for good, unless another launcher has this host's place."""
        if not self._is_replaced:
            self.set_closed()
        return True


class RollCall:
    """Which of some launchers are alive: those whose words have changed a short time ago."""

    def __init__(self, nodes: int) -> None:
        self._words: list[str | None] = [None] * nodes
        self._changed_at = [-math.inf] * nodes

    def absent(self, words: Iterable[str]) -> list[int]:
        """Numbers of the others, given what all say now. Nobody counts at first sight: the word
        may be an old one."""
        now = time.monotonic()
        for node, word in enumerate(words):
            if self._words[node] not in (None, word):
                self._changed_at[node] = now
            self._words[node] = word
        return [node for node, at in enumerate(self._changed_at) if now - at > FRESH_S]


class _Word:
    """What a launcher says in a round."""

    def __init__(self, store: Store, key: str, name: str) -> None:
        self._store, self._key, self._name = store, key, name
        self._count, self._said_at = 0, time.monotonic()
        store.set(key, self._text)  # in place of one that has died

    @property
    def _text(self) -> str:
        return f"{self._name} {self._count}"

    def stands(self) -> bool:
        """Say it again, if it is time; whether nobody else has said theirs in its place."""
        if time.monotonic() - self._said_at < BEAT_S:
            return True
        before, self._said_at = self._text, time.monotonic()
        self._count += 1
        return bool(self._store.compare_set(self._key, before, self._text).decode() == self._text)
