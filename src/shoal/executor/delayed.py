"""Delayed updates: a step is computed with parameters that lack the gradient of the step before, which is being averaged meanwhile.

Idea: overlap of one step's averaging and optimizer with the next one's compute, at a staleness of exactly one (ZeRO-Offload,
arXiv 2101.06840, calls it delayed parameter update). Step s is computed with the parameters of version s - 1, those that hold the
gradients of the steps 0 to s - 2; only the first step after a beginning has no older version than the one it begins with. So two
versions of the parameters and the sums of two steps are here at once: a step that has begun goes on with its own while the next
version is made, and a step that a death has opened again is computed with what it was computed with before.

Around an executor that computes with copies of its parameters (`Restorable`). The parameters themselves are the newest version; the copies
hold that one or the one before, which is put aside while they hold the newest. So making a version touches nothing that is computed
with: `begin` makes sure that the copies hold what the next step needs, and `finish` may run on another thread, beside its hops.
With `swapping` all of it lies in the host's memory, and the device holds what it holds without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.executor.base import Executor, copy_state_

MODEL, PREVIOUS = "model/", "previous/"


class Restorable(Executor, Protocol):
    """What a delayed executor stands on. With train.staleness its parameters, as `state` gives them, are not what it computes with."""

    @property
    def computing(self) -> Sequence[Tensor]:
        """The copies that compute, in the order of the parameters."""
        ...

    def restore(self, brought: Tensor) -> None:
        """The sum is again what `brought` gave, (length,) fp32."""
        ...

    def make(self, reduced: Tensor, norm: float, step: int) -> None:
        """`apply` to the parameters alone: what computes holds what it held, until `refresh`. It may go on beside hops."""
        ...

    def compute_with(self, values: Sequence[Tensor]) -> None:
        """Copy these, in the order of `computing`, into what computes."""
        ...


class Delayed:
    """See base.Executor; of several steps at once, of which `at` says which one is meant. `inner` computes, adds and steps.

    From `begin` until `finish` is over only hops of the step after that one may be asked for."""

    def __init__(self, inner: Restorable) -> None:
        self._inner = inner
        self.length = inner.length
        self._names = [name.removeprefix(MODEL) for name in inner.state() if name.startswith(MODEL)]
        self._aside = [
            value.detach().clone() for value in inner.computing
        ]  # the older version, while the newest computes
        self._older = True  # the version before the newest computes; at first they are the same
        self._making = False
        self._version = 0
        self._meant = 0  # the step that hops and `brought` are of
        self._inside = 0  # the step whose sum `inner` adds to
        self._sums: dict[int, Tensor] = {}  # of other steps, (length,) fp32

    @property
    def sum(self) -> Tensor:
        """Gradients so far of the step that is meant."""
        return self._inner.sum if self._meant == self._inside else self._sums.get(self._meant, torch.zeros(self.length))

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

    def inside(self) -> Restorable:
        """The executor inside, as it computes the step that is meant: for hops that only it can do."""
        self._turn()
        return self._inner

    def zero(self, step: int = 0) -> None:
        """Empty all sums; the newest version is `step`."""
        assert not self._making
        self._inner.zero(step)
        self._sums.clear()
        self._version = self._meant = self._inside = step

    def brought(self, start: int = 0, stop: int | None = None) -> Tensor:
        if self._meant == self._inside:
            return self._inner.brought(start, stop)
        return self.sum[start:stop].to("cpu", copy=True)

    def apply(self, reduced: Tensor, norm: float, step: int) -> None:
        self.begin(step)
        self.finish(reduced, norm, step)

    def begin(self, step: int) -> None:
        """Version `step` + 1 will be made of the newest, `step`, which stays for the hops of step + 1. The sum of `step` is emptied."""
        assert step == self._version and not self._making, f"step {step} is applied to version {self._version}"
        if self._older:
            self._inner.refresh()  # nobody computes step `step` again: what it was computed with may go
        self._older = self._making = True
        self._version, self._meant = step + 1, max(self._meant, step + 1)
        self._sums.pop(step, None)
        if self._inside == step:
            self._inner.zero(step + 1)
            if step + 1 in self._sums:  # `step` had been opened again, and no hop of the next one came since
                self._inner.restore(self._sums.pop(step + 1))
            self._inside = step + 1

    def finish(self, reduced: Tensor, norm: float, step: int) -> None:
        """Make it, on whichever thread. When it fails, the state is void."""
        assert self._making and step + 1 == self._version
        try:
            self._inner.make(reduced, norm, step)
        finally:
            self._making = False

    def state(self) -> dict[str, Tensor]:
        """Of the newest version."""
        assert not self._making
        return self._inner.state()

    def previous(self) -> dict[str, Tensor]:
        """What computed the version before (`previous/NAME`): what a replica that comes later needs besides `state`."""
        return self._named(self._inner.computing if self._older else self._aside)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Also with `previous`; without it there is no older version than this one."""
        assert not self._making
        older = {name: value for name, value in state.items() if name.startswith(PREVIOUS)}
        self._inner.load_state({name: value for name, value in state.items() if name not in older})
        self._older = True
        if older:
            copy_state_(self._named(self._aside), older)
            self._inner.compute_with(self._aside)

    def digest(self) -> str:
        assert not self._making
        return self._inner.digest()

    def refresh(self) -> None:
        """The parameters were written to. There is no older version than this one."""
        assert not self._making
        self._inner.refresh()
        self._older = True

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {PREVIOUS + name: value.detach() for name, value in zip(self._names, values, strict=True)}

    def _turn(self) -> None:
        """Compute the step that is meant: with its version, into its sum."""
        self._hold(older=self._meant == self._version)
        if self._meant != self._inside:
            self._sums[self._inside] = self._inner.sum.clone()
            self._inner.zero()
            if self._meant in self._sums:
                self._inner.restore(self._sums.pop(self._meant))
            self._inside = self._meant

    def _hold(self, older: bool) -> None:
        """Have the one version or the other compute."""
        if older == self._older:
            return
        if older:
            self._inner.compute_with(self._aside)
        else:
            assert not self._making, f"version {self._version} is being made"
            for kept, value in zip(self._aside, self._inner.computing, strict=True):
                kept.copy_(value.detach())
            self._inner.refresh()
        self._older = older
