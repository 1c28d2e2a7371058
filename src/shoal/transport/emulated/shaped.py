"""Any network with the line of a modelled peer before it: delay, uplink and downlink bandwidth.

For runs that pretend to be spread over the world, and for benchmarks. `LineQueue` decides when what has passed (a function of
calls and times, no clock); `Shaped` waits for those times. Everything is reckoned in the line's own time: when this process
wakes late, what it handed over is late, but the line was busy meanwhile and the next message does not start any later.

The uplink holds each message until its last byte has left, plus the delay. A link of one pair, where one is given, takes bytes
as they leave the uplink: links to several peers are filled side by side as far as the uplink is wider than they are, and a
narrow one holds nobody else up. The downlink takes bytes while they arrive: a message that comes alone and no faster than the
line is not held at all; two at once share it. At the uplink bulk messages of one rank pass one after the other; a control message, or bulk
of a higher rank, goes first, as its packets would, and pushes what is in transmission back by its own time. The real network
beneath adds what it costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.core.messages import RANKS, Message, Peer, rank
from shoal.slots import Inflow
from shoal.transport.base import Blob, Event, Incoming, Limits, Lost, Transport, Unknown
from shoal.transport.streams.receive_queue import ReceiveQueue
from shoal.transport.wire import encode, size

log = logging.getLogger(__name__)

T = TypeVar("T")


class PairLink(msgspec.Struct, frozen=True):
    """The way to one other peer, beyond this one's uplink. 0: as it is."""

    delay_s: float = 0.0
    bandwidth_Bps: float = 0.0


class AccessLink(msgspec.Struct, frozen=True):
    """A peer's way to the others. 0: as it is. The delay is added to what this peer sends, except to the hosts of `pairs`."""

    delay_s: float = 0.0
    up_Bps: float = 0.0
    down_Bps: float = 0.0
    pairs: Mapping[str, PairLink] = {}  # by the host at which the other listens


class Reachable(Transport, Protocol):
    """A transport with addresses, in its own terms: host and port, or libp2p's multiaddrs."""

    @property
    def address(self) -> Any: ...

    def learn(self, peer: Peer, address: Any) -> None: ...


class _Passing(Generic[T]):
    """A message on the line. `lane`: 0 for control, 1 and up for bulk by rank. `leaves_at`: when its last byte is through."""

    __slots__ = ("item", "lane", "leaves_at", "nbytes", "peer", "seconds")

    def __init__(self, item: T, peer: Peer, nbytes: int, lane: int, seconds: float, leaves_at: float) -> None:
        self.item = item
        self.peer = peer
        self.nbytes = nbytes
        self.lane = lane
        self.seconds = seconds
        self.leaves_at = leaves_at


class LineQueue(Generic[T]):
    """What a peer sends, or one pair's way."""

    def __init__(self, bandwidth_Bps: float, delay_s: float = 0.0) -> None:
        self._bandwidth_Bps = bandwidth_Bps
        self._delay_s = delay_s
        self._lanes: list[deque[_Passing[T]]] = [deque() for _ in range(1 + RANKS)]  # control, then bulk by rank
        self._free = [float("-inf")] * (1 + RANKS)  # when the last message of each lane is through

    def push(
        self, item: T, peer: Peer, nbytes: int, bulk: bool, now: float, since: float | None = None, rank: int = 0
    ) -> None:
        """Its last byte is here `now`; its first was `since`, where that is known. `rank` is that of bulk."""
        seconds = nbytes / self._bandwidth_Bps if self._bandwidth_Bps else 0.0
        began = since if since is not None else now
        lane = 1 + rank if bulk else 0
        leaves_at = max(max(*self._free[: lane + 1], began) + seconds, now)
        self._free[lane] = leaves_at
        self._lanes[lane].append(_Passing(item, peer, nbytes, lane, seconds, leaves_at))
        self._delay(lane + 1, seconds, now)

    def take(self, now: float) -> list[T]:
        """What has arrived by `now`: control first, then by rank, each in order."""
        return [passing.item for passing in self.passed(now)]

    def passed(self, now: float) -> list[_Passing[T]]:
        """The same, with when each was through."""
        return [
            lane.popleft()
            for lane in self._lanes
            for _ in range(sum(passing.leaves_at + self._delay_s <= now for passing in lane))
        ]

    @property
    def deadline(self) -> float | None:
        return min((lane[0].leaves_at + self._delay_s for lane in self._lanes if lane), default=None)

    def waiting_bytes(self, peer: Peer) -> int:
        """Of bulk."""
        return sum(passing.nbytes for lane in self._lanes[1:] for passing in lane if passing.peer == peer)

    def drop(self, peer: Peer, now: float) -> None:
        """Forget that peer's messages; those behind them move up, but not those that are through already."""
        self._lanes[0] = deque(passing for passing in self._lanes[0] if passing.peer != peer)
        self._remove(lambda passing: passing.peer == peer, now)

    def withdraw(self, is_void: Callable[[Peer, T], bool], now: float) -> None:
        """The same of such bulk, where nothing of it is on its way."""
        self._remove(
            lambda passing: is_void(passing.peer, passing.item) and passing.leaves_at - passing.seconds > now, now
        )

    def _remove(self, goes: Callable[[_Passing[T]], bool], now: float) -> None:
        """Of bulk."""
        waiting = [(passing.leaves_at, lane, passing) for lane in range(1, 1 + RANKS) for passing in self._lanes[lane]]
        waiting.sort(key=lambda each: each[:2])
        self._lanes[1:] = [deque() for _ in range(RANKS)]
        gained = 0.0
        for leaves_at, lane, passing in waiting:
            if goes(passing):
                # What is left of it, where others that go first may have had the line for a while since it began.
                ahead = (
                    (until, other) for until, higher, other in waiting if higher < lane and now < until <= leaves_at
                )
                first = sum(min(other.seconds, until - now) for until, other in ahead)
                gained += max(0.0, min(passing.seconds, leaves_at - now - first))
            else:
                passing.leaves_at -= gained
                self._lanes[lane].append(passing)
        for lane in range(1, 1 + RANKS):
            if self._free[lane] > now:
                self._free[lane] = max([now, *(passing.leaves_at for passing in self._lanes[lane])])

    def _delay(self, lane: int, seconds: float, now: float) -> None:
        """Push back by so much what is still passing in this and the lower lanes."""
        for lower in range(lane, 1 + RANKS):
            for passing in self._lanes[lower]:
                if passing.leaves_at > now:
                    passing.leaves_at += seconds
            if self._free[lower] > now:
                self._free[lower] += seconds


