"""Which forwards a replica keeps the activations of. For the executor that keeps them and the simulator that prices them.

What is kept is bounded in number and bytes. A full store keeps what it has and not what is new, since backwards come in the order
of the forwards, about: to evict the oldest for the newest would evict each just before its use. One that is never used, because its
backward went to another replica, is evicted after STALE newer ones were offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
STALE = 64  # forwards: more than are between a forward and its backward, and far fewer than a long step has


class Kept(Generic[Value]):
    """At most `most` values of `limit_bytes` together, oldest first."""

    def __init__(self, most: int, limit_bytes: float) -> None:
        self.nbytes = 0.0
        self.used = 0  # values taken so far
        self._most, self._limit_bytes = most, limit_bytes
        self._offered = 0
        self._values: dict[int, tuple[Value, float]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def has_room(self, nbytes: float) -> bool:
        """Whether one more of that size would be kept; stale ones go now."""
        self._offered += 1
        while self._values and next(iter(self._values)) <= self._offered - max(STALE, 4 * self._most):
            self._remove(next(iter(self._values)))
        return len(self._values) < self._most and self.nbytes + nbytes <= self._limit_bytes

    def add(self, value: Value, nbytes: float) -> None:
        """Call `has_room` before."""
        self._values[self._offered] = value, nbytes
        self.nbytes += nbytes

    def take(self, is_wanted: Callable[[Value], bool]) -> Value | None:
        """The oldest that is wanted, kept no longer."""
        number = next((number for number, (value, _) in self._values.items() if is_wanted(value)), None)
        if number is None:
            return None
        self.used += 1
        return self._remove(number)

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0.0

    def _remove(self, number: int) -> Value:
        value, nbytes = self._values.pop(number)
        self.nbytes -= nbytes
        return value
