"""Received messages that wait for the node: control before bulk, each sender's in order; bounded, with backpressure on readers.

For every transport. Any thread puts; one task takes, from one sender after the other, so that a sender that floods delays itself
alone. A sender is a key (the name without its incarnation, which is free), and what may wait is bounded for each and for all. `on_space`
is called in the taking task's thread when the queue, or one sender's share of it, is no longer full.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from shoal.transport.base import Event, Incoming

BULK_LIMIT_BYTES = 256 << 20  # bulk that waits; beyond it readers pause and the network pushes back
CONTROL_LIMIT_BYTES = 16 << 20  # control likewise: decoded it takes up to 16 times as much memory
LIMIT_ITEMS = 20_000  # of either
SENDER_SHARES = 8  # one sender may use an eighth of each limit

Item = tuple[Event, int]


class FairQueue:
    """Control or bulk: a queue per sender, taken from in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()  # the first is the next to be taken from
        self._bytes_of: dict[str, int] = {}
        self.bytes = self.items = 0

    def put(self, item: Event, nbytes: int) -> None:
        sender = sender_of(item.peer)
        self._queues.setdefault(sender, deque()).append((item, nbytes))
        self._count(sender, nbytes, 1)

    def take(self) -> Item:
        sender, queue = next(iter(self._queues.items()))
        item, nbytes = queue.popleft()
        self._queues.move_to_end(sender)
        self._count(sender, -nbytes, -1)
        return item, nbytes

    def share_of(self, sender: str) -> tuple[int, int]:
        """Bytes and items of that sender."""
        return self._bytes_of.get(sender, 0), len(self._queues.get(sender, ()))

    def keep(self, wanted: Callable[[Event], bool]) -> None:
        waiting, self._queues = self._queues, OrderedDict()
        self._bytes_of, self.bytes, self.items = {}, 0, 0
        for queue in waiting.values():
            for item, nbytes in queue:
                if wanted(item):
                    self.put(item, nbytes)

    def __iter__(self) -> Iterator[Item]:
        return (item for queue in list(self._queues.values()) for item in list(queue))

    def __len__(self) -> int:
        return self.items

    def _count(self, sender: str, nbytes: int, items: int) -> None:
        self.bytes += nbytes
        self.items += items
        self._bytes_of[sender] = self._bytes_of.get(sender, 0) + nbytes
        if not self._queues[sender]:
            del self._queues[sender], self._bytes_of[sender]


class ReceiveQueue:
    def __init__(self, on_space: Callable[[], None] = lambda: None) -> None:
        self._lanes = (FairQueue(), FairQueue())  # control, bulk
        self._paused: set[tuple[bool, str]] = set()  # senders whose readers have paused
        self._on_space = on_space
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    def full(self, bulk: bool, peer: str = "") -> bool:
        """Should readers pause: those of that peer, or without one those of all?"""
        with self._lock:
            if peer and self._exceeds_share(bulk, sender_of(peer), SENDER_SHARES):
                self._paused.add((bulk, sender_of(peer)))
                return True
            return self._full(bulk)

    def put(self, item: Event, nbytes: int = 0) -> None:
        bulk = isinstance(item, Incoming) and bool(item.blobs)
        with self._lock:
            self._lanes[bulk].put(item, nbytes)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            try:
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)
            except RuntimeError:  # its loop is closed: nothing takes any more
                pass

    async def take(self) -> Event:
        while True:
            with self._lock:
                if any(self._lanes):
                    break
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter
        with self._lock:
            bulk = not self._lanes[0]
            was_full = self._full(bulk)
            item, _ = self._lanes[bulk].take()
            key = (bulk, sender_of(item.peer))
            # At half of its share: otherwise every message of a sender that floods would wake every reader.
            space = key in self._paused and not self._exceeds_share(*key, 2 * SENDER_SHARES)
            if space:
                self._paused.discard(key)
            space = space or (was_full and not self._full(bulk))
        if space:
            self._on_space()
        return item

    def drop(self, unwanted: Callable[[Event], bool]) -> None:
        """Remove the waiting items for which `unwanted` is true."""
        with self._lock:
            was_full = self._full(False) or self._full(True) or bool(self._paused)
            for lane in self._lanes:
                lane.keep(lambda item: not unwanted(item))
            self._paused.clear()
        if was_full:
            self._on_space()

    @property
    def _bytes(self) -> tuple[int, int]:
        """Of control and bulk that wait; for tests."""
        return self._lanes[0].bytes, self._lanes[1].bytes

    def _full(self, bulk: bool) -> bool:
        lane = self._lanes[bulk]
        return lane.bytes >= _limit_bytes(bulk) or lane.items >= LIMIT_ITEMS

    def _exceeds_share(self, bulk: bool, sender: str, shares: int) -> bool:
        nbytes, items = self._lanes[bulk].share_of(sender)
        return nbytes >= max(1, _limit_bytes(bulk) // shares) or items >= LIMIT_ITEMS // shares


def sender_of(peer: str) -> str:
    """The key in a peer's name."""
    return peer.partition(".")[0]


def _limit_bytes(bulk: bool) -> int:
    return BULK_LIMIT_BYTES if bulk else CONTROL_LIMIT_BYTES


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