class DownlinkQueue(Generic[T]):
    """What a peer receives. A message's bytes came in while it travelled, up to `now`; in what order, their senders have settled."""

    def __init__(self, bandwidth_Bps: float) -> None:
        self._bandwidth_Bps = bandwidth_Bps
        self._inflow = Inflow(), Inflow()  # control, which goes first and takes next to nothing, and bulk
        self._passing: list[tuple[float, int, _Passing[T]]] = []  # heap, by when they are through
        self._last: dict[tuple[Peer, int], float] = {}
        self._serial = 0

    def push(self, item: T, peer: Peer, nbytes: int, bulk: bool, now: float, rank: int = 0) -> None:
        """Its last byte is here `now`. Two that come at once share the line; alone and no faster than the line none is held."""
        seconds, lane = nbytes / self._bandwidth_Bps if self._bandwidth_Bps else 0.0, 1 + rank if bulk else 0
        through = max(self._inflow[bulk].through(peer, seconds, now, rank), self._last.get((peer, lane), now))
        self._last[peer, lane] = through
        self._serial += 1
        heappush(self._passing, (through, self._serial, _Passing(item, peer, nbytes, lane, seconds, through)))

    def take(self, now: float) -> list[T]:
        """What has arrived by `now`."""
        items = []
        while self._passing and self._passing[0][0] <= now:
            items.append(heappop(self._passing)[2].item)
        return items

    @property
    def deadline(self) -> float | None:
        return self._passing[0][0] if self._passing else None

    def waiting_bytes(self, peer: Peer) -> int:
        """Of bulk."""
        return sum(passing.nbytes for _, _, passing in self._passing if passing.peer == peer and passing.lane)

    def drop(self, peer: Peer) -> None:
        """Forget that peer's messages; the line has carried them all the same."""
        self._passing = [entry for entry in self._passing if entry[2].peer != peer]
        heapify(self._passing)
        self._last = {key: at for key, at in self._last.items() if key[0] != peer}


class UplinkQueue(Generic[T]):
    """What a peer sends: its uplink, and behind it the links of pairs that have one of their own."""

    def __init__(self, link: AccessLink) -> None:
        self.pairs = link.pairs
        self.hosts: dict[Peer, str] = {}  # as far as known; a peer that has called before it was heard of has none yet
        self._first: LineQueue[T] = LineQueue(link.up_Bps, 0.0 if link.pairs else link.delay_s)
        self._behind: dict[str, LineQueue[T]] = {
            host: LineQueue(pair.bandwidth_Bps, pair.delay_s) for host, pair in link.pairs.items()
        }
        self._others: LineQueue[T] = LineQueue(0.0, link.delay_s)

    def push(self, item: T, peer: Peer, nbytes: int, bulk: bool, now: float, rank: int = 0) -> None:
        self._first.push(item, peer, nbytes, bulk, now, rank=rank)

    def take(self, now: float) -> list[T]:
        """What has arrived by `now`."""
        if not self.pairs:
            return self._first.take(now)
        for done in sorted(self._first.passed(now), key=lambda passing: passing.leaves_at):
            line = self._behind.get(self.hosts.get(done.peer, ""), self._others)
            since, bulk = done.leaves_at - done.seconds, done.lane > 0
            line.push(done.item, done.peer, done.nbytes, bulk, done.leaves_at, since, max(0, done.lane - 1))
        return [item for line in self._lines[1:] for item in line.take(now)]

    @property
    def deadline(self) -> float | None:
        return min((line.deadline for line in self._lines if line.deadline is not None), default=None)

    def waiting_bytes(self, peer: Peer) -> int:
        return sum(line.waiting_bytes(peer) for line in self._lines)

    def drop(self, peer: Peer, now: float) -> None:
        for line in self._lines:
            line.drop(peer, now)

    def withdraw(self, is_void: Callable[[Peer, T], bool], now: float) -> None:
        """Such bulk that has not begun to pass the uplink; what is on a pair's way has."""
        self._first.withdraw(is_void, now)

    @property
    def _lines(self) -> list[LineQueue[T]]:
        return [self._first, *self._behind.values(), self._others]


