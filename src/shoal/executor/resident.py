"""Runs a stage whose parameters stay on its device. Activations are kept while memory is left (graphs.py); else backward recomputes
them from the stage's input, with the same bits.

With train.dtype = bfloat16 the stage computes with bf16 copies; optimizer, `state`, `digest` and checkpoints use the fp32
parameters. Gradients are added in fp32 in either case.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config, microbatches, slices, token_rows
from shoal.core.messages import Rewards
from shoal.executor.base import DTYPES, NotFinite, base_of, out_of_memory, with_base
from shoal.executor.graphs import Graph, Graphs
from shoal.executor.inputs import BackwardInput, add_, check_ends, check_input, cut, joined, outcome, parted
from shoal.executor.master import Master
from shoal.model.cut import Stage, counted
from shoal.model.layers import pairs
from shoal.numerics import pieces
from shoal.numerics.compress import finite
from shoal.numerics.optimizer import Schedule


class Resident:
    """See base.Executor."""

    def __init__(self, stage: Stage, config: Config, schedule: Schedule | None = None) -> None:
        self._stage = stage
        self._slice = token_rows(config) // slices(config)
        self._parts = microbatches(config.train) * slices(config)  # slices per step
        self._dtype, self._compiled = DTYPES[config.train.dtype], config.device.compile
        names, self.computing = zip(*stage.named_parameters(), strict=True)
        self._device = self.computing[0].device
        parameters = self.computing
        if self._dtype != torch.float32 or config.train.staleness:
            parameters = tuple(value.detach().clone() for value in self.computing)
            for value in self.computing:
                value.data = value.data.to(self._dtype)
        self._master = Master(names, parameters, config, schedule)
        self.length = self._master.length
        self.sum = torch.zeros(self.length, dtype=torch.float32, device=self._device)
        self._sums = self._master.views(self.sum)
        self.graphs = Graphs(stage, config)
        self.base = base_of(stage)

    def draw(self, sample: tuple[int, int] | None) -> None:
        if self._stage.masks is not None:
            self._stage.masks.sample = sample

    def _at(self, slice_number: int) -> None:
        """That slice passes next."""
        if self._stage.masks is not None:
            self._stage.masks.at(slice_number, self._slice)

    def forward(self, x: Tensor) -> Tensor:
        x, reference = parted(self._stage, self._input(x))
        xs = torch.split(x, self._slice)
        ys = self.graphs.forward(xs)
        return self._output(self._forwards(xs) if ys is None else ys, reference)

    def _forwards(self, xs: Sequence[Tensor]) -> list[Tensor]:
        ys = []
        with torch.no_grad():
            for at, part in enumerate(xs):
                self._at(at)
                ys.append(self._stage.forward(part))
        return ys

    def _output(self, ys: Sequence[Tensor], reference: Tensor | None) -> Tensor:
        """What the next stage gets: a microbatch's slices, and behind them those of the reference."""
        if reference is not None:
            ys = [*ys, *map(self._stage.reference, torch.split(reference, self._slice))]
        y = ys[0] if len(ys) == 1 else torch.cat(list(ys))
        if not finite(y):
            raise NotFinite("the stage's output is not finite")
        return y

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        x = self._input(x)
        self._stage.compared.clear()
        check_ends(self._stage, x, grad, tokens)
        x, reference = parted(self._stage, x)
        slices = cut(self._slice, x, *(None if value is None else value.to(self._device) for value in (grad, tokens)))
        references = self._references(slices, reference)
        sum_before = self.sum.clone() if len(slices) > 1 else None  # a later slice can fail
        graphs = self.graphs.take([part.x for part in slices])
        try:
            results = []
            for at, part in enumerate(slices):
                self._at(at)
                results.append(self._slice_back(part, references[at], graphs[at] if graphs else None))
        except Exception as error:  # such as no memory: the hop is done again elsewhere, and must not count twice
            if sum_before is not None:
                self.sum.copy_(sum_before)
            if out_of_memory(error):
                self.graphs.give_up()
            raise
        return joined(results)

    def _references(self, slices: Sequence[BackwardInput], reference: Tensor | None) -> Sequence[Tensor | None]:
        """What the loss of each slice compares with."""
        if reference is None or not self._stage.last:
            return [None] * len(slices)
        return torch.split(reference, self._slice)

    def _slice_back(
        self, part: BackwardInput, reference: Tensor | None, graph: Graph | None
    ) -> tuple[Tensor | None, float | None]:
        x = part.x if graph is None else graph.x
        variables = list(self.computing)
        if not self._stage.first:
            variables.append(x.requires_grad_())
        with torch.enable_grad():
            y, grad_y, loss = outcome(self._stage, part._replace(x=x), None if graph is None else graph.y, reference)
            y = y if loss is None else y / self._parts
            gradients = list(torch.autograd.grad(y, variables, grad_y, allow_unused=True, materialize_grads=True))
        if not finite(*gradients):
            raise NotFinite("the stage's gradient is not finite")
        grad_x = None if self._stage.first else gradients.pop()
        if self._dtype == torch.float32:
            torch._foreach_add_(self._sums, gradients)
        else:
            for into, gradient in zip(self._sums, gradients, strict=True):
                add_(into, gradient)
        return grad_x, None if loss is None else float(loss)

    def recompute(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        x = self._input(x)
        check_ends(self._stage, x, grad, tokens)
        x, reference = parted(self._stage, x)
        slices = cut(self._slice, x, *(None if value is None else value.to(self._device) for value in (grad, tokens)))
        results = []
        for at, (part, of) in enumerate(zip(slices, self._references(slices, reference), strict=True)):
            self._at(at)
            results.append(self._again(part, of))
        self._stage.compared.clear()  # rewards are those of backwards
        return joined(results)

    def _again(self, part: BackwardInput, reference: Tensor | None) -> tuple[Tensor | None, float | None]:
        x = part.x if self._stage.first else part.x.requires_grad_()
        with torch.enable_grad():
            y, grad_y, loss = outcome(self._stage, part._replace(x=x), None, reference)
            y = y if loss is None else y / self._parts
            grad_x = None if self._stage.first else torch.autograd.grad(y, [x], grad_y)[0]
        if grad_x is not None and not finite(grad_x):
            raise NotFinite("the stage's gradient is not finite")
        return grad_x, None if loss is None else float(loss)

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        # Texts have any length, for which compiled blocks would be compiled again and again.
        eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        self.draw(None)
        with torch.no_grad(), eager:
            return self._stage.infer(self._input(x), cache)

    def frozen(self) -> Mapping[str, Tensor]:
        return dict(self._stage.named_frozen())

    def evaluate(self, x: Tensor, tokens: Tensor | None) -> Tensor | float:
        x, reference = parted(self._stage, self._input(x))
        if tokens is None:
            return self._output(self._forwards(torch.split(x, self._slice)), reference)
        self._stage.compared.clear()
        slices = cut(self._slice, x, None, tokens.to(self._device))
        with torch.no_grad():
            parts = zip(slices, self._references(slices, reference), strict=True)
            losses = [outcome(self._stage, part, None, compared)[0] for part, compared in parts]
        paired, means = self._stage.paired, map(float, losses)
        every = [len(part.x) // 2 if paired else part.x.shape[:2].numel() for part in slices]
        loss = math.fsum(map(operator.mul, means, every)) / max(1, counted(tokens, paired))
        if not math.isfinite(loss):
            raise NotFinite("the loss of held-out samples is not finite")
        return loss

    def rewards(self) -> Rewards | None:
        return pairs.rewards(torch.cat(self._stage.compared)) if self._stage.compared else None

    def zero(self, step: int = 0) -> None:
        self.sum.zero_()
        self.graphs.clear()

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        return pieces.copied(self.sum[start:stop])

    def restore(self, contribution: Tensor) -> None:
        """Set the sum to an earlier `contribution`, (length,) fp32."""
        self.sum.copy_(contribution)

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        self.make(reduced, norm, step, scale)
        self.refresh()

    def make(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """See delayed.Restorable."""
        self._master.apply(reduced, norm, step, scale)

    def state(self) -> dict[str, Tensor]:
        return self._master.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._master.load_state(state)
        self.refresh()

    def digest(self) -> str:
        return with_base(self._master.digest(), self.base)

    def refresh(self) -> None:
        """Round the fp32 parameters into the copies to compute with."""
        self.graphs.clear()
        if self.computing is not self._master.parameters:
            self.compute_with(self._master.parameters)

    def compute_with(self, values: Sequence[Tensor]) -> None:
        self.graphs.clear()
        with torch.no_grad():
            torch._foreach_copy_(list(self.computing), list(values))

    def _input(self, x: Tensor) -> Tensor:
        x = check_input(self._stage, x)
        return x.detach().to(self._device, self._dtype) if x.is_floating_point() else x.to(self._device)
