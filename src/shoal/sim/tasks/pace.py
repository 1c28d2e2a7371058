"""How many virtual seconds a peer's tasks take, one computing task after the other. For task_runner.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core import messages as m
from shoal.kept import Kept
from shoal.sim.lines import Wire
from shoal.sim.tasks.storage import Blob

# Seconds of the tasks that do not depend on the model's size; about what small stages take.
SECONDS: dict[type, float] = {
    m.Fetch: 0.01, m.Cut: 0.01, m.AddRow: 0.02, m.Add: 0.02, m.Gather: 0.03, m.Apply: 0.05, m.Reset: 0.01, m.Init: 0.5, m.Export: 0.1,
    m.ReadChunk: 0.05, m.CheckChunk: 0.05, m.Import: 0.3, m.Blend: 0.5, m.RunSave: 0.4, m.RunPublish: 0.2,
    m.OfferShard: 0.1, m.ReadShard: 0.05, m.WriteChunk: 0.05, m.RunCopy: 0.1, m.Infer: 0.05, m.Forget: 0.001,
    m.Describe: 0.01, m.EndAudit: 0.02,
}  # fmt: skip
SLICE_S = 0.3  # of computing, for which a task waits while a state is copied for a joiner (runtime/tasks/seat.py)
LONGEST_S = 15.0  # a stage's only peer that builds its state for minutes holds everybody up, by right


class Pace:
    """How long a peer's tasks take, and when its compute is idle."""

    def __init__(self, wire: Wire | None, stages: int) -> None:
        self.slowness = 1.0  # seconds per second of a usual peer
        self.forward_s = 0.1
        self.backward = 2.5  # forwards that a backward takes which recomputes
        self.kept: Kept[Blob] = Kept(0, math.inf)  # inputs of the forwards whose activations are held
        self.rounds = 1.0  # how much longer than SECONDS the tasks of a round take
        self.states = 1.0  # and those of downloads and checkpoints
        self.share = 1.0  # of the gradient, that a round's piece is
        self._free_s = 0.0  # when the compute is idle
        self._copied_s = 0.0  # when the state is copied, for joiners
        self._wire, self._stages = wire, stages

    def seconds(self, task: m.Task, inputs: Sequence[Blob], length: int) -> float:
        """`length`: of the stage's gradient."""
        kind = type(task)
        if kind is m.RunAudit:
            seconds = self.forward_s * self.slowness * self.backward
        elif kind is m.RunForward or kind is m.RunBackward:
            seconds = self.forward_s * self.slowness * self._forwards(task, inputs[0])
        else:
            seconds = SECONDS[kind] * self.slowness
            if isinstance(task, m.Cut):
                self.share = (task.bounds[-1] - task.bounds[0]) / max(1, length)
            if task.purpose == "round":
                seconds *= self.rounds * (1.0 if kind is m.Apply else self.share)
            elif task.purpose == "state":
                seconds *= self.states
            seconds = min(seconds, LONGEST_S)
        if self._wire is not None:
            seconds += self._wire.codec_s(task, self._stages, inputs) * self.slowness
        return seconds

    def _forwards(self, task: m.Task, x: Blob) -> float:
        """What a hop takes, in forwards: a backward of an input whose activations are kept does not recompute."""
        if isinstance(task, m.RunBackward):
            return self.backward - (1.0 if self.kept.take(lambda other: other == x) is not None else 0.0)
        if self.kept.has_room(0.0):
            self.kept.add(x, 0.0)
        return 1.0

    def wait_s(self, task: m.Task, seconds: float, now: float) -> float:
        """Until a task is done that is given `now` and takes so long: at once, or after the computing tasks before it. A state is copied
        for joiners between them, and whole before it changes."""
        if task.lane in ("read", "write") or isinstance(task, m.RunSave):  # beside the line of computing tasks
            return seconds
        self._free_s = max(self._free_s, now)
        if isinstance(task, m.Export):
            self._copied_s = self._free_s + seconds
            return self._copied_s - now
        if isinstance(task, m.Apply):
            self._free_s = max(self._free_s, self._copied_s)
        elif self._free_s < self._copied_s:
            self._free_s += min(SLICE_S * self.slowness, self._copied_s - self._free_s)
        self._free_s += seconds
        return self._free_s - now
