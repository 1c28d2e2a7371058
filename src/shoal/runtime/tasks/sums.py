"""The arithmetic of all-reduce: cut a step's sum into chunks, add up received chunks, gather totals into the averaged gradient.

For task_runner.py. core decides rounds, chunks and their order; coding.py encodes and adds the error feedback.
"""

from __future__ import annotations

import math

import msgspec
import torch

from shoal.config import Config
from shoal.core.messages import Add, AddRow, Cut, Gather, Result, Sketch
from shoal.executor.base import Executor, digest_of
from shoal.numerics import pieces
from shoal.numerics.optimizer import norm_sq
from shoal.numerics.sketches import hashed, sketch
from shoal.runtime.tasks.auditing import Audit
from shoal.runtime.tasks.coding import Averaging, Held, plain

MAX_ROUNDS = 2  # rounds whose result is stored: a commit may name the one before the running one


class Gathered(msgspec.Struct, frozen=True):
    """A round's averaged gradient (length,) fp32, and this replica's residual (None: no encoding)."""

    reduced: torch.Tensor
    left: torch.Tensor | None


class Sums:
    """The rounds of the stage that this peer serves."""

    def __init__(self, config: Config) -> None:
        self.averaging = Averaging(config)
        self.audit = Audit(config)
        self.reduced: dict[tuple[int, int], Gathered] = {}  # by step and round
        self._scale = 1.0  # of what is cut in the present round (core/allreduce/bounds.py)
        # Key of the round, values so far, target
        self._gathering: tuple[tuple[int, int], int, torch.Tensor] | None = None

    def cut(self, task: Cut, executor: Executor) -> list[Held]:
        """The chunks of the executor's contribution that `task` names. ValueError: the bounds do not fit."""
        bounds = task.bounds
        if len(bounds) != len(task.outs) + 1 or list(bounds) != sorted(bounds) or bounds[-1] > executor.length:
            raise ValueError(f"bounds {bounds} do not cut {executor.length} values into {len(task.outs)}")
        contribution = executor.contribution(bounds[0], bounds[-1])
        if bounds[0] == 0:
            self._scale = self._shortening(task.longest, bounds[-1], executor) if task.longest is not None else 1.0
        return self.averaging.parts(contribution, bounds, task.outs, executor.length, self._scale)

    def _shortening(self, longest: float, step: int, executor: Executor) -> float:
        """What makes all that this replica brings as short as it has to be; looked at in pieces of `step` values."""
        squares = list[float]()
        for start in range(0, executor.length, step):
            piece = executor.contribution(start, min(start + step, executor.length))
            squares.append(norm_sq(self.averaging.fed_back_(piece, start)))
        norm = math.sqrt(math.fsum(squares))
        return longest / norm if norm > longest else 1.0

    def add_row(self, task: AddRow, parts: list[torch.Tensor]) -> list[Held]:
        total, bounds = add_up(parts), task.bounds
        cut = list(bounds) == sorted(bounds) and len(bounds) == len(task.outs) + 1
        if not cut or len(total) != bounds[-1] - bounds[0]:
            raise ValueError(f"bounds {bounds} do not cut {len(total)} values into {len(task.outs)}")
        return self.averaging.row_parts(total, task.parts, bounds, task.outs)

    def add(self, task: Add, parts: list[torch.Tensor]) -> tuple[Held, tuple[Sketch, ...]]:
        total = add_up(parts)
        held = self.averaging.sum(total, task.parts)
        if not task.check:
            return held, ()
        digest = hashed(plain(held))
        lost = Sketch() if held is total else Sketch(*sketch(total, digest))  # what encoding has left of it
        return held, (*(Sketch(*sketch(part, digest)) for part in parts), lost)

    def gather(self, task: Gather, sums: list[torch.Tensor], own: list[torch.Tensor | None], length: int) -> Result:
        """Append totals to the averaged gradient of `length` values; pieces arrive in order. ValueError: they do not fit."""
        key, at = (task.step, task.round), task.start
        if at == 0:
            self._gathering = key, 0, torch.empty(length)
        gathering_key, filled, reduced = self._gathering or (None, 0, torch.empty(0))
        if gathering_key != key or filled != at:
            raise ValueError(
                f"values from {at} on of round {task.round}, of which {filled if gathering_key == key else 0} are here"
            )
        stop = at + sum(len(flat(part)) for part in sums)
        if stop > length or (task.last and stop != length):
            raise ValueError(f"the sums have {stop} values together, the stage {length}")
        for part in sums:
            pieces.copy_(reduced[at : at + len(part)], part)
            at += len(part)
        self._gathering = None if task.last else (key, stop, reduced)
        digests, sketches = _checks(sums, own)
        if not task.last:
            return Result(digests=digests, sketches=sketches)
        squares = norm_sq(reduced)
        if not math.isfinite(squares):  # as any value that is not; no square of a finite one overflows fp64
            raise ValueError("the reduced gradient is not finite")
        self.reduced[key] = Gathered(reduced, self.averaging.left())
        for old in list(self.reduced)[:-MAX_ROUNDS]:
            del self.reduced[old]
        return Result(digest=digest_of([reduced]), norm_sq=squares, digests=digests, sketches=sketches)

    def commit(self, step: int, round_: int) -> torch.Tensor:
        """The averaged gradient (length,) fp32 of that round, to be applied; drops all others. ValueError: it is missing."""
        gathered = self.reduced.get((step, round_))
        if gathered is None:
            raise ValueError(f"no reduced gradient of step {step}, round {round_} is here")
        self.averaging.applied(gathered.left)
        self._forget()
        return gathered.reduced

    def void(self, seat: bool) -> None:
        """Drop the step's rounds; with `seat`, which says that the stage changed, the residual too."""
        self._forget()
        self.averaging.void(seat=seat)

    def _forget(self) -> None:
        self.reduced.clear()
        self._gathering = None


def _checks(sums: list[torch.Tensor], own: list[torch.Tensor | None]) -> tuple[tuple[str, ...], tuple[Sketch, ...]]:
    """The digest of each sum, and sketches of it and of this replica's part of it."""
    if not own:
        return (), ()
    digests, sketches = tuple(map(hashed, sums)), list[Sketch]()
    for total, part, digest in zip(sums, own, digests, strict=True):
        sketches += [Sketch(*sketch(total, digest)), Sketch(*sketch(part, digest)) if part is not None else Sketch()]
    return digests, tuple(sketches)


def flat(part: torch.Tensor) -> torch.Tensor:
    if part.dim() != 1 or part.dtype != torch.float32:
        raise ValueError(f"a part of type {part.dtype} and shape {tuple(part.shape)}, not flat fp32")
    return part


def add_up(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add chunks (n,) fp32 in the given order, on which fp32 addition depends. ValueError: unequal sizes."""
    if not parts or len({len(flat(part)) for part in parts}) > 1:
        raise ValueError(f"parts of {[len(part) for part in parts]} values cannot be added")
    return pieces.sum_of(parts)
