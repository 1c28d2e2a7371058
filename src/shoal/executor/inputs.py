"""What an executor accepts for a stage, and what it differentiates there. For every executor that runs a cut.Stage."""

from __future__ import annotations

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
