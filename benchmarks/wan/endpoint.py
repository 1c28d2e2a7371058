"""One host of wan_bulk.py: sends or receives tensors over plain sockets and over our transport, in turns. Ends with its lab.

    python endpoint.py receive FOLDER ADDRESS SENDER    answers the sender
    python endpoint.py send FOLDER ADDRESS PLAN_JSON    transfers, and prints one JSON line for each transfer

Each writes its transport's name and port into the folder, under its address.

A transfer moves `count` tensors to each receiver, `window` at once, while small messages measure the round trip: over a socket of
their own, and over our control stream. Both sides of the comparison do the same work: a tensor is done when its receipt arrives.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.messages import BoundaryTensor, Chunk, Recall, Refused
from shoal.transport.base import Blob, Incoming
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import read_invite
from shoal.transport.streams import carrier
from shoal.transport.tls import TlsTransport

TENSOR_BYTES = 8 << 20
STATE_BYTES = 1 << 20  # of a chunk of state
PLAIN_PORT = 9000
PING_EVERY_S = 0.05
CONGESTION = os.environ.get("WAN_CONGESTION", "").encode()


class Transfer(msgspec.Struct, frozen=True):
    receivers: list[str]
    count: int  # tensors to each
    window: int  # of them at once
    beside: list[str] = []  # receivers of state meanwhile, over our transport alone
    over: tuple[str, ...] = ("plain", "shoal")


class Measured(msgspec.Struct, frozen=True):
    over: str  # plain, shoal
    seconds: float
    round_trips_s: list[float]
    beside_bytes: int = 0


def main() -> None:
    role, folder, address, *words = sys.argv[1:]
    if CONGESTION:
        carrier.CONGESTION = CONGESTION
    if role == "receive":
        asyncio.run(receive(Path(folder), address, words[0]))
    else:
        plan = msgspec.json.decode(words[0], type=list[Transfer])
        asyncio.run(send(Path(folder), address, plan))


def transport(folder: Path, address: str) -> TlsTransport:
    identity = Identity.new()
    return TlsTransport(
        identity, read_invite((folder / "invite").read_text(), time.time()).membership(identity), host=address
    )


def prompt(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if CONGESTION:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)
    return sock


# --------------------------------------------------------------------------------------------------------------- receiving


async def announce(folder: Path, ours: TlsTransport) -> None:
    await ours.start()
    address, port = ours.address
    (folder / f".{address}").write_text(json.dumps([ours.name, port]))
    (folder / f".{address}").rename(folder / address)


async def learn(folder: Path, ours: TlsTransport, address: str) -> str:
    """The name of the peer there, once it has announced itself."""
    while not (folder / address).exists():
        await asyncio.sleep(0.05)
    name, port = json.loads((folder / address).read_bytes())
    ours.learn(name, (address, port))
    return str(name)


async def receive(folder: Path, address: str, sender: str) -> None:
    listener = socket.create_server((address, PLAIN_PORT))
    threading.Thread(target=serve_plain, args=(listener,), daemon=True).start()
    ours = transport(folder, address)
    await announce(folder, ours)
    await learn(folder, ours, sender)
    while True:
        item = await ours.receive()
        if isinstance(item, Incoming):
            index = index_of(item.message)
            ours.send(item.peer, Refused(0, 0, index, 0, 0, False, ""))


def index_of(message: Any) -> int:
    return int(message.chunk if isinstance(message, Chunk) else message.index)


def serve_plain(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=answer_plain, args=(prompt(sock),), daemon=True).start()


def answer_plain(sock: socket.socket) -> None:
    view = memoryview(bytearray(TENSOR_BYTES))
    while prefix := sock.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(prefix, "big")
        while left:
            left -= sock.recv_into(view, min(left, TENSOR_BYTES))
        sock.sendall(b"!")


# ----------------------------------------------------------------------------------------------------------------- sending


async def send(folder: Path, address: str, plan: list[Transfer]) -> None:
    ours = Ours(transport(folder, address))
    await announce(folder, ours.transport)
    listening = asyncio.create_task(ours.listen())
    data = os.urandom(TENSOR_BYTES)
    for transfer in plan:
        names = [await learn(folder, ours.transport, each) for each in transfer.receivers]
        others = [await learn(folder, ours.transport, each) for each in transfer.beside]
        for over in transfer.over:
            measured = (
                await asyncio.to_thread(plain, transfer, data)
                if over == "plain"
                else await ours.measure(transfer, names, others, data)
            )
            print(msgspec.json.encode(measured).decode(), flush=True)
    listening.cancel()


def plain(transfer: Transfer, data: bytes) -> Measured:
    connections = [prompt(socket.create_connection((each, PLAIN_PORT))) for each in transfer.receivers]
    small = prompt(socket.create_connection((transfer.receivers[0], PLAIN_PORT)))
    for each in (*connections, small):
        ping(each)
    trips_s: list[float] = []
    over = threading.Event()

    def measure() -> None:
        while not over.wait(PING_EVERY_S):
            trips_s.append(timed(lambda: ping(small)))

    def stream(sock: socket.socket) -> None:
        for number in range(transfer.count):
            sock.sendall(len(data).to_bytes(8, "big"))
            sock.sendall(data)
            if number >= transfer.window - 1:
                sock.recv(1)
        for _ in range(min(transfer.count, transfer.window - 1)):
            sock.recv(1)

    streams = [threading.Thread(target=stream, args=(sock,)) for sock in connections]
    pings = threading.Thread(target=measure)

    def all_streams() -> None:
        for each in streams:
            each.start()
        for each in streams:
            each.join()

    pings.start()
    seconds = timed(all_streams)
    over.set()
    pings.join()
    for each in (*connections, small):
        each.close()
    return Measured("plain", seconds, trips_s)


def ping(sock: socket.socket) -> None:
    sock.sendall(bytes(8))
    sock.recv(1)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Ours:
    def __init__(self, transport: TlsTransport) -> None:
        self.transport = transport
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def listen(self) -> None:
        while True:
            item = await self.transport.receive()
            if not isinstance(item, Incoming):
                print(f"lost {item.peer}: {item.reason}", file=sys.stderr)
                os._exit(1)  # who waits for a receipt would wait for ever
            receipt = self._waiting.pop(item.message.index)  # type: ignore[union-attr]
            if not receipt.done():  # a ping that nobody waits for any more
                receipt.set_result(None)

    async def measure(self, transfer: Transfer, peers: list[str], others: list[str], data: bytes) -> Measured:
        for peer in (*peers, *others):
            await self._ping(peer)
            await self._bulk(peer, data[:1])
        trips_s: list[float] = []

        async def pings() -> None:
            while True:
                await asyncio.sleep(PING_EVERY_S)
                start = time.perf_counter()
                await self._ping(peers[0])
                trips_s.append(time.perf_counter() - start)

        async def stream(peer: str) -> None:
            room = asyncio.Semaphore(transfer.window)

            async def one() -> None:
                async with room:
                    await self._bulk(peer, data)

            await asyncio.gather(*(one() for _ in range(transfer.count)))

        moved_bytes = 0

        async def state(peer: str) -> None:
            nonlocal moved_bytes
            while True:
                await self._bulk(peer, data[:STATE_BYTES], state=True)
                moved_bytes += STATE_BYTES

        measuring = [asyncio.create_task(pings()), *(asyncio.create_task(state(peer)) for peer in others * 2)]
        start = time.perf_counter()
        await asyncio.gather(*map(stream, peers))
        seconds = time.perf_counter() - start
        for each in measuring:
            each.cancel()
        return Measured("shoal", seconds, trips_s, moved_bytes)

    async def _bulk(self, peer: str, data: bytes, state: bool = False) -> None:
        serial = self._serial
        message = Chunk(0, 0, 0, serial) if state else BoundaryTensor(0, 0, serial, 1, False)
        await self._ask(peer, message, (Blob("uint8", (len(data),), data),))

    async def _ping(self, peer: str) -> None:
        await self._ask(peer, Recall(0, 0, self._serial, 0, 0, 0))

    async def _ask(self, peer: str, message: Any, blobs: tuple[Blob, ...] = ()) -> None:
        receipt = self._waiting[self._serial] = asyncio.get_running_loop().create_future()
        self._serial += 1
        self.transport.send(peer, message, blobs)
        await receipt


def quantile(values: list[float], part: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * part) - 1]


if __name__ == "__main__":
    main()
