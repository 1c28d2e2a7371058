"""Any network whose links are cut and slowed on purpose, as a file says: for `shoal chaos` on real processes.

A run that allows it (network.fault_injection) puts this before each peer's network; a run that does not never makes one. The file holds a
list of `Fault`s, each until a moment of the machine's monotonic clock, so that links heal by themselves should whoever wrote it be
killed. What is cut vanishes without a word, as packets do behind a firewall that drops them: connections stay, and nobody is told.
A cut is obeyed at both ends, so it holds even where one end reads the file late; a slow link is a `LineQueue` (shaped.py) per peer,
at the sending end. What peers tell of one another's addresses (directory.py) has connections of its own and is not touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.core.messages import Message, Peer
from shoal.escaping import UNDECODABLE
from shoal.transport.base import Blob, Event, Limits, Lost, Unknown
from shoal.transport.emulated.shaped import AccessLink, LineQueue, Reachable, loop_time, set_or_due, tell_mistake
from shoal.transport.wire import encode

FAULTS = "faults.json"  # in the directory of the run
LOOK_S = 0.1  # between looks at the file

Direction = Literal["both", "out", "in"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Links between `side` and `others` (none named: everybody who is not of `side`). `out`: what `side` sends; `in`: what is sent
    to it. Without a `link` they are cut; with one they are like that, which slows them. `large`: only messages with blobs are cut, as
    where a router drops packets above a size without a word (an MTU black hole): everything small passes."""

    side: tuple[Peer, ...]
    others: tuple[Peer, ...] = ()
    direction: Direction = "both"
    link: AccessLink | None = None
    large: bool = False
    until_s: float  # of this machine's monotonic clock

    def cuts(self, blobs: tuple[Blob, ...]) -> bool:
        return self.link is None and (bool(blobs) or not self.large)

    def meets(self, sender: Peer, receiver: Peer) -> bool:
        """Is what `sender` sends to `receiver` meant?"""
        leaving = sender in self.side and self._far(receiver)
        coming = receiver in self.side and self._far(sender)
        return (leaving and self.direction != "in") or (coming and self.direction != "out")

    def _far(self, peer: Peer) -> bool:
        return peer in self.others if self.others else peer not in self.side


_FAULTS = msgspec.json.Decoder(tuple[Fault, ...])


def read(path: Path) -> tuple[Fault, ...]:
    """None when there is no file, or when it is none of ours: nobody's training ends with a torn file."""
    try:
        return _FAULTS.decode(path.read_bytes())
    except (FileNotFoundError, *UNDECODABLE):
        return ()


class Faulty:
    def __init__(self, inner: Reachable, path: Path, limits: Limits = Limits()) -> None:
        self.name = inner.name
        self._inner, self._path, self._limits = inner, path, limits
        self._faults: tuple[Fault, ...] = ()
        self._seen: object = None  # of the file: what tells that it is another
        self._lines: dict[Peer, tuple[AccessLink, LineQueue[tuple[Message, tuple[Blob, ...]]]]] = {}
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._inner.start()
        self.look()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._turn())]
        for task in self._tasks:
            task.add_done_callback(tell_mistake)

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        link = self._line_to(peer)
        self._settle(peer, link)
        if self._cut(self.name, peer, blobs):
            return 0
        if link is None:
            return self._inner.send(peer, message, blobs)
        frame = encode(message, blobs, self._limits)  # refuses at once what the inner network would refuse later
        line = self._lines.setdefault(peer, (link, LineQueue(link.up_Bps, link.delay_s)))[1]
        waiting_bytes = line.waiting_bytes(peer) if frame.bulk else 0
        if waiting_bytes and waiting_bytes + frame.nbytes > self._limits.queued_bytes:
            return 0
        line.push((message, blobs), peer, frame.nbytes, frame.bulk, loop_time(), rank=frame.rank)
        self._news.set()
        return frame.nbytes

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        now = loop_time()
        for _, line in self._lines.values():
            line.withdraw(lambda peer, item: bool(item[1]) and is_void(peer, item[0]), now)
        self._inner.withdraw(is_void)
        self._news.set()

    def line_Bps(self) -> tuple[float, float]:
        return self._inner.line_Bps()

    async def receive(self) -> Event:
        while True:
            item = await self._inner.receive()
            if isinstance(item, Lost | Unknown) or not self._cut(item.peer, self.name, item.blobs):
                return item

    def forget(self, peer: Peer) -> None:
        self._lines.pop(peer, None)
        self._inner.forget(peer)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()

    @property
    def address(self) -> Any:
        return self._inner.address

    def learn(self, peer: Peer, address: Any) -> None:
        self._inner.learn(peer, address)

    def look(self) -> None:
        """Read the file again if it is another."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self._faults = None, ()
            return
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            self._seen, self._faults = seen, read(self._path)

    # ------------------------------------------------------------------------------------------------------- private

    def _cut(self, sender: Peer, receiver: Peer, blobs: tuple[Blob, ...]) -> bool:
        now = loop_time()
        return any(f.cuts(blobs) and now < f.until_s and f.meets(sender, receiver) for f in self._faults)

    def _line_to(self, peer: Peer) -> AccessLink | None:
        """The first slow link that is meant for what is sent to that peer now."""
        now = loop_time()
        meant = (fault for fault in self._faults if now < fault.until_s and fault.meets(self.name, peer))
        return next((fault.link for fault in meant if fault.link), None)

    def _settle(self, peer: Peer, link: AccessLink | None) -> None:
        """The link to that peer is another than it was: what is on its way arrives now, before anything sent later."""
        held = self._lines.get(peer)
        if held is not None and held[0] != link:
            del self._lines[peer]
            for message, blobs in held[1].take(float("inf")):
                self._hand_over(peer, message, blobs)

    def _hand_over(self, peer: Peer, message: Message, blobs: tuple[Blob, ...]) -> None:
        if not self._cut(self.name, peer, blobs):
            self._inner.send(peer, message, blobs)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
            for peer in list(self._lines):
                self._settle(peer, self._line_to(peer))

    async def _turn(self) -> None:
        """Hand over what has passed a slow link, when it has."""
        while True:
            self._news.clear()
            now = loop_time()
            for peer, (_, line) in list(self._lines.items()):
                for message, blobs in line.take(now):
                    self._hand_over(peer, message, blobs)
            deadlines = [line.deadline for _, line in self._lines.values() if line.deadline is not None]
            await set_or_due(self._news, deadlines)
