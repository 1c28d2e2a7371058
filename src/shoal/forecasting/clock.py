"""Where the seconds of a run went that is played message by message: for exact.py.

Told by what the view and the rounds say, not by a model. The parts are those of the aggregated forecast (forecaster.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shoal.core import messages as m
from shoal.core.consensus.certificates import can_agree
from shoal.forecasting.forecaster import Parts
from shoal.forecasting.job import Job

PARTS = Parts.__struct_fields__


class Clock:
    """Where the seconds went: `spend` gives those since the last call to a part, by what the run was doing."""

    def __init__(self, job: Job) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.busy = [0.0] * job.stages
        self.round_open = self.failed = False  # of the step: a round, and whether one was begun and did not end
        self._job, self._now = job, 0.0
        # Of the step, that microbatches took so far: compute and network are told apart at its end
        self._working_s = 0.0
        self._done: dict[int, dict[str, float]] = {}  # parts when a version was made

    def spend(self, now: float, view: m.View | None, living: set[m.Peer]) -> None:
        """`living`: the members' names that live."""
        seconds, self._now = now - self._now, now
        if view is None or not view.started:
            self.parts["joining"] += seconds
            return
        dead = [one for one in view.members if one.peer not in living]
        served = {one.stage for one in view.members if one.peer in living}
        if len(served) < self._job.stages or not can_agree(view, living):
            self.parts["stalled"] += seconds
        elif self.failed or (self.round_open and not self._job.seats.staleness):
            whole = "averaging" if self.round_open else "redone"
            self.parts["waiting" if dead else whole] += seconds
        else:
            waits = self._waiting(view, dead)
            self.parts["waiting"] += waits * seconds
            self._working_s += (1 - waits) * seconds

    def _waiting(self, view: m.View, dead: Sequence[m.Member]) -> float:
        """The part of all requests that waits for a dead peer. With one stage, owners serve themselves."""
        if self._job.stages == 1:
            return 0.0
        count = Counter(one.stage for one in view.members)
        return 1 - math.prod(1 - 1 / count[lost.stage] for lost in dead)

    def commit(self, view: m.View, redone: int) -> None:
        """A step has ended, in which so many bookings were computed again."""
        job, parts = self._job, self.parts
        hops = job.microbatches * job.stages
        again_s = self._working_s * min(1.0, redone / (hops + redone))
        members = [sum(one.stage == stage for one in view.members) for stage in range(job.stages)]
        compute_s = max(busy / max(1, count) for busy, count in zip(self.busy, members, strict=True))
        compute_s = min(compute_s, self._working_s - again_s)
        parts["redone"] += again_s
        parts["compute"] += compute_s
        parts["network"] += self._working_s - again_s - compute_s
        self._begin()
        self._done[view.step] = dict(parts)

    def back(self, step: int) -> None:
        """Everybody went back to that version: what was done since was for nothing."""
        self.parts["redone"] += self._working_s
        self._begin()
        before = self._done.get(step, dict.fromkeys(PARTS, 0.0))
        for part in ("compute", "network", "averaging"):
            self.parts["redone"] += self.parts[part] - before[part]
            self.parts[part] = before[part]

    def end(self) -> Parts:
        """Of the whole time; a step that has not ended is all network but for what was computed."""
        compute_s, parts = min(self._working_s, max(self.busy) / max(1, len(self.busy))), dict(self.parts)
        parts["compute"] += compute_s
        parts["network"] += self._working_s - compute_s
        return Parts(**parts)

    def _begin(self) -> None:
        self.busy[:] = [0.0] * len(self.busy)
        self._working_s, self.round_open, self.failed = 0.0, False, False
