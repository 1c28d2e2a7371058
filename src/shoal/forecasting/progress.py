"""How far a forecast run is: its phase, its step, and the exchanges of an open round, by stage. For forecaster.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from shoal.core.messages import Stage
from shoal.forecasting.models.step_time import StepTime

NEVER = math.inf
ROUNDING = 1e-9  # of a step, a microbatch, a second


class Exchanges:
    """`left_s` is by stage. A stage whose replica has died begins its own again, which takes what that stage's takes and no other's."""

    def __init__(self, stages: int, applied_s: float) -> None:
        """`applied_s`: of each exchange, after its replicas have said that they have all sums."""
        self.left_s = [0.0] * stages
        self._applied_s = applied_s

    def begin(self, stages: Iterable[Stage], time: StepTime, exchange_s: Sequence[float] | None) -> None:
        """`time`: of a step with those who take part. `exchange_s`: of each stage's exchange, if that is another than the step's."""
        each_s = exchange_s or time.exchange_s
        for stage in stages:
            self.left_s[stage] = each_s[stage] if each_s else time.averaging_s

    def advance(self, stage: Stage, seconds: float) -> None:
        self.left_s[stage] = max(self.left_s[stage] - seconds, 0.0)

    def reported(self) -> list[Stage]:
        """Stages whose replicas have all sums. Before, whoever dies takes sums with it that another one lacks."""
        return [stage for stage, left_s in enumerate(self.left_s) if left_s <= self._applied_s]


class Phase(Enum):
    GATHERING = "joining"
    COMPUTING = "computing"
    OPENING = "opening"
    AVERAGING = "averaging"
    AGREEING = "agreeing"
    LOST = "lost"


class Progress(msgspec.Struct):
    """Of the run: `passed` is the part of the step's microbatches that were computed for the first time."""

    exchanges: Exchanges  # of the round that is open
    begun: bool = False  # a step is done: peers and lines are measured
    phase: Phase = Phase.GATHERING
    step: int = 0
    passed: float = 0.0
    redo: list[float] = []  # of microbatches to be computed again, by stage, in whole hops
    redo_from_s: float = 0.0  # the moment at which they begin
    redo_s: float = 0.0  # the moment until which the first of them is on its way at least
    left_s: float = NEVER  # of a phase that is neither COMPUTING nor AVERAGING
    closing_s: float = 0.0  # of the open round's commit
    saved: int = 0
    began_s: float = 0.0  # the step
    step_s: float = NEVER  # the last one took
