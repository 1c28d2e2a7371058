"""TLS to whom it reaches, libp2p to whom it does not; over real sockets and real daemons."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from tests.transport.test_libp2p import Hidden, processes

from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport import auto
from shoal.transport.auto import AutoTransport, EitherCarrier
from shoal.transport.base import Blob, Incoming, Lost
from shoal.transport.daemon import Daemon
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.libp2p import Route
from shoal.transport.streams import handshake

INVITE = read_invite(Authority.new().invite((), time.time() + 3600), time.time())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs this may be very busy."""
    monkeypatch.setattr(handshake, "CONNECT_S", 60.0)


def make(kind: type[Daemon] = Daemon) -> tuple[AutoTransport, list[str]]:
    identity, reports = Identity.new(), list[str]()
    return AutoTransport(identity, INVITE.membership(identity), kind(identity), report=reports.append), reports


def control(index: int) -> Cancelled:
    return Cancelled(0, 1, index, 0, 0)


def bulk(index: int, data: bytes) -> tuple[BoundaryTensor, tuple[Blob, ...]]:
    return BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (len(data),), data),)


def families(transport: AutoTransport) -> set[int]:
    """Of the sockets over which it hears others."""
    return {link.sock.family for stream in transport._receiver._streams.values() for link in stream.connections}


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[:2]


@contextmanager
def mute() -> Iterator[tuple[str, int]]:
    """An address that does not even say no: a port whose queue of callers is full."""
    with socket.socket() as sock, socket.socket() as first, socket.socket() as second:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(sock.getsockname())
        yield sock.getsockname()


async def arrives(a: AutoTransport, b: AutoTransport, index: int) -> None:
    """EitherCarrier kinds, sent again when a was told that they vanished."""
    data = os.urandom(1 << 20)
    for message, blobs in ((control(index), ()), bulk(index, data)):
        a.send(b.name, message, blobs)
        receiving = asyncio.ensure_future(b.receive())
        while not receiving.done():
            telling = asyncio.ensure_future(a.receive())
            await asyncio.wait([receiving, telling], return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                assert isinstance(telling.result(), Lost)
                await asyncio.sleep(0.1)
                a.send(b.name, message, blobs)
            telling.cancel()
        got = receiving.result()
        assert isinstance(got, Incoming) and got.peer == a.name and got.message == message
        assert [bytes(blob.data) for blob in got.blobs] == [blob.data for blob in blobs]


@pytest.mark.slow
def test_a_pair_that_reaches_one_another_talks_over_tls_alone() -> None:
    async def story() -> None:
        (a, reports), (b, _) = make(), make()
        await asyncio.gather(a.start(), b.start())
        a.learn(b.name, b.address)
        b.learn(a.name, a.address)
        await arrives(a, b, 1)
        await arrives(b, a, 2)
        assert families(a) == families(b) == {socket.AF_INET} and not reports
        await asyncio.gather(a.close(), b.close())
        assert not processes(str(a._both.libp2p.daemon.directory))

    asyncio.run(story())


def test_a_peer_without_an_open_port_sends_over_tls_and_is_answered_over_libp2p() -> None:
    async def story() -> None:
        (a, reports), (hidden, its) = make(), make(Hidden)
        await asyncio.gather(a.start(), hidden.start())
        hidden.learn(a.name, a.address)
        a.learn(hidden.name, msgspec.structs.replace(hidden.address, direct=closed_port()))
        await arrives(hidden, a, 1)
        assert families(a) == {socket.AF_INET} and not its
        await arrives(a, hidden, 2)
        assert families(hidden) == {socket.AF_UNIX}
        assert reports and "cannot be reached at 127.0.0.1:" in reports[0] and "refused" in reports[0]
        await asyncio.gather(a.close(), hidden.close())

    asyncio.run(story())


@pytest.mark.slow
def test_an_address_that_does_not_even_say_no_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "DIRECT_S", 0.3)

    async def story() -> None:
        (a, reports), (b, _) = make(), make()
        await asyncio.gather(a.start(), b.start())
        with mute() as address:
            a.learn(b.name, msgspec.structs.replace(b.address, direct=address))
            await arrives(a, b, 1)
        assert families(b) == {socket.AF_UNIX} and "no answer in time" in reports[0]
        await asyncio.gather(a.close(), b.close())

    asyncio.run(story())


@pytest.mark.slow
def test_another_peer_at_its_address_is_told_nothing_and_libp2p_finds_the_right_one() -> None:
    async def story() -> None:
        (a, reports), (b, _), (other, _) = make(), make(), make()
        await asyncio.gather(a.start(), b.start(), other.start())
        a.learn(b.name, msgspec.structs.replace(b.address, direct=other.address.direct))
        await arrives(a, b, 1)
        assert families(b) == {socket.AF_UNIX} and "another peer answers" in reports[0]
        assert not families(other)
        await asyncio.gather(a.close(), b.close(), other.close())

    asyncio.run(story())


@pytest.mark.slow
def test_a_peer_that_is_gone_is_lost_once_and_nothing_is_said_of_detours() -> None:
    async def story() -> None:
        (a, reports), (b, _) = make(), make()
        await asyncio.gather(a.start(), b.start())
        a.learn(b.name, b.address)
        a.send(b.name, control(1))
        await b.receive()
        await b.close()
        assert isinstance(await a.receive(), Lost)
        a.send(b.name, control(2))
        assert isinstance(await a.receive(), Lost)
        assert not reports and not any(a._receive_queue._lanes)
        await a.close()

    asyncio.run(story())


class Book:
    """What the two carriers know of ways."""

    def __init__(self, route: Any) -> None:
        self.known = route

    def route(self, peer: str) -> Any:
        return self.known

    def reached(self, peer: str, route: Any) -> None: ...

    def failed(self, peer: str, route: Any, reason: str) -> bool:
        return False


def test_it_goes_directly_again_after_a_while_or_to_a_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(auto.time, "monotonic", lambda: clock[0])
    reports: list[str] = []
    direct, over = Book(("10.0.0.1", 1)), Book(Route(b"connect", b"open"))
    both = EitherCarrier(direct, over, reports.append)  # type: ignore[arg-type]
    assert both.route("p") == direct.known
    assert both.failed("p", direct.known, "refused") and both.route("p") == over.known
    both.reached("p", over.known)
    both.reached("p", over.known)
    assert reports == ["p cannot be reached at 10.0.0.1:1 (refused): libp2p to it instead of TLS"]
    clock[0] += auto.AGAIN_S
    assert both.route("p") == direct.known
    assert both.failed("p", direct.known, "refused") and both.route("p") == over.known
    direct.known = ("10.0.0.2", 1)
    assert both.route("p") == direct.known
    both.reached("p", direct.known)
    assert reports[1:] == ["p is reached directly again: TLS to it from now on"]
    assert both.failed("p", direct.known, "refused")
    assert not both.failed("p", over.known, "nor so") and both.route("p") == direct.known
    over.known = None
    assert not both.failed("p", direct.known, "refused") and both.route("p") == direct.known
    direct.known = None
    assert both.route("p") is None
