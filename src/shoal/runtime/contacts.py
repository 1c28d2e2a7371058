"""A peer's use of the run's directory: looks up the other peers when that is asked for, and keeps this peer announced.

For node.py; the directory (transport/directory) finds records, and core decides when peers are looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shoal.core.messages import Found, Peer
from shoal.transport.directory.directory import Directory

LOOK_UP_S = 0.5  # shortest time between two look-ups
ANNOUNCE_S = 20.0  # well below the lifetime of a directory's record


class Contacts:
    """`look_up` and `announce` run until cancelled; `find` and `announce_now` wake them."""

    def __init__(self, name: Peer, directory: Directory) -> None:
        self.listed: tuple[Peer, ...] = ()  # result of the last look-up
        self.directory = directory
        self._name = name
        self._find = asyncio.Event()
        self._announce_now = asyncio.Event()

    def find(self) -> None:
        self._find.set()

    def announce_now(self) -> None:
        self._announce_now.set()

    async def look_up(self, handle: Callable[[Found], None]) -> None:
        while True:
            await self._find.wait()
            self._find.clear()
            self.listed = tuple(record.peer for record in await self.directory.peers())
            handle(Found(peers=tuple(peer for peer in self.listed if peer != self._name)))
            await asyncio.sleep(LOOK_UP_S)

    async def announce(self) -> None:
        while True:
            self._announce_now.clear()
            await self.directory.announce()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._announce_now.wait()
