"""What strangers, and members in no view, can take of a peer: connections, memory, turns and log are all bounded."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from shoal.core.messages import Booking, BoundaryTensor, Cancelled, Heartbeat
from shoal.transport import budget
from shoal.transport.base import Incoming, Limits, Lost
from shoal.transport.budget import Allowance
from shoal.transport.identity.identity import Identity, client_context
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.streams import admission, handshake, receive_queue, sender
from shoal.transport.streams.handshake import encode_hello
from shoal.transport.tls import TlsTransport
from shoal.transport.wire import BlobHead, Head, encode, fragment_head

MIB = 1 << 20
INVITE = read_invite(Authority.new().invite((), time.time() + 3600), time.time())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may pass because somebody's time is over."""
    monkeypatch.setattr(handshake, "CONNECT_S", 600.0)


def make(limits: Limits = Limits()) -> TlsTransport:
    identity = Identity.new()
    return TlsTransport(identity, INVITE.membership(identity), limits=limits)


@asynccontextmanager
async def started(*transports: TlsTransport) -> Any:
    for one in transports:
        await one.start()
    for one in transports:
        for other in transports:
            one.learn(other.name, other.address)
    try:
        yield transports
    finally:
        for one in transports:
            await one.close()


def control(index: int) -> Cancelled:
    return Cancelled(0, 1, index, 0, 0)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Connections that stay open until the test ends."""
    with ExitStack() as stack:
        yield stack


def call(held: ExitStack, victim: TlsTransport, identity: Identity, kind: Any = "control") -> ssl.SSLSocket:
    """Come in as a member; the hello is answered when this returns."""
    plain = held.enter_context(socket.create_connection(victim.address, 60))
    sock = held.enter_context(client_context(identity).wrap_socket(plain))
    membership = INVITE.membership(identity)  # from here on its name says by which invite it came
    hello = encode_hello(identity.name, victim.name, kind, membership)
    sock.sendall(struct.pack(">H", len(hello)) + hello)
    (length,) = struct.unpack(">H", _exactly(sock, 2))
    assert b"Hello" in _exactly(sock, length)
    return sock


def _exactly(sock: ssl.SSLSocket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = sock.recv(count - len(received))
        if not piece:
            raise ConnectionError("closed by the other side")
        received += piece
    return received


async def message_of(victim: TlsTransport, peer: str) -> int:
    """How many of others come before the next message of that peer."""
    others = 0
    while True:
        item = await victim.receive()
        if isinstance(item, Incoming) and item.peer == peer:
            return others
        others += 1


def test_connections_that_never_speak_lock_nobody_out(held: ExitStack) -> None:
    async def story() -> None:
        async with started(make(), make()) as (victim, peer):
            for _ in range(admission.MAX_PENDING + 60):
                held.enter_context(socket.create_connection(victim.address, 60))
            peer.send(victim.name, control(1))
            assert await message_of(victim, peer.name) == 0
            assert victim._admission.counts[0] <= admission.MAX_PENDING
            held.close()
            while victim._admission.counts[0]:  # nothing of them stays
                await asyncio.sleep(0.01)

    asyncio.run(story())


def test_a_hundred_peers_behind_one_address_come_in_beside_silent_connections_from_there(held: ExitStack) -> None:
    async def story() -> None:
        async with started(make()) as (victim,):
            for _ in range(admission.MAX_PENDING):
                held.enter_context(socket.create_connection(victim.address, 60))

            def come() -> None:
                for _ in range(25):
                    call(held, victim, Identity.new())

            await asyncio.gather(*(asyncio.to_thread(come) for _ in range(4)))
            assert victim._admission.counts[1] == 100

    asyncio.run(story())


def test_more_new_connections_than_an_address_may_make_are_closed_at_once_and_counted_in_few_lines(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "PER_ADDRESS", Allowance(per_s=1e-9, at_once=20.0))

    async def story() -> None:
        async with started(make()) as (victim,):
            socks = [held.enter_context(socket.create_connection(victim.address, 60)) for _ in range(60)]
            closed = await asyncio.to_thread(lambda: [_is_closed(sock) for sock in socks[20:]])
            assert all(closed) and victim._admission.counts == (20, 0)

    asyncio.run(story())
    assert len(caplog.records) <= budget.FIRST + 2


def test_garbage_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with started(make(), make()) as (victim, peer):
            for _ in range(100):
                with socket.create_connection(victim.address, 60) as sock:
                    sock.sendall(os.urandom(300))
            peer.send(victim.name, control(1))
            await message_of(victim, peer.name)

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert len(caplog.text) < 5_000 and len(caplog.records) <= budget.FIRST + 3


def test_a_key_takes_no_more_connections_by_taking_more_names(held: ExitStack) -> None:
    async def story() -> None:
        async with started(make()) as (victim,):
            key = Identity.new().key
            socks = [call(held, victim, Identity(key, f"{number}")) for number in range(8)]
            closed = await asyncio.to_thread(lambda: [_is_closed(sock) for sock in socks[: -admission.NAMES]])
            assert all(closed) and victim._admission.counts == (0, admission.NAMES)

    asyncio.run(story())


def test_what_one_key_has_waiting_is_bounded_under_any_names_and_others_pass_it(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest Heartbeats there may be, from a member in no view."""
    for rate in ("BYTE_RATE", "LARGE_BYTE_RATE"):
        monkeypatch.setattr(admission, rate, Allowance(1e9, 1e9))
    monkeypatch.setattr(receive_queue, "CONTROL_LIMIT_BYTES", 8 * MIB)
    books = tuple(Booking(100_000 + index, 0.5) for index in range(34_000))
    words = b"".join(encode(Heartbeat(1, 1, 1, True, books), (), Limits()).parts)
    assert 0.5 * MIB < len(words) < 0.75 * MIB

    async def story() -> None:
        async with started(make(), make()) as (victim, peer):
            key = Identity.new().key
            over = threading.Event()

            def flood(sock: ssl.SSLSocket) -> None:
                try:
                    while not over.is_set():
                        sock.sendall(words)
                except OSError:  # it was hung up on
                    return

            socks = [await asyncio.to_thread(call, held, victim, Identity(key, f"{number}")) for number in range(6)]
            floods = [asyncio.ensure_future(asyncio.to_thread(flood, sock)) for sock in socks]
            while victim._receive_queue._bytes[0] < MIB:
                await asyncio.sleep(0.01)
            most = 0
            for turn in range(30):  # the node is slow: the flood has all the time to come
                peer.send(victim.name, control(turn))
                while not victim._receive_queue._lanes[0].share_of(peer.name.partition(".")[0])[1]:
                    await asyncio.sleep(0.001)
                assert await message_of(victim, peer.name) <= 1
                most = max(most, victim._receive_queue._bytes[0])
            assert most <= (1 + admission.NAMES) * MIB, "its part, and what was being read on each connection"
            over.set()
            for sock in socks[-admission.NAMES :]:
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever writes
            await asyncio.gather(*floods)

    asyncio.run(story())


