"""What is particular to the TLS network: bounded waiting, bounded queues, pushing back."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from functools import partial
from typing import Any

import pytest

from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport.base import Blob, Incoming, Limits, Lost
from shoal.transport.identity.identity import Identity, certificate_key_id, client_context
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.streams import handshake, receive_queue
from shoal.transport.streams.engine import Connection, Engine, WaitFor
from shoal.transport.tls import TlsTransport

MIB = 1 << 20
RUN = Authority.new()
INVITE = read_invite(RUN.invite((), time.time() + 3600), time.time())


def make(limits: Limits = Limits(), host: str = "127.0.0.1") -> TlsTransport:
    identity = Identity.new()
    return TlsTransport(identity, INVITE.membership(identity), host, limits=limits)


def bulk(index: int, nbytes: int) -> tuple[BoundaryTensor, tuple[Blob, ...]]:
    return BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (nbytes,), bytes(nbytes)),)


async def take(transport: TlsTransport) -> Any:
    return await asyncio.wait_for(transport.receive(), 60)


@pytest.fixture
def silent() -> Any:
    """A port where connections are taken and nobody ever speaks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def test_a_peer_that_does_not_answer_is_lost_after_a_while(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 0.2)

    async def story() -> None:
        a, there = make(), Identity.new().name
        await a.start()
        a.learn(there, silent)
        a.send(there, Cancelled(0, 1, 2, 0, 0))
        assert await take(a) == Lost(there, "no answer in time")
        assert not a._sender._queues[there, "control"].pending, "it would wait for ever"
        await a.close()

    asyncio.run(story())


def test_what_waits_for_a_peer_is_bounded_and_given_back_when_it_is_forgotten(
    silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 600.0)

    async def story() -> None:
        a, there = make(Limits(queued_bytes=3 * MIB)), Identity.new().name
        await a.start()
        a.learn(there, silent)
        for index in range(10):
            a.send(there, *bulk(index, MIB))
        queue = a._sender._queues[there, "bulk"]
        assert MIB < queue._bytes <= 3 * MIB
        a.forget(there)
        assert queue._bytes == 0 and queue.take() is None
        await a.close()

    asyncio.run(story())


def test_a_message_larger_than_the_queue_is_sent_when_nothing_else_waits() -> None:
    async def story() -> None:
        a, b = make(Limits(queued_bytes=MIB)), make()
        await a.start()
        await b.start()
        a.learn(b.name, b.address)
        a.send(b.name, *bulk(0, 4 * MIB))
        assert (await take(b)).message.index == 0
        await a.close()
        await b.close()

    asyncio.run(story())


def test_a_reader_that_does_not_take_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "BULK_LIMIT_BYTES", 2 * MIB)

    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        a.learn(b.name, b.address)
        b.learn(a.name, a.address)
        for index in range(60):
            a.send(b.name, *bulk(index, MIB))
        for index in range(100):  # time enough for the rest to come, if it could
            a.send(b.name, Cancelled(0, 1, index, 0, 0))
            await take(b)
            b.send(a.name, Cancelled(0, 1, index, 0, 0))
            await take(a)
            assert b._receive_queue._bytes[1] < 4 * MIB
        while (item := await take(b)).message != bulk(59, 1)[0]:
            assert isinstance(item, Incoming)
            assert b._receive_queue._bytes[1] < 4 * MIB
        await a.close()
        await b.close()

    asyncio.run(story())


def test_without_a_certificate_nobody_is_heard() -> None:
    async def story() -> None:
        a = make()
        await a.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        def call() -> bytes:
            with context.wrap_socket(socket.create_connection(a.address, 60)) as sock:
                sock.sendall(b"\0\1x")
                return sock.recv(1)

        with pytest.raises(OSError, match=r"(?i)certificate|reset"):
            await asyncio.to_thread(call)
        await a.close()

    asyncio.run(story())


def test_older_tls_is_not_spoken() -> None:
    async def story() -> None:
        a = make()
        await a.start()
        context = client_context(Identity.new())
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            await asyncio.to_thread(lambda: context.wrap_socket(socket.create_connection(a.address, 60)))
        await a.close()

    asyncio.run(story())


