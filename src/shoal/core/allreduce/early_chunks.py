"""Chunks that arrive before the round or the piece that they belong to. For rounds.py, which takes them when it gets there.

A replica may begin a round, or the next piece of it, before its message reaches another. What is held of one sender is bounded: the
chunks of its newest round, and of the lowest pieces of that.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core.messages import Command, GatherChunk, Peer, ReduceChunk
from shoal.core.replica_state import drop


class EarlyChunk(msgspec.Struct, frozen=True):
    """A chunk received before the Round it belongs to, or before the view that this round needs."""

    message: ReduceChunk | GatherChunk
    blobs: tuple[str, ...]
    fault: str

    @property
    def when(self) -> tuple[int, int]:
        return self.message.round, self.message.chunk


class EarlyChunks:
    def __init__(self) -> None:
        self._held: dict[tuple[Peer, bool], list[EarlyChunk]] = {}  # of each sender, parts and sums apart

    def hold(self, peer: Peer, early: EarlyChunk, most: int) -> list[Command]:
        """At most `most` of its newest round, the lowest ones."""
        held = self._held.setdefault((peer, isinstance(early.message, GatherChunk)), [])
        if any(one.when == early.when or one.message.round > early.message.round for one in held):
            return drop(early.blobs)
        stale = [one for one in held if one.message.round < early.message.round]
        if len(held) - len(stale) >= most:
            lowest = min(held, key=lambda one: one.when)
            if lowest.when > early.when:
                return drop(early.blobs)
            stale.append(lowest)
        held[:] = [*(one for one in held if one not in stale), early]
        return [command for one in stale for command in drop(one.blobs)]

    def take_due(self, due: Callable[[Peer, EarlyChunk], bool]) -> list[tuple[Peer, EarlyChunk]]:
        """Those that are due, each with its sender. They are held no longer."""
        taken = [(peer, one) for (peer, _), held in self._held.items() for one in held if due(peer, one)]
        self._keep(lambda peer, one: not due(peer, one))
        return taken

    def keep_step(self, step: tuple[int, int] | None) -> list[Command]:
        """Only those of that epoch and step; of none: nothing."""
        blobs = tuple(
            blob
            for held in self._held.values()
            for one in held
            if (one.message.epoch, one.message.step) != step
            for blob in one.blobs
        )
        self._keep(lambda _, one: (one.message.epoch, one.message.step) == step)
        return drop(blobs)

    def keep_senders(self, serves: Callable[[Peer], bool]) -> list[Command]:
        left = [key for key in self._held if not serves(key[0])]
        return drop(tuple(blob for key in left for one in self._held.pop(key) for blob in one.blobs))

    def _keep(self, stays: Callable[[Peer, EarlyChunk], bool]) -> None:
        kept = {key: [one for one in held if stays(key[0], one)] for key, held in self._held.items()}
        self._held = {key: held for key, held in kept.items() if held}
