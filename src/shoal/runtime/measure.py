"""Measures the links between the peers of a run over the run's own transport: each peer's answers, and the survey of all pairs.

Every peer's `Meter` answers Ping with Pong, and Measure by measuring its own links; its machine never gets these messages. So
one visitor with an invite can measure all pairs (`survey`), and a training run is measured under its own load. Bounds: 64 MiB
per transfer, 1 GiB per request; a peer serves one request at a time and queues a few, one per key; answers to pings have a
budget per key and for all. Loads of one size share a buffer while one of them is being sent, so waiting ones take little
memory. A delay is half a round trip: clocks are not compared, so both directions have the same.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.core.messages import Measure, Measured, Peer, Ping, Pong
from shoal.transport.base import Blob, Incoming, Transport
from shoal.transport.budget import Allowance, Budgets
from shoal.transport.streams.receive_queue import sender_of

MOST_BYTES = 64 << 20  # of one transfer
FIRST_BYTES = 256 << 10  # of the first; each next one has four times as many
ENOUGH_S = 1.0  # a transfer of this length gives the bandwidth: TCP's slow start is over
PINGS = 8  # round trips; the shortest is the line's delay
EVERY_S = 0.1  # between pings during a transfer
ANSWER_S = 10.0  # for a ping; later it counts as lost
TRANSFER_S = 60.0  # a longer transfer is given up
FACTS_CHARS = 4000  # core/messages.py allows no more
REQUEST_BYTES = 1 << 30  # to all peers of one request together
REFUSAL_BYTES = 200  # of one Measured
WAITING = 4  # requests that a peer queues
# Of answers, in bytes. `link` and `survey` load lines with their pings and ask for facts only.
ANSWERS_TO_ONE = Allowance(per_s=4 << 20, at_once=MOST_BYTES)
ANSWERS_TO_ALL = Allowance(per_s=16 << 20, at_once=2 * MOST_BYTES)

_NOISE = np.frombuffer(os.urandom(1 << 20), np.uint8)  # incompressible
# Larger loads by their size, as long as one is being sent: a peer that was measured once must not keep 64 MiB.
_loads: WeakValueDictionary[int, npt.NDArray[np.uint8]] = WeakValueDictionary()


class Meter:
    """One peer's measurements. `facts`: the text of device.toml, the result of `shoal probe` on its machine."""

    def __init__(self, transport: Transport) -> None:
        self.facts = ""
        self._transport = transport
        self._serial = 0
        self._pongs: dict[tuple[Peer, int], asyncio.Future[Pong]] = {}
        self._requests: asyncio.Queue[tuple[Peer, Measure]] = asyncio.Queue(WAITING)
        self._askers: set[str] = set()  # keys with a queued request
        self._answers = Budgets(ANSWERS_TO_ONE, ANSWERS_TO_ALL)
        self._callbacks: dict[int, Callable[[Peer, Measured], None]] = {}

    def takes(self, incoming: Incoming) -> bool:
        """Handle a message about measurements; False: it is another message."""
        peer = incoming.peer
        match incoming.message:
            case Ping() as ping:
                self._answer(peer, ping)
            case Pong() as pong:
                waiting = self._pongs.pop((peer, pong.id), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(pong)
            case Measure() as measure:
                self._note(peer, measure)
            case Measured() as measured:
                tell = self._callbacks.get(measured.id)
                if tell is not None:
                    tell(peer, measured)
            case _:
                return False
        return True

    def _answer(self, peer: Peer, ping: Ping) -> None:
        """Answer a ping; without the requested load where that exceeds the sender's budget."""
        facts = self.facts[:FACTS_CHARS] if ping.facts else ""
        nbytes = len(facts) + ping.answer_bytes
        allowed = not nbytes or self._answers.take(sender_of(peer), time.monotonic(), nbytes)
        self._transport.send(peer, Pong(ping.id, facts), _load(ping.answer_bytes if allowed else 0))

    def _note(self, peer: Peer, measure: Measure) -> None:
        """Queue the request, one per key, or refuse it."""
        asker = sender_of(peer)
        if asker not in self._askers and not self._requests.full():
            self._askers.add(asker)
            self._requests.put_nowait((peer, measure))
        elif self._answers.take(asker, time.monotonic(), REFUSAL_BYTES * len(measure.peers)):
            for target in measure.peers:
                self._transport.send(peer, Measured(measure.id, target, reason="it measures for others already"))

    async def serve(self) -> None:
        """Serve the queued requests, one after another, until cancelled."""
        while True:
            asker, measure = await self._requests.get()
            self._askers.discard(sender_of(asker))
            peers = [peer for peer in dict.fromkeys(measure.peers) if peer != self._transport.name]
            most = min(measure.most_bytes, MOST_BYTES, REQUEST_BYTES // max(1, len(peers)))

            async def tell(peer: Peer, asker: Peer = asker, number: int = measure.id, most: int = most) -> None:
                self._transport.send(asker, msgspec.structs.replace(await self.link(peer, most), id=number))

            await asyncio.gather(*(tell(peer) for peer in peers))

    async def ping(
        self, peer: Peer, nbytes: int = 0, facts: bool = False, patience_s: float | None = None
    ) -> tuple[float, Pong]:
        """Send `nbytes` and wait for the answer: seconds, and the answer. TimeoutError."""
        self._serial += 1
        key = (peer, self._serial)
        answer = self._pongs[key] = asyncio.get_running_loop().create_future()
        before = time.monotonic()
        self._transport.send(peer, Ping(self._serial, 0, facts), _load(nbytes))
        try:
            async with asyncio.timeout(ANSWER_S if patience_s is None else patience_s):
                pong = await answer
        finally:
            self._pongs.pop(key, None)
        return time.monotonic() - before, pong

    async def link(self, peer: Peer, most_bytes: int) -> Measured:
        """Measure the link from this peer to `peer`."""
        try:
            await self.ping(peer)  # opens the connection; the first message to an unknown peer may be lost
        except TimeoutError:
            pass
        try:
            trips = [(await self.ping(peer))[0] for _ in range(PINGS)]
            nbytes = min(FIRST_BYTES, most_bytes)
            while True:
                seconds, loaded = await self._transfer(peer, nbytes)
                if seconds >= ENOUGH_S or nbytes >= most_bytes:
                    break
                nbytes = min(4 * nbytes, most_bytes)
        except TimeoutError:
            return Measured(0, peer, reason=f"no answer within {ANSWER_S:.0f} s, or {TRANSFER_S:.0f} s for a transfer")
        shortest = min(trips)
        typical = statistics.median(loaded or trips)
        return Measured(0, peer, shortest / 2, typical / 2, nbytes / max(seconds - shortest, 1e-6))

    async def _transfer(self, peer: Peer, nbytes: int) -> tuple[float, list[float]]:
        """Seconds of one transfer, and round trips of pings during it."""
        moving = asyncio.ensure_future(self.ping(peer, nbytes, patience_s=TRANSFER_S))
        loaded: list[float] = []
        try:
            while not moving.done():
                await asyncio.wait({moving}, timeout=EVERY_S)
                if not moving.done():
                    loaded.append((await self.ping(peer, patience_s=TRANSFER_S))[0])
            return moving.result()[0], loaded
        finally:
            moving.cancel()

    async def ask(
        self, requests: Sequence[tuple[Peer, tuple[Peer, ...]]], most_bytes: int
    ) -> list[tuple[Peer, Measured]]:
        """Request (peer, targets) measurements, all at once. A missing answer becomes a Measured with a reason."""
        self._serial += 1
        number = self._serial
        missing = {(peer, target) for peer, targets in requests for target in targets}
        figures: list[tuple[Peer, Measured]] = []
        complete = asyncio.Event()

        def receive(peer: Peer, measured: Measured) -> None:
            if (peer, measured.peer) in missing:
                missing.discard((peer, measured.peer))
                figures.append((peer, measured))
                if not missing:
                    complete.set()

        self._callbacks[number] = receive
        for peer, targets in requests:
            self._transport.send(peer, Measure(number, targets, min(most_bytes, MOST_BYTES)))
        try:
            async with asyncio.timeout(2 * TRANSFER_S):
                await complete.wait()
        except TimeoutError:
            silent = f"no figures within {2 * TRANSFER_S:.0f} s"
            figures += [(peer, Measured(number, target, reason=silent)) for peer, target in sorted(missing)]
        finally:
            del self._callbacks[number]
        return figures


class Survey(msgspec.Struct):
    """Measurements: links by (from, to), and each peer's total rates to and from all others at once."""

    peers: list[Peer]
    facts: dict[Peer, str]
    links: dict[tuple[Peer, Peer], Measured]
    up_Bps: dict[Peer, float]
    down_Bps: dict[Peer, float]


async def survey(meter: Meter, peers: Sequence[Peer], most_bytes: int, on_progress: Callable[[str], None]) -> Survey:
    """Measure every pair in both directions at once, disjoint pairs in parallel; then each peer with all others at once."""
    facts = await _facts(meter, peers, on_progress)
    result = Survey([peer for peer in peers if peer in facts], facts, {}, {}, {})
    rounds = pairings(result.peers)
    for number, pairs in enumerate(rounds):
        on_progress(f"round {number + 1} of {len(rounds)}: {len(pairs)} pairs, both ways at once")
        requests = [(one, (two,)) for pair in pairs for one, two in (pair, pair[::-1])]
        for peer, measured in await meter.ask(requests, most_bytes):
            result.links[peer, measured.peer] = measured
            if measured.reason:
                on_progress(f"{peer} to {measured.peer}: {measured.reason}")
    if len(result.peers) >= 3:  # the figures of a pair are the totals
        await _measure_lines(meter, result, most_bytes, on_progress)
    return result


async def _facts(meter: Meter, peers: Sequence[Peer], on_progress: Callable[[str], None]) -> dict[Peer, str]:
    """What each peer that answers says of its machine."""
    facts = {}
    for peer in peers:
        for attempt in range(3):  # the first message to an unknown peer may be lost: it must learn our address
            try:
                facts[peer] = (await meter.ping(peer, facts=True))[1].facts
                break
            except TimeoutError:
                on_progress(f"{peer} does not answer" + ("; it is left out" if attempt == 2 else ", asking again"))
    return facts


async def _measure_lines(meter: Meter, result: Survey, most_bytes: int, on_progress: Callable[[str], None]) -> None:
    for number, peer in enumerate(result.peers):
        others = tuple(other for other in result.peers if other != peer)
        on_progress(f"lines of peer {number + 1} of {len(result.peers)}: to all the others at once, then from them")
        up = await meter.ask([(peer, others)], most_bytes)
        result.up_Bps[peer] = sum(measured.bandwidth_Bps for _, measured in up)
        down = await meter.ask([(other, (peer,)) for other in others], most_bytes)
        result.down_Bps[peer] = sum(measured.bandwidth_Bps for _, measured in down)


def pairings(peers: Sequence[Peer]) -> list[list[tuple[Peer, Peer]]]:
    """Every pair once, in rounds of disjoint pairs (the circle method of tournaments)."""
    ring: list[Peer | None] = list(peers) + ([None] if len(peers) % 2 else [])
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(one, two) for one, two in pairs if one is not None and two is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _load(nbytes: int) -> tuple[Blob, ...]:
    """A blob of `nbytes` random bytes. Loads of one size class (1, 4, 16 and 64 MiB) share one buffer."""
    if not nbytes:
        return ()
    repeats = 1
    while repeats * len(_NOISE) < nbytes:
        repeats *= 4
    noise = _NOISE if repeats == 1 else _loads.get(repeats)
    if noise is None:
        noise = _loads[repeats] = np.tile(_NOISE, repeats)
    return (Blob("uint8", (nbytes,), noise.data[:nbytes]),)
