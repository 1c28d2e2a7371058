"""Executors run one stage of a model on one device. `create` picks the one that the configuration names."""

from __future__ import annotations

from shoal.config import Config
from shoal.executor.base import Executor, check_device


def create(config: Config, stage: int, *, source: str | None = None) -> Executor:
    """The executor of stage `stage`, its weights from the directory `source`, else `model.path`, else the seed."""
    if config.train.local_steps > 1:
        from shoal.executor.local import LocalSteps

        return LocalSteps(lambda alone: _plain(alone, stage, source), config)
    return _plain(config, stage, source)


def _plain(config: Config, stage: int, source: str | None) -> Executor:
    if config.device.executor == "emulated":  # imports are here: an emulated peer never loads transformers
        from shoal.executor.emulated import Emulated

        return Emulated(config, stage)
    if config.device.executor == "resident":
        check_device(config)
        from shoal.executor.resident import Resident
        from shoal.model import stages

        return Resident(stages.build(config, stage, source=source, device=config.device.kind), config)
    if config.device.executor == "swapping":
        check_device(config)
        from shoal.executor.swapping import Swapping
        from shoal.model import stages

        return Swapping(stages.build(config, stage, source=source), config)
    raise ValueError(f"device.executor = {config.device.executor!r} is none of resident, swapping, emulated")
