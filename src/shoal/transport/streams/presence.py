"""Which peers are connected, and the Lost events that say when one no longer is.

A peer has up to four streams. When it dies all of them break, and only the first of these failures is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.core.messages import Peer
from shoal.transport.base import Lost
from shoal.transport.streams.receive_queue import ReceiveQueue


class Presence:
    """`connected` and `disconnected` are called from any thread; everything else in the node's."""

    def __init__(self, receive_queue: ReceiveQueue) -> None:
        self._receive_queue = receive_queue
        self._connected: set[Peer] = set()  # node's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._closed = True

    def add(self, peer: Peer) -> None:
        self._connected.add(peer)

    def forget(self, peer: Peer) -> None:
        self._connected.discard(peer)

    def connected(self, peer: Peer) -> None:
        self._call(lambda: self._connected.add(peer))

    def disconnected(self, peer: Peer, error: Exception, always: bool) -> None:
        """`always`: report it even when the peer was not connected."""
        self._call(lambda: self._lose(peer, error, always))

    def _lose(self, peer: Peer, error: Exception, always: bool) -> None:
        if not self._closed and (always or peer in self._connected):
            self._connected.discard(peer)
            self._receive_queue.put(Lost(peer, str(error) or type(error).__name__))

    def _call(self, call: Callable[[], object]) -> None:
        """Run it in the node's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed
            pass