def test_the_certificate_shows_the_key() -> None:
    async def story() -> None:
        a = make()
        await a.start()

        def look() -> str:
            with client_context(Identity.new()).wrap_socket(socket.create_connection(a.address, 60)) as sock:
                shown = sock.getpeercert(binary_form=True)
                assert shown is not None
                return certificate_key_id(shown)

        assert f"{await asyncio.to_thread(look)}." in a.name
        await a.close()

    asyncio.run(story())


def test_useless_addresses_are_not_kept() -> None:
    a, peer = make(), Identity.new().name
    for name, address in (
        (peer, ("somewhere.example", 80)),
        (peer, ("127.0.0.1", 0)),
        (peer, ("127.0.0.1", 70_000)),
        ("p1", ("127.0.0.1", 80)),
        (a.name, ("127.0.0.1", 80)),
    ):
        a.learn(name, address)
    assert not a._tls._routes
    asyncio.run(a.close())


def test_a_peer_that_calls_from_another_address_is_reached_there() -> None:
    """The directory says so later."""

    async def story() -> None:
        a, b = make(), make(host="0.0.0.0")
        await a.start()
        await b.start()
        a.learn(b.name, ("127.0.0.9", b.address[1]))
        b.learn(a.name, a.address)
        b.send(a.name, Cancelled(0, 1, 2, 0, 0))
        await take(a)
        assert a._tls.route(b.name) == ("127.0.0.1", b.address[1])
        a._tls.called(b.name, "8.8.8.8")
        assert a._tls.route(b.name) == ("127.0.0.1", b.address[1]), "a router's address"
        await a.close()
        await b.close()

    asyncio.run(story())


def test_a_peer_that_listens_everywhere_announces_one_address() -> None:
    async def story() -> None:
        a = make(host="0.0.0.0")
        await a.start()
        host, port = a.address
        assert host != "0.0.0.0" and port
        await a.close()

    asyncio.run(story())


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    async def story() -> None:
        a = make(host="192.0.2.1")
        with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1"):
            await a.start()
        await a.close()

    asyncio.run(story())


def test_a_mistake_in_one_connection_does_not_stop_the_others() -> None:
    def wrong() -> Any:
        yield WaitFor.AGAIN
        raise KeyError("a mistake")

    async def story() -> None:
        loop, failed, engine = asyncio.get_running_loop(), asyncio.Event(), Engine("test")
        engine.start()
        for _ in range(2):
            failed.clear()
            link = Connection(socket.socket(), lambda error: loop.call_soon_threadsafe(failed.set))
            link.steps = wrong()
            engine.post(lambda link=link: engine.adopt(link))  # type: ignore[misc]
            await asyncio.wait_for(failed.wait(), 60)
        engine.stop()

    asyncio.run(story())


def test_a_connection_handed_to_an_engine_that_has_ended_is_closed() -> None:
    """Both have a say in when they end: a link that is between them belongs to neither."""

    def goes_on(other: Engine, begun: threading.Event) -> Any:
        begun.set()
        yield other

    for ended in (False, True):
        one, other = Engine("one"), Engine("other")
        one.start()
        if ended:
            other.start()
            other.stop()
        link = Connection(socket.socket(), lambda error: None)
        begun = threading.Event()
        link.steps = goes_on(other, begun)
        one.post(partial(one.adopt, link))
        assert begun.wait(60)
        one.stop()  # after the step that it is in
        other.stop()
        assert link.closed and link.sock.fileno() == -1


def test_a_revoked_peer_is_refused_and_shown_the_authoritys_word() -> None:
    async def story() -> None:
        me, other = Identity.new(), Identity.new()
        mine, theirs = INVITE.membership(me), INVITE.membership(other)
        a, b = TlsTransport(me, mine), TlsTransport(other, theirs)
        await a.start()
        await b.start()
        a.learn(b.name, b.address)
        theirs.take_list(RUN.pass_list(1, (), (RUN.revoked(me.key_id, time.time()),)))
        a.send(b.name, Cancelled(0, 1, 2, 0, 0))
        lost = await take(a)
        assert isinstance(lost, Lost) and f"its key {me.key_id} was revoked by the run's authority" in lost.reason
        assert mine.revoked(a.name) is not None, "it knows now, and need not believe b"
        await a.close()
        await b.close()

    asyncio.run(story())
