"""One machine that trains the whole model alone, without peers and network. For `shoal train`.

A step is that of a run: the same samples, schedule and checkpoints; the gradients of all microbatches are added in order,
clipped by their norm and applied. A run of one peer that books them in order has the same bits. With swapping,
`run.queue_limit` microbatches run through each group before the next group is loaded. With overlap a step is applied on a
thread of its own while the next step is computed (executor/delayed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from torch import Tensor

from shoal.config import Config, microbatches, paired, settings
from shoal.core.consensus.phases import ended
from shoal.core.consensus.validity import measured
from shoal.core.leader.ledger import mean_rewards
from shoal.core.messages import Account, Committed, HeldOut, Member, Phase, Rewards, Share, View
from shoal.executor import create
from shoal.executor.base import Executor, draw, evaluate, prepare_thread, rewards
from shoal.executor.delayed import Delayed
from shoal.executor.swap.swapping import Swapping
from shoal.model.cut import counted, inputs
from shoal.numerics.optimizer import norm_sq
from shoal.runtime.checkpoints import checkpoint
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import Dataset

ME = "local"

ProgressCallback = Callable[[int, int], None]  # microbatches done, microbatches of the step; called after each pass


class Broken(Exception):
    """The device or memory failed in a step. Earlier checkpoints are complete."""


class Alone:
    """The whole model on this machine. ValueError: it does not fit, or the checkpoint of `first_step` is of another model."""

    def __init__(self, config: Config, dataset: Dataset, store: Store, first_step: int = 0) -> None:
        self._config, self._dataset, self._store = config, dataset, store
        prepare_thread(config)
        self._count = microbatches(config.train)
        self._settings = settings(config)
        self.executor: Executor = create(config, 0)
        if first_step:
            self.executor.load_state(store.load(first_step, self.executor.state()))
        self.executor.zero(first_step)
        self._first = self.done = first_step  # steps
        self.heldout: HeldOut | None = None
        self._compared: list[tuple[Rewards | None, int]] = []  # of the step's microbatches, with their counted pairs
        self.saved = first_step or None  # the step of the newest checkpoint
        self._optimizer_thread = (
            ThreadPoolExecutor(1, "shoal-optimizer", lambda: prepare_thread(config)) if config.train.staleness else None
        )
        self._pending_update: Future[None] | None = None  # the update to the newest version, if unfinished

    def step(self, on_progress: ProgressCallback = lambda done, count: None) -> View:
        """Train one step. Returns the view that a run would have agreed on. Broken: the parameters lack the step."""
        try:
            heldout = self._measure()
            self._compared.clear()
            losses, tokens = self._losses(on_progress)
            reduced = self.executor.sum  # on its device; nothing is averaged
            if self._optimizer_thread is not None:
                reduced = reduced.clone()  # the next step's gradients are added while the optimizer reads this
            scale = self._settings.scale(tokens)
            norm = math.sqrt(norm_sq(reduced)) * scale
            if not math.isfinite(norm):
                raise ValueError(f"the gradient of step {self.done} is not finite; try a lower train.learning_rate")
            self._apply(reduced, norm, scale)
        except (RuntimeError, MemoryError) as error:  # what torch raises when a device or its memory fails
            raise Broken(f"step {self.done} failed: {error}") from error
        self.done += 1
        if self.done >= self._config.run.steps:
            self._wait_for_update()
            self._measure()
        view = self._view_after(sum(losses) / len(losses) * scale, norm, tokens, heldout)
        return msgspec.structs.replace(view, last=self._with_rewards(view.last))

    @property
    def ended(self) -> bool:
        """No further step is due."""
        return ended(View(1, self.done, (Member(ME, 0),), heldout=self.heldout), self._settings)

    def save(self) -> str:
        """Write a checkpoint of the newest step and delete the oldest ones. Returns its path. OSError: from the storage. Broken: the
        state is unreadable, and nothing is written."""
        self._wait_for_update()
        try:
            record = self._store.write_shard(self.done, 0, 1, self.executor.state())
        except (RuntimeError, MemoryError) as error:
            raise Broken(f"the checkpoint of step {self.done} failed: {error}") from error
        about = checkpoint.about(self._config, self._dataset.digest, self._dataset.describe)
        path = self._store.publish(self.done, [record], about)
        best = self.heldout.best_step if self.heldout is not None and self._settings.save_measured else 0
        self._store.prune(self._config.checkpoint.keep, best)
        self.saved = self.done
        return path

    def belong_to(self, run: str) -> None:
        """Checkpoints belong to that run from now on; `run`: the id of its key."""
        self._store.catalog.authority = run

    def due(self) -> bool:
        """Whether a checkpoint is due after the newest step."""
        every, last = self._config.checkpoint.every, self._config.checkpoint.at_end
        measures = self._settings.save_measured and self._settings.heldout_at(self.done) > 0
        return (self.ended and last) or measures or (every > 0 and self.done % every == 0)

    def _apply(self, reduced: Tensor, norm: float, scale: float) -> None:
        """One optimizer step. With overlap it only starts here, after the end of the one before."""
        if self._optimizer_thread is None:
            self.executor.apply(reduced, norm, self.done, scale)
            self.executor.zero(self.done + 1)
            return
        assert isinstance(self.executor, Delayed)
        self._wait_for_update()
        self.executor.begin(self.done)
        self._pending_update = self._optimizer_thread.submit(self.executor.finish, reduced, norm, self.done, scale)

    def _wait_for_update(self) -> None:
        """Wait until the parameters are those of the newest step. Broken: the update failed."""
        update, self._pending_update = self._pending_update, None
        try:
            if update is not None:
                update.result()
        except (RuntimeError, MemoryError) as error:
            raise Broken(f"the optimizer failed at the end of step {self.done - 1}: {error}") from error

    def _losses(self, on_progress: ProgressCallback) -> tuple[list[float], int]:
        """Add every microbatch's gradient; returns their losses and counted tokens."""
        losses: list[float] = []
        tokens = 0
        batch_size = self._config.run.queue_limit if self._config.device.executor == "swapping" else 1
        for first in range(0, self._count, batch_size):
            indices = range(first, min(first + batch_size, self._count))
            batch = [self._dataset.microbatch(self.done, index) for index in indices]
            draw(
                self.executor, (self.done, first)
            )  # the only one, but where a swapping stage takes several, which drops nothing
            losses += self._backward(batch)
            if self._settings.tokens:
                tokens += sum(counted(part, paired(self._config)) for part in batch)
            on_progress(len(losses), self._count)
        return losses, tokens

    def _with_rewards(self, last: Committed | None) -> Committed | None:
        means = mean_rewards(self._compared)
        return last if last is None or means is None else msgspec.structs.replace(last, rewards=means)

    def _measure(self) -> float | None:
        """The held-out loss with the newest parameters, as a run's last stage measures it. None: it is not due."""
        total, tokens = 0.0, 0
        draw(self.executor, None)
        for index in range(self._count, self._settings.count(self.done)):
            batch = self._dataset.microbatch(self.done, index)
            counts = counted(batch, paired(self._config))
            total += float(evaluate(self.executor, inputs(batch), batch)) * counts
            tokens += counts
        if not tokens:
            return None
        self.heldout = measured(self.heldout, self.done, total / tokens)
        return total / tokens

    def _backward(self, batch: list[Tensor]) -> list[float]:
        executor = self.executor.inside() if isinstance(self.executor, Delayed) else self.executor
        if isinstance(executor, Swapping):
            return executor.backward_batch(batch)
        losses = []
        for tokens in batch:
            losses.append(executor.backward(inputs(tokens), None, tokens)[1])
            self._compared.append((rewards(executor), counted(tokens, paired(self._config))))
        return [loss for loss in losses if loss is not None]

    def _view_after(self, loss: float, norm: float, tokens: int, heldout: float | None) -> View:
        """The view after the step, without the digest that replicas compare: it takes longer than the optimizer."""
        share = Share(ME, tuple(range(self._count)))
        committed = Committed(
            step=self.done - 1,
            round=0,
            norm=norm,
            loss=loss,
            digests=("",),
            groups=((share,),),
            save=self.due(),
            counted=tokens,
            heldout=heldout,
        )
        trained = (self.done - self._first) * self._count  # by this process, as a run's members count
        return View(
            number=self.done + 1,
            step=self.done,
            members=(Member(ME, 0),),
            phase=Phase.FINISHED if self.ended else Phase.TRAINING,
            heldout=self.heldout,
            last=committed,
            saved=self.saved or 0,
            account=Account(issued=trained, committed=trained),
        )
