"""Plays a step in the middle of which newcomers begin to serve. For the forecaster.

They own no microbatch of it, and get the hops whose requests have not been made: few or none, where all are on their way soon."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np

from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.detours import PlayWithDetours
from shoal.planner.prediction.seats import Seats


class PlayWithEntry(PlayWithDetours):
    """`through` plays the step that the newcomers enter; `run` before it those that warm up, without them."""

    def __init__(
        self, seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float, newcomers: Collection[int]
    ) -> None:
        """`seats`: of all, newcomers among them."""
        super().__init__(seats, cluster, rng, spread)
        self._entered = self._view_of(self._members)
        self._members = [device for device in self._members if device not in newcomers]
        if self._leader in newcomers:
            self._leader = self._members[0]

    def through(self, microbatches: int, start: float, at_s: float) -> float:
        """When the leader knows that all is booked. `at_s`: when it decides on the view with them, after the step has begun."""
        self._at(start + at_s, self._enter)
        return self.run(microbatches, start)

    def _enter(self, now: float) -> None:
        assert self._leader is not None
        for owner in self._members:
            self._at(self.lines.control(self._leader, owner, now), partial(self._on_view, owner))

    def _on_view(self, owner: int, now: float) -> None:
        self._owners[owner].routes.on_view(self._entered, now, begins=False)
