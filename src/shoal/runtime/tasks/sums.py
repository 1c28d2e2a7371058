"""The arithmetic of rounds with real tensors: parts cut from a step's sum, added up, gathered into the reduced gradient.

For task_runner.py, which hands over tensors and keeps what is made; when, of which round and brought by whom is core's. What the codes of
parts and sums leave out is fed back by coding.py.
"""

from __future__ import annotations

import hashlib

import msgspec
import torch

from shoal.config import Config
from shoal.core.messages import Add, AddRow, Cut, Gather, Result
from shoal.executor.base import Executor
from shoal.numerics.optimizer import norm_sq
from shoal.runtime.state import raw
from shoal.runtime.tasks.coding import Averaging, Held
from shoal.runtime.tasks.kinds import finite

ROUNDS_KEPT = 2  # a commit may name the round before the one that is running


class Gathered(msgspec.Struct, frozen=True):
    """A round's reduced gradient (length,) fp32, and what its codes leave out here (None: nothing)."""

    reduced: torch.Tensor
    left: torch.Tensor | None


class Sums:
    """Of the stage that this peer serves."""

    def __init__(self, config: Config) -> None:
        self.averaging = Averaging(config)
        self.reduced: dict[tuple[int, int], Gathered] = {}  # by step and round
        self._gathering: tuple[tuple[int, int], int, torch.Tensor] | None = None  # of which round, how far, into what

    def cut(self, task: Cut, executor: Executor) -> list[Held]:
        """The parts of the executor's sum that `task` names."""
        bounds = task.bounds
        if len(bounds) != len(task.outs) + 1 or list(bounds) != sorted(bounds) or bounds[-1] > executor.length:
            raise ValueError(f"bounds {bounds} do not cut {executor.length} values into {len(task.outs)}")
        brought = executor.contribution(bounds[0], bounds[-1])
        return self.averaging.parts(brought, bounds, task.outs, executor.length)

    def add_row(self, task: AddRow, parts: list[torch.Tensor]) -> list[Held]:
        total, bounds = added(parts), task.bounds
        cut = list(bounds) == sorted(bounds) and len(bounds) == len(task.outs) + 1
        if not cut or len(total) != bounds[-1] - bounds[0]:
            raise ValueError(f"bounds {bounds} do not cut {len(total)} values into {len(task.outs)}")
        return self.averaging.row_parts(total, task.parts, bounds, task.outs)

    def add(self, task: Add, parts: list[torch.Tensor]) -> Held:
        return self.averaging.sum(added(parts), task.parts)

    def gather(self, task: Gather, sums: list[torch.Tensor], length: int) -> Result:
        """`length`: of the stage's gradient. The pieces of a round come in order."""
        key, at = (task.step, task.round), task.start
        if at == 0:
            self._gathering = key, 0, torch.empty(length)
        begun, filled, reduced = self._gathering or (None, 0, torch.empty(0))
        if begun != key or filled != at:
            raise ValueError(
                f"values from {at} on of round {task.round}, of which {filled if begun == key else 0} are here"
            )
        stop = at + sum(len(flat(part)) for part in sums)
        if stop > length or (task.last and stop != length):
            raise ValueError(f"the sums have {stop} values together, the stage {length}")
        for part in sums:
            reduced[at : at + len(part)] = part
            at += len(part)
        if not finite(reduced[task.start : stop]):
            raise ValueError("the reduced gradient is not finite")
        self._gathering = None if task.last else (key, stop, reduced)
        if not task.last:
            return Result()
        self.reduced[key] = Gathered(reduced, self.averaging.left())
        for old in list(self.reduced)[:-ROUNDS_KEPT]:
            del self.reduced[old]
        return Result(digest=hashlib.sha256(raw(reduced)).hexdigest(), norm_sq=norm_sq(reduced))

    def commit(self, step: int, round_: int) -> torch.Tensor:
        """The reduced gradient (length,) fp32 of that round, which is to be applied; all others are void. ValueError: it is not here."""
        gathered = self.reduced.get((step, round_))
        if gathered is None:
            raise ValueError(f"no reduced gradient of step {step}, round {round_} is here")
        self.averaging.applied(gathered.left)
        self._forget()
        return gathered.reduced

    def void(self, seat: bool) -> None:
        """The step's books are void; with `seat`, so is all that is held of the stage."""
        self._forget()
        self.averaging.void(seat=seat)

    def _forget(self) -> None:
        self.reduced.clear()
        self._gathering = None


def flat(part: torch.Tensor) -> torch.Tensor:
    if part.dim() != 1 or part.dtype != torch.float32:
        raise ValueError(f"a part of type {part.dtype} and shape {tuple(part.shape)}, not flat fp32")
    return part


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts (n,) fp32 added one after another in the order given: fp32 addition depends on it."""
    if not parts or len({len(flat(part)) for part in parts}) > 1:
        raise ValueError(f"parts of {[len(part) for part in parts]} values cannot be added")
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
