"""Limits on what others may use of this peer's transport: connections, message rates, and memory for incomplete messages.

Before its handshake a peer is known only by its address, and addresses cost little. So an address has a budget of new connections,
and where too many handshakes are pending the oldest of the address with the most of them is dropped: silence locks nobody out. After
the handshake a key may have a few names at a time (a restarted peer has a new name), and where too many connections are open, the
address with the most of them gets no more. Called from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict

import msgspec

from shoal.core.messages import Peer
from shoal.transport.base import StreamKind
from shoal.transport.budget import Allowance, Budget, Budgets
from shoal.transport.streams.engine import Connection
from shoal.transport.wire import ORDINARY_BYTES

MAX_PENDING = 128  # connections whose handshake is not complete
MAX_ADMITTED = 4096  # connections whose handshake is complete
DESCRIPTOR_SHARE = 0.75  # of the process's file descriptors, at most: it opens files, too
NAMES = 2  # of one key: the newest
# New connections: two for each peer that begins to send here. A thousand at once from one address is a laboratory of 400 peers behind
# one router. A handshake takes 1.5 ms, so a flood from all addresses takes 0.3 of a core, of a thread with low priority.
PER_ADDRESS = Allowance(per_s=50.0, at_once=1000.0)
ALL_ADDRESSES = Allowance(per_s=200.0, at_once=3000.0)
# Of one key: the number of messages, bytes of control, and bytes of large control messages, which take much more of the node's time. A
# trainer sends 50 messages of 120 bytes for a microbatch of three stages; a leader of 1,000 peers sends each a View of 200 kB at times.
MESSAGE_RATE = Allowance(per_s=4000.0, at_once=16_000.0)
BYTE_RATE = Allowance(per_s=2 << 20, at_once=16 << 20)
LARGE_BYTE_RATE = Allowance(per_s=512 << 10, at_once=8 << 20)
RATES = 4096  # keys whose rate is remembered


class AdmittedConnection(msgspec.Struct, frozen=True):
    peer: Peer
    kind: StreamKind
    address: str  # budget.address_group of where it came from


class Admission:
    """Connections that others have opened: pending until `admit`, then admitted until `remove`."""

    def __init__(self, max_admitted: int | None = None) -> None:
        self._max_admitted = _descriptor_limit() if max_admitted is None else max_admitted
        self._budgets = Budgets(PER_ADDRESS, ALL_ADDRESSES)
        self._pending: dict[Connection, str] = {}  # with the address of each; the oldest first
        self._admitted: dict[Connection, AdmittedConnection] = {}  # the oldest first
        self._names: dict[str, OrderedDict[Peer, int]] = {}  # of each key, with the number of connections
        self._lock = threading.Lock()

    def may_connect(self, address: str) -> bool:
        with self._lock:
            return self._budgets.take(address, time.monotonic())

    def add_pending(self, connection: Connection, address: str) -> Connection | None:
        """Returns the pending connection that has to be dropped for it."""
        with self._lock:
            displaced = None
            if len(self._pending) >= MAX_PENDING:
                displaced = _oldest_of_busiest(self._pending)
                del self._pending[displaced]
            self._pending[connection] = address
            return displaced

    def admit(self, connection: Connection, key: str, peer: Peer, kind: StreamKind) -> list[AdmittedConnection]:
        """Its handshake is complete. Returns the connections that have to be dropped for it. ValueError: there is no room."""
        with self._lock:
            address = self._pending.pop(connection, "")
            displaced = self._make_room(address)
            self._admitted[connection] = AdmittedConnection(peer, kind, address)
            names = self._names.setdefault(key, OrderedDict())
            names[peer] = names.get(peer, 0) + 1
            names.move_to_end(peer)
            if len(names) > NAMES:
                oldest = next(iter(names))
                for other, admitted in list(self._admitted.items()):
                    if admitted.peer == oldest:
                        displaced.append(admitted)
                        self._forget(other)
            return displaced

    def remove(self, connection: Connection) -> None:
        """The connection has ended, whatever its state was."""
        with self._lock:
            self._pending.pop(connection, None)
            if connection in self._admitted:
                self._forget(connection)

    def is_admitted(self, connection: Connection) -> bool:
        """It was admitted, and has not been displaced since."""
        with self._lock:
            return connection in self._admitted

    @property
    def counts(self) -> tuple[int, int]:
        """Pending and admitted connections."""
        with self._lock:
            return len(self._pending), len(self._admitted)

    def _make_room(self, address: str) -> list[AdmittedConnection]:
        if len(self._admitted) < self._max_admitted:
            return []
        addresses = {connection: admitted.address for connection, admitted in self._admitted.items()}
        busiest = _busiest(addresses)
        if busiest == address:
            raise ValueError(f"{self._max_admitted} connections are open here, most of them from your address")
        newest = next(connection for connection in reversed(addresses) if addresses[connection] == busiest)
        displaced = self._admitted[newest]
        self._forget(newest)
        return [displaced]

    def _forget(self, connection: Connection) -> None:
        peer = self._admitted.pop(connection).peer
        key = peer.partition(".")[0]
        names = self._names.get(key, OrderedDict())
        names[peer] = names.get(peer, 1) - 1
        if not names[peer]:
            del names[peer]
        if not names:
            self._names.pop(key, None)


class SenderRate:
    """How fast one key may send messages of one kind."""

    def __init__(self) -> None:
        self._messages, self._bytes, self._large_bytes = (
            Budget(MESSAGE_RATE),
            Budget(BYTE_RATE),
            Budget(LARGE_BYTE_RATE),
        )

    def spend(self, now: float, nbytes: int) -> None:
        """For one message."""
        self._messages.spend(now, 1.0)
        self._bytes.spend(now, nbytes)
        self._large_bytes.spend(now, nbytes if nbytes > ORDINARY_BYTES else 0)

    def debt_s(self, now: float) -> float:
        """Seconds until the next message may be read."""
        return max(self._messages.debt_s(now), self._bytes.debt_s(now), self._large_bytes.debt_s(now))


class SenderRates:
    """One rate per key, whatever names it takes. In one thread."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, SenderRate] = OrderedDict()

    def of(self, key: str) -> SenderRate:
        rate = self._rates.setdefault(key, SenderRate())
        self._rates.move_to_end(key)
        if len(self._rates) > RATES:
            self._rates.popitem(last=False)
        return rate


