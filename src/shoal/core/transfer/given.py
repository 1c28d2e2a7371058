"""Chunks that were sent to whoever asked, and may still wait for a line, where a second copy would stand behind the first.

For donor.py and copies.py. Who asks again says so (`ChunkRequest.again`): it has received nothing. A broken connection loses what
waits, and so does nothing else.
"""

from __future__ import annotations

from shoal.core.messages import ChunkRequest, Peer

WAITED = 3  # requests in a row that are not answered: whoever asks waits twice as long after each (download.py)
MOST = 4096  # chunks that are remembered


class Given:
    def __init__(self) -> None:
        self._repeats: dict[tuple[Peer, int, int, str, int], int] = {}  # since it was sent, the oldest first

    def send(self, peer: Peer, request: ChunkRequest) -> None:
        key = chunk_key(peer, request)
        self._repeats.pop(key, None)
        self._repeats[key] = 0
        if len(self._repeats) > MOST:
            del self._repeats[next(iter(self._repeats))]

    def comes(self, peer: Peer, request: ChunkRequest) -> bool:
        """It was sent and is thought to be on its way."""
        key = chunk_key(peer, request)
        repeats = self._repeats.get(key, WAITED)
        if not request.again or repeats >= WAITED:
            return False
        self._repeats[key] = repeats + 1
        return True

    def was_sent(self, peer: Peer, request: ChunkRequest) -> bool:
        return chunk_key(peer, request) in self._repeats

    def on_unreachable(self, peer: Peer) -> None:
        """What was on its way there is lost."""
        self._repeats = {key: repeats for key, repeats in self._repeats.items() if key[0] != peer}


def chunk_key(peer: Peer, request: ChunkRequest) -> tuple[Peer, int, int, str, int]:
    """The same however often it is asked for."""
    return peer, request.step, request.stage, request.shard, request.chunk
