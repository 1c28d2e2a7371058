"""What has arrived and waits for the node: control before bulk, each sender's in order; says when readers should pause.

For every transport. Any thread puts; one task takes: senders take turns, so that one that floods delays itself alone. A
sender is a key (the name without its incarnation, which is free), and what may wait is bounded for each and for all.
`on_space` is called in the taking task's thread when what was full is not any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from shoal.transport.base import Incoming, Lost

BULK_LIMIT_BYTES = 256 << 20  # bulk waiting to be taken; beyond it readers pause and the network pushes back
CONTROL_LIMIT_BYTES = 16 << 20  # control likewise: decoded it takes up to 16 times as much memory
LIMIT_ITEMS = 20_000  # of either
SENDER_SHARES = 8  # one sender may have an eighth of all that

Item = tuple[Incoming | Lost, int]


class FairQueue:
    """What waits, of control or of bulk: a queue per sender, in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()  # the first is the next to be taken from
        self._bytes_of: dict[str, int] = {}
        self.bytes = self.items = 0

    def put(self, item: Incoming | Lost, nbytes: int) -> None:
        sender = sender_of(item.peer)
        self._queues.setdefault(sender, deque()).append((item, nbytes))
        self._count(sender, nbytes, 1)

    def take(self) -> Item:
        sender, queue = next(iter(self._queues.items()))
        item, nbytes = queue.popleft()
        self._queues.move_to_end(sender)
        self._count(sender, -nbytes, -1)
        return item, nbytes

    def part_of(self, sender: str) -> tuple[int, int]:
        """Bytes and items of that sender."""
        return self._bytes_of.get(sender, 0), len(self._queues.get(sender, ()))

    def keep(self, wanted: Callable[[Incoming | Lost], bool]) -> None:
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
        self._paused: set[tuple[bool, str]] = set()  # senders whose readers were told to pause
        self._on_room = on_space
        self._waiting: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    def full(self, bulk: bool, peer: str = "") -> bool:
        """Should readers of all, or of that peer, pause?"""
        with self._lock:
            if peer and self._exceeds_share(bulk, sender_of(peer), SENDER_SHARES):
                self._paused.add((bulk, sender_of(peer)))
                return True
            return self._full(bulk)

    def put(self, item: Incoming | Lost, nbytes: int = 0) -> None:
        bulk = isinstance(item, Incoming) and bool(item.blobs)
        with self._lock:
            self._lanes[bulk].put(item, nbytes)
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                waiting.get_loop().call_soon_threadsafe(_ring, waiting)
            except RuntimeError:  # its loop is closed: nobody takes any more
                pass

    async def take(self) -> Incoming | Lost:
        while True:
            with self._lock:
                if any(self._lanes):
                    break
                waiting = self._waiting = asyncio.get_running_loop().create_future()
            await waiting
        with self._lock:
            bulk = not self._lanes[0]
            was_full = self._full(bulk)
            item, _ = self._lanes[bulk].take()
            one = (bulk, sender_of(item.peer))
            # At half of its part: otherwise every message of a sender that floods would wake every reader.
            room = one in self._paused and not self._exceeds_share(*one, 2 * SENDER_SHARES)
            if room:
                self._paused.discard(one)
            room = room or (was_full and not self._full(bulk))
        if room:
            self._on_room()
        return item

    def drop(self, unwanted: Callable[[Incoming | Lost], bool]) -> None:
        """Forget what waits, as far as `unwanted` says."""
        with self._lock:
            was_full = self._full(False) or self._full(True) or bool(self._paused)
            for lane in self._lanes:
                lane.keep(lambda item: not unwanted(item))
            self._paused.clear()
        if was_full:
            self._on_room()

    @property
    def _bytes(self) -> tuple[int, int]:
        """That wait, of control and bulk; for tests."""
        return self._lanes[0].bytes, self._lanes[1].bytes

    def _full(self, bulk: bool) -> bool:
        lane = self._lanes[bulk]
        return lane.bytes >= _limit_bytes_of(bulk) or lane.items >= LIMIT_ITEMS

    def _exceeds_share(self, bulk: bool, sender: str, part: int) -> bool:
        nbytes, items = self._lanes[bulk].part_of(sender)
        return nbytes >= max(1, _limit_bytes_of(bulk) // part) or items >= LIMIT_ITEMS // part


def sender_of(peer: str) -> str:
    """The key in a peer's name."""
    return peer.partition(".")[0]


def _limit_bytes_of(bulk: bool) -> int:
    return BULK_LIMIT_BYTES if bulk else CONTROL_LIMIT_BYTES


def _ring(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
