"""Incoming connections until their handshake is complete. For streams.py.

They have an engine of their own, so that members never wait for connections that have not proven their membership. admission.py
bounds how many there are.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from functools import partial
from typing import Any

from shoal.core.messages import Peer
from shoal.transport.base import StreamKind
from shoal.transport.budget import Warnings, address_group
from shoal.transport.identity.invite import Membership
from shoal.transport.streams import handshake
from shoal.transport.streams.admission import Admission, AdmittedConnection
from shoal.transport.streams.carrier import ByteStream, Carrier, Detached
from shoal.transport.streams.engine import Connection, Engine, Steps, WaitFor
from shoal.transport.streams.handshake import HandshakeRefused, Hello, check_hello, encode_hello, encode_rejection
from shoal.transport.streams.receiver import Receiver

log = logging.getLogger(__name__)

ACCEPTED = 16  # connections accepted at once, before the connections that are already open have their turn
PAUSE_S = 0.01  # before more are accepted, after one was refused


class Listener:
    """Runs in the engine for handshakes, except `close`."""

    def __init__(
        self,
        name: Peer,
        membership: Membership,
        carrier: Carrier[Any],
        engine: Engine,
        admission: Admission,
        receiver: Receiver,
        warnings: Warnings,
    ) -> None:
        self._name, self._membership, self._carrier = name, membership, carrier
        self._engine, self._admission, self._receiver, self._warnings = engine, admission, receiver, warnings
        self._spare: socket.socket | None = None  # a file descriptor to give up when there are no others
        self._closed = False

    def start(self) -> None:
        self._spare = socket.socket()

    def close(self) -> None:
        self._closed = True

    def release(self) -> None:
        """After the engine has stopped."""
        if self._spare is not None:
            self._spare.close()

    def listen(self, listening: socket.socket) -> None:
        """Accept the connections of this socket, too."""
        connection = Connection(
            listening, lambda error: log.error("%s no longer accepts connections: %s", self._name, error)
        )
        connection.steps = self._accept(connection)
        self._engine.post(lambda: self._engine.adopt(connection))

    def _accept(self, listening: Connection) -> Steps:
        turn = 0
        while True:
            turn += 1
            if turn % ACCEPTED == 0:
                yield WaitFor.AGAIN
            try:
                sock, address = listening.sock.accept()
            except BlockingIOError:
                yield WaitFor.READ
                continue
            except OSError as error:  # the other side has closed already, or no file descriptor is left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listening.sock)
                yield from self._pause(listening)
                continue
            group = address_group(address[0]) if isinstance(address, tuple) else ""  # a libp2p daemon gives none
            if self._closed or not self._admission.may_connect(group):
                sock.close()
                self._warnings.warn("connections refused", f"{self._name}: too many new connections from {group}")
                yield from self._pause(listening)
                continue
            self._begin(sock, group)

    def take(self, sock: socket.socket) -> None:
        """From any thread: answer a connection that a relay has joined with a caller's."""
        self._engine.post(lambda: self._begin(sock, "a relay", relayed=True))

    def _begin(self, sock: socket.socket, group: str, relayed: bool = False) -> None:
        sock.setblocking(False)
        connection = Connection(sock, lambda error: None)
        connection.relayed = relayed
        connection.failed = partial(self._failed, connection, group)
        connection.steps = self._answer(connection)
        connection.deadline = time.monotonic() + handshake.CONNECT_S
        displaced = self._admission.add_pending(connection, group)
        if displaced is not None:
            self._engine.drop(displaced)
            self._warnings.warn(
                "silent connections", f"{self._name}: too many connections that do not begin the handshake"
            )
        self._engine.adopt(connection)

    def _pause(self, listening: Connection) -> Steps:
        until = listening.resume_at = time.monotonic() + PAUSE_S
        while time.monotonic() < until:
            yield WaitFor.WOKEN

    def _turn_away(self, listening: socket.socket) -> None:
        """No file descriptor is left: give up the spare one while the caller's connection is closed. Otherwise the connection would
        wait, and this thread spin, for ever."""
        text = f"{self._name} has no file descriptors left for further connections; raise the limit (ulimit -n)"
        self._warnings.warn("no file descriptors", text)
        if self._spare is not None:
            self._spare.close()
            try:
                listening.accept()[0].close()
            except OSError:  # another thread took the descriptor: the caller waits until its own timeout
                pass
        try:
            self._spare = socket.socket()
        except OSError:
            self._spare = None

    def _failed(self, connection: Connection, group: str, error: Exception) -> None:
        self._admission.remove(connection)
        if not isinstance(error, Detached):
            self._warnings.warn("connections refused", f"{self._name} refused a connection from {group}: {error}")

    def _answer(self, connection: Connection) -> Steps:
        stream, key = yield from self._carrier.answer(connection)
        try:
            hello = check_hello((yield from handshake.read(stream)), key, self._name, self._membership)
            displaced = self._admit(connection, key, hello.name, hello.kind)
        except HandshakeRefused as refusal:
            yield from handshake.write(stream, encode_rejection(refusal))
            raise HandshakeRefused(f"key {key}: {refusal}") from None
        seen = "" if connection.relayed else _caller(connection.sock)
        self._carrier.called(hello.name, seen)
        connection.failed = lambda error: self._receiver.failed(hello.name, hello.kind, connection, error)
        for other in displaced:
            self._receiver.disconnect(other.peer, other.kind)
        answer = encode_hello(self._name, hello.name, hello.kind, self._membership, seen)
        yield from handshake.write(stream, answer)
        connection.deadline = None
        yield from self._hand_over(connection, stream, hello)

    def _admit(self, connection: Connection, key: str, peer: Peer, kind: StreamKind) -> list[AdmittedConnection]:
        try:
            return self._admission.admit(connection, key, peer, kind)
        except ValueError as error:
            raise HandshakeRefused(str(error)) from None

    def _hand_over(self, connection: Connection, stream: ByteStream, hello: Hello) -> Steps:
        """To the engine that reads this kind of stream."""
        yield self._receiver.engine(hello.kind)
        if not self._admission.is_admitted(connection):
            raise ConnectionError("it gave way to another connection")
        yield from self._receiver.receive(connection, stream.paced(None) if hello.kind == "bulk" else stream, hello)


def _caller(sock: socket.socket) -> str:
    """The address at the other end; '' of a libp2p daemon's connection."""
    try:
        address = sock.getpeername()
    except OSError:  # it has closed already
        return ""
    return str(address[0])[:64] if isinstance(address, tuple) else ""
