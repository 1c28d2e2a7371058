"""Frames to peers whose address is not known here yet: kept until it is learned, or reported as Lost after a while.

A newcomer asks every member that it finds, and a member may be asked before the newcomer's record has reached it: its answer waits here
while the node looks the peer up (base.py: Unknown). For streams.py; everything is called in the node's thread.
"""

from __future__ import annotations

import asyncio

from shoal.core.messages import Peer
from shoal.transport.base import Lost, Unknown
from shoal.transport.streams.receive_queue import ReceiveQueue
from shoal.transport.wire import Frame

LOOK_UP_S = 3.0  # after which a peer whose address was not found is reported as Lost
PEERS = 64  # names are free: further ones are Lost at once
PEER_BYTES = 64 << 20  # what waits for one peer; the rest is dropped
ALL_BYTES = 256 << 20


class UnroutedFrames:
    def __init__(self, receive_queue: ReceiveQueue) -> None:
        self._receive_queue = receive_queue
        self._frames: dict[Peer, list[Frame]] = {}
        self._timers: dict[Peer, asyncio.TimerHandle] = {}

    def put(self, peer: Peer, frame: Frame) -> bool:
        """False: the frame is dropped, because too much waits, or because too many peers are not known."""
        waiting = self._frames.get(peer)
        if waiting is None and len(self._frames) >= PEERS:
            self._receive_queue.put(Lost(peer, "its address is not known, nor are those of many others"))
            return False
        here = sum(each.nbytes for each in waiting or ()) + frame.nbytes
        if here > PEER_BYTES or frame.nbytes + sum(self._nbytes(each) for each in self._frames) > ALL_BYTES:
            return False
        if waiting is None:
            waiting = self._frames[peer] = []
            self._timers[peer] = asyncio.get_running_loop().call_later(LOOK_UP_S, self._give_up, peer)
            self._receive_queue.put(Unknown(peer))
        waiting.append(frame)
        return True

    def take(self, peer: Peer) -> list[Frame]:
        """What waits for that peer, in order; it waits no longer."""
        timer = self._timers.pop(peer, None)
        if timer is not None:
            timer.cancel()
        return self._frames.pop(peer, [])

    def clear(self) -> None:
        for peer in tuple(self._frames):
            self.take(peer)

    def _nbytes(self, peer: Peer) -> int:
        return sum(each.nbytes for each in self._frames[peer])

    def _give_up(self, peer: Peer) -> None:
        self.take(peer)
        self._receive_queue.put(Lost(peer, f"its address is not known and was not found in {LOOK_UP_S:g} s"))
