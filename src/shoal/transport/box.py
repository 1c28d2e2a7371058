"""What waits to be sent to one peer, on one kind of stream: bounded, and shared by two threads. For streams.py."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from shoal.core.messages import Peer
from shoal.transport.engine import Link
from shoal.transport.wire import Frame

Kind = Literal["control", "bulk"]


class Box:
    """What waits for one peer on one kind of stream, and that stream. Filled by the node's thread, emptied by the
    engine's."""

    def __init__(self, peer: Peer, kind: Kind, limit_bytes: int) -> None:
        self.peer = peer
        self.kind: Kind = kind
        self.link: Link | None = None  # engine's thread only
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def put(self, frame: Frame) -> bool:
        """False: too much waits already, the frame vanishes. One frame is always taken."""
        with self._lock:
            if self._frames and self._bytes + frame.nbytes > self._limit_bytes:
                return False
            self._frames.append(frame)
            self._bytes += frame.nbytes
            return True

    def first(self) -> Frame | None:
        """Stays in the box until `sent`."""
        with self._lock:
            return self._frames[0] if self._frames else None

    def sent(self, frame: Frame) -> None:
        with self._lock:
            if self._frames and self._frames[0] is frame:  # not when the box was emptied meanwhile
                self._frames.popleft()
                self._bytes -= frame.nbytes

    def empty(self) -> None:
        with self._lock:
            self._frames.clear()
            self._bytes = 0
