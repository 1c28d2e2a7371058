"""A receiver's shares on real connections: told beside its bulk, followed by the sender's system, bounded whatever the receiver says."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, cast

import pytest
from tests.transport.test_lanes import indices, lanes_to, tensor, without_bbr
from tests.transport.test_strangers import call, held, make, started

from shoal.core.messages import Peer
from shoal.transport.base import Lost
from shoal.transport.congestion.shares import LEAST_BPS, Share, Shares
from shoal.transport.identity.identity import Identity
from shoal.transport.streams import uplink
from shoal.transport.streams.engine import Connection, WaitFor
from shoal.transport.streams.uplink import PACE, SO_MAX_PACING_RATE, Sent, Uplink
from shoal.transport.wire import TOLD_BYTES, share, share_told

assert held  # a fixture
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what was acknowledged, and paces")


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> dict[Peer, float]:
    """What every receiver tells, all the time."""
    rates: dict[Peer, float] = {}
    monkeypatch.setattr(Shares, "told", lambda self, now: [Share(peer, rate) for peer, rate in rates.items()])
    return rates


def only(uplink: Uplink) -> tuple[Any, Sent]:
    ((connection, sent),) = uplink._sent.items()
    return connection, sent


def paced_Bps(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)


@linux
def test_a_sender_follows_what_its_receiver_tells(tells: dict[Peer, float], monkeypatch: pytest.MonkeyPatch) -> None:
    least_Bps = 1e6
    assert LEAST_BPS < least_Bps
    monkeypatch.setattr(uplink, "LEAST_BPS", least_Bps)  # at its own the tensor takes half a minute

    async def story() -> None:
        async with started(make(), make()) as (a, b):
            tells[a.name] = 50e6
            for index in range(4):
                a.send(b.name, *tensor(index))
            assert await indices(b, 4) == [0, 1, 2, 3]
            connection, sent = only(a._sender._uplink)
            until = time.monotonic() + 10
            while math.isinf(sent.share_Bps) and time.monotonic() < until:  # the last was told after the last byte
                await asyncio.sleep(0.01)
            assert sent.share_Bps == 50e6 and paced_Bps(connection.sock) == pytest.approx(PACE * 50e6, rel=0.06)
            tells[a.name] = 0.0
            a.send(b.name, *tensor(4))
            assert await indices(b, 1) == [4]
            while sent.share_Bps != least_Bps and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert sent.share_Bps == least_Bps, "no receiver stops a sender for good"
            assert len(cast(Any, sent.hear).__self__._told) < TOLD_BYTES, "what was read is not kept"

    asyncio.run(story())


@linux
def test_a_receiver_that_knows_no_limit_says_when_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the sender knows the queue of its own downlink."""
    monkeypatch.setattr(Shares, "told", lambda self, now: [Share(peer, math.inf) for peer in self._senders])

    async def story() -> None:
        async with started(make(), make()) as (a, b):
            known = a._sender._uplink._downlink_queue
            assert known.queue_s(time.monotonic()) is None
            until = time.monotonic() + 10
            index = 0
            while known.queue_s(time.monotonic()) is None and time.monotonic() < until:
                a.send(b.name, *tensor(index))
                assert await indices(b, 1) == [index]
                index += 1
            queue_s = known.queue_s(time.monotonic())
            assert queue_s is not None and 0.0 <= queue_s < 1.0
            assert b._receiver._shares._own_queue_s(time.monotonic()) is None, "it has sent nothing"

    asyncio.run(story())


def test_who_is_not_measured_is_not_woken_by_what_it_does_not_hear() -> None:
    """It would turn for as long as its system takes nothing. Systems other than Linux measure nothing."""
    mine, other = socket.socketpair()
    with mine, other:
        mine.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                mine.send(bytes(1 << 16))
        other.send(b"words")
        connection = Connection(mine, lambda error: None)
        assert next(Uplink().write(connection, memoryview(b"more"))) is WaitFor.WRITE


def test_a_stream_of_several_connections_is_told_no_share(tells: dict[Peer, float]) -> None:
    async def story() -> None:
        async with started(without_bbr(), make()) as (a, b):
            a.send(b.name, *tensor(0))
            assert await indices(b, 1) == [0]
            await lanes_to(b, a.name)
            assert b._receiver._streams[a.name, "bulk"].tell is None

    asyncio.run(story())


@linux
def test_a_share_that_is_not_told_again_is_forgotten(tells: dict[Peer, float], monkeypatch: Any) -> None:
    async def story() -> None:
        async with started(make(), make()) as (a, b):
            a.send(b.name, *tensor(0))
            assert await indices(b, 1) == [0]
            _, sent = only(a._sender._uplink)
            sent.share_Bps, sent.share_until, sent.heard_at = 1e6, time.monotonic() - 1, 0.0
            a.send(b.name, *tensor(1))
            assert await indices(b, 1) == [1]
            assert math.isinf(sent.share_Bps)

    asyncio.run(story())


def test_what_a_sender_does_not_read_is_not_told_for_ever(tells: dict[Peer, float], held: ExitStack) -> None:
    async def story() -> None:
        """It sends bulk and never reads: its receiver keeps one share for it, and serves others."""
        async with started(make(), make()) as (victim, other):
            stranger = Identity.new()
            sock = call(held, victim, stranger, "bulk")
            while not victim._receiver._streams:
                await asyncio.sleep(0.01)
            ((name, _),) = victim._receiver._streams
            tells[name] = 1e6
            tell = victim._receiver._streams[name, "bulk"].tell
            assert tell is not None
            for _ in range(200_000):
                tell(share_told(1e6, 0.0))
            assert len(cast(Any, tell).__self__._untold) < 100
            other.send(victim.name, *tensor(0))
            assert await indices(victim, 1) == [0]
            words, channel = b"", cast(Any, tell).__self__
            assert channel._untold
            while channel._untold:  # the system took part of a record, and later shares came: the rest goes first
                words += sock.recv(1 << 16)
                tell(share_told(1e6, 0.0))
            sock.settimeout(0.5)
            with suppress(TimeoutError):
                while True:
                    words += sock.recv(1 << 16)
            assert words and words == (share_told(1e6, 0.0) * len(words))[: len(words)]
            sock.close()

    asyncio.run(story())


def test_words_that_are_no_shares_break_their_own_stream_at_most(tells: dict[Peer, float]) -> None:
    async def story() -> None:
        async with started(make(), make()) as (a, b):
            tells[a.name] = 1e9
            a.send(b.name, *tensor(0))
            assert await indices(b, 1) == [0]
            tell = b._receiver._streams[a.name, "bulk"].tell
            b._receiver.engine("bulk").post(lambda: tell(b"\0" * 4099))
            a.send(b.name, *tensor(1))
            got: list[int] = []
            while 1 not in got:
                item = await b.receive()
                if not isinstance(item, Lost):
                    got.append(item.message.index)
                    continue
                a.send(b.name, *tensor(1))

    asyncio.run(story())


def test_a_share_is_what_was_told() -> None:
    assert share(share_told(math.inf, 0.0)) == (math.inf, 0.0) and share(share_told(1e15, 1.5)) == (math.inf, 1.5)
    assert share(share_told(0.0, 12.25)) == (0.0, 12.25) and share(share_told(123456.7, 3e6)) == (123456.0, 3e6)
