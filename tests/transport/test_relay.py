"""Peers that nobody reaches directly are reached through a relay, which passes bytes within bounds and for members only."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest

from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport import relay, tls
from shoal.transport.base import Blob, Incoming, Limits, Lost
from shoal.transport.identity.identity import Identity, key_id
from shoal.transport.identity.invite import Authority, Membership, read_invite
from shoal.transport.relay import Relays
from shoal.transport.streams import handshake
from shoal.transport.tls import TlsTransport

RUN = Authority.new()
INVITE = read_invite(RUN.invite((), time.time() + 3600), time.time())
ROUTER = "203.0.113.7"  # whose address others see
HELLO = Cancelled(0, 1, 2, 0, 0)
HERE = Identity.new().key_id  # of a relay


class Host:
    def __init__(self, authority: Authority = RUN) -> None:
        identity = Identity.new()
        self.membership = read_invite(authority.invite((), time.time() + 3600), time.time()).membership(identity)
        self.identity, self.named = identity, asyncio.Event()
        self.routes: tuple[str, ...] = ()
        self.relays = Relays(identity, self.membership)
        self.relays.hear(self._announce)
        self.transport = TlsTransport(identity, self.membership, "127.0.0.1", limits=Limits(), relays=self.relays)

    def _announce(self, routes: tuple[str, ...]) -> None:
        self.routes = routes
        self.named.set()

    @property
    def name(self) -> str:
        return self.transport.name

    async def take(self) -> Any:
        return await asyncio.wait_for(self.transport.receive(), 60)

    async def wait_at(self, *others: Host) -> None:
        """Behind a router, this peer reaches the others and waits there."""
        self.membership.seen = ROUTER
        for each in others:
            self.transport.learn(each.name, each.transport.address)
            self.transport.send(each.name, HELLO)
            assert isinstance(await each.take(), Incoming)
            self.membership.seen = ROUTER  # the handshake has shown the loopback's
        while len(self.routes) < len(others):
            self.named.clear()
            await asyncio.wait_for(self.named.wait(), 60)


@asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    members = [Host() for _ in range(count)]
    for each in members:
        await each.transport.start()
    try:
        yield members
    finally:
        for each in members:
            await each.transport.close()


def nowhere() -> tuple[str, int]:
    """An address of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
    return address


def route_of(relaying: Host) -> str:
    return relay.RelayRoute(*relaying.transport.address, relaying.identity.key_id).text


def run(story: Callable[[], Any]) -> None:
    asyncio.run(story())


def test_a_peer_without_an_open_port_is_reached_through_a_relay() -> None:
    async def story() -> None:
        async with hosts(3) as (a, b, r):
            await b.wait_at(r)
            a.transport.learn(b.name, (*nowhere(), *b.routes))
            for index in range(20):
                a.transport.send(b.name, Cancelled(0, 1, index, 0, 0))
                assert (await b.take()).message.index == index
            data = bytes(range(256)) * 8192
            a.transport.send(b.name, BoundaryTensor(0, 1, 9, 1, False), (Blob("uint8", (len(data),), data),))
            received = await b.take()
            assert received.peer == a.name and bytes(received.blobs[0].data) == data
            assert r.relays.service.passed_bytes > len(data)
            assert a.membership.seen == "", "the relay's address is not where this peer's calls come from"

    run(story)


def test_who_listens_late_hears_of_the_relays_all_the_same() -> None:
    """The network of a peer begins while it still loads, and its record is told to others after that."""

    async def story() -> None:
        async with hosts(2) as (b, r):
            await b.wait_at(r)
            late: list[tuple[str, ...]] = []
            b.relays.hear(late.append)
            assert late == [(route_of(r),)]

    run(story)


def test_a_peer_that_others_reach_waits_nowhere() -> None:
    async def story() -> None:
        async with hosts(2) as (a, r):
            a.transport.learn(r.name, r.transport.address)
            r.transport.learn(a.name, a.transport.address)
            for one, other in ((a, r), (r, a)):
                one.transport.send(other.name, HELLO)
                await other.take()
            assert not a.relays._unreachable() and a.routes == ()

    run(story)


