"""A network inside one event loop, for tests: nothing is encrypted, nobody is checked, every message is encoded.

Peers of one Hub reach one another at once. Messages pass as the very bytes of wire.py, so that limits and malformed data
are met here as on a real network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.core.messages import Message, Peer
from shoal.transport.base import Blob, Event, Incoming, Limits, Lost
from shoal.transport.streams.receive_queue import ReceiveQueue
from shoal.transport.wire import Malformed, decode, encode

log = logging.getLogger(__name__)


class Hub:
    """The air between the peers."""

    def __init__(self) -> None:
        self.peers: dict[Peer, MemoryTransport] = {}

    def carry(self, sender: Peer, receiver: Peer, data: bytes) -> bool:
        """False: nobody is there."""
        there = self.peers.get(receiver)
        if there is not None:
            there.arrive(sender, data)
        return there is not None

    def part(self, peer: Peer, other: Peer) -> None:
        """`peer` hangs up on `other`."""
        there = self.peers.get(other)
        if there is not None:
            there.left(peer)

    def remove(self, peer: Peer) -> None:
        self.peers.pop(peer, None)
        for other in list(self.peers.values()):
            other.left(peer)


class MemoryTransport:
    def __init__(self, hub: Hub, name: Peer, limits: Limits = Limits()) -> None:
        self.name = name
        self._hub = hub
        self._limits = limits
        self._receive_queue = ReceiveQueue()
        self._talked: set[Peer] = set()
        self._open = False

    async def start(self) -> None:
        if self.name in self._hub.peers:
            raise ValueError(f"the name {self.name} is taken in this network")
        self._hub.peers[self.name] = self
        self._open = True

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        frame = encode(message, blobs, self._limits)
        if not self._open:
            return 0
        if self._hub.carry(self.name, peer, b"".join(frame.parts)):
            self._talked.add(peer)
            return frame.nbytes
        self._talked.discard(peer)
        self._receive_queue.put(Lost(peer, "there is no such peer"))
        return 0

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        """Nothing waits: what is sent has arrived."""

    async def receive(self) -> Event:
        return await self._receive_queue.take()

    def line_Bps(self) -> tuple[float, float]:
        return 0.0, 0.0

    def forget(self, peer: Peer) -> None:
        self._talked.discard(peer)
        self._receive_queue.drop(lambda item: item.peer == peer)
        self._hub.part(self.name, peer)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._hub.remove(self.name)

    def learn(self, peer: Peer, address: tuple[str, int]) -> None:
        """Every peer of the hub is known already."""

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", 0)

    # ---------------------------------------------------------------------------------------------------- for the hub

    def arrive(self, sender: Peer, data: bytes) -> None:
        try:
            message, blobs = decode(data, self._limits)
        except Malformed as error:
            log.warning("%s is dropped: it sent %s", sender, error)
            self._talked.discard(sender)
            self._receive_queue.put(Lost(sender, str(error)))
            return
        bulk = bool(blobs)
        if self._receive_queue.full(bulk):  # nothing can push back here
            log.warning("too much waits at %s: %s from %s is dropped", self.name, type(message).__name__, sender)
            return
        self._talked.add(sender)
        self._receive_queue.put(Incoming(sender, message, blobs, len(data)), len(data))

    def left(self, peer: Peer) -> None:
        if peer in self._talked:
            self._talked.discard(peer)
            self._receive_queue.put(Lost(peer, "closed by the other side"))
