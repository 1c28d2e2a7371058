"""One machine that trains the whole model by itself: no peers, no network, nothing to agree on. For `shoal train`.

A step is that of a run: the same samples, schedule and checkpoints, the gradients of all microbatches added in order, clipped
by their norm, applied. A run of one peer that books them in order has the same bits. Where layers take turns on the device,
as many microbatches as a peer may hold pass through each group before the next one is loaded. With delayed updates a step is applied on
a thread of its own while the next one is computed (executor/delayed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shoal.config import Config, microbatches
from shoal.core.messages import Account, Committed, Member, Phase, Share, View
from shoal.executor import create
from shoal.executor.base import Executor
from shoal.executor.delayed import Delayed
from shoal.executor.swap.swapping import Swapping
from shoal.model.cut import inputs
from shoal.numerics.optimizer import norm_sq
from shoal.runtime.checkpoints import checkpoint
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data import Dataset

ME = "local"

Told = Callable[[int, int], None]  # microbatches done, of so many: called after each pass


class Broken(Exception):
    """The device, or memory, failed in the middle of a step. What was saved before is whole."""


class Alone:
    """The model on this machine. ValueError: it does not fit, or the checkpoint of `first_step` is of another model."""

    def __init__(self, config: Config, dataset: Dataset, store: Store, first_step: int = 0) -> None:
        self._config, self._dataset, self._store = config, dataset, store
        self._threads()
        self._count = microbatches(config.train)
        self.executor: Executor = create(config, 0)
        if first_step:
            self.executor.load_state(store.load(first_step, self.executor.state()))
        self.executor.zero(first_step)
        self._first = self.done = first_step  # steps
        self.saved = first_step or None  # the step of the newest checkpoint
        self._beside = ThreadPoolExecutor(1, "shoal-optimizer", self._threads) if config.train.staleness else None
        self._making: Future[None] | None = None  # the newest version, while it may not be there yet

    def step(self, told: Told = lambda done, count: None) -> View:
        """Train one step. Returns what a run would have agreed on. Broken: nothing of the step is in the parameters."""
        try:
            losses = self._losses(told)
            reduced = self.executor.contribution()
            norm = math.sqrt(norm_sq(reduced))
            if not math.isfinite(norm):
                raise ValueError(f"the gradient of step {self.done} is not finite; try a lower train.learning_rate")
            self._apply(reduced, norm)
        except (RuntimeError, MemoryError) as error:  # what torch raises when a device or its memory fails
            raise Broken(f"step {self.done} failed: {error}") from error
        self.done += 1
        if self.done >= self._config.run.steps:
            self._settle()
        return self._agreed(sum(losses) / len(losses), norm)

    def save(self) -> str:
        """Write a checkpoint of the newest step and delete the oldest. Returns its path. OSError: the storage's. Broken: the
        state cannot be read any more, and nothing is written."""
        self._settle()
        try:
            record = self._store.write_shard(self.done, 0, 1, self.executor.state())
        except (RuntimeError, MemoryError) as error:
            raise Broken(f"the checkpoint of step {self.done} failed: {error}") from error
        about = checkpoint.about(self._config, self._dataset.digest, self._dataset.describe)
        path = self._store.publish(self.done, [record], about)
        self._store.prune(self._config.checkpoint.keep)
        self.saved = self.done
        return path

    def belong_to(self, run: str) -> None:
        """Its checkpoints are that run's, by the id of its key."""
        self._store.catalog.authority = run

    def due(self) -> bool:
        """Whether a checkpoint is to be written after the newest step."""
        every, last = self._config.checkpoint.every, self._config.checkpoint.last
        ended = self.done >= self._config.run.steps
        return (ended and last) or (every > 0 and self.done % every == 0)

    def _apply(self, reduced: Tensor, norm: float) -> None:
        """One optimizer step. With delayed updates it has only begun; the one before is over."""
        if self._beside is None:
            self.executor.apply(reduced, norm, self.done)
            self.executor.zero(self.done + 1)
            return
        assert isinstance(self.executor, Delayed)
        self._settle()
        self.executor.begin(self.done)
        self._making = self._beside.submit(self.executor.finish, reduced, norm, self.done)

    def _settle(self) -> None:
        """The parameters are those of the newest step. Broken: they could not be made."""
        making, self._making = self._making, None
        try:
            if making is not None:
                making.result()
        except (RuntimeError, MemoryError) as error:
            raise Broken(f"the optimizer failed at the end of step {self.done - 1}: {error}") from error

    def _threads(self) -> None:
        if self._config.device.threads:
            torch.set_num_threads(self._config.device.threads)

    def _losses(self, told: Told) -> list[float]:
        """Of every microbatch, its gradient added."""
        found: list[float] = []
        at_once = self._config.run.queue_limit if self._config.device.executor == "swapping" else 1
        for first in range(0, self._count, at_once):
            several = range(first, min(first + at_once, self._count))
            found += self._back([self._dataset.microbatch(self.done, index) for index in several])
            told(len(found), self._count)
        return found

    def _back(self, batch: list[Tensor]) -> list[float]:
        executor = self.executor.inside() if isinstance(self.executor, Delayed) else self.executor
        if isinstance(executor, Swapping):
            return executor.backward_batch(batch)
        losses = [executor.backward(inputs(tokens), None, tokens)[1] for tokens in batch]
        return [loss for loss in losses if loss is not None]

    def _agreed(self, loss: float, norm: float) -> View:
        """Without a digest, which replicas would compare: it takes longer than the optimizer."""
        share = Share(ME, tuple(range(self._count)))
        committed = Committed(
            step=self.done - 1, round=0, norm=norm, loss=loss, digests=("",), groups=((share,),), save=self.due()
        )
        trained = (self.done - self._first) * self._count  # since this process began, as a run's members count
        return View(
            number=self.done + 1,
            step=self.done,
            members=(Member(ME, 0),),
            phase=Phase.FINISHED if self.done >= self._config.run.steps else Phase.TRAINING,
            last=committed,
            saved=self.saved or 0,
            account=Account(issued=trained, committed=trained),
        )
