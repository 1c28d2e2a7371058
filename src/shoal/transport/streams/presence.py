"""Which peers are connected, the Lost events that say when one no longer is, and peers that messages wait for.

A peer has up to four streams. When it dies all of them break, and only the first of these failures is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.core.messages import Peer
from shoal.transport.base import Lost, Unknown
from shoal.transport.streams.receive_queue import ReceiveQueue

LOOK_UP_S = 3.0  # after which a peer whose address was not found is reported as Lost
PEERS = 64  # names are free: further ones are Lost at once


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


class UnroutedPeers:
    """Those that messages wait for because their address is not known here yet: Lost if it is not learned in a while.

    A newcomer asks every member that it finds, and a member may be asked before the newcomer's record has reached it: its answer waits in
    the sender's queue while the node looks the peer up (base.py: Unknown). In the node's thread. `give_up` drops what waits for a peer."""

    def __init__(self, receive_queue: ReceiveQueue, give_up: Callable[[Peer], None]) -> None:
        self._receive_queue, self._give_up = receive_queue, give_up
        self._timers: dict[Peer, asyncio.TimerHandle] = {}

    def add(self, peer: Peer) -> bool:
        """False: too many peers are not known, and this one is Lost."""
        if peer in self._timers:
            return True
        if len(self._timers) >= PEERS:
            self._receive_queue.put(Lost(peer, "its address is not known, nor are those of many others"))
            return False
        self._timers[peer] = asyncio.get_running_loop().call_later(LOOK_UP_S, self._lose, peer)
        self._receive_queue.put(Unknown(peer))
        return True

    def remove(self, peer: Peer) -> bool:
        """Whether messages waited for that peer's address."""
        timer = self._timers.pop(peer, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def clear(self) -> None:
        for peer in tuple(self._timers):
            self.remove(peer)

    def _lose(self, peer: Peer) -> None:
        self.remove(peer)
        self._give_up(peer)
        self._receive_queue.put(Lost(peer, f"its address is not known and was not found in {LOOK_UP_S:g} s"))
