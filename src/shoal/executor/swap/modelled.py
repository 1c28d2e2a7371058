"""The streams of a modelled GPU and its host link, as three clocks.

For tests and benchmarks of the swapping executor without a GPU: the CPU computes and copies everything in order, while each
stream's clock advances by the time that a device would need and waits where the executor waits. So the time of a pass is that
of the executor's schedule; `pass_s` is ATOM's formula, to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import msgspec


class Seconds(msgspec.Struct, frozen=True):
    """Seconds that one group takes."""

    load: float  # of its parameters
    store: float  # of its sums
    forward: float  # of one slice
    back: float  # of one slice, recomputation included


class ModelledStreams:
    """See streams.Streams."""

    def __init__(self, groups: Sequence[Seconds]) -> None:
        self.groups = tuple(groups)
        self._clocks = {"compute": 0.0, "loads": 0.0, "stores": 0.0}
        self.busy_s = 0.0  # of compute

    def on(self, stream: str, group: int = 0, what: str = "", share: float = 1.0) -> AbstractContextManager[object]:
        seconds = self.groups[group]
        self._clocks[stream] += share * (seconds.load if what == "parameters" else seconds.store)
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

    def reached(self, mark: object) -> None: ...

    def settle(self) -> None:
        latest = self.now_s
        self._clocks = dict.fromkeys(self._clocks, latest)

    @property
    def now_s(self) -> float:
        return max(self._clocks.values())


def pass_s(groups: Sequence[Seconds], slices: int) -> float:
    """Seconds of a forward and backward pass of `slices` slices with the greatest overlap. The last two groups stay on the
    device in between, so the backward pass starts with the load of the third from the end."""
    last = len(groups) - 1
    if last == 0:
        return groups[0].load + slices * groups[0].back + groups[0].store
    total_s = groups[0].load
    for group, following in pairwise(groups):
        total_s += max(slices * group.forward, following.load)
    total_s += slices * groups[last].back
    for at in range(last - 1, -1, -1):
        load = groups[at - 1].load if at else 0.0
        total_s += max(slices * groups[at].back, load, groups[at + 1].store)
    return total_s + groups[0].store
