"""A stage's state on its way from replicas to a joiner, in symbols: exported, read in chunks, checked, downloaded. For task_runner.py."""

from __future__ import annotations

from shoal.core import messages as m
from shoal.sim.tasks.storage import CHUNKS, Blob, short

State = tuple[int, int, str, str]  # version, stage, digest; with delayed updates, the digest of the version before


class StateTransfer:
    """One peer's part in it: the copy that it offers to joiners, and the chunks of its own download."""

    def __init__(self, chunks: int = CHUNKS) -> None:
        self._count = chunks  # that a state is cut into
        self._exported: State | None = None
        self._chunks: dict[int, Blob] = {}

    def export(self, state: State) -> m.Result:
        self._exported = state
        hashes = tuple(short(_chunk(state, number)) for number in range(self._count))
        return m.Result(manifest=m.Manifest(hashes, (1000,) * self._count))

    def withdraw(self) -> None:
        """Nothing is exported any more."""
        self._exported = None

    def read(self, task: m.ReadChunk) -> Blob:
        if self._exported is None or self._exported[0] != task.step:
            raise ValueError(f"version {task.step} is not exported")
        return _chunk(self._exported, task.chunk)

    def check(self, task: m.CheckChunk, chunk: Blob) -> m.Result:
        if short(chunk) != task.digest:
            raise ValueError("the chunk's digest differs")
        self._chunks[task.chunk] = chunk
        return m.Result()

    def downloaded(self, wanted: range) -> State:
        """What these chunks make."""
        chunks = [self._chunks.get(number) for number in wanted]
        states: set[State] = {chunk[1] for chunk in chunks if chunk is not None}
        if None in chunks or len(states) != 1 or [chunk[2] for chunk in chunks if chunk] != list(range(self._count)):
            raise ValueError(f"the kept chunks do not make one state: {chunks}")
        return states.pop()

    def forget_download(self) -> None:
        self._chunks.clear()


def _chunk(state: State, number: int) -> Blob:
    return ("state", state, number)
