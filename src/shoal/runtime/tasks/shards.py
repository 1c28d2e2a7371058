"""Files between peers: shards of checkpoints, and frozen weights. For the task runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from shoal.config import Config
from shoal.core.messages import FROZEN, OfferShard, ReadShard, Result, RunCopy, WriteChunk
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.checkpoints.copies import Copies
from shoal.runtime.frozen import Frozen
from shoal.runtime.state import raw

ShardTask = OfferShard | RunCopy | ReadShard | WriteChunk


class Shards:
    """Of one peer. `store`: its checkpoints, if it has any."""

    def __init__(self, config: Config, store: Store | None) -> None:
        self._config, self.store = config, store
        self.frozen = Frozen(config)

    def place(self) -> Store:
        """ValueError: there is none."""
        if self.store is None:
            raise ValueError("this peer knows no place for checkpoints")
        return self.store

    def run(
        self,
        task: ShardTask,
        take: Callable[[str], torch.Tensor],
        keep: Callable[[str, torch.Tensor], Result],
    ) -> Result:
        """`take` gives a blob, `keep` stores one."""
        files = self.frozen if task.shard == FROZEN else self._copies
        match task:
            case OfferShard() | RunCopy():
                return files.carry_out(task)
            case ReadShard():
                return keep(task.out, torch.frombuffer(files.read(task), dtype=torch.uint8))
            case WriteChunk():
                return Result(nbytes=files.write(task, raw(take(task.blob))))

    @cached_property
    def _copies(self) -> Copies:
        return Copies(self.place(), self._config.run.stages)
