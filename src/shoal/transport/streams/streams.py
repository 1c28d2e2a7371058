"""The contract of base.py over any network that carries streams of bytes whose other end has proven its key.

The network beneath (TLS over TCP, libp2p) is a Carrier (carrier.py). Everything else is decided here, once for all carriers. A peer
proves its membership by the pass in its hello (handshake.py), and the other side must hold the very name that was dialled. Each peer
has up to four streams: control and bulk, one per direction, opened by the sender when there is something to send (sender.py). One per
direction, so that a new stream simply replaces the old one and order cannot suffer; two kinds, so that control never waits behind
bulk. A stream is one connection, or several of bulk where TCP stands no losses (sender.py). Bulk goes by rank, in fragments.
Four threads do the work (engine.py): one for all control, one for outgoing bulk, one for incoming bulk (receiver.py), and one for
connections without a completed handshake (listener.py), which members therefore never wait for.
admission.py bounds how many connections others may open and how fast one key may send.

A stream that breaks loses what waits to be sent on it and is reported as Lost (presence.py); the next send dials again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Generic

from shoal.core.messages import Message, Peer
from shoal.transport.base import STREAM_KINDS, Blob, Event, Incoming, Limits
from shoal.transport.budget import Warnings
from shoal.transport.congestion.downlink import DownlinkQueue
from shoal.transport.identity.invite import Membership
from shoal.transport.streams.admission import Admission
from shoal.transport.streams.carrier import Carrier, Route
from shoal.transport.streams.engine import Connection, Engines
from shoal.transport.streams.listener import Listener
from shoal.transport.streams.presence import Presence, UnroutedPeers
from shoal.transport.streams.receive_queue import ReceiveQueue
from shoal.transport.streams.receiver import Receiver
from shoal.transport.streams.sender import Sender
from shoal.transport.wire import encode

log = logging.getLogger(__name__)

LINGER_S = 1.0  # for which `close` waits until queued messages are sent


class StreamTransport(Generic[Route]):
    """`name` is that of the carrier's identity."""

    def __init__(self, name: Peer, membership: Membership, carrier: Carrier[Route], limits: Limits) -> None:
        self.name = name
        self._carrier = carrier
        self._limits = limits
        self._warnings = Warnings(log)
        self._engines = Engines()
        self._receive_queue = ReceiveQueue(on_space=lambda: self._receiver.wake_all())
        self._presence = Presence(self._receive_queue)
        self._admission = Admission()
        downlink_queue = DownlinkQueue()
        self._receiver = Receiver(
            membership,
            limits,
            self._engines,
            self._receive_queue,
            self._admission,
            self._presence,
            self._warnings,
            downlink_queue,
        )
        self._sender = Sender(
            name,
            membership,
            carrier,
            limits,
            self._engines,
            self._presence,
            self._warnings,
            self._receiver.queue_s,
            downlink_queue,
        )
        self._unrouted = UnroutedPeers(self._receive_queue, give_up=self._sender.forget)
        self._listener = Listener(
            name, membership, carrier, self._engines.handshakes, self._admission, self._receiver, self._warnings
        )
        self._closed = False

    async def start(self) -> None:
        self._presence.start()
        listening = await self._carrier.start()
        self._listener.start()
        for each in listening:
            self.listen(each)
        for engine in self._engines.all:
            engine.start()

    def listen(self, listening: socket.socket) -> None:
        """Accept the connections of this socket, too."""
        self._listener.listen(listening)

    def take(self, sock: socket.socket) -> None:
        """Answer a connection that this peer has made to a relay. From any thread."""
        self._listener.take(sock)

    def moved(self, hosts: tuple[str, ...]) -> None:
        """This machine's addresses are these by now: connections from others carry nothing, and TCP would take long to see that."""
        for engine in self._engines.all:
            engine.fail_if(partial(_is_from_another, hosts), ConnectionError("this machine's address has changed"))

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        frame = encode(message, blobs, self._limits)
        if self._closed:
            return 0
        if peer == self.name:
            self._receive_queue.put(Incoming(peer, message, blobs), frame.nbytes)
            return 0
        if self._carrier.route(peer) is None and not self._unrouted.add(peer):
            return 0
        if not self._sender.put(peer, frame):
            text = f"too much waits for {peer}: {type(message).__name__} to it is dropped"
            self._warnings.warn("messages dropped", text)
            return 0
        return frame.nbytes

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        self._sender.withdraw(is_void)

    def learned(self, peer: Peer) -> None:
        """The carrier may have a route to that peer now: send what waits for it."""
        if not self._closed and self._carrier.route(peer) is not None and self._unrouted.remove(peer):
            self._sender.resume(peer)

    async def receive(self) -> Event:
        item = await self._receive_queue.take()
        if isinstance(item, Incoming):
            self._presence.add(item.peer)
        return item

    def line_Bps(self) -> tuple[float, float]:
        now = time.monotonic()
        return self._sender.uplink.rate_Bps(now), self._receiver.downlink.rate_Bps(now)

    def forget(self, peer: Peer) -> None:
        self._carrier.forget(peer)
        self._presence.forget(peer)
        self._unrouted.remove(peer)
        self._receive_queue.drop(lambda item: item.peer == peer)
        self._sender.forget(peer)
        for kind in STREAM_KINDS:
            self._receiver.disconnect(peer, kind)

    async def close(self) -> None:
        """Queued messages have a second to be sent."""
        if self._closed:
            return
        self._closed = True
        self._unrouted.clear()
        self._presence.close()
        self._listener.close()
        until = time.monotonic() + LINGER_S
        while self._sender.pending and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for engine in self._engines.all:
            engine.stop()
        await self._carrier.close()
        self._listener.release()


def _is_from_another(hosts: tuple[str, ...], connection: Connection) -> bool:
    """Neither from one of these addresses nor within this machine."""
    try:
        own, other = connection.sock.getsockname(), connection.sock.getpeername()
    except OSError:  # it listens, or is not connected
        return False
    inside = not isinstance(own, tuple) or own[0] == other[0] or ipaddress.ip_address(own[0]).is_loopback
    return not inside and own[0] not in hosts
