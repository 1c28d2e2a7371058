"""How long a small, urgent message waits while state for a joiner fills a line of 200 Mbit/s.

    python benchmarks/priority.py [--seconds 8]

Two TLS transports with a line between them: a forwarder of 25 MB/s for all connections together, which takes from each in turn,
64 KiB at a time, and holds no more than that, as a router with a short queue. State travels in chunks of 16 MiB without a pause; twenty
times a second a backward's answer with 4 KiB is sent, as bulk. Its time from `send` to the other node is what counts, beside
that of the same message with ranks taken away (first come, first served, as before) and of a control message. `modelled` is the
line of transport/emulated/shaped.py instead of the forwarder. The last line's value is the 99th percentile in ms with ranks through the
forwarder, its target 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from report import at_most, parse, report
from shoal.core.messages import BoundaryTensor, Cancelled, Chunk
from shoal.transport import wire
from shoal.transport.base import Blob, Incoming
from shoal.transport.emulated import shaped
from shoal.transport.emulated.shaped import AccessLink, Shaped
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.tls import TlsTransport

LINE_Bps = 25e6
PIECE_BYTES = 64 << 10
CHUNK_BYTES = 16 << 20
SMALL_BYTES = 4096
EVERY_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    asked = parse(parser)
    found: dict[str, Any] = {}
    for name, ranked, modelled in (
        ("ranked", True, False),
        ("first come, first served", False, False),
        ("ranked, modelled", True, True),
        ("first come, first served, modelled", False, True),
    ):
        with ranks(ranked):
            found[name] = asyncio.run(measure(asked.seconds, modelled))
        print(f"{name:36}", "  ".join(f"{key} {value:g}" for key, value in found[name].items()), flush=True)
    waits_ms = found["ranked"]["urgent_p99_ms"]
    report("priority", waits_ms, "ms that an urgent message waits, p99", at_most(50.0), found, asked.record)


@contextmanager
def ranks(kept: bool) -> Iterator[None]:
    """Without them all bulk is of one rank."""
    before = wire.rank, shaped.rank
    if not kept:
        wire.rank = shaped.rank = lambda message: 0  # type: ignore[attr-defined]
    try:
        yield
    finally:
        wire.rank, shaped.rank = before  # type: ignore[attr-defined]


async def measure(seconds: float, modelled: bool) -> dict[str, float]:
    authority = Authority.new()
    text = authority.invite((), time.time() + 3600)

    def make() -> Any:
        identity = Identity.new()
        plain = TlsTransport(identity, read_invite(text, time.time()).membership(identity))
        return Shaped(plain, AccessLink(0.0, LINE_Bps, LINE_Bps)) if modelled else plain

    a, b = make(), make()
    await a.start()
    await b.start()
    line = None if modelled else Line(b.address)
    a.learn(b.name, b.address if line is None else line.address)
    state = (Blob("uint8", (CHUNK_BYTES,), os.urandom(CHUNK_BYTES)),)
    small = (Blob("uint8", (SMALL_BYTES,), bytes(SMALL_BYTES)),)
    sent: dict[tuple[str, int], float] = {}
    waited: dict[str, list[float]] = {"urgent": [], "control": []}
    chunks = 0
    began = time.monotonic()
    until = began + seconds

    async def listen() -> None:
        nonlocal chunks
        while True:
            item = await b.receive()
            assert isinstance(item, Incoming), item
            if isinstance(item.message, Chunk):
                chunks += 1
                a.send(b.name, Chunk(0, 0, 0, chunks + 2), state)
                continue
            kind = "urgent" if item.blobs else "control"
            waited[kind].append(1000 * (time.monotonic() - sent.pop((kind, item.message.index))))  # type: ignore[union-attr]

    listening = asyncio.create_task(listen())
    for index in range(3):
        a.send(b.name, Chunk(0, 0, 0, index), state)
    await asyncio.sleep(1.0)  # the line is full
    index = 0
    while time.monotonic() < until:
        for kind, message, blobs in (
            ("urgent", BoundaryTensor(0, 0, index, 0, True), small),
            ("control", Cancelled(0, 0, index, 0, 0), ()),
        ):
            sent[kind, index] = time.monotonic()
            a.send(b.name, message, blobs)
        index += 1
        await asyncio.sleep(EVERY_S)
    rate = chunks * CHUNK_BYTES / (time.monotonic() - began) / 1e6
    while sent and time.monotonic() < until + 30:
        await asyncio.sleep(0.05)
    listening.cancel()
    await a.close()
    await b.close()
    if line is not None:
        line.close()
    result = {"state_MBps": round(rate, 1)}
    for kind, times in waited.items():
        cuts = statistics.quantiles(times, n=100)
        result |= {f"{kind}_p50_ms": round(cuts[49], 1), f"{kind}_p99_ms": round(cuts[98], 1)}
        result[f"{kind}_max_ms"] = round(max(times), 1)
    return result


class Line:
    """A forwarder of LINE_Bps to one address, in a thread of its own. What comes back is not held."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._routes: dict[
            socket.socket, tuple[socket.socket, bool]
        ] = {}  # where bytes go on, and whether over the line
        self._free_s = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join(10)
        for sock in [*self._routes, self._listener]:
            sock.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._forward(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        far = socket.create_connection(self._target)
        for sock, other, slow in ((near, far, True), (far, near, False)):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._routes[sock] = other, slow
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        other, slow = self._routes[sock]
        try:
            data = sock.recv(PIECE_BYTES)
            if data and slow:
                self._free_s = max(self._free_s, time.monotonic() - 0.005) + len(data) / LINE_Bps
                time.sleep(max(0.0, self._free_s - time.monotonic()))
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._selector.unregister(sock)
        other.close()


if __name__ == "__main__":
    main()
