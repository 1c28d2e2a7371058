"""Measuring links: over modelled lines the figures are the lines' own, and a visitor learns those of pairs it is no part of."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.core.messages import Leave, Measure, Measured, Ping
from shoal.runtime import measure
from shoal.runtime.measure import Meter, pairings, survey
from shoal.transport.base import Incoming
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.emulated.shaped import AccessLink, Shaped


@asynccontextmanager
async def meters(*links: AccessLink) -> AsyncIterator[list[Meter]]:
    """One meter per link, each behind it; all in one process over the network in memory."""
    hub = Hub()
    transports: list[Any] = []
    for number, link in enumerate(links):
        plain = MemoryTransport(hub, f"p{number}")
        transports.append(Shaped(plain, link) if link != AccessLink() else plain)  # type: ignore[arg-type]
    running = [Meter(transport) for transport in transports]

    async def receive(meter: Meter, transport: Any) -> None:
        while True:
            incoming = await transport.receive()
            if isinstance(incoming, Incoming):
                meter.takes(incoming)

    for transport in transports:
        await transport.start()
    tasks = [asyncio.create_task(receive(m, t)) for m, t in zip(running, transports, strict=True)]
    tasks += [asyncio.create_task(meter.serve()) for meter in running]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        for transport in transports:
            await transport.close()


def test_pings_that_ask_for_more_than_their_part_are_answered_without_a_load_and_loads_share_one_buffer() -> None:
    async def story() -> None:
        hub = Hub()

        class Recording(MemoryTransport):
            def send(self, peer: Any, message: Any, blobs: Any = ()) -> int:  # nothing is taken: as on a slow line
                sent.append((peer, message, blobs))
                return 1

        sent: list[Any] = []
        meter = Meter(Recording(hub, "a"))
        for number in range(40):  # names are free, keys are not
            assert meter.takes(Incoming(f"key.{number}", Ping(number, measure.MOST_BYTES)))
        assert len(sent) == 40, "each is answered"
        loads = [blob.data for _, _, blobs in sent for blob in blobs]
        assert sum(len(load) for load in loads) <= measure.MOST_BYTES
        for number in range(40):
            meter.takes(Incoming(f"other{number}.1", Ping(number, measure.MOST_BYTES)))
        loads = [blob.data for _, _, blobs in sent for blob in blobs]
        assert 1 < len(loads) and sum(len(load) for load in loads) <= 2 * measure.MOST_BYTES
        assert len({id(load.obj) for load in loads}) == 1, "a copy for each"

    run(story)


def test_the_memory_of_a_large_load_is_free_again_once_it_is_sent() -> None:
    """One ping of a stranger for 64 MiB must not make a peer hold them for the rest of its run."""

    async def story() -> None:
        hub = Hub()
        asked, asker = MemoryTransport(hub, "a"), MemoryTransport(hub, "key.1")
        await asyncio.gather(asked.start(), asker.start())
        tracemalloc.start()
        try:
            Meter(asked).takes(Incoming("key.1", Ping(1, measure.MOST_BYTES)))
            answer = await asker.receive()
            assert isinstance(answer, Incoming) and len(answer.blobs[0].data) == measure.MOST_BYTES
            del answer
            held_bytes, _ = tracemalloc.get_traced_memory()
            assert held_bytes < 1 << 20
        finally:
            tracemalloc.stop()
            await asyncio.gather(asked.close(), asker.close())

    run(story)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_every_pair_is_met_once_and_nobody_twice_in_a_round() -> None:
    for count in range(2, 9):
        peers = [f"p{i}" for i in range(count)]
        rounds = pairings(peers)
        met = [frozenset(pair) for pairs in rounds for pair in pairs]
        assert len(met) == len(set(met)) == count * (count - 1) // 2
        for pairs in rounds:
            busy = [peer for pair in pairs for peer in pair]
            assert len(busy) == len(set(busy))


def test_a_modelled_line_is_measured_never_quicker_than_it_is() -> None:
    async def story() -> None:
        async with meters(AccessLink(0.02, 4e6, 4e6), AccessLink(0.02, 1e6, 1e6)) as (fast, slow):
            there, back = await asyncio.gather(fast.link("p1", 1 << 20), slow.link("p0", 1 << 20))
            for link in (there, back):
                assert not link.reason
                assert link.delay_s >= 0.02  # a busy machine adds to it, nothing takes away
                assert (
                    0 < link.bandwidth_Bps <= 2e6
                )  # the slow line, either way; a late ping on a busy machine makes it look quicker

    run(story)


def test_a_visitor_learns_of_all_pairs_and_what_each_peers_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ANSWER_S", 60.0)

    async def story() -> None:
        async with meters(
            AccessLink(), AccessLink(0.0, 8e6, 8e6), AccessLink(0.0, 8e6, 8e6), AccessLink()
        ) as survey_text:
            survey_text[1].facts = "one"
            notes: list[str] = []
            result = await survey(survey_text[0], ["p1", "p2", "p3"], 1 << 20, notes.append)
            assert result.peers == ["p1", "p2", "p3"] and result.facts["p1"] == "one"
            assert sorted(result.links) == [(f"p{a}", f"p{b}") for a in (1, 2, 3) for b in (1, 2, 3) if a != b]
            assert not any(link.reason for link in result.links.values())
            assert result.links["p1", "p2"].bandwidth_Bps <= 16e6
            assert result.up_Bps["p1"] <= 16e6 and result.down_Bps["p2"] <= 16e6
            assert notes and "round 1 of 3" in notes[0]

    run(story)


def test_a_peer_that_is_silent_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ANSWER_S", 0.2)

    async def story() -> None:
        async with meters(AccessLink(), AccessLink()) as (visitor, other):
            assert (await other.link("p9", 1000)).reason.startswith("no answer")
            notes: list[str] = []
            result = await survey(visitor, ["p9"], 1000, notes.append)
            assert result.peers == [] and any("left out" in text for text in notes)

    run(story)


def test_what_is_not_about_measuring_is_left_to_the_machine_and_a_full_queue_is_told() -> None:
    async def story() -> None:
        hub = Hub()
        transport, asker = MemoryTransport(hub, "a"), MemoryTransport(hub, "b")
        await transport.start()
        await asker.start()
        meter = Meter(transport)
        assert not meter.takes(Incoming("b", Leave()))
        assert meter.takes(Incoming("b", Ping(1)))
        for number in range(measure.WAITING - 1):
            assert meter.takes(Incoming(f"other{number}", Measure(number, ("c",), 1000)))
        for number in range(10, 12):  # the second of one key does not take the place of another's
            assert meter.takes(Incoming("b", Measure(number, ("c",), 1000)))
        assert not meter._requests.full() or measure.WAITING == meter._requests.qsize()
        answers = [await asker.receive() for _ in range(2)]
        refused = [answer.message for answer in answers if isinstance(answer, Incoming)][1]
        assert isinstance(refused, Measured) and refused.id == 11 and "already" in refused.reason
        meter.takes(Incoming("late", Measure(12, ("c",), 1000)))
        assert meter._requests.qsize() == measure.WAITING
        await transport.close()
        await asker.close()

    run(story)