def test_a_key_that_talks_too_fast_is_slowed_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MESSAGE_RATE", Allowance(per_s=1e-6, at_once=20.0))

    async def story() -> None:
        async with started(make(), make(), make()) as (victim, rogue, peer):
            for number in range(500):
                rogue.send(victim.name, control(number))
            peer.send(victim.name, control(0))
            before = await message_of(victim, peer.name)
            peer.send(victim.name, control(1))
            assert before + await message_of(victim, peer.name) <= 21

    asyncio.run(story())


def test_a_key_that_talks_too_fast_gains_nothing_by_new_connections_under_new_names(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MESSAGE_RATE", Allowance(per_s=1e-6, at_once=3.0))
    words = b"".join(encode(control(1), (), Limits()).parts)

    async def story() -> None:
        async with started(make(), make()) as (victim, peer):
            key = Identity.new().key
            for number in range(20):
                sock = await asyncio.to_thread(call, held, victim, Identity(key, f"{number}"))
                with suppress(OSError):
                    sock.sendall(words)
                    sock.settimeout(0.05)  # so that it is read, if it is to be
                    sock.recv(1)
            peer.send(victim.name, control(1))
            taken = []
            while not (isinstance(item := await victim.receive(), Incoming) and item.peer == peer.name):
                taken += [item] if isinstance(item, Incoming) else []
            assert len(taken) <= 4

    asyncio.run(story())


def test_messages_that_never_end_are_bounded_and_the_greediest_sender_is_dropped(held: ExitStack) -> None:
    limits = Limits(blob_bytes=MIB)
    head = msgspec.msgpack.encode(Head(BoundaryTensor(0, 1, 2, 1, False), (BlobHead("uint8", (MIB,), "raw", MIB),)))
    begun = len(head).to_bytes(4, "big") + head + bytes(MIB - 1024 - len(head))

    def begin(victim: TlsTransport, rank: int, sock: ssl.SSLSocket) -> None:
        for number, at in enumerate(range(0, len(begun), 1 << 18)):
            piece = begun[at : at + (1 << 18)]
            sock.sendall(bytes(fragment_head(rank, number, len(piece))) + piece)

    async def story() -> None:
        async with started(make(limits), make(limits)) as (victim, peer):
            modest, greedy = Identity.new(), Identity.new()
            one = await asyncio.to_thread(call, held, victim, modest, "bulk")
            two = await asyncio.to_thread(call, held, victim, greedy, "bulk")
            await asyncio.to_thread(begin, victim, 1, one)
            for rank in range(4):
                with suppress(OSError):  # it was hung up on
                    await asyncio.to_thread(begin, victim, rank, two)
            while not isinstance(item := await victim.receive(), Lost):
                pass
            assert item.peer == greedy.name and "unfinished" in item.reason
            assert victim._receiver._partial_messages.nbytes <= 2 * MIB
            peer.send(victim.name, control(1))
            assert await message_of(victim, peer.name) == 0

    asyncio.run(story())


def test_a_socket_that_cannot_be_made_loses_one_message_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with started(make(), make()) as (one, other):
            plain = one._tls.socket
            faults = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2

            def scarce(route: Any) -> socket.socket:
                if faults:
                    raise faults.pop()
                return plain(route)

            monkeypatch.setattr(one._tls, "socket", scarce)
            for kind in range(2):
                one.send(other.name, control(kind))
                lost = await one.receive()
                assert isinstance(lost, Lost) and "open files" in lost.reason
            one.send(other.name, control(7))
            assert (await other.receive()).message == control(7)  # type: ignore[union-attr]

    asyncio.run(story())


def test_addresses_and_send_queues_do_not_grow_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.transport import tls

    monkeypatch.setattr(sender, "SEND_QUEUES", 10)
    monkeypatch.setattr(tls, "ADDRESSES", 10)

    async def story() -> None:
        async with started(make()) as (one,):
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                nobody = closed.getsockname()
                for _ in range(50):
                    name = Identity.new().name
                    one.learn(name, nobody)
                    one.send(name, control(1))
                    assert isinstance(await one.receive(), Lost)
            assert len(one._sender._queues) <= 11 and len(one._tls._routes) <= 10

    asyncio.run(story())


def test_what_waits_for_all_peers_together_is_bounded_and_each_has_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "ALL_CONTROL_BYTES", 3 * MIB)
    books = tuple(Booking(index) for index in range(60_000))

    async def story() -> None:
        one = make()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with started(one):
                sent = 0
                for _ in range(20):
                    name = Identity.new().name
                    one.learn(name, silent.getsockname())
                    sent += one.send(name, Heartbeat(1, 1, 1, True, books))
                    assert one.send(name, control(1))
                assert 2 * MIB < sent <= 3 * MIB and one._sender._queued_bytes["control"].nbytes < 4 * MIB
                for peer, _ in list(one._sender._queues):
                    one.forget(peer)
                assert one._sender._queued_bytes["control"].nbytes == 0

    asyncio.run(story())


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except OSError:
        return True
