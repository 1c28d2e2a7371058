"""A device that only takes time: the streams of a modelled GPU and its link, kept as three clocks.

For tests and benchmarks of the swapping executor where there is no GPU: everything is computed and copied for real, on the CPU and
in order, while each stream's clock goes on by what a device would need and waits where the executor lets it wait. So the time of a
pass is that of the executor's own schedule, not of a formula; `pass_s` is the formula (papers: ATOM), to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import msgspec


class Seconds(msgspec.Struct, frozen=True):
    """What one group takes."""

    load: float  # of its parameters
    store: float  # of its sums
    forward: float  # of one slice
    back: float  # of one slice, forward again included


class ModelledStreams:
    """See link.Streams."""

    def __init__(self, groups: Sequence[Seconds]) -> None:
        self.groups = tuple(groups)
        self._clocks = {"compute": 0.0, "loads": 0.0, "stores": 0.0}
        self.busy_s = 0.0  # of compute

    def on(self, stream: str, group: int, what: str) -> AbstractContextManager[object]:
        seconds = self.groups[group]
        self._clocks[stream] += seconds.load if what == "parameters" else seconds.store
        return nullcontext()

    def computed(self, group: int, back: bool) -> None:
        seconds = self.groups[group].back if back else self.groups[group].forward
        self._clocks["compute"] += seconds
        self.busy_s += seconds

    def mark(self, stream: str) -> object:
        return self._clocks[stream]

    def wait(self, stream: str, mark: object) -> None:
        if isinstance(mark, float):
            self._clocks[stream] = max(self._clocks[stream], mark)

    def settle(self) -> None:
        latest = self.now_s
        self._clocks = dict.fromkeys(self._clocks, latest)

    @property
    def now_s(self) -> float:
        return max(self._clocks.values())


def pass_s(groups: Sequence[Seconds], slices: int) -> float:
    """A pass of so many slices through the groups and back, every copy hidden that can be. The last two groups stay on the
    device between forward and back, so that going back begins with the load of the third from the end."""
    last = len(groups) - 1
    if last == 0:
        return groups[0].load + slices * groups[0].back + groups[0].store
    found = groups[0].load
    for this, following in pairwise(groups):
        found += max(slices * this.forward, following.load)
    found += slices * groups[last].back
    for place in range(last - 1, -1, -1):
        load = groups[place - 1].load if place else 0.0
        found += max(slices * groups[place].back, load, groups[place + 1].store)
    return found + groups[0].store
