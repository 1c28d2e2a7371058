"""All stages of a run in one process, with everything that travels between peers encoded as peers encode it.

The executors and runtime/tasks/coding.py are the run's own; what networks, machines and tasks add is left out. Told in which order a run
added (reference.as_recorded), it ends with that run's bits, codecs and all: tests/e2e/test_codecs.py. benchmarks/quality.py trains
with it, and what it says of a codec therefore holds for runs. tests/reference.py is the other way round: no part of ours, no codecs.
"""

from __future__ import annotations

import math

import msgspec
import torch
from tests import reference
from tests.reference import Order
from torch import Tensor

from shoal.config import Config
from shoal.core.allreduce.layout import split
from shoal.executor import create
from shoal.executor.delayed import Delayed
from shoal.runtime.data.dataset import Dataset
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Averaging, Held


class Trained(msgspec.Struct, frozen=True):
    """After one step. `digests`: of each stage's parameters."""

    loss: float
    norm: float
    digests: tuple[str, ...]


class Pipeline:
    """`peers[stage]` names the replicas whose errors are fed back, each its own."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        torch.set_num_threads(max(1, config.device.threads))
        self.config, self.dataset = config, dataset
        self.stages = config.run.stages
        self.microbatches = config.train.batch // config.train.microbatch
        self.executors = [create(config, stage) for stage in range(self.stages)]
        self.averaging: list[dict[str, Averaging]] = [{} for _ in range(self.stages)]
        self.step = 0

    def train(self, order: Order, names: tuple[tuple[str, ...], ...]) -> Trained:
        """One step. order[stage][i] is what the replica names[stage][i] adds, one after the other."""
        self._compute_with(self.step)
        losses, grads = zip(*(self._hops(index) for index in range(self.microbatches)), strict=True)
        reduced = []
        for stage in range(self.stages):
            sums = [self._sum([grads[index][stage] for index in share], stage) for share in order[stage]]
            reduced.append(self._averaged(stage, names[stage], sums))
        norm = math.sqrt(sum(map(reference._squares, reduced)))
        for executor, gradient in zip(self.executors, reduced, strict=True):
            executor.apply(gradient, norm, self.step)
        self.step += 1
        loss = sum(losses) / self.microbatches
        return Trained(loss, norm, tuple(executor.digest() for executor in self.executors))

    def loss(self, steps: range) -> float:
        """Mean over the microbatches of steps that are not trained, through the same codes."""
        self._compute_with(self.step + 1)  # delayed updates or not, the newest parameters
        losses = [self._loss(self.dataset.microbatch(step, i)) for step in steps for i in range(self.microbatches)]
        return sum(losses) / len(losses)

    def _compute_with(self, step: int) -> None:
        for executor in self.executors:
            if isinstance(executor, Delayed):
                executor.at(step)

    def _loss(self, tokens: Tensor) -> float:
        x = tokens[:, :-1]
        for executor in self.executors[:-1]:
            x = coding.plain(coding.packed(executor.forward(x), self.config.network.activations))
        _, loss = self.executors[-1].backward(x, None, tokens)
        self.executors[-1].sum.zero_()
        assert loss is not None
        return loss

    def _hops(self, index: int) -> tuple[float, list[Tensor]]:
        """A microbatch there and back: its loss, and each stage's gradient (length,)."""
        network, last = self.config.network, self.stages - 1
        tokens = self.dataset.microbatch(self.step, index)
        x = [tokens[:, :-1]]
        for executor in self.executors[:-1]:
            x.append(self._carried(executor.forward(x[-1]), network.activations))
        outputs, grad, loss = [], None, None
        for stage in range(last, -1, -1):
            executor, ends = self.executors[stage], tokens if stage == last else None
            grad, said = executor.backward(x[stage], grad, ends)
            loss = loss if said is None else said
            outputs.insert(0, executor.sum.clone())
            executor.sum.zero_()
            grad = None if grad is None else self._carried(grad, network.gradients)
        assert loss is not None
        return loss, outputs

    def _sum(self, grads: list[Tensor], stage: int) -> Tensor:
        total = torch.zeros(self.executors[stage].length)
        for grad in grads:
            total += grad
        return total

    def _averaged(self, stage: int, names: tuple[str, ...], sums: list[Tensor]) -> Tensor:
        """As a round does it: parts to the owners of chunks, sums back."""
        chunks = split(len(sums[0]), names)
        assert len(chunks.rows) == 1, "larger groups: tests/runtime/test_large_groups.py"
        known = self.averaging[stage]
        group = [known.setdefault(name, Averaging(self.config)) for name in names]
        outs = [tuple(f"{name}/{chunk}" for chunk in range(len(chunks.owners))) for name in names]
        parts = [one.parts(whole, chunks.bounds, out) for one, whole, out in zip(group, sums, outs, strict=True)]
        averages: list[Held] = []
        for chunk in range(len(chunks.owners)):
            total = coding.plain(parts[0][chunk]).clone()
            for others in parts[1:]:
                total += coding.plain(others[chunk])
            if len(names) > 1:
                averages.append(group[chunk].sum(total, tuple(out[chunk] for out in outs)))
            else:
                averages.append(total)
        reduced = torch.cat([coding.plain(one) for one in averages])
        for one in group:
            one.applied(one.left())
        return reduced

    @staticmethod
    def _carried(tensor: Tensor, how: str) -> Tensor:
        return coding.plain(coding.packed(tensor, how))
