"""Overlap (delayed updates): a step is computed while the step before is averaged, with parameters that lack its gradient.

Idea: overlap one step's averaging and optimizer with the next step's compute, at a staleness of exactly one (ZeRO-Offload,
arXiv 2101.06840: delayed parameter update). Step s is computed with version s - 1 of the parameters, which includes the
gradients of steps 0 to s - 2; the first step after a start uses the version it starts with. So two versions of the parameters
and the sums of two steps exist at once. A step that a peer's death opens again is computed with the same version as before.

`Delayed` wraps an executor that computes with copies of its parameters (`Restorable`). The parameters are the newest version; the
copies hold that version or the one before, which is saved while they hold the newest. The optimizer therefore never writes to
tensors in use: `begin` loads the copies for the next step, and `finish` may run on another thread beside the hops.
On a card `finish` has a stream of its own, which waits for what `begin` issued.
With `swapping` all versions lie in host memory, and the device needs no more than without overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.messages import Rewards
from shoal.executor.base import Executor, copy_state_, draw, frozen, infer, rewards
from shoal.executor.streams import streams_of
from shoal.numerics import pieces

MODEL, PREVIOUS = "model/", "previous/"


class Restorable(Executor, Protocol):
    """An executor that `Delayed` can wrap: with train.staleness it computes with copies of the parameters in `state`."""

    @property
    def computing(self) -> Sequence[Tensor]:
        """The tensors that hops compute with, in the order of the parameters."""
        ...

    def restore(self, contribution: Tensor) -> None:
        """Set the sum to an earlier `contribution`, (length,) fp32."""
        ...

    def make(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """`apply` without `refresh`: `computing` stays unchanged. May run beside hops."""
        ...

    def compute_with(self, values: Sequence[Tensor]) -> None:
        """Copy `values`, in the order of `computing`, into `computing`."""
        ...


class Delayed:
    """See base.Executor, for two steps at once; `at` selects the step. `inner` computes, adds and applies.

    Between `begin(step)` and the end of `finish` only hops of `step` + 1 are allowed."""

    def __init__(self, inner: Restorable) -> None:
        self._inner = inner
        self._streams = streams_of(str(inner.sum.device), "optimizer")
        self._begun: object = None  # mark: the copies to compute with are loaded, and the parameters may change
        self.length = inner.length
        self._names = [name.removeprefix(MODEL) for name in inner.state() if name.startswith(MODEL)]
        # The older version, while the newest computes
        self._saved = [value.detach().clone() for value in inner.computing]
        self._older = True  # the version before the newest computes; at first they are the same
        self._updating = False
        self._version = 0
        self._selected = 0  # the step that hops and `brought` are of
        self._sum_step = 0  # the step whose sum `inner` adds to
        self._sums: dict[int, Tensor] = {}  # of other steps, (length,) fp32

    @property
    def base(self) -> str:
        return self._inner.base

    @property
    def sum(self) -> Tensor:
        """Gradients so far of the selected step."""
        return (
            self._inner.sum
            if self._selected == self._sum_step
            else self._sums.get(self._selected, torch.zeros(self.length))
        )

    def at(self, step: int) -> None:
        """Select the step of later hops and contributions: the newest version's or the next. ValueError: any other."""
        if not self._version <= step <= self._version + 1:
            raise ValueError(f"step {step} is not computed with versions {self._version - 1} and {self._version}")
        self._selected = step

    def forward(self, x: Tensor) -> Tensor:
        self._select()
        return self._inner.forward(x)

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        self._select()
        return self._inner.backward(x, grad, tokens)

    def inside(self) -> Restorable:
        """The inner executor, set to the selected step: for hops that only it can run."""
        self._select()
        return self._inner

    def rewards(self) -> Rewards | None:
        return rewards(self._inner)

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return infer(self._inner, x, cache)

    def draw(self, sample: tuple[int, int] | None) -> None:
        draw(self._inner, sample)

    def frozen(self) -> Mapping[str, Tensor]:
        return frozen(self._inner)

    def zero(self, step: int = 0) -> None:
        """Empty all sums; the newest version is `step`."""
        assert not self._updating
        self._inner.zero(step)
        self._sums.clear()
        self._version = self._selected = self._sum_step = step

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        if self._selected == self._sum_step:
            return self._inner.contribution(start, stop)
        return pieces.copied(self.sum[start:stop])

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        self.begin(step)
        self.finish(reduced, norm, step, scale)

    def begin(self, step: int) -> None:
        """Prepare the update from version `step`, the newest, which hops of `step` + 1 keep using. Empties the sum of `step`."""
        assert step == self._version and not self._updating, f"step {step} is applied to version {self._version}"
        if self._older:
            self._inner.refresh()  # step `step` is never computed again, so its version is not needed
        self._older = self._updating = True
        self._version, self._selected = step + 1, max(self._selected, step + 1)
        self._sums.pop(step, None)
        if self._sum_step == step:
            self._inner.zero(step + 1)
            if step + 1 in self._sums:  # `step` was opened again, and no hop of the next step has run since
                self._inner.restore(self._sums.pop(step + 1))
            self._sum_step = step + 1
        self._begun = self._streams.mark("compute")

    def finish(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """Apply the update that `begin` prepared, on any thread. After an exception the state is void."""
        assert self._updating and step + 1 == self._version
        self._streams.wait("optimizer", self._begun)
        try:
            with self._streams.on("optimizer"):
                self._inner.make(reduced, norm, step, scale)
        finally:
            self._streams.reached(self._streams.mark("optimizer"))
            self._updating = False

    def skip(self, step: int) -> None:
        """The newest version is the one before it, unchanged."""
        self.begin(step)
        self._updating = False

    def state(self) -> dict[str, Tensor]:
        """Of the newest version."""
        assert not self._updating
        return self._inner.state()

    def previous(self) -> dict[str, Tensor]:
        """The older version as `previous/NAME`, which a joiner needs besides `state`."""
        return self._named(self._inner.computing if self._older else self._saved)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """`state` with or without `previous`; without it the older version is this one."""
        assert not self._updating
        older = {name: value for name, value in state.items() if name.startswith(PREVIOUS)}
        self._inner.load_state({name: value for name, value in state.items() if name not in older})
        self._older = True
        if older:
            copy_state_(self._named(self._saved), older)
            self._inner.compute_with(self._saved)

    def digest(self) -> str:
        assert not self._updating
        with self._streams.on("optimizer"):  # a copy to the host that does not wait for hops
            return self._inner.digest()

    def refresh(self) -> None:
        """See base.Executor. The older version is then this one."""
        assert not self._updating
        self._inner.refresh()
        self._older = True

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {PREVIOUS + name: value.detach() for name, value in zip(self._names, values, strict=True)}

    def _select(self) -> None:
        """Set the inner executor to the selected step: its version and its sum."""
        self._hold(older=self._selected == self._version)
        if self._selected != self._sum_step:
            self._sums[self._sum_step] = self._inner.sum.clone()
            self._inner.zero()
            if self._selected in self._sums:
                self._inner.restore(self._sums.pop(self._selected))
            self._sum_step = self._selected

    def _hold(self, older: bool) -> None:
        """Load the older or the newest version into `computing`."""
        if older == self._older:
            return
        if older:
            self._inner.compute_with(self._saved)
        else:
            assert not self._updating, f"version {self._version} is being computed"
            for saved, value in zip(self._saved, self._inner.computing, strict=True):
                saved.copy_(value.detach())
            self._inner.refresh()
        self._older = older
