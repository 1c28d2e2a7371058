"""Compiles a stage's blocks before its first microbatch: a hop has a deadline that compiling would miss. For `create`.

Every graph that the executor runs is compiled: forward without gradients, forward whose activations are kept, and backward.
"""

from __future__ import annotations

import logging
import time

import torch

from shoal.config import Config, slices, token_rows
from shoal.executor.base import Executor, boundary, boundary_gradient
from shoal.model.cut import Stage

log = logging.getLogger(__name__)


def warm_up(executor: Executor, stage: Stage, config: Config) -> None:
    """A first forward and backward, which compile the blocks; logs their seconds. `executor` is left as it was.

    ValueError: PyTorch cannot compile the blocks."""
    start = time.perf_counter()
    shape, dtype = boundary(config)
    tokens = torch.zeros(token_rows(config), config.data.sequence + 1, dtype=torch.int64)
    columns = shape[-1] + (config.data.document_end >= 0)
    hidden = torch.zeros(*shape[:-1], columns, dtype=dtype)
    x, grad = tokens[:, :-1] if stage.first else hidden, hidden[: boundary_gradient(config).shape[0]]
    try:
        if not stage.last:
            executor.forward(x)  # measures what a kept forward takes
            with torch.no_grad():
                stage.forward(x[: len(tokens) // slices(config)].to(next(stage.named_parameters())[1].device))
        executor.backward(x, None if stage.last else grad, tokens if stage.last else None)
    except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"device.compile = true: PyTorch cannot compile this stage ({line}); leave it out") from error
    executor.zero()
    log.warning("torch.compile of the stage's blocks took %.1f s", time.perf_counter() - start)
