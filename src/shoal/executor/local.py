"""Local steps: each peer trains the whole model alone for some steps, then the peers average their changes.

Paper: DiLoCo (arXiv 2311.08105). Claim: workers that take H local AdamW steps and then average their parameter changes, as the
gradient of an outer SGD with Nesterov momentum, train as well as workers that average every step, with H times less traffic.
`_local_step` is its inner optimizer, `contribution` its outer gradient, `apply` its outer step.

What we changed: a worker's change is weighted by the microbatches that it booked, so that every sample counts once whatever
the speeds, deaths and joiners; and AdamW's moments are reset in every round. So a round is a function of the outer state and of
what each replica booked in which order: a replay gives the same bits, a fenced peer's work leaves no trace, and a joiner or a
resumed run needs only the outer state, which is what `state` holds. The first steps after a reset have the size of signs, so
the learning rate warms up over the first `train.local_warmup` steps of a round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.config import Config, Train, local_batch, microbatches
from shoal.executor.base import Executor, NotFinite, copy_state_, digest_of, draw, frozen, infer
from shoal.numerics.optimizer import OptimizerStep, Schedule, nesterov_, norm_sq
from shoal.numerics.schedule import learning_rate

log = logging.getLogger(__name__)

MODEL, MOMENTS, OUTER = "model/", "exp_avg", "momentum/"


class LocalSchedule:
    """A Schedule of local steps: the learning rate continues over all rounds and warms up after each reset of the moments."""

    def __init__(self, train: Train, steps: int) -> None:
        self._train, self._steps = train, steps
        self.age = 0  # local steps of this round so far, which may be more than there are `step` numbers in it

    def __call__(self, step: int) -> OptimizerStep:
        return OptimizerStep(learning_rate(self._train, self._steps, step, self.age), self.age)


class LocalSteps:
    """See base.Executor. `make` builds the executor of the local model with a schedule."""

    def __init__(self, make: Callable[[Config, Schedule], Executor], config: Config) -> None:
        run, train = config.run, config.train
        local = msgspec.structs.replace(train, batch=local_batch(config), local_batch=0, local_steps=1)
        run = msgspec.structs.replace(run, steps=run.steps * train.local_steps)
        self._schedule = LocalSchedule(local, run.steps)
        self._inner = make(msgspec.structs.replace(config, run=run, train=local), self._schedule)
        self._train = train
        self._of_round, self._of_step = microbatches(train), microbatches(local)
        self.length = self._inner.length
        inner = self._inner.state()
        self._shapes = {name.removeprefix(MODEL): inner[name].shape for name in inner if name.startswith(MODEL)}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._start = _flat(self._inner)  # parameters at the start of the round
        self._momentum = torch.zeros(self.length)
        self._version = 0
        self._booked = self._waiting = 0  # microbatches of this round; those not applied yet

    @property
    def base(self) -> str:
        return self._inner.base

    @property
    def sum(self) -> Tensor:
        """Gradients since the last local step."""
        return self._inner.sum

    def forward(self, x: Tensor) -> Tensor:
        return self._inner.forward(x)

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        result = self._inner.backward(x, grad, tokens)
        self._booked, self._waiting = self._booked + 1, self._waiting + 1
        if self._waiting == self._of_step:
            self._local_step()
        return result

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return infer(self._inner, x, cache)

    def draw(self, sample: tuple[int, int] | None) -> None:
        draw(self._inner, sample)

    def frozen(self) -> Mapping[str, Tensor]:
        return frozen(self._inner)

    def zero(self, step: int = 0) -> None:
        """Return to the parameters at the start of the round."""
        if self._booked:
            self._begin(step)
        self._version = step

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Start of the round minus the local parameters, weighted by the share of the round booked here."""
        if self._waiting:
            self._local_step()  # a last, smaller step
        here = _flat(self._inner, start, self.length if stop is None else stop)
        return torch.sub(self._start[start:stop], here, out=here).mul_(self._booked / self._of_round)

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """The outer step. `norm` is not used: each local step was clipped by its own norm. `scale` is 1: config refuses others."""
        if tuple(reduced.shape) != (self.length,) or reduced.dtype != torch.float32:
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)} {reduced.dtype}, not ({self.length},) fp32")
        if not math.isfinite(norm):
            raise NotFinite(f"norm = {norm}")
        nesterov_(
            self._start, self._momentum, reduced.to("cpu"), self._train.outer_learning_rate, self._train.outer_momentum
        )
        self._begin(step + 1)

    def state(self) -> dict[str, Tensor]:
        """Parameters at the start of the round (`model/NAME`) and outer momentum (`momentum/NAME`)."""
        return {
            prefix + name: part.view(shape)
            for prefix, flat in ((MODEL, self._start), (OUTER, self._momentum))
            for (name, shape), part in zip(self._shapes.items(), torch.split(flat, self._sizes), strict=True)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)
        self._begin(self._version)

    def digest(self) -> str:
        return digest_of(value for name, value in self.state().items() if name.startswith(MODEL))

    def refresh(self) -> None:
        self._begin(self._version)

    def _local_step(self) -> None:
        """AdamW on the mean gradient since the last local step; the schedule continues over all rounds. A sum that is not finite
        changes nothing, as a step's does, or with on_nonfinite = "stop" fails the round."""
        gradient = self._inner.sum  # where it was computed, and empty after this step
        if self._waiting < self._of_step:
            gradient.mul_(self._of_step / self._waiting)
        whole_norm = math.sqrt(norm_sq(gradient))
        if math.isfinite(whole_norm):
            expected = self._train.local_steps
            step = self._version * expected + min(self._schedule.age, expected - 1)
            self._inner.apply(gradient, whole_norm, step)
        elif self._train.on_nonfinite == "stop":
            raise NotFinite("the sum of a local step's gradients is not finite")
        else:
            log.warning("a local step changed nothing: the sum of its gradients is not finite")
        self._inner.zero()
        self._waiting, self._schedule.age = 0, self._schedule.age + 1

    def _begin(self, version: int) -> None:
        """Start a round: outer parameters, empty moments, nothing booked."""
        state = self._inner.state()
        for name, value in state.items():
            if name.startswith(MOMENTS):
                value.zero_()
        self._inner.load_state(state | {name: value for name, value in self.state().items() if name in state})
        self._inner.zero()
        self._version, self._booked, self._waiting, self._schedule.age = version, 0, 0, 0


def _flat(executor: Executor, start: int = 0, stop: int | None = None) -> Tensor:
    """A copy of values `start` up to `stop` of the parameters, (length,) fp32 on the CPU."""
    parts, offset = [torch.empty(0)], 0
    for name, value in executor.state().items():
        if name.startswith(MODEL):
            low, high = max(start - offset, 0), value.numel() if stop is None else min(stop - offset, value.numel())
            if low < high:
                parts.append(value.reshape(-1)[low:high].cpu())
            offset += value.numel()
    return torch.cat(parts)
