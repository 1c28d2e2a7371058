"""Local steps: a peer trains the whole model alone for a while, and what is averaged is how far each has come.

Paper: DiLoCo (arXiv 2311.08105). Claim: workers that take H AdamW steps apart and average the way they went, which an outer SGD
with Nesterov momentum takes as its gradient, train as well as workers that average every step and talk H times less.
`_step_alone` is its inner optimizer, `brought` its outer gradient, `apply` its outer step.

What we changed: a worker's way is weighted by the microbatches that it booked, so that uneven peers, a death and a joiner leave
an average in which every sample counts once; and the moments of AdamW begin anew in every round. So a round is a function of
the outer state and of what each replica booked in which order: the ledger repeats it bit for bit, what a fenced peer did
leaves no trace, and a joiner or a resumed run needs the outer state alone, which is all that `state` holds. Steps with young
moments are the size of signs, so over the first `train.round_warmup` steps of a round the learning rate rises anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from shoal.config import Config, Train, local_batch, microbatches
from shoal.executor.base import Executor, NotFinite, copy_state_, digest_of
from shoal.numerics.optimizer import Pace, Schedule, learning_rate, nesterov_, norm_sq

MODEL, MOMENTS, OUTER = "model/", "exp_avg", "momentum/"


class Rounds:
    """A Schedule of local steps: the rate goes on over all rounds, and rises anew where the moments are empty."""

    def __init__(self, train: Train, steps: int) -> None:
        self._train, self._steps = train, steps
        self.age = 0  # local steps of this round so far, which may be more than there are `step` numbers in it

    def __call__(self, step: int) -> Pace:
        return Pace(learning_rate(self._train, self._steps, step, self.age), self.age)


class LocalSteps:
    """See base.Executor. `make` builds the executor of the local model, which computes and steps, as the schedule says."""

    def __init__(self, make: Callable[[Config, Schedule], Executor], config: Config) -> None:
        run, train = config.run, config.train
        alone = msgspec.structs.replace(train, batch=local_batch(config), local_batch=0, local_steps=1)
        run = msgspec.structs.replace(run, steps=run.steps * train.local_steps)
        self._rounds = Rounds(alone, run.steps)
        self._inner = make(msgspec.structs.replace(config, run=run, train=alone), self._rounds)
        self._train = train
        self._of_round, self._of_step = microbatches(train), microbatches(alone)
        self.length = self._inner.length
        inner = self._inner.state()
        self._shapes = {name.removeprefix(MODEL): inner[name].shape for name in inner if name.startswith(MODEL)}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._start = _flat(self._inner)  # parameters that the round began with
        self._momentum = torch.zeros(self.length)
        self._version = 0
        self._booked = self._waiting = 0  # microbatches of this round; those not stepped yet

    @property
    def sum(self) -> Tensor:
        """Gradients that wait for the next local step."""
        return self._inner.sum

    def forward(self, x: Tensor) -> Tensor:
        return self._inner.forward(x)

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        answer = self._inner.backward(x, grad, tokens)
        self._booked, self._waiting = self._booked + 1, self._waiting + 1
        if self._waiting == self._of_step:
            self._step_alone()
        return answer

    def zero(self, step: int = 0) -> None:
        """Back to where the round began."""
        if self._booked:
            self._begin(step)
        self._version = step

    def brought(self, start: int = 0, stop: int | None = None) -> Tensor:
        """From here to where the round began, weighted by the share of the round that was booked here."""
        if self._waiting:
            self._step_alone()  # a last step of fewer microbatches
        here = _flat(self._inner, start, self.length if stop is None else stop)
        return torch.sub(self._start[start:stop], here, out=here).mul_(self._booked / self._of_round)

    def apply(self, reduced: Tensor, norm: float, step: int) -> None:
        """The outer step. `norm` clips nothing: each local step was clipped by its own."""
        if tuple(reduced.shape) != (self.length,) or reduced.dtype != torch.float32:
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)} {reduced.dtype}, not ({self.length},) fp32")
        if not math.isfinite(norm):
            raise NotFinite(f"norm = {norm}")
        nesterov_(self._start, self._momentum, reduced.to("cpu"), self._train.outer_rate, self._train.outer_momentum)
        self._begin(step + 1)

    def state(self) -> dict[str, Tensor]:
        """Parameters as the round began with them (`model/NAME`) and the outer momentum (`momentum/NAME`)."""
        return {
            prefix + name: part.view(shape)
            for prefix, flat in ((MODEL, self._start), (OUTER, self._momentum))
            for (name, shape), part in zip(self._shapes.items(), torch.split(flat, self._sizes), strict=True)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)
        self._begin(self._version)

    def digest(self) -> str:
        return digest_of([self._start])

    def refresh(self) -> None:
        self._begin(self._version)

    def _step_alone(self) -> None:
        """AdamW on the mean gradient of what waits, as the next step of the round; the schedule goes on over all rounds."""
        gradient = self._inner.brought()
        if self._waiting < self._of_step:
            gradient *= self._of_step / self._waiting
        whole_norm = math.sqrt(norm_sq(gradient))
        if not math.isfinite(whole_norm):
            raise NotFinite("the sum of a local step's gradients is not finite")
        expected = self._train.local_steps
        step = self._version * expected + min(self._rounds.age, expected - 1)
        self._inner.apply(gradient, whole_norm, step)
        self._inner.zero()
        self._waiting, self._rounds.age = 0, self._rounds.age + 1

    def _begin(self, version: int) -> None:
        """The local model as the round begins: the outer parameters, no moments, nothing booked."""
        state = self._inner.state()
        for name, value in state.items():
            if name.startswith(MOMENTS):
                value.zero_()
        self._inner.load_state(state | {name: value for name, value in self.state().items() if name in state})
        self._inner.zero()
        self._version, self._booked, self._waiting, self._rounds.age = version, 0, 0, 0


def _flat(executor: Executor, start: int = 0, stop: int | None = None) -> Tensor:
    """Values `start` up to `stop` of its parameters, (length,) fp32 in the CPU's memory: a copy."""
    found, at = [torch.empty(0)], 0
    for name, value in executor.state().items():
        if name.startswith(MODEL):
            low, high = max(start - at, 0), value.numel() if stop is None else min(stop - at, value.numel())
            if low < high:
                found.append(value.reshape(-1)[low:high].cpu())
            at += value.numel()
    return torch.cat(found)
