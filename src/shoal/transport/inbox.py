"""What has arrived and waits for the node: control before bulk, each in order; says when readers should pause.

For every transport. Any thread puts; one task takes. `on_room` is called in that task's thread when what was full is not
any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from shoal.transport.base import Incoming, Lost

ROOM_BYTES = (
    256 << 20
)  # waiting to be taken, control and bulk each; beyond it readers pause and the network pushes back
ROOM_ITEMS = 20_000


class Inbox:
    def __init__(self, on_room: Callable[[], None] = lambda: None) -> None:
        self._lanes: tuple[deque[tuple[Incoming | Lost, int]], ...] = (deque(), deque())  # control, bulk
        self._bytes = [0, 0]
        self._on_room = on_room
        self._waiting: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    def full(self, bulk: bool) -> bool:
        return self._bytes[bulk] >= ROOM_BYTES or len(self._lanes[bulk]) >= ROOM_ITEMS

    def put(self, item: Incoming | Lost, nbytes: int = 0) -> None:
        bulk = isinstance(item, Incoming) and bool(item.blobs)
        with self._lock:
            self._lanes[bulk].append((item, nbytes))
            self._bytes[bulk] += nbytes
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
        bulk = not self._lanes[0]
        with self._lock:
            was_full = self.full(bulk)
            item, nbytes = self._lanes[bulk].popleft()
            self._bytes[bulk] -= nbytes
        if was_full and not self.full(bulk):
            self._on_room()
        return item

    def drop(self, unwanted: Callable[[Incoming | Lost], bool]) -> None:
        """Forget what waits, as far as `unwanted` says."""
        with self._lock:
            was_full = self.full(False) or self.full(True)
            for bulk, lane in enumerate(self._lanes):
                kept = [(item, nbytes) for item, nbytes in lane if not unwanted(item)]
                lane.clear()
                lane.extend(kept)
                self._bytes[bulk] = sum(nbytes for _, nbytes in kept)
        if was_full:
            self._on_room()


def _ring(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
