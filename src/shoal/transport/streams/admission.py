"""Connections that others make to this peer: who may still come, and who gives way when there are too many.

For streams.py. Before it has shown its pass nobody is known by more than an address, which costs little, so an address has a budget
of new connections, and where too many have not yet said who they are the oldest of the address with the most of them gives way:
silence locks nobody out. Afterwards a key has at most a few names here at a time (a peer started again is another name), and
where there are too many connections in all, the address with the most of them gets no more. Called from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict

import msgspec

from shoal.core.messages import Peer
from shoal.transport.budget import Allowance, Budgets
from shoal.transport.streams.engine import Connection
from shoal.transport.streams.send_queue import Kind

MAX_PENDING = 128  # connections whose other end has not yet said who it is
MAX_ADMITTED = 4096  # connections of those who have
DESCRIPTOR_SHARE = 0.75  # of the process's file descriptors for them, at most: it has files to open, too
NAMES = 2  # of one key: the newest
# New connections, two for each peer that begins to send here. A thousand at once from one address: a laboratory of 400 peers behind
# one router. A handshake takes 1.5 ms, so that a flood from everywhere takes 0.3 of a core, of a thread that ranks low.
PER_ADDRESS = Allowance(per_s=50.0, at_once=1000.0)
ALL_ADDRESSES = Allowance(per_s=200.0, at_once=3000.0)


class AdmittedConnection(msgspec.Struct, frozen=True):
    peer: Peer
    kind: Kind
    place: str


class Admission:
    def __init__(self, most: int | None = None) -> None:
        self._max_admitted = _max_admitted() if most is None else most
        self._budgets = Budgets(PER_ADDRESS, ALL_ADDRESSES)
        self._unknown: dict[Connection, str] = {}  # with the place each calls from; the oldest first
        self._known: dict[Connection, AdmittedConnection] = {}  # likewise
        self._names: dict[str, OrderedDict[Peer, int]] = {}  # of each key, with the number of connections
        self._lock = threading.Lock()

    def may_connect(self, place: str) -> bool:
        with self._lock:
            return self._budgets.take(place, time.monotonic())

    def add_pending(self, link: Connection, place: str) -> Connection | None:
        """A new one. Returns the one that has to go for it."""
        with self._lock:
            gone = None
            if len(self._unknown) >= MAX_PENDING:
                gone = _first_of_most(self._unknown)
                del self._unknown[gone]
            self._unknown[link] = place
            return gone

    def admit(self, link: Connection, key: str, peer: Peer, kind: Kind) -> list[AdmittedConnection]:
        """It has proven who it is. Returns those who have to go for it. ValueError: there is no room for it."""
        with self._lock:
            place = self._unknown.pop(link, "")
            gone: list[AdmittedConnection] = []
            if len(self._known) >= self._max_admitted:
                places = {each: caller.place for each, caller in self._known.items()}
                crowded = _crowded(places)
                if crowded == place:
                    raise ValueError(f"{self._max_admitted} connections are open here, most of them from your address")
                last = next(each for each in reversed(places) if places[each] == crowded)
                gone.append(self._known[last])
                self._forget(last)
            self._known[link] = AdmittedConnection(peer, kind, place)
            names = self._names.setdefault(key, OrderedDict())
            names[peer] = names.get(peer, 0) + 1
            names.move_to_end(peer)
            if len(names) > NAMES:
                old = next(iter(names))
                for each, caller in list(self._known.items()):
                    if caller.peer == old:
                        gone.append(caller)
                        self._forget(each)
            return gone

    def remove(self, link: Connection) -> None:
        """Its connection is over, or was never known here."""
        with self._lock:
            self._unknown.pop(link, None)
            if link in self._known:
                self._forget(link)

    def is_admitted(self, link: Connection) -> bool:
        """It has entered, and nobody was preferred to it since."""
        with self._lock:
            return link in self._known

    @property
    def counts(self) -> tuple[int, int]:
        """Unknown and known."""
        with self._lock:
            return len(self._unknown), len(self._known)

    def _forget(self, link: Connection) -> None:
        peer = self._known.pop(link).peer
        key = peer.partition(".")[0]
        names = self._names.get(key, OrderedDict())
        names[peer] = names.get(peer, 1) - 1
        if not names[peer]:
            del names[peer]
        if not names:
            self._names.pop(key, None)


class PartialMessages:
    """Bytes of messages that have come in part: they are in memory, and only their end shows that they were meant."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._of: dict[tuple[Peer, Kind], int] = {}
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, peer: Peer, kind: Kind, nbytes: int) -> tuple[Peer, Kind] | None:
        """Returns whose connection has to go: the one that holds most, where all together hold too much."""
        with self._lock:
            self.nbytes += nbytes
            self._of[peer, kind] = self._of.get((peer, kind), 0) + nbytes
            if self.nbytes <= self._limit_bytes:
                return None
            return max(self._of, key=lambda one: (self._of[one], one))

    def over(self, peer: Peer, kind: Kind, nbytes: int | None = None) -> None:
        """So many of them belong to a message that is whole now; all of them: its connection has ended."""
        with self._lock:
            held = self._of.pop((peer, kind), 0)
            left = 0 if nbytes is None else held - nbytes
            self.nbytes -= held - left
            if left:
                self._of[peer, kind] = left


def _crowded(places: dict[Connection, str]) -> str:
    counts = Counter(places.values())
    return max(counts, key=lambda place: (counts[place], place))


def _first_of_most(places: dict[Connection, str]) -> Connection:
    crowded = _crowded(places)
    return next(link for link, place in places.items() if place == crowded)


def _max_admitted() -> int:
    try:
        import resource
    except ImportError:  # not on this system: it has no such limit either
        return MAX_ADMITTED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_ADMITTED if soft < 0 else max(64, min(MAX_ADMITTED, int(soft * DESCRIPTOR_SHARE)))
