"""Delayed updates: a step is computed with parameters that lack the gradient of the step before, which is being averaged meanwhile.

Idea: overlap of one step's averaging and optimizer with the next one's compute, at a staleness of exactly one (ZeRO-Offload,
arXiv 2101.06840, calls it delayed parameter update). Step s is computed with the parameters of version s - 1, those that hold the
gradients of the steps 0 to s - 2; only the first step after a beginning has no older version than the one it begins with. So two
versions of the parameters and the sums of two steps are here at once: a step that has begun goes on with its own while the next
version is made, and a step that a death has opened again is computed with what it was computed with before.

Around an executor whose parameters can be written and whose sum can be restored. It computes with the values that its parameters
hold: the two versions change places there, which costs three copies of the parameters twice a step. With `swapping` both versions
and both sums lie in the host's memory, and the device holds what it holds without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from shoal.executor.base import Executor, copy_state_, digest_of

MODEL, PREVIOUS = "model/", "previous/"


class Restorable(Executor, Protocol):
    """What a delayed executor stands on."""

    def restore(self, brought: Tensor) -> None:
        """The sum is again what `brought` gave, (length,) fp32."""
        ...


class Delayed:
    """See base.Executor; of several steps at once, of which `at` says which one is meant. `inner` computes, adds and steps."""

    def __init__(self, inner: Restorable) -> None:
        self._inner = inner
        self.length = inner.length
        self._other = {name: value.clone() for name, value in _parameters(inner).items()}  # the version that waits
        self._older_inside = False  # `inner` holds the version before the newest, `_other` the newest
        self._version = 0
        self._meant = 0  # the step that hops and `brought` are of
        self._inside = 0  # the step whose sum `inner` adds to
        self._aside: dict[int, Tensor] = {}  # sums of other steps, (length,) fp32

    @property
    def sum(self) -> Tensor:
        """Gradients so far of the step that is meant."""
        return (
            self._inner.sum if self._meant == self._inside else self._aside.get(self._meant, torch.zeros(self.length))
        )

    def at(self, step: int) -> None:
        """Hops and `brought` are of that step from now on: the newest version's or the one after it."""
        if not self._version <= step <= self._version + 1:
            raise ValueError(f"step {step} is not computed with versions {self._version - 1} and {self._version}")
        self._meant = step

    def forward(self, x: Tensor) -> Tensor:
        self._turn()
        return self._inner.forward(x)

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        self._turn()
        return self._inner.backward(x, grad, tokens)

    def zero(self, step: int = 0) -> None:
        """Empty all sums; the newest version is `step`."""
        self._inner.zero(step)
        self._aside.clear()
        self._version = self._meant = self._inside = step

    def brought(self, start: int = 0, stop: int | None = None) -> Tensor:
        if self._meant == self._inside:
            return self._inner.brought(start, stop)
        return self.sum[start:stop].to("cpu", copy=True)

    def apply(self, reduced: Tensor, norm: float, step: int, age: int | None = None) -> None:
        """Make version `step` + 1 of the newest, `step`, which stays for the hops of step + 1. The sum of `step` is emptied."""
        assert step == self._version, f"step {step} is applied to version {self._version}"
        self._hold(older=False)
        for name, value in _parameters(self._inner).items():
            self._other[name].copy_(value)
        self._inner.apply(reduced, norm, step, age)
        self._version, self._meant = step + 1, max(self._meant, step + 1)
        self._aside.pop(step, None)
        if self._inside == step:
            self._inner.zero(step + 1)
            self._inside = step + 1

    def state(self) -> dict[str, Tensor]:
        """Of the newest version."""
        return {**self._inner.state(), **self._newest()}

    def previous(self) -> dict[str, Tensor]:
        """The parameters of the version before (`previous/NAME`): what a replica that comes later needs besides `state`."""
        older = _parameters(self._inner) if self._older_inside else self._other
        return {PREVIOUS + name.removeprefix(MODEL): value for name, value in older.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Also with `previous`; without it there is no older version than this one."""
        older = {name: value for name, value in state.items() if name.startswith(PREVIOUS)}
        newest = {name: value for name, value in state.items() if name not in older}
        self._inner.load_state(newest)
        self._older_inside = False
        copy_state_(self._other, {name: value for name, value in newest.items() if name.startswith(MODEL)})
        if older:
            copy_state_(self.previous(), older)

    def digest(self) -> str:
        return digest_of(self._newest().values())

    def refresh(self) -> None:
        self._inner.refresh()

    def _newest(self) -> dict[str, Tensor]:
        return self._other if self._older_inside else _parameters(self._inner)

    def _turn(self) -> None:
        """Compute the step that is meant: with its version, into its sum."""
        self._hold(older=self._meant == self._version)
        if self._meant != self._inside:
            self._aside[self._inside] = self._inner.sum.clone()
            self._inner.zero()
            if self._meant in self._aside:
                self._inner.restore(self._aside.pop(self._meant))
            self._inside = self._meant

    def _hold(self, older: bool) -> None:
        """The one version or the other inside."""
        if older == self._older_inside:
            return
        for name, value in _parameters(self._inner).items():
            kept = value.clone()
            value.copy_(self._other[name])
            self._other[name].copy_(kept)
        self._inner.refresh()
        self._older_inside = older


def _parameters(executor: Executor) -> dict[str, Tensor]:
    """The live ones, by their names in `state`."""
    return {name: value for name, value in executor.state().items() if name.startswith(MODEL)}
