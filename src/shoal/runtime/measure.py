"""Links between the peers of a run, measured over the run's own transport: a peer's answers, and the survey of all pairs.

Every peer answers (`Meter`, called by its node before its machine hears of anything): Ping with Pong, and Measure by measuring
its own links and telling the figures. So one visitor with an invite learns about all pairs (`survey`), and a run that trains is
measured under its own load. Bounds: a transfer has at most 64 MiB and all of one request a GiB; a peer measures for one at a
time and keeps a short queue, in which one key has one place; what it answers to pings with has a budget for each key and for all.
Loads of one size share a buffer while any of them is being sent, so that what waits for slow lines takes little memory. A delay is
half a round trip: two clocks are not compared, so both directions have the same.
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
ENOUGH_S = 1.0  # a transfer that takes so long tells the bandwidth: slow starts are over on any ordinary line
PINGS = 8  # the shortest of so many round trips is the line's own
EVERY_S = 0.1  # between pings while bytes are on their way
ANSWER_S = 10.0  # for a ping: what is not heard of by then is lost
TRANSFER_S = 60.0  # a transfer that takes longer is given up: its line carries less than 4 KiB/s
FACTS_CHARS = 4000  # core/messages.py allows no more
REQUEST_BYTES = 1 << 30  # to all peers of one request together
REFUSAL_BYTES = 200  # of one Measured
WAITING = 4  # requests to measure that a peer keeps
# Of answers, in bytes. `link` and `survey` load lines with their pings and ask for facts only.
ANSWERS_TO_ONE = Allowance(per_s=4 << 20, at_once=MOST_BYTES)
ANSWERS_TO_ALL = Allowance(per_s=16 << 20, at_once=2 * MOST_BYTES)

_NOISE = np.frombuffer(os.urandom(1 << 20), np.uint8)  # incompressible
# Larger loads by their size, as long as one is being sent: a peer that was measured once must not keep 64 MiB for good.
_loads: WeakValueDictionary[int, npt.NDArray[np.uint8]] = WeakValueDictionary()


class Meter:
    """One peer's part in measuring. `facts` is what `shoal probe` found out about its machine: the text of device.toml."""

    def __init__(self, transport: Transport) -> None:
        self.facts = ""
        self._transport = transport
        self._serial = 0
        self._pongs: dict[tuple[Peer, int], asyncio.Future[Pong]] = {}
        self._asked: asyncio.Queue[tuple[Peer, Measure]] = asyncio.Queue(WAITING)
        self._askers: set[str] = set()  # keys whose request waits
        self._answers = Budgets(ANSWERS_TO_ONE, ANSWERS_TO_ALL)
        self._told: dict[int, Callable[[Peer, Measured], None]] = {}

    def takes(self, incoming: Incoming) -> bool:
        """Whether this was about measuring; then it is dealt with."""
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
                tell = self._told.get(measured.id)
                if tell is not None:
                    tell(peer, measured)
            case _:
                return False
        return True

    def _answer(self, peer: Peer, ping: Ping) -> None:
        """Without the load that it asks for, where that is more than its part."""
        facts = self.facts[:FACTS_CHARS] if ping.facts else ""
        wanted = len(facts) + ping.answer_bytes
        allowed = not wanted or self._answers.take(sender_of(peer), time.monotonic(), wanted)
        self._transport.send(peer, Pong(ping.id, facts), _load(ping.answer_bytes if allowed else 0))

    def _note(self, peer: Peer, measure: Measure) -> None:
        """Keep the request, or refuse it: one of each key may wait."""
        asker = sender_of(peer)
        if asker not in self._askers and not self._asked.full():
            self._askers.add(asker)
            self._asked.put_nowait((peer, measure))
        elif self._answers.take(asker, time.monotonic(), REFUSAL_BYTES * len(measure.peers)):
            for target in measure.peers:
                self._transport.send(peer, Measured(measure.id, target, reason="it measures for others already"))

    async def serve(self) -> None:
        """Measure for others, one request after the other, for ever."""
        while True:
            asker, measure = await self._asked.get()
            self._askers.discard(sender_of(asker))
            peers = [peer for peer in dict.fromkeys(measure.peers) if peer != self._transport.name]
            most = min(measure.most_bytes, MOST_BYTES, REQUEST_BYTES // max(1, len(peers)))

            async def tell(peer: Peer, asker: Peer = asker, number: int = measure.id, most: int = most) -> None:
                self._transport.send(asker, msgspec.structs.replace(await self.link(peer, most), id=number))

            await asyncio.gather(*(tell(peer) for peer in peers))

    async def ping(
        self, peer: Peer, nbytes: int = 0, facts: bool = False, patience_s: float | None = None
    ) -> tuple[float, Pong]:
        """Seconds until that many bytes were there and the answer here. TimeoutError."""
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
        """My line to that peer, one way."""
        try:
            await self.ping(peer)  # opens the connection; the first message to a stranger may be lost
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
        """Seconds of one transfer, and the round trips of pings meanwhile."""
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
        """Have each of these peers measure its links to those; all at once. What does not come back is told as a reason."""
        self._serial += 1
        number = self._serial
        missing = {(peer, target) for peer, targets in requests for target in targets}
        found: list[tuple[Peer, Measured]] = []
        over = asyncio.Event()

        def heard(peer: Peer, measured: Measured) -> None:
            if (peer, measured.peer) in missing:
                missing.discard((peer, measured.peer))
                found.append((peer, measured))
                if not missing:
                    over.set()

        self._told[number] = heard
        for peer, targets in requests:
            self._transport.send(peer, Measure(number, targets, min(most_bytes, MOST_BYTES)))
        try:
            async with asyncio.timeout(2 * TRANSFER_S):
                await over.wait()
        except TimeoutError:
            silent = f"no figures within {2 * TRANSFER_S:.0f} s"
            found += [(peer, Measured(number, target, reason=silent)) for peer, target in sorted(missing)]
        finally:
            del self._told[number]
        return found


class Survey(msgspec.Struct):
    """What was measured: links by (from, to), and per peer the sum of what it sent to all, and got from all, at once."""

    peers: list[Peer]
    facts: dict[Peer, str]
    links: dict[tuple[Peer, Peer], Measured]
    up_Bps: dict[Peer, float]
    down_Bps: dict[Peer, float]


async def survey(meter: Meter, peers: Sequence[Peer], most_bytes: int, told: Callable[[str], None]) -> Survey:
    """Every pair, both ways at the same time, pairs without a common peer side by side; then each peer with all at once."""
    found = Survey(list(peers), {}, {}, {}, {})
    for peer in peers:
        for attempt in range(3):  # the first message to a stranger may be lost: it must learn where we are
            try:
                found.facts[peer] = (await meter.ping(peer, facts=True))[1].facts
                break
            except TimeoutError:
                told(f"{peer} does not answer" + ("; it is left out" if attempt == 2 else ", asking again"))
    found.peers = [peer for peer in peers if peer in found.facts]
    rounds = pairings(found.peers)
    for number, pairs in enumerate(rounds):
        told(f"round {number + 1} of {len(rounds)}: {len(pairs)} pairs, both ways at once")
        requests = [(one, (two,)) for pair in pairs for one, two in (pair, pair[::-1])]
        for peer, measured in await meter.ask(requests, most_bytes):
            found.links[peer, measured.peer] = measured
            if measured.reason:
                told(f"{peer} to {measured.peer}: {measured.reason}")
    if len(found.peers) < 3:
        return found  # the pair's own figures say it all
    for number, peer in enumerate(found.peers):
        others = tuple(other for other in found.peers if other != peer)
        told(f"lines of peer {number + 1} of {len(found.peers)}: to all the others at once, then from them")
        sent = await meter.ask([(peer, others)], most_bytes)
        found.up_Bps[peer] = sum(measured.bandwidth_Bps for _, measured in sent)
        received = await meter.ask([(other, (peer,)) for other in others], most_bytes)
        found.down_Bps[peer] = sum(measured.bandwidth_Bps for _, measured in received)
    return found


def pairings(peers: Sequence[Peer]) -> list[list[tuple[Peer, Peer]]]:
    """Every pair once, in rounds in which nobody is in two pairs (the circle method of tournaments)."""
    ring: list[Peer | None] = list(peers) + ([None] if len(peers) % 2 else [])
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(one, two) for one, two in pairs if one is not None and two is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _load(nbytes: int) -> tuple[Blob, ...]:
    """A view of noise. Loads of one size class (1, 4, 16 and 64 MiB) share one copy, however many are being sent."""
    if not nbytes:
        return ()
    repeats = 1
    while repeats * len(_NOISE) < nbytes:
        repeats *= 4
    noise = _NOISE if repeats == 1 else _loads.get(repeats)
    if noise is None:
        noise = _loads[repeats] = np.tile(_NOISE, repeats)
    return (Blob("uint8", (nbytes,), noise.data[:nbytes]),)
