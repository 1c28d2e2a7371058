"""Runs a stage whose parameters stay on its device. Activations are not kept: backward recomputes from the stage's input.

With train.dtype = bfloat16 the stage computes with bf16 copies of its parameters; the fp32 ones here are what the optimizer
steps, what `state` gives, what `digest` covers and what checkpoints hold. Gradients are added in fp32 in either case.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.config import Config
from shoal.executor.base import DTYPES, NotFinite, copy_state_, digest_of
from shoal.model.cut import Stage
from shoal.numerics.optimizer import adamw, clip_factor, learning_rate, step_


class Resident:
    """See base.Executor."""

    def __init__(self, stage: Stage, config: Config) -> None:
        self._stage = stage
        self._train = config.train
        self._steps = config.run.steps
        self._microbatches = config.train.batch // config.train.microbatch
        self._dtype = DTYPES[config.train.dtype]
        self._names, self._computing = zip(*stage.named_parameters(), strict=True)
        self._device = self._computing[0].device
        self._parameters = self._computing
        if self._dtype != torch.float32:
            self._parameters = tuple(value.detach().clone() for value in self._computing)
            for value in self._computing:
                value.data = value.data.to(self._dtype)
        self._optimizer = adamw(dict(zip(self._names, self._parameters, strict=True)), config.train)
        self.length = sum(value.numel() for value in self._parameters)
        self.sum = torch.zeros(self.length, dtype=torch.float32, device=self._device)
        self._sums = self._views(self.sum)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self._stage.forward(self._input(x))
        if not torch.isfinite(y).all():
            raise NotFinite("the stage's output is not finite")
        return y

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        x = self._input(x)
        wanted = list(self._computing)
        if not self._stage.first:
            wanted.append(x.requires_grad_())
        with torch.enable_grad():
            y, grad_y, loss = self._outcome(x, grad, tokens)
            found = list(torch.autograd.grad(y, wanted, grad_y, allow_unused=True, materialize_grads=True))
        if not torch.stack([torch.isfinite(part).all() for part in found]).all():
            raise NotFinite("the stage's gradient is not finite")
        grad_x = None if self._stage.first else found.pop()
        torch._foreach_add_(self._sums, [part.float() for part in found])
        return grad_x, loss

    def zero(self) -> None:
        self.sum.zero_()

    def apply(self, reduced: Tensor, norm: float, step: int) -> None:
        if tuple(reduced.shape) != (self.length,) or reduced.dtype != torch.float32:
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)} {reduced.dtype}, not ({self.length},) fp32")
        clipped = reduced.to(self._device) * clip_factor(norm, self._train.clip)
        for value, part in zip(self._parameters, self._views(clipped), strict=True):
            value.grad = part
        step_(self._optimizer, learning_rate(self._train, self._steps, step), step)
        for value in self._parameters:
            value.grad = None  # it would keep `clipped` alive until the next step
        self._refresh()

    def state(self) -> dict[str, Tensor]:
        named = list(zip(self._names, self._parameters, strict=True))
        moments = self._optimizer.state
        return {
            **{f"model/{name}": value.detach() for name, value in named},
            **{f"exp_avg/{name}": moments[value]["exp_avg"] for name, value in named},
            **{f"exp_avg_sq/{name}": moments[value]["exp_avg_sq"] for name, value in named},
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)
        self._refresh()

    def digest(self) -> str:
        return digest_of(self._parameters)

    def _outcome(
        self, x: Tensor, grad: Tensor | None, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None, float | None]:
        """What to differentiate, from which gradient, and the loss."""
        if self._stage.last:
            if tokens is None:
                raise ValueError("the last stage runs back from the tokens, and there are none")
            tokens = self._known(tokens)
            if x.shape[:2] != (tokens.shape[0], tokens.shape[1] - 1):
                raise ValueError(f"input {tuple(x.shape)} does not fit tokens {tuple(tokens.shape)}")
            loss = self._stage.loss(x, tokens)
            return loss / self._microbatches, None, float(loss.detach())
        if grad is None:
            raise ValueError("only the last stage runs back without a gradient")
        y = self._stage.forward(x)
        if grad.shape != y.shape:
            raise ValueError(f"gradient {tuple(grad.shape)} of an output {tuple(y.shape)}")
        return y, grad.to(self._device, y.dtype), None

    def _input(self, x: Tensor) -> Tensor:
        if self._stage.first and not x.is_floating_point():
            return self._known(x)
        if not x.is_floating_point():
            raise ValueError(f"input of {x.dtype} at a stage that takes hidden states")
        if self._stage.first and self._stage.vocabulary is not None:
            raise ValueError(f"input of {x.dtype} at a stage that takes tokens")
        return x.detach().to(self._device, self._dtype)

    def _known(self, tokens: Tensor) -> Tensor:
        """On a GPU a token outside the vocabulary would end the process, not raise."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens {tuple(tokens.shape)} are not (B, L)")
        if self._stage.vocabulary is not None and not ((tokens >= 0) & (tokens < self._stage.vocabulary)).all():
            raise ValueError(f"tokens outside the vocabulary of {self._stage.vocabulary}")
        return tokens.to(self._device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [value.numel() for value in self._parameters])
        return [part.view(value.shape) for part, value in zip(parts, self._parameters, strict=True)]

    def _refresh(self) -> None:
        """Round the fp32 parameters to the copies that compute."""
        if self._computing is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._computing), list(self._parameters))
