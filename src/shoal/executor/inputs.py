"""What an executor accepts for a stage, how it is sliced, and what is differentiated. For every executor that runs a cut.Stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.model.cut import Stage


def checked(stage: Stage, x: Tensor) -> Tensor:
    """A stage's input, found to be of the kind that the stage takes. ValueError: it is not."""
    if stage.first and not x.is_floating_point():
        return known(stage, x)
    if not x.is_floating_point():
        raise ValueError(f"input of {x.dtype} at a stage that takes hidden states")
    if stage.first and stage.vocabulary is not None:
        raise ValueError(f"input of {x.dtype} at a stage that takes tokens")
    return x


def known(stage: Stage, tokens: Tensor) -> Tensor:
    """On a GPU a token outside the vocabulary would end the process, not raise."""
    if tokens.dim() != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} are not (B, L)")
    if stage.vocabulary is not None and not ((tokens >= 0) & (tokens < stage.vocabulary)).all():
        raise ValueError(f"tokens outside the vocabulary of {stage.vocabulary}")
    return tokens


def check_ends(stage: Stage, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> None:
    """ValueError: what a backward pass starts from is missing or does not fit. All that can be said before running."""
    if not stage.last:
        if grad is None:
            raise ValueError("only the last stage runs back without a gradient")
        return
    if tokens is None:
        raise ValueError("the last stage runs back from the tokens, and there are none")
    known(stage, tokens)
    if x.shape[:2] != (tokens.shape[0], tokens.shape[1] - 1):
        raise ValueError(f"input {tuple(x.shape)} does not fit tokens {tuple(tokens.shape)}")


End = tuple[Tensor, Tensor | None, Tensor | None]  # a stage's input, the gradient of its output, the tokens


def cut(sequences: int, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> list[End]:
    """What one microbatch's way back starts from, in slices of so many sequences."""
    xs = torch.split(x, sequences)
    grads = [None] * len(xs) if grad is None else torch.split(grad, sequences)
    targets = [None] * len(xs) if tokens is None else torch.split(tokens, sequences)
    if not len(xs) == len(grads) == len(targets):
        raise ValueError(
            f"an input of {len(x)} sequences, with {'tokens' if grad is None else 'a gradient'} of another number"
        )
    return [(part.detach(), back, target) for part, back, target in zip(xs, grads, targets, strict=True)]


def joined(slices: Sequence[tuple[Tensor | None, float | None]]) -> tuple[Tensor | None, float | None]:
    """What came of a microbatch's slices, as of the whole: the gradient of its input, its mean loss."""
    grads = [grad for grad, _ in slices if grad is not None]
    losses = [loss for _, loss in slices if loss is not None]
    return torch.cat(grads) if grads else None, math.fsum(losses) / len(losses) if losses else None


def outcome(
    stage: Stage, x: Tensor, grad: Tensor | None, tokens: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What to differentiate, from which gradient, and the loss, of inputs that `check_ends` has passed."""
    if stage.last:
        assert tokens is not None
        loss = stage.loss(x, tokens)
        return loss, None, loss.detach()
    assert grad is not None
    y = stage.forward(x)
    if grad.shape != y.shape:
        raise ValueError(f"gradient {tuple(grad.shape)} of an output {tuple(y.shape)}")
    return y, grad.to(y.dtype), None
