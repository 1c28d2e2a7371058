"""The keys and values of texts that a peer serves, and the next positions computed with them.

For the task runner; whose are kept is core's decision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.core.messages import Infer, Result
from shoal.executor.base import Executor, infer


class Texts:
    """By session, of the stage that is served."""

    def __init__(self) -> None:
        self._caches: dict[str, Any] = {}

    def forget(self, sessions: tuple[str, ...]) -> None:
        for session in sessions:
            self._caches.pop(session, None)

    def run(self, task: Infer, executor: Executor, x: Tensor | None) -> tuple[Result, Tensor]:
        """The stage's output for the next stage, (1, L, D), and what is reported. At the last stage the output is of no use."""
        cache = self._caches.pop(task.session, None)
        if task.start:
            cache = None
        elif cache is None:
            raise ValueError("the keys and values of this text are not here")
        y, cache = infer(executor, torch.tensor([task.tokens]) if x is None else x, cache)
        self._caches[task.session] = cache
        nbytes = _nbytes(cache)
        if task.out:
            return Result(nbytes=nbytes), y
        scores, tokens = torch.topk(y[0].float(), min(task.scores, y.shape[-1]))
        return Result(nbytes=nbytes, tokens=tuple(tokens.tolist()), scores=tuple(scores.tolist())), y


def _nbytes(cache: Any) -> int:
    layers = {id(layer): layer for layer in cache.layers}.values()
    return sum(value.nbytes for layer in layers for value in (layer.keys, layer.values) if value is not None)
