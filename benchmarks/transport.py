"""How fast each network is between two processes of this machine, beside a plain TCP socket in the same run.

    python benchmarks/transport.py [--only tls] [--repeats 5]

For each: MB/s one way and CPU seconds per GB (both processes together) at 4 and 64 MB, from `send` until the other
side's node has the whole message and its word of it is back; then the time from `send` of a small message until the
other node has it, while 64 MB messages travel without a pause. `shaped` is TLS behind a modelled line of 25 MB/s
(200 Mbit/s) and 50 ms each way: each message is waited for, so that size / (size / line + round trip) is the most it can
show. The last line is one JSON object; its value is that of TLS at 64 MB; `plain` in
`setting` is the plain socket.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from report import Target, parse, report
from shoal.core.messages import BoundaryTensor, Leave, Recall, Refused
from shoal.transport.base import Blob, Incoming
from shoal.transport.daemon import Daemon
from shoal.transport.emulated.shaped import AccessLink, Shaped
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, Membership, read_invite
from shoal.transport.libp2p import Libp2pTransport
from shoal.transport.tls import TlsTransport

MB = 1_000_000
SIZES_MB = (4, 64)
WANTED_MBps = {"tls": 350.0, "libp2p": 250.0}  # one way, 64 MB
LINE_Bps = 25e6
DELAY_S = 0.05


def make_tls(identity: Identity, membership: Membership) -> Any:
    return TlsTransport(identity, membership)


def make_libp2p(identity: Identity, membership: Membership) -> Any:
    return Libp2pTransport(identity.name, membership, Daemon(identity))


def make_shaped(identity: Identity, membership: Membership) -> Any:
    return Shaped(TlsTransport(identity, membership), AccessLink(DELAY_S, LINE_Bps, LINE_Bps))


MAKERS: dict[str, Callable[[Identity, Membership], Any]] = {
    "tls": make_tls,
    "libp2p": make_libp2p,
    "shaped": make_shaped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MAKERS, help="this network and the plain socket")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parse(parser)
    results = {"plain": plain(asked.repeats)}
    tell("plain", results["plain"])
    for name in [asked.only] if asked.only else MAKERS:
        results[name] = asyncio.run(measure(name, asked.repeats if name != "shaped" else 1))
        tell(name, results[name])
    first = asked.only or "tls"
    last = f"MBps_{SIZES_MB[-1]}MB"
    name, rate = f"transport, {first}", results[first][last]
    report(name, rate, "MB/s one way, 64 MB", Target(WANTED_MBps.get(first), "higher"), results, asked.record)


def tell(name: str, result: dict[str, float]) -> None:
    print(f"{name:8}", "  ".join(f"{key} {value:g}" for key, value in result.items()), flush=True)


# ------------------------------------------------------------------------------------------------------ plain TCP socket


def plain(repeats: int) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=plain_reader, args=(theirs,), daemon=True)
    child.start()
    result: dict[str, float] = {}
    with socket.create_connection(("127.0.0.1", ours.recv())) as sock:
        for size in SIZES_MB:
            data = os.urandom(MB) * size
            rates, before = [], cpu() + asked_cpu(sock)
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                sock.sendall(len(data).to_bytes(8, "big"))
                sock.sendall(data)
                sock.recv(1, socket.MSG_WAITALL)
                rates.append(size / (time.perf_counter() - begin))
            spent = cpu() + asked_cpu(sock) - before
            note(result, size, rates, spent)
    child.join(10)
    return result


def plain_reader(pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    with sock:
        while prefix := sock.recv(8, socket.MSG_WAITALL):
            length = int.from_bytes(prefix, "big")
            if not length:
                sock.sendall(int(cpu() * 1e6).to_bytes(8, "big"))
                continue
            view, at = memoryview(bytearray(length)), 0
            while at < length:
                at += sock.recv_into(view[at:])
            sock.sendall(b"!")


def asked_cpu(sock: socket.socket) -> float:
    sock.sendall(bytes(8))
    return int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big") / 1e6


# ------------------------------------------------------------------------------------------------------- our transports


async def measure(name: str, repeats: int) -> dict[str, float]:
    authority = Authority.new()
    invite = authority.invite((), time.time() + 3600)
    ours, theirs = multiprocessing.Pipe()
    identity = Identity.new()
    transport = MAKERS[name](identity, read_invite(invite, time.time()).membership(identity))
    await transport.start()
    words = (name, invite, transport.name, transport.address)
    child = multiprocessing.get_context("spawn").Process(target=reader, args=(theirs, words), daemon=True)
    child.start()
    peer, address = await asyncio.to_thread(ours.recv)
    transport.learn(peer, address)
    result = await Sender(transport, peer).measure(repeats)
    await transport.close()
    child.terminate()
    child.join(10)
    return result


class Sender:
    def __init__(self, transport: Any, peer: str) -> None:
        self.transport = transport
        self.peer = peer
        self.serial = 0
        self.waiting: dict[int, asyncio.Future[Any]] = {}

    async def measure(self, repeats: int) -> dict[str, float]:
        listening = asyncio.create_task(self.listen())
        result: dict[str, float] = {}
        for size in SIZES_MB:
            data = os.urandom(MB) * size
            await self.bulk(data)
            rates, before = [], cpu() + await self.their_cpu()
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                await self.bulk(data)
                rates.append(size / (time.perf_counter() - begin))
            spent = cpu() + await self.their_cpu() - before
            note(result, size, rates, spent)
        await self.small_beside_large(data, result)
        listening.cancel()
        return result

    async def small_beside_large(self, data: bytes, result: dict[str, float], seconds: float = 3.0) -> None:
        stop = time.perf_counter() + seconds

        async def large() -> None:
            while time.perf_counter() < stop:
                await self.bulk(data)

        travelling = [asyncio.create_task(large()) for _ in range(2)]  # two: the line is never empty
        trips_ms = []
        while time.perf_counter() < stop:
            begin = time.monotonic()
            answer = await self.ask(Recall(0, 0, self.serial, 0, 0, 0))
            trips_ms.append(1000 * (float(answer.reason) - begin))
            await asyncio.sleep(0.005)
        await asyncio.gather(*travelling)
        cuts = statistics.quantiles(trips_ms, n=100)
        result["small_p50_ms"], result["small_p99_ms"] = round(cuts[49], 2), round(cuts[98], 2)

    async def listen(self) -> None:
        while True:
            item = await self.transport.receive()
            assert isinstance(item, Incoming), item
            index = -1 if isinstance(item.message, Leave) else item.message.index
            self.waiting.pop(index).set_result(item.message)

    async def bulk(self, data: bytes) -> None:
        message = BoundaryTensor(0, 0, self.serial, 1, False)
        await self.ask(message, (Blob("uint8", (len(data),), data),))

    async def ask(self, message: Any, blobs: tuple[Blob, ...] = ()) -> Any:
        answer = self.waiting[self.serial] = asyncio.get_running_loop().create_future()
        self.serial += 1
        self.transport.send(self.peer, message, blobs)
        return await answer

    async def their_cpu(self) -> float:
        answer = self.waiting[-1] = asyncio.get_running_loop().create_future()
        self.transport.send(self.peer, Leave())
        return float((await answer).reason)


def reader(pipe: Connection, words: tuple[str, str, str, tuple[str, int]]) -> None:
    name, invite, there, address = words
    identity = Identity.new()
    membership = read_invite(invite, time.time()).membership(identity)

    async def answer() -> None:
        transport = MAKERS[name](identity, membership)
        await transport.start()
        transport.learn(there, address)
        pipe.send((transport.name, transport.address))
        while True:
            item = await transport.receive()
            if not isinstance(item, Incoming):
                continue
            message = item.message
            if isinstance(message, Leave):
                transport.send(item.peer, Leave(str(cpu())))
            else:
                came = str(time.monotonic())  # one clock for all processes of a machine
                transport.send(item.peer, Refused(0, 0, message.index, 0, 0, False, came))  # type: ignore[union-attr]

    threading.Thread(target=end_with_parent, args=(pipe,), daemon=True).start()
    asyncio.run(answer())


def end_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


# --------------------------------------------------------------------------------------------------------------- figures


def note(result: dict[str, float], size: int, rates: list[float], spent_s: float) -> None:
    result[f"MBps_{size}MB"] = round(statistics.median(rates), 1)
    result[f"cpu_s_per_GB_{size}MB"] = round(spent_s / (len(rates) * size / 1000), 2)


def cpu() -> float:
    """Of this process and of its libp2p daemon, if any."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(map(process_cpu, daemons()))


def daemons() -> list[int]:
    """p2pd is the child of a shell that is our child."""
    shells = [pid for pid in children(os.getpid()) if name_of(pid) == "sh"]
    return [pid for shell in shells for pid in children(shell) if name_of(pid) == "p2pd"]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it is over
        return ""


def process_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
