"""Where documents start in a microbatch, for stages behind the first (data.document_end). For the task runner.

Their input is hidden states, and every peer has the data: borders are read here, not sent. They go to the executor as a
column behind the hidden states (model/cut.py), and the same column of a result is taken off before it is kept or sent."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config import Config
from shoal.core.messages import RunAudit, RunBackward, RunForward
from shoal.model.cut import document_starts, inputs, with_borders
from shoal.runtime.data.dataset import Dataset


class Borders:
    """Does nothing where documents attend to one another."""

    def __init__(self, config: Config, dataset: Dataset | None) -> None:
        self._end = -1 if config.device.executor == "emulated" else config.data.document_end
        self._last, self._dataset = config.run.stages - 1, dataset

    def input(self, task: RunForward | RunBackward | RunAudit, x: Tensor) -> Tensor:
        """Of the stage: the tokens (B, L) at the first one."""
        if task.stage == 0:
            return inputs(x)
        if self._end < 0:
            return x
        if self._dataset is None:
            raise ValueError("this peer has no data to read the borders of documents from")
        return with_borders(x, document_starts(inputs(self._dataset.microbatch(task.step, task.index)), self._end))

    def gradient(self, task: RunBackward | RunAudit, grad: Tensor | None) -> Tensor | None:
        """Of the stage's output, for the executor. None at the last stage."""
        if task.stage == self._last or grad is None:
            return None
        return grad if self._end < 0 else with_borders(grad, torch.zeros(grad.shape[:-1]))

    def plain(self, task: RunForward | RunBackward | RunAudit, result: Tensor) -> Tensor:
        """A result of the executor as it is sent."""
        logits = isinstance(task, RunForward) and task.stage == self._last
        return result if self._end < 0 or logits else result[..., :-1].contiguous()
