"""Frames that wait to be sent to one peer on one kind of stream: bounded, and shared by two threads. For sender.py.

And which rank of bulk goes next, of those that wait for one peer and of all peers' that wait for the uplink (uplink.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.core.messages import RANKS, Message, Peer
from shoal.slots import RankTurns
from shoal.transport.base import StreamKind
from shoal.transport.streams.engine import Connection
from shoal.transport.wire import Frame

SHARE_BYTES = 256 << 10  # that may wait for one peer even when all queues together are full


class QueuedBytes:
    """Of all send queues of a kind together."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Fragment(NamedTuple):
    """A part of a frame that one connection sends: the frame's bytes from `start` on. `number`: among those of its rank."""

    frame: Frame
    start: int
    nbytes: int
    number: int
    stream: int  # the queue's generation when it was taken
    left_bytes: int  # that wait behind it


class SendQueue:
    """The frames for one peer, and the connections that send them. The node's thread puts; the engine's sends."""

    def __init__(self, peer: Peer, kind: StreamKind, limit_bytes: int, total: QueuedBytes) -> None:
        self.peer = peer
        self.kind: StreamKind = kind
        self.connections: list[Connection] = []  # of one stream; engine's thread only
        self.generation = time.monotonic_ns()  # of that stream: another one than any of an earlier queue
        self._frames: tuple[deque[Frame], ...] = tuple(deque() for _ in range(RANKS))
        self._taken = [0] * RANKS  # bytes of each rank's first frame that connections have taken
        self._numbers = [0] * RANKS  # fragments taken
        self._turns = RankTurns()
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._total = total
        self._lock = threading.Lock()

    def put(self, frame: Frame) -> bool:
        """False: the queue is full and the frame is dropped. An empty queue takes one frame of any size, unless all together are full."""
        with self._lock:
            if self._bytes and self._bytes + frame.nbytes > self._limit_bytes:
                return False
            crowded = self._total.nbytes + frame.nbytes > self._total.limit_bytes and self._total.nbytes
            if crowded and self._bytes + frame.nbytes > SHARE_BYTES:
                return False
            self._frames[frame.rank].append(frame)
            self._count(frame.nbytes)
            return True

    @property
    def idle(self) -> bool:
        """Empty and without a connection."""
        return self._bytes == 0 and not self.connections

    @property
    def pending(self) -> bool:
        """Something is not written yet."""
        return self._bytes > 0

    def begin(self) -> None:
        """A new stream: its fragments are numbered from 0."""
        with self._lock:
            self.generation += 1
            self._numbers = [0] * RANKS

    def take(self, most: int | None = None) -> Fragment | None:
        """What a connection writes next: of the rank that goes next, at most so many bytes, or the whole frame. `sent` when it is."""
        with self._lock:
            waiting = self._waiting()
            if not waiting:
                return None
            rank = self._turns.next(waiting)
            self._turns.took(rank, waiting)
            frame, start, number = self._frames[rank][0], self._taken[rank], self._numbers[rank]
            nbytes = frame.nbytes - start if most is None else min(most, frame.nbytes - start)
            self._taken[rank] += nbytes
            self._numbers[rank] += 1
            if self._taken[rank] == frame.nbytes:
                self._frames[rank].popleft()
                self._taken[rank] = 0
            return Fragment(frame, start, nbytes, number, self.generation, self._bytes - nbytes)

    def sent(self, fragment: Fragment) -> None:
        with self._lock:
            if fragment.stream == self.generation:  # else the queue was cleared meanwhile
                self._count(-fragment.nbytes)

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        """Forget such frames, but for one of which a part was taken."""
        with self._lock:
            for rank, frames in enumerate(self._frames):
                begun = self._taken[rank] > 0
                kept = [
                    frame
                    for number, frame in enumerate(frames)
                    if (begun and not number) or not is_void(self.peer, frame.message)
                ]
                self._count(sum(frame.nbytes for frame in kept) - sum(frame.nbytes for frame in frames))
                frames.clear()
                frames.extend(kept)

    def clear(self) -> None:
        """What waits is lost, and so is what was taken: the stream has ended."""
        with self._lock:
            for frames in self._frames:
                frames.clear()
            self._taken = [0] * RANKS
            self.generation += 1
            self._count(-self._bytes)

    def _waiting(self) -> list[int]:
        return [rank for rank, frames in enumerate(self._frames) if frames]

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._total.add(nbytes)
