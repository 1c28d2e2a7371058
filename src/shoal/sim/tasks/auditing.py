"""Audited steps in symbols: what tensors are, and hops of another replica that are computed again. For task_runner.py."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core import messages as m
from shoal.sim.tasks.oddities import made_of
from shoal.sim.tasks.sketches import sketch_of_all
from shoal.sim.tasks.storage import Blob, short


def describe(task: m.Describe, inputs: Sequence[Blob]) -> m.Result:
    sketches = tuple(m.Sketch() if blob[0] == "x" and blob[3] == 0 else sketch_of_all((blob,)) for blob in inputs)
    return m.Result(digests=tuple(map(short, inputs)), sketches=sketches if task.seed else ())


def entry_of(task: m.RunBackward | m.RunAudit, x: Blob, used: str, more: Sequence[Blob]) -> Blob:
    """What a backward adds: whose output it was computed from, and with which parameters; and which noise, if it was."""
    return (task.step, task.index, x[4], used, more[0][4] if task.grad else "", *made_of(x, *more))


class Audit:
    """The sum of the hops of another replica."""

    def __init__(self) -> None:
        self._added: list[Blob] = []

    def run(self, task: m.RunAudit, inputs: Sequence[Blob], used: str, last: int, rounding: float) -> m.Result:
        """`used`: the parameters; `rounding`: by which this machine's results differ from others'."""
        x, *more = inputs
        if task.first:
            self._added = []
        self._added.append(entry_of(task, x, used, more))
        output: Blob = ("x", task.step, task.index, task.stage + 1, used, *made_of(x))
        back: Blob = ("g", task.step, task.index, task.stage - 1, used, *made_of(x, *more))
        of_tokens = x if task.stage == 0 else more[0] if task.stage == last else None
        return m.Result(
            loss=1.0 + task.index / 64 if task.stage == last else None,
            digests=(
                short(of_tokens) if of_tokens is not None else "",
                short(x) if task.stage else "",
                short(more[0]) if task.stage < last else "",
            ),
            sketches=(
                sketch_of_all((output,), rounding) if task.stage < last else m.Sketch(),
                sketch_of_all((back,), rounding) if task.stage else m.Sketch(),
            ),
        )

    def end(self, task: m.EndAudit, rounding: float) -> m.Result:
        added, self._added = self._added, []
        cuts = zip(task.bounds[:-1], task.bounds[1:], strict=True) if task.digests else ()
        return m.Result(sketches=tuple(sketch_of_all(added, rounding, low, high) for low, high in cuts))
