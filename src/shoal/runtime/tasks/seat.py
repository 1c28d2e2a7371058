"""The stage that a peer serves: copies of its state for checkpoints and joiners, and the download that it is built from.

For the task runner. How a state becomes chunks is in runtime/state.py.
"""

from __future__ import annotations

import msgspec
import torch

from shoal.core.messages import Blend, CheckChunk, Import, Result
from shoal.executor.base import Executor
from shoal.executor.delayed import Delayed
from shoal.numerics.blend import blend
from shoal.runtime.frozen import OtherBase
from shoal.runtime.state import Copy, check_chunk, join, raw
from shoal.runtime.tasks.texts import Texts


class Seat(msgspec.Struct):
    """The stage that this peer serves, at version `step`."""

    executor: Executor
    stage: int
    step: int
    texts: Texts = msgspec.field(default_factory=Texts)


class Snapshots:
    """Copies of the stage's state: one is kept until a checkpoint has it, one is exported to joiners. One copy serves both."""

    def __init__(self) -> None:
        self._kept: Copy | None = None
        self._exported: Copy | None = None

    def clear(self) -> None:
        self._kept = self._exported = None

    def keep(self, seat: Seat) -> Copy:
        """For a checkpoint."""
        copy = self._kept = self._copy(seat)
        return copy

    def kept(self, step: int) -> Copy | None:
        copy = self._kept  # read once: another lane may say at this moment that it is saved
        return copy if copy is not None and copy.step == step else None

    def saved(self, copy: Copy) -> None:
        """Its record is all that will be asked for again."""
        if self._kept is copy:
            self._kept = None

    def export(self, seat: Seat) -> Copy:
        """For joiners."""
        copy = self._exported = self._copy(seat)
        return copy

    def exported(self, step: int) -> Copy:
        copy = self._exported
        if copy is None or copy.step != step:
            raise ValueError(f"no copy of step {step} is held here")
        return copy

    def _copy(self, seat: Seat) -> Copy:
        for copy in (self._kept, self._exported):
            if copy is not None and copy.step == seat.step:
                return copy
        return Copy(_whole(seat.executor), seat.step, _note(seat.stage, seat.step, seat.executor.base))


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
