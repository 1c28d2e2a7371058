"""Checks a stage's inputs, cuts them into slices, and says what to differentiate. For every executor that runs a cut.Stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.model.cut import Stage
from shoal.model.layers import pairs

PIECE = 1 << 14  # values, whose fp32 copy stays in the cache


def check_input(stage: Stage, x: Tensor) -> Tensor:
    """`x` unchanged. ValueError: it is not tokens at the first stage, or hidden states at a later one."""
    if stage.first and not x.is_floating_point():
        return check_tokens(stage, x)
    if not x.is_floating_point():
        raise ValueError(f"input of {x.dtype} at a stage that takes hidden states")
    if stage.first and stage.vocabulary is not None:
        raise ValueError(f"input of {x.dtype} at a stage that takes tokens")
    return x


def check_tokens(stage: Stage, tokens: Tensor, uncounted: bool = False) -> Tensor:
    """`tokens` unchanged; with `uncounted` some may be ~id. ValueError: not (B, L), or outside the vocabulary, which on a GPU would
    end the process."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} are not (B, L)")
    if stage.vocabulary is not None:
        least = -stage.vocabulary if uncounted else 0
        if not ((tokens >= least) & (tokens < stage.vocabulary)).all():
            raise ValueError(f"tokens outside the vocabulary of {stage.vocabulary}")
    return tokens


def check_ends(stage: Stage, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> None:
    """ValueError: the gradient or tokens that a backward pass starts from are missing or do not fit `x`."""
    if not stage.last:
        if grad is None:
            raise ValueError("only the last stage runs back without a gradient")
        return
    if tokens is None:
        raise ValueError("the last stage runs back from the tokens, and there are none")
    check_tokens(stage, tokens, uncounted=True)
    rows = len(tokens) * (2 if stage.paired and not stage.first else 1)
    if x.shape[:2] != (rows, tokens.shape[1] - 1):
        raise ValueError(f"input {tuple(x.shape)} does not fit tokens {tuple(tokens.shape)}")


class BackwardInput(NamedTuple):
    """What the backward pass of one slice starts from, through a stage or a part of it."""

    x: Tensor
    grad: Tensor | None  # of the output
    tokens: Tensor | None


def parted(stage: Stage, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows that are trained, and those of the reference; None: samples are no preference pairs."""
    if not stage.paired:
        return x, None
    return (x, x) if stage.first else pairs.parted(x)


def cut(sequences: int, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> list[BackwardInput]:
    """The inputs of one microbatch's backward pass, in slices of `sequences` sequences."""
    xs = torch.split(x, sequences)
    grads = [None] * len(xs) if grad is None else torch.split(grad, sequences)
    token_parts = [None] * len(xs) if tokens is None else torch.split(tokens, sequences)
    if not len(xs) == len(grads) == len(token_parts):
        raise ValueError(
            f"an input of {len(x)} sequences, with {'tokens' if grad is None else 'a gradient'} of another number"
        )
    return [
        BackwardInput(part.detach(), part_grad, part_tokens)
        for part, part_grad, part_tokens in zip(xs, grads, token_parts, strict=True)
    ]


def joined(slices: Sequence[tuple[Tensor | None, float | None]]) -> tuple[Tensor | None, float | None]:
    """A microbatch's input gradient and mean loss, from those of its slices."""
    grads = [grad for grad, _ in slices if grad is not None]
    losses = [loss for _, loss in slices if loss is not None]
    return torch.cat(grads) if grads else None, math.fsum(losses) / len(losses) if losses else None


def outcome(
    stage: Stage, given: BackwardInput, y: Tensor | None = None, reference: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensor to differentiate, the gradient to start from, and the loss. Call `check_ends` before. `y`: the output on `x`
    with its graph, where that is kept. `reference`: the same rows as the frozen base computes them, which the last stage's loss of
    preference pairs compares with."""
    x, grad, tokens = given
    if stage.last:
        assert tokens is not None
        loss = stage.loss(x, tokens) if reference is None else stage.loss(x, tokens, reference)
        return loss, None, loss.detach()
    assert grad is not None
    if y is None:
        y = stage.forward(x)
    if grad.shape != y.shape:
        raise ValueError(f"gradient {tuple(grad.shape)} of an output {tuple(y.shape)}")
    return y, grad.to(y.dtype), None


def add_(into: Tensor, gradient: Tensor) -> None:
    """Add to fp32 sums. On a CPU torch copies a bf16 gradient to fp32 as a whole, so it is added piece by piece there."""
    if gradient.dtype == into.dtype or into.device.type != "cpu" or into.numel() <= PIECE:
        into.add_(gradient)
        return
    rows = PIECE // (into.numel() // len(into))
    parts = (
        zip(torch.split(into, rows), torch.split(gradient, rows), strict=True)
        if rows
        else zip(into, gradient, strict=True)
    )
    for part, gradient_part in parts:
        add_(part, gradient_part)