def test_a_peer_that_nobody_calls_waits_at_a_relay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall changes no address."""
    monkeypatch.setattr(relay, "SILENT_S", 0.0)

    async def story() -> None:
        async with hosts(2) as (a, r):
            a.transport.learn(r.name, r.transport.address)
            a.transport.send(r.name, HELLO)
            await asyncio.wait_for(a.named.wait(), 60)
            assert a.routes == (route_of(r),)

    run(story)


def test_when_a_relay_ends_the_peer_names_the_other() -> None:
    async def story() -> None:
        async with hosts(4) as (a, b, first, second):
            await b.wait_at(first, second)
            await first.transport.close()
            while len(b.routes) != 1:
                b.named.clear()
                await asyncio.wait_for(b.named.wait(), 60)
            a.transport.learn(b.name, (*nowhere(), *b.routes))
            a.transport.send(b.name, HELLO)
            while not isinstance(event := await b.take(), Incoming):  # b has lost the first relay's peer
                pass
            assert event.peer == a.name

    run(story)


def test_a_peer_that_waits_nowhere_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "OPENING_S", 0.5)

    async def story() -> None:
        async with hosts(3) as (a, b, r):
            a.transport.learn(b.name, (*nowhere(), route_of(r)))
            a.transport.send(b.name, HELLO)
            assert isinstance(await a.take(), Lost)

    run(story)


def test_a_relay_passes_no_more_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RATE", relay.Allowance(per_s=1e6, at_once=1e5))

    async def story() -> None:
        async with hosts(3) as (a, b, r):
            await b.wait_at(r)
            a.transport.learn(b.name, (*nowhere(), *b.routes))
            began = time.monotonic()
            data = bytes(1_000_000)
            a.transport.send(b.name, BoundaryTensor(0, 1, 9, 1, False), (Blob("uint8", (len(data),), data),))
            await b.take()
            assert time.monotonic() - began > 0.8

    run(story)


def test_a_full_relay_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with hosts(3) as (a, b, r):
            await b.wait_at(r)
            monkeypatch.setattr(relay, "CIRCUITS", 0)
            a.transport.learn(b.name, (*nowhere(), *b.routes))
            a.transport.send(b.name, HELLO)
            assert isinstance(await a.take(), Lost) and r.relays.service.passed_bytes == 0

    run(story)


async def circuit(caller: Host, target: Host, at: Host) -> tuple[socket.socket, bytes]:
    """A connection of the caller's at that relay, and the relay's answer: JOINED, or nothing."""
    loop, sock = asyncio.get_running_loop(), socket.create_connection(at.transport.address)
    sock.setblocking(False)
    await loop.sock_sendall(sock, relay.CALL)
    nonce = await asyncio.wait_for(loop.sock_recv(sock, relay.NONCE_BYTES), 60)
    await loop.sock_sendall(
        sock, relay.request(caller.identity, caller.membership, at.identity.key_id, nonce, target.name)
    )
    return sock, await asyncio.wait_for(loop.sock_recv(sock, 1), 60)


def test_one_peer_takes_only_its_part_of_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CALLER_CIRCUITS", 1)

    async def story() -> None:
        async with hosts(4) as (a, b, c, r):
            await b.wait_at(r)
            calls = [await circuit(each, b, r) for each in (a, a, c)]
            for sock, _ in calls:
                sock.close()
            assert [answer for _, answer in calls] == [relay.JOINED, b"", relay.JOINED]

    run(story)


def test_a_silent_connection_does_not_stay_at_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "IDLE_S", 0.2)
    monkeypatch.setattr(handshake, "CONNECT_S", 600)  # the other end's own patience

    async def story() -> None:
        async with hosts(3) as (a, b, r):
            await b.wait_at(r)
            sock, answer = await circuit(a, b, r)
            assert answer == relay.JOINED
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 60) == b""
            sock.close()

    run(story)


def test_a_relay_serves_members_only() -> None:
    identity, stranger, nonce = Identity.new(), Identity.new(), bytes(relay.NONCE_BYTES)
    membership = INVITE.membership(identity)
    foreign = read_invite(Authority.new().invite((), time.time() + 3600), time.time()).membership(stranger)
    others = Membership(INVITE.run, membership.proof, stranger.name)
    data = relay.request(identity, membership, HERE, nonce, "")[2:]
    assert relay.checked(data, HERE, nonce, membership).name == identity.name
    for wrong, reason in (
        (b"nothing", "malformed"),
        (relay.request(stranger, foreign, HERE, nonce, "")[2:], "another run"),
        (relay.request(stranger, others, HERE, nonce, "")[2:], "pass"),
    ):
        with pytest.raises(ValueError, match=reason):
            relay.checked(wrong, HERE, nonce, membership)
    with pytest.raises(ValueError, match="signature is wrong"):
        relay.checked(data, HERE, bytes([1]) + nonce[1:], membership)
    with pytest.raises(ValueError, match="for another relay"):
        relay.checked(data, stranger.key_id, nonce, membership)


def test_a_request_to_one_relay_is_of_no_use_at_another() -> None:
    """A hostile relay hands another's nonce to a peer that waits, and would wait in its place there."""

    async def story() -> None:
        async with hosts(2) as (victim, r):
            loop, sock = asyncio.get_running_loop(), socket.create_connection(r.transport.address)
            with sock:
                sock.setblocking(False)
                await loop.sock_sendall(sock, relay.CALL)
                nonce = await asyncio.wait_for(loop.sock_recv(sock, relay.NONCE_BYTES), 60)
                hostile = Identity.new().key_id
                await loop.sock_sendall(sock, relay.request(victim.identity, victim.membership, hostile, nonce, ""))
                assert await asyncio.wait_for(loop.sock_recv(sock, 1), 60) == b"", "refused"

    run(story)


