"""What has arrived and waits for the node: control before bulk, each in order; says when readers should pause.

For every transport. One event loop takes; `put` belongs to the same loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shoal.transport.base import Incoming, Lost

ROOM_BYTES = 256 << 20  # of bulk waiting to be taken; beyond it readers pause and the network pushes back
ROOM_ITEMS = 20_000


class Inbox:
    def __init__(self, on_room: Callable[[], None] = lambda: None, room_bytes: int = ROOM_BYTES) -> None:
        self._lanes: tuple[deque[tuple[Incoming | Lost, int]], ...] = (deque(), deque())  # control, bulk
        self._bytes = [0, 0]
        self._room_bytes = room_bytes
        self._on_room = on_room
        self._waiting: asyncio.Future[None] | None = None

    def full(self, bulk: bool) -> bool:
        return self._bytes[bulk] >= self._room_bytes or len(self._lanes[bulk]) >= ROOM_ITEMS

    def put(self, item: Incoming | Lost, nbytes: int = 0) -> None:
        bulk = isinstance(item, Incoming) and bool(item.blobs)
        self._lanes[bulk].append((item, nbytes))
        self._bytes[bulk] += nbytes
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> Incoming | Lost:
        while not any(self._lanes):
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        bulk = not self._lanes[0]
        was_full = self.full(bulk)
        item, nbytes = self._lanes[bulk].popleft()
        self._bytes[bulk] -= nbytes
        if was_full and not self.full(bulk):
            self._on_room()
        return item

    def drop(self, unwanted: Callable[[Incoming | Lost], bool]) -> None:
        """Forget what waits, as far as `unwanted` says."""
        was_full = self.full(False) or self.full(True)
        for bulk, lane in enumerate(self._lanes):
            kept = [(item, nbytes) for item, nbytes in lane if not unwanted(item)]
            lane.clear()
            lane.extend(kept)
            self._bytes[bulk] = sum(nbytes for _, nbytes in kept)
        if was_full:
            self._on_room()
