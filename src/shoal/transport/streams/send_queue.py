"""What waits to be sent to one peer, on one kind of stream: bounded, and shared by two threads. For streams.py."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from shoal.core.messages import RANKS, Peer
from shoal.transport.streams.engine import Connection
from shoal.transport.wire import Frame

Kind = Literal["control", "bulk"]

SHARE_BYTES = 256 << 10  # that may wait for one peer even when too much waits for all together


class QueuedBytes:
    """What waits in all boxes of a kind."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class SendQueue:
    """What waits for one peer on one kind of stream, and that stream. Filled by the node's thread, emptied by the
    engine's."""

    def __init__(self, peer: Peer, kind: Kind, limit_bytes: int, total: QueuedBytes) -> None:
        self.peer = peer
        self.kind: Kind = kind
        self.link: Connection | None = None  # engine's thread only
        self._frames: tuple[deque[Frame], ...] = tuple(deque() for _ in range(RANKS))
        self._gone = [0] * RANKS  # bytes of each rank's first frame that have been written
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._total = total
        self._lock = threading.Lock()

    def put(self, frame: Frame) -> bool:
        """False: too much waits already, the frame vanishes. One frame is always taken, unless too much waits for others."""
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
        """Nothing waits, and there is no connection."""
        return self._bytes == 0 and self.link is None

    def first(self) -> tuple[Frame, int] | None:
        """Of the highest rank that waits, and how much of it is gone. It stays in the box until all of it was `sent`."""
        with self._lock:
            for frames, gone in zip(self._frames, self._gone, strict=True):
                if frames:
                    return frames[0], gone
            return None

    def sent(self, frame: Frame, nbytes: int) -> None:
        with self._lock:
            frames = self._frames[frame.rank]
            if not frames or frames[0] is not frame:  # the box was emptied meanwhile
                return
            self._gone[frame.rank] += nbytes
            if self._gone[frame.rank] == frame.nbytes:
                frames.popleft()
                self._gone[frame.rank] = 0
                self._count(-frame.nbytes)

    def empty(self) -> None:
        with self._lock:
            for frames in self._frames:
                frames.clear()
            self._gone = [0] * RANKS
            self._count(-self._bytes)

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._total.add(nbytes)
