"""The stage that a peer serves: copies of its state for checkpoints and joiners, and the download that it is built from.

For the task runner. How a state becomes chunks is in runtime/state.py.
"""

from __future__ import annotations

import math

import msgspec
import torch

from shoal.core.messages import Blend, CheckChunk, Import, Result
from shoal.executor.base import Executor
from shoal.executor.delayed import Delayed
from shoal.numerics.blend import blend
from shoal.runtime.frozen import OtherBase
from shoal.runtime.state import Copy, check_chunk, copied, join, raw
from shoal.runtime.tasks.texts import Texts

SLICE_BYTES = (
    2**28
)  # of a state that are copied for joiners before what waits has its turn, a third of a second; a tensor is not cut


class Seat(msgspec.Struct):
    """The stage that this peer serves, at version `step`."""

    executor: Executor
    stage: int
    step: int
    texts: Texts = msgspec.field(default_factory=Texts)


class Begun(msgspec.Struct):
    """A copy that is being made: what has been copied, and what is left."""

    seat: Seat
    step: int
    left: list[tuple[str, torch.Tensor]]  # in reverse
    state: dict[str, torch.Tensor] = {}

    def go_on(self, nbytes: float) -> bool:
        """Copy so many bytes, and the tensor that they end in. Whether nothing is left."""
        while self.left and nbytes > 0:
            name, tensor = self.left.pop()
            self.state[name] = copied(tensor)
            nbytes -= tensor.nbytes
        return not self.left

    def copy(self) -> Copy:
        return Copy(self.state, self.step, _note(self.seat.stage, self.step, self.seat.executor.base))


class Snapshots:
    """Copies of the stage's state: one is kept until a checkpoint has it, one is exported to joiners. One copy serves both.

    What is copied for joiners is copied in slices, between which hops and tasks of rounds have their turn: a large state takes seconds,
    and nobody waits for them. `finish` before the state changes."""

    def __init__(self) -> None:
        self._kept: Copy | None = None
        self._exported: Copy | None = None
        self._begun: Begun | None = None  # for joiners

    def clear(self) -> None:
        self._kept = self._exported = self._begun = None

    def keep(self, seat: Seat) -> Copy:
        """For a checkpoint."""
        self.finish()
        copy = self._kept = self._held(seat.step) or _whole_copy(seat)
        return copy

    def kept(self, step: int) -> Copy | None:
        copy = self._kept  # read once: another lane may say at this moment that it is saved
        return copy if copy is not None and copy.step == step else None

    def saved(self, copy: Copy) -> None:
        """Its record is all that will be asked for again."""
        if self._kept is copy:
            self._kept = None

    def export(self, seat: Seat) -> None:
        """Begin a copy for joiners."""
        self._exported, self._begun = self._held(seat.step), None
        if self._exported is None:
            self._begun = _begun(seat)

    def go_on(self, step: int, nbytes: float = SLICE_BYTES) -> Copy | None:
        """Copy so many more bytes for joiners. The copy, once it is whole. ValueError: it was given up."""
        if self._begun is not None and self._begun.step == step:
            if not self._begun.go_on(nbytes):
                return None
            self._exported, self._begun = self._begun.copy(), None
        return self.exported(step)

    def finish(self) -> None:
        """Copy what is left, as the state is about to change."""
        if self._begun is not None:
            self.go_on(self._begun.step, math.inf)

    def exported(self, step: int) -> Copy:
        copy = self._exported
        if copy is None or copy.step != step:
            raise ValueError(f"no copy of step {step} is held here")
        return copy

    def _held(self, step: int) -> Copy | None:
        return next((copy for copy in (self._kept, self._exported) if copy is not None and copy.step == step), None)


class Download:
    """Chunks of a stage's state from other peers, or of both stages beside it, until the stage is built of them."""

    def __init__(self) -> None:
        self._chunks: dict[int, torch.Tensor] = {}

    def add(self, task: CheckChunk, data: torch.Tensor) -> Result:
        fault = check_chunk(raw(data), task.digest)
        if fault:
            raise ValueError(f"chunk {task.chunk}: {fault}")
        self._chunks[task.chunk] = data
        return Result(nbytes=data.nbytes)

    def load(self, executor: Executor, task: Import | Blend) -> None:
        """Into a stage that was just built. The chunks are not needed again, whether they fit or not."""
        chunks, self._chunks = self._chunks, {}
        if isinstance(task, Import):
            executor.load_state(_state(chunks, range(task.chunks), task.stage, task.step, executor.base))
            return
        first, whole = task.chunks[0], sum(task.chunks)
        below = _state(chunks, range(first), task.stage - 1, task.step)
        above = _state(chunks, range(first, whole), task.stage + 1, task.step)
        executor.load_state(blend(_whole(executor), below, above, task.below))


def _begun(seat: Seat) -> Begun:
    return Begun(seat, seat.step, list(reversed(_whole(seat.executor).items())))


def _whole_copy(seat: Seat) -> Copy:
    begun = _begun(seat)
    begun.go_on(math.inf)
    return begun.copy()


def _whole(executor: Executor) -> dict[str, torch.Tensor]:
    """All that another replica needs to go on as this one does."""
    previous = executor.previous() if isinstance(executor, Delayed) else {}
    return {**executor.state(), **previous}


def _state(
    chunks: dict[int, torch.Tensor], wanted: range, stage: int, step: int, base: str | None = None
) -> dict[str, torch.Tensor]:
    """The state of that stage and step from its chunks. `base`: of the weights beside which it was trained; None: of any."""
    missing = [chunk for chunk in wanted if chunk not in chunks]
    if missing:
        raise ValueError(f"chunk {missing[0] - wanted.start} of {len(wanted)} was not downloaded")
    state, note = join([raw(chunks[chunk]) for chunk in wanted])
    theirs = note.pop("base", "")
    if note != _note(stage, step):
        raise ValueError(f"the downloaded state is of {note}, not of {_note(stage, step)}")
    if base is not None and theirs != base:
        raise OtherBase(
            f"the downloaded adapters belong to other frozen weights ({theirs[:16]}, here {base[:16]}); is model.path the run's model?"
        )
    return state


def _note(stage: int, step: int, base: str = "") -> dict[str, str]:
    return {"stage": str(stage), "step": str(step), **({"base": base} if base else {})}
