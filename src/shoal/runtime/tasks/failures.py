"""The answer to a task that failed: whether its peer can go on. For task_runner.py.

A peer whose device is gone ends, and so does one whose stage does not fit its memory: it is told what would fit, instead of
downloading the stage and failing again and again. Where the failed task left the stage's state void, one failure is enough; a hop
left it as it was, and the next one may find the memory that another program had taken.
"""

from __future__ import annotations

import logging

from shoal.config import Config
from shoal.core.messages import Apply, Blend, Done, Failed, Import, Init, RunBackward, RunForward, Task
from shoal.executor import base
from shoal.runtime import frozen
from shoal.runtime.checkpoints import checkpoint

log = logging.getLogger(__name__)

REASON_LENGTH = 1000  # of a failure, in letters; core's Text holds 2000
# In a row for which memory ran out: another program's peak passes, a microbatch that never fits does not
SHORT_HOPS = 3


class DoesNotFit(ValueError):
    """The stage does not fit this machine; the text says what would."""


class Failures:
    """Of one peer's tasks."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._short_hops = 0  # hops in a row for which memory ran out

    def on_done(self, done: Done, task: Task) -> Done:
        if isinstance(task, RunForward | RunBackward):
            self._short_hops = 0
        return done

    def answer(self, task: Task, stage: int | None, error: Exception) -> Failed:
        """`stage`: the one that this peer serves, or builds with this task."""
        unloadable = error if isinstance(error, checkpoint.Unloadable) else None
        older, lacks = (unloadable.older, unloadable.lacks) if unloadable else (None, ())
        if isinstance(error, ValueError | OSError):
            reason = str(error)[:REASON_LENGTH] or type(error).__name__
            lost, nonfinite = isinstance(error, DoesNotFit), isinstance(error, base.NotFinite)
            held = error.held if isinstance(error, frozen.Incomplete) else ()
            return Failed(task.id, reason, lost=lost, nonfinite=nonfinite, older=older, lacks=lacks, held=held)
        log.error("%s failed", task, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH]
        if isinstance(error, base.DeviceLost) or not base.alive(self._config):
            return Failed(task.id, f"the device is lost: {reason}", lost=True)
        if stage is None or not base.out_of_memory(error) or not self._is_final(task):
            return Failed(task.id, reason)
        from shoal.executor import fit  # imports transformers, which an emulated peer never does

        first_line, advice = reason.partition("\n")[0][: REASON_LENGTH // 2], fit.advice(self._config, stage)
        return Failed(task.id, f"too little memory for {type(task).__name__}: {advice} ({first_line})", lost=True)

    def _is_final(self, task: Task) -> bool:
        if not isinstance(task, RunForward | RunBackward):
            return isinstance(task, Init | Import | Blend | Apply)
        self._short_hops += 1
        # A hop of local steps may have failed in the optimizer, and its parameters are void.
        return self._short_hops >= SHORT_HOPS or self._config.train.local_steps > 1