@pytest.mark.parametrize(
    "text",
    ["/relay/", "/relay/somewhere/1/k", "/relay/127.0.0.1/0/k", "/relay/127.0.0.1/x/k", "/relay/127.0.0.1/80"],
)
def test_a_useless_relay_is_left_out(text: str) -> None:
    assert relay.route(text) is None
    usable = relay.RelayRoute("fd77::1", 80, HERE)
    assert tls.relay.route(usable.text) == usable


def test_peers_that_have_left_a_relay_keep_no_place_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WAITING_PEERS", 1)

    async def story() -> None:
        service = relay.RelayService(HERE, INVITE.membership(Identity.new()), print)
        first, first_end = socket.socketpair()
        second, second_end = socket.socketpair()
        with first, first_end, second, second_end:
            first.setblocking(False)
            second.setblocking(False)
            assert await service._wait(first, "first")
            with pytest.raises(ValueError, match="too many peers"):
                await service._wait(second, "second")
            first_end.close()
            assert await service._wait(second, "second")
            assert list(service._waiting) == ["second"]

    run(story)


def test_a_relay_bounds_connections_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte, CALL, takes a connection out of the listener's own bound."""
    monkeypatch.setattr(relay, "OPENINGS", 2)

    async def story() -> None:
        async with hosts(1) as (r,):
            loop, callers = asyncio.get_running_loop(), list[socket.socket]()
            try:
                for _ in range(3):
                    callers.append(socket.create_connection(r.transport.address))
                    callers[-1].setblocking(False)
                    await loop.sock_sendall(callers[-1], relay.CALL)
                    try:
                        answer = await asyncio.wait_for(loop.sock_recv(callers[-1], relay.NONCE_BYTES), 60)
                    except ConnectionResetError:
                        answer = b""
                    assert len(answer) == (relay.NONCE_BYTES if len(callers) < 3 else 0)
            finally:
                for each in callers:
                    each.close()

    run(story)


def test_only_an_address_is_taken_for_the_one_that_others_see() -> None:
    """Anything else would end the loop that looks for relays."""
    other, me = Identity.new(), Identity.new()
    theirs, mine = INVITE.membership(other), INVITE.membership(me)
    kind = get_args(handshake.StreamKind)[0]
    for seen, taken in (("nowhere", ""), (ROUTER, ROUTER)):
        hello = handshake.encode_hello(other.name, me.name, kind, theirs, seen)
        handshake.check_hello(hello, key_id(other.public), me.name, mine)
        assert mine.seen == taken