class PartialMessages:
    """Bytes of incomplete messages. They are in memory, and only a message's end shows that the sender meant it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes_of: dict[tuple[Peer, StreamKind], int] = {}
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, peer: Peer, kind: StreamKind, nbytes: int) -> tuple[Peer, StreamKind] | None:
        """Returns whose connection has to be dropped: the one with most bytes, where all together have too many."""
        with self._lock:
            self.nbytes += nbytes
            self._bytes_of[peer, kind] = self._bytes_of.get((peer, kind), 0) + nbytes
            if self.nbytes <= self._limit_bytes:
                return None
            return max(self._bytes_of, key=lambda key: (self._bytes_of[key], key))

    def remove(self, peer: Peer, kind: StreamKind, nbytes: int | None = None) -> None:
        """`nbytes` belong to a message that is complete now. None: all of them, as the connection has ended."""
        with self._lock:
            held = self._bytes_of.pop((peer, kind), 0)
            left = 0 if nbytes is None else held - nbytes
            self.nbytes -= held - left
            if left:
                self._bytes_of[peer, kind] = left


def _busiest(addresses: dict[Connection, str]) -> str:
    counts = Counter(addresses.values())
    return max(counts, key=lambda address: (counts[address], address))


def _oldest_of_busiest(addresses: dict[Connection, str]) -> Connection:
    busiest = _busiest(addresses)
    return next(connection for connection, address in addresses.items() if address == busiest)


def _descriptor_limit() -> int:
    try:
        import resource
    except ImportError:  # not on this system, which has no such limit either
        return MAX_ADMITTED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_ADMITTED if soft < 0 else max(64, min(MAX_ADMITTED, int(soft * DESCRIPTOR_SHARE)))
