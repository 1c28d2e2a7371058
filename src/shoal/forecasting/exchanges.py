"""The exchanges of an open round, by stage: how long each still takes, and which stages have done their part. For forecaster.py."""

from __future__ import annotations

from shoal.core.messages import Stage
from shoal.forecasting.rates import StepTime


class Exchanges:
    """`left_s` is by stage. A stage whose replica has died begins its own again, which takes what that stage's takes and no other's."""

    def __init__(self, stages: int, applied_s: float) -> None:
        """`applied_s`: of each exchange, after its replicas have said that they have all sums."""
        self.left_s = [0.0] * stages
        self._applied_s = applied_s

    def open(self, time: StepTime) -> None:
        for stage in range(len(self.left_s)):
            self.begin(stage, time)

    def begin(self, stage: Stage, time: StepTime) -> None:
        """`time`: of a step with those who take part."""
        self.left_s[stage] = time.exchange_s[stage] if time.exchange_s else time.averaging_s

    def advance(self, stage: Stage, seconds: float) -> None:
        self.left_s[stage] = max(self.left_s[stage] - seconds, 0.0)

    def reported(self) -> list[Stage]:
        """Stages whose replicas have all sums. Before, whoever dies takes sums with it that another one lacks."""
        return [stage for stage, left_s in enumerate(self.left_s) if left_s <= self._applied_s]
