"""Peers that messages wait for because their address is not known here yet: Lost if it is not learned in a while.

A newcomer asks every member that it finds, and a member may be asked before the newcomer's record has reached it: its answer waits in the
sender's queue while the node looks the peer up (base.py: Unknown). For streams.py; everything is called in the node's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.core.messages import Peer
from shoal.transport.base import Lost, Unknown
from shoal.transport.streams.receive_queue import ReceiveQueue

LOOK_UP_S = 3.0  # after which a peer whose address was not found is reported as Lost
PEERS = 64  # names are free: further ones are Lost at once


class UnroutedPeers:
    """`give_up` drops what waits for a peer."""

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
