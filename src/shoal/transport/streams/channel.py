"""Streams of bytes over a connection, in steps (engine.py): TLS, and a plain socket.

TLS works on memory and the socket is read in large pieces, because that takes a third of the system calls of ssl's own sockets (and they
allow no reading beside writing); crypto and copies run outside the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable

from shoal.transport.streams.engine import Connection, Steps, WaitFor
from shoal.transport.streams.uplink import QUANTUM_BYTES, Uplink
from shoal.transport.wire import TOLD_BYTES, share

WRITE_BYTES = 256 << 10  # encrypted and handed to a socket at once
HEARD_BYTES = 4 << 10  # of what a receiver says, taken at once: hundreds of shares


class Channel:
    """TLS over one non-blocking socket, in steps."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, server_side: bool) -> None:
        self._connection = connection
        self._sock = connection.sock
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._uplink: Uplink | None = None  # of bulk
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_side)
        self._told = bytearray()  # of a share
        self._untold = b""  # of what this side says, encrypted
        self._arrived: Callable[[int], None] = lambda _: None

    def handshake(self) -> Steps:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                yield from self._flush()
                yield from self._fill()
            except ssl.SSLError:
                yield from self._flush()  # the alert that tells the other side why
                raise
            else:
                yield from self._flush()
                return

    def certificate(self) -> bytes:
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None  # the handshake requires one
        return shown

    def read(self, view: memoryview) -> Steps:
        """Fill `view`. ConnectionError when the other side has closed."""
        at = turn = 0
        while at < view.nbytes:
            try:
                got: int = self._tls.read(view.nbytes - at, view[at:])  # type: ignore[assignment]  # a number, as it is given a buffer
            except ssl.SSLWantReadError:
                yield from self._fill()
                continue
            except ssl.SSLZeroReturnError:
                got = 0
            if not got:
                raise ConnectionError("closed by the other side")
            at += got
            turn += got
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def write(self, view: memoryview) -> Steps:
        turn = 0
        for at in range(0, view.nbytes, WRITE_BYTES):
            part = view[at : at + WRITE_BYTES]
            self._tls.write(part)
            yield from self._flush()
            turn += part.nbytes
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def check_open(self) -> None:
        """Between writes: ConnectionError when the other side has closed; it has nothing else to say than shares."""
        if self._uplink is not None:
            self._uplink.watch(self._connection)
        self._hear()

    def _hear(self) -> None:
        assert self._connection.engine is not None
        scratch = self._connection.engine.scratch
        try:
            got = self._sock.recv_into(scratch, HEARD_BYTES)
        except BlockingIOError:
            return
        if not got:
            raise ConnectionError("closed by the other side")
        self._in.write(scratch[:got])
        try:
            while heard := self._tls.read(HEARD_BYTES):
                if self._uplink is None:
                    break
                self._told += heard
        except ssl.SSLWantReadError:
            self._take_share()
            return
        except ssl.SSLZeroReturnError:
            pass
        raise ConnectionError("closed by the other side")

    def _take_share(self) -> None:
        """The newest that is whole."""
        whole = len(self._told) // TOLD_BYTES * TOLD_BYTES
        if whole:
            assert self._uplink is not None
            self._uplink.take_share(self._connection, *share(self._told[whole - TOLD_BYTES : whole]))
            del self._told[:whole]

    def telling(self, arrived: Callable[[int], None]) -> Callable[[bytes], None]:
        self._arrived = arrived
        return self._tell

    def _tell(self, words: bytes) -> None:
        """Nothing, when the other side has not taken what was said before. An error shows in this connection's own steps."""
        with contextlib.suppress(OSError):
            if not self._untold:
                self._tls.write(words)
                self._untold = self._out.read()
            try:
                self._untold = self._untold[self._sock.send(self._untold) :]
            except BlockingIOError:
                return

    def paced(self, uplink: Uplink | None) -> Channel:
        if uplink is not None:
            uplink.join(self._connection, self._hear)
        self._uplink = uplink
        return self

    def _fill(self) -> Steps:
        while True:
            assert self._connection.engine is not None
            scratch = self._connection.engine.scratch  # of the thread this runs in now
            try:
                got = self._sock.recv_into(scratch)
            except BlockingIOError:
                yield WaitFor.READ
                continue
            if not got:
                raise ConnectionError("closed by the other side")
            self._arrived(got)
            self._in.write(scratch[:got])
            return

    def _flush(self) -> Steps:
        waiting = memoryview(self._out.read())
        if self._uplink is not None:
            return (yield from self._uplink.write(self._connection, waiting))
        while waiting:
            try:
                waiting = waiting[self._sock.send(waiting) :]
            except BlockingIOError:
                yield WaitFor.WRITE


class PlainStream:
    """A plain socket, in steps: what it carries is encrypted by others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sock = connection.sock

    def read(self, view: memoryview) -> Steps:
        at = turn = 0
        while at < view.nbytes:
            try:
                got = self._sock.recv_into(view[at:])
            except BlockingIOError:
                yield WaitFor.READ
                continue
            if not got:
                raise ConnectionError("closed by the other side")
            at += got
            turn += got
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def write(self, view: memoryview) -> Steps:
        turn = 0
        while view:
            try:
                sent = self._sock.send(view[:QUANTUM_BYTES])
            except BlockingIOError:
                yield WaitFor.WRITE
                continue
            view = view[sent:]
            turn += sent
            if turn >= QUANTUM_BYTES:
                turn = 0
                yield WaitFor.AGAIN

    def telling(self, arrived: Callable[[int], None]) -> None:
        """Others pace what it carries."""

    def check_open(self) -> None:
        if self.received(1):
            raise ConnectionError("the other side sent data on a stream of this side's")

    def received(self, most: int) -> bytes:
        """The bytes that have arrived, without waiting."""
        try:
            words = self._sock.recv(most)
        except BlockingIOError:
            return b""
        if not words:
            raise ConnectionError("closed by the other side")
        return words