class Shaped:
    def __init__(self, inner: Reachable, link: AccessLink, limits: Limits = Limits()) -> None:
        self.name = inner.name
        self._inner = inner
        self._limits = limits
        self._rates_Bps = link.up_Bps, link.down_Bps
        self._up: UplinkQueue[tuple[Peer, Message, tuple[Blob, ...]]] = UplinkQueue(link)
        self._down: DownlinkQueue[tuple[Incoming, int]] = DownlinkQueue(link.down_Bps)
        self._receive_queue = ReceiveQueue(on_space=lambda: self._room.set())
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        await self._inner.start()
        self._tasks = [asyncio.create_task(self._pull()), asyncio.create_task(self._turn())]
        for task in self._tasks:
            task.add_done_callback(tell_mistake)

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        frame = encode(message, blobs, self._limits)  # refuses at once what the inner network would refuse later
        if self._closed:
            return 0
        waiting_bytes = self._up.waiting_bytes(peer) if frame.bulk else 0
        if waiting_bytes and waiting_bytes + frame.nbytes > self._limits.queued_bytes:
            return 0
        self._up.push((peer, message, blobs), peer, frame.nbytes, frame.bulk, loop_time(), frame.rank)
        self._news.set()
        return frame.nbytes

    async def receive(self) -> Event:
        return await self._receive_queue.take()

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        self._up.withdraw(lambda peer, item: bool(item[2]) and is_void(peer, item[1]), loop_time())
        self._inner.withdraw(is_void)
        self._news.set()

    def line_Bps(self) -> tuple[float, float]:
        """The modelled line's, where it has a rate: the real one beneath is never full."""
        up_Bps, down_Bps = self._inner.line_Bps()
        return self._rates_Bps[0] or up_Bps, self._rates_Bps[1] or down_Bps

    def forget(self, peer: Peer) -> None:
        self._up.drop(peer, loop_time())
        self._down.drop(peer)
        self._receive_queue.drop(lambda item: item.peer == peer)
        self._inner.forget(peer)
        self._news.set()

    async def close(self) -> None:
        """What is still on the modelled line vanishes."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()

    @property
    def address(self) -> Any:
        return self._inner.address

    def learn(self, peer: Peer, address: Any) -> None:
        if self._up.pairs:
            self._up.hosts[peer] = address[0]
        self._inner.learn(peer, address)

    # ------------------------------------------------------------------------------------------------------- private

    async def _pull(self) -> None:
        """From the inner network onto the downlink, as long as the node takes what comes."""
        while True:
            item = await self._inner.receive()
            if isinstance(item, Lost | Unknown):
                if isinstance(item, Lost):  # as a real connection's queue, which does not fill the line for the dead
                    self._up.drop(item.peer, loop_time())
                self._receive_queue.put(item)
                continue
            nbytes = size(item.message, item.blobs)
            if item.blobs and self._down.waiting_bytes(item.peer) > self._limits.queued_bytes:
                continue  # more than the modelled line can take: vanishes, as at the sender
            self._down.push((item, nbytes), item.peer, nbytes, bool(item.blobs), loop_time(), rank=rank(item.message))
            self._news.set()
            while self._receive_queue.full(bulk=True) or self._receive_queue.full(bulk=False):
                self._room.clear()
                await self._room.wait()

    async def _turn(self) -> None:
        """Hand over what has passed a line, when it has."""
        while True:
            self._news.clear()
            now = loop_time()
            for peer, message, blobs in self._up.take(now):
                self._inner.send(peer, message, blobs)
            for incoming, nbytes in self._down.take(now):
                self._receive_queue.put(incoming, nbytes)
            deadlines = [line.deadline for line in (self._up, self._down) if line.deadline is not None]
            await set_or_due(self._news, deadlines)


def tell_mistake(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a shaped network has stopped", exc_info=task.exception())


def loop_time() -> float:
    """The event loop's clock is the machine's monotonic one, which all its processes share."""
    return asyncio.get_running_loop().time()


async def set_or_due(event: asyncio.Event, deadlines: Sequence[float]) -> None:
    """Wait until `event` is set, or set it at the first deadline."""
    alarm = asyncio.get_running_loop().call_at(min(deadlines), event.set) if deadlines else None
    try:
        await event.wait()
    finally:
        if alarm is not None:
            alarm.cancel()
