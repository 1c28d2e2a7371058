"""Audited steps with real tensors: what held tensors are, and hops of another replica that are computed again. For task_runner.py.

Both replicas compute from the same bytes. Unlike machines differ by rounding, and a code can turn a difference of rounding into one step of
the code; so what is made here is encoded and decoded, too (docs/design/2026-11-24-audited-steps.md has the distances measured).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.config import Config
from shoal.core.messages import Describe, EndAudit, Result, RunAudit, Sketch
from shoal.executor.base import Executor, Recomputing
from shoal.numerics.sketches import sketch
from shoal.runtime.state import raw
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.borders import Borders
from shoal.runtime.tasks.coding import Held
from shoal.transport.base import Blob

DIGEST = 32  # hexadecimal digits that travel


def describe(task: Describe, tensors: Sequence[Held]) -> Result:
    digests = tuple(map(digest_of, tensors))
    if not task.seed:
        return Result(digests=digests)
    return Result(digests=digests, sketches=tuple(sketch_of(coding.plain(one), task.seed) for one in tensors))


def digest_of(held: Held) -> str:
    """SHA-256 of what travels, its type and shape: the same at both ends of a boundary."""
    known = coding.ready(held)
    dtype = known.dtype if isinstance(known, Blob) else str(known.dtype).removeprefix("torch.")
    how = known.codec if isinstance(known, Blob) else "raw"
    mixed = hashlib.sha256(f"{dtype} {tuple(known.shape)} {how}".encode())
    mixed.update(known.data if isinstance(known, Blob) else raw(known.to("cpu").contiguous()))
    return mixed.hexdigest()[:DIGEST]


def sketch_of(values: Tensor, seed: str) -> Sketch:
    """None of tokens."""
    if not values.is_floating_point():
        return Sketch()
    return Sketch(*sketch(values.detach().to("cpu", torch.float32).contiguous().view(-1), seed))


class Audit:
    """The sum beside the step's of the hops of one replica."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sum: Tensor | None = None

    def run(
        self, task: RunAudit, executor: Executor, borders: Borders, inputs: tuple[Held, Held | None], device: str
    ) -> Result:
        """`inputs`: x, and the gradient of the output or the tokens. ValueError: this executor cannot compute a hop again."""
        if not isinstance(executor, Recomputing):
            raise ValueError("this peer audits nobody: only a resident stage on one device computes hops again")
        if task.first or self._sum is None:
            self._sum = torch.zeros_like(executor.sum)
        (x, grad), last = inputs, task.stage == self._config.run.stages - 1
        values, other = coding.plain(x, device), None if grad is None else coding.plain(grad, device)
        tokens = (values if task.stage == 0 else other) if last else None
        given = borders.input(task, values), borders.gradient(task, other), tokens
        made = executor.recompute(*given, self._sum)
        network = self._config.network
        output, gradient = (
            self._sent(task, borders, tensor, how)
            for tensor, how in ((made.output, network.activations), (made.gradient, network.gradients))
        )
        of_tokens = (x if task.stage == 0 else grad) if task.stage == 0 or last else None
        digests = (
            digest_of(of_tokens) if of_tokens is not None else "",
            digest_of(x) if task.stage else "",
            digest_of(grad) if grad is not None and not last else "",
        )
        return Result(loss=made.loss, digests=digests, sketches=(output, gradient))

    def _sent(self, task: RunAudit, borders: Borders, made: Tensor | None, how: str) -> Sketch:
        """A result as it would have been sent."""
        if made is None:
            return Sketch()
        return sketch_of(coding.plain(coding.packed(borders.plain(task, made), how)), task.seed)

    def end(self, task: EndAudit) -> Result:
        total, self._sum = self._sum, None
        if not task.digests:
            return Result()
        if total is None or task.bounds[-1] > len(total):
            raise ValueError(f"no sum of {task.bounds[-1]} values is here")
        parts = zip(task.bounds[:-1], task.bounds[1:], task.digests, strict=True)
        return Result(sketches=tuple(Sketch(*sketch(total[low:high].to("cpu"), digest)) for low, high, digest in parts))
