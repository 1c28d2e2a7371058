"""The whole tree, composed of its sections, and all their checks. What a section holds stands in the section's own module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.config.section import Section
from shoal.config.sections import checkpoint, data, device, eval, model, network, run, train, tune
from shoal.config.sections.checkpoint import Checkpoint
from shoal.config.sections.data import Data
from shoal.config.sections.device import Device
from shoal.config.sections.eval import Eval
from shoal.config.sections.model import Model
from shoal.config.sections.network import Network
from shoal.config.sections.plan import Plan
from shoal.config.sections.run import Run
from shoal.config.sections.train import Train
from shoal.config.sections.tune import Tune


class Config(Section, frozen=True):
    """The whole tree."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    eval: Eval = Eval()
    train: Train = Train()
    tune: Tune = Tune()
    network: Network = Network()
    device: Device = Device()
    checkpoint: Checkpoint = Checkpoint()
    plan: Plan = Plan()


def completed(config: Config, named: Mapping[str, Mapping[str, Any]]) -> Config:
    """With the settings that follow from those that are `named`, by section."""
    rows = data.implied(config.data, named.get("data", {}), config.model.path)
    return config if rows == config.data else msgspec.structs.replace(config, data=rows)


def problems(config: Config) -> Iterator[str]:
    """Which settings do not fit together, in words. Bounds of single settings are checked before (reading.py)."""
    yield from model.problems(config.model, config.run, config.data, config.device)
    yield from run.problems(config.run)
    yield from data.problems(config.data, config.train, config.plan)
    yield from eval.problems(config.eval, config.data, config.run, config.train, config.device)
    yield from train.problems(config.train, config.run, config.plan)
    yield from tune.problems(config.tune, config.model, config.train, config.device, config.data)
    yield from device.problems(config.device, config.run, config.train)
    yield from network.problems(config.network, config.model, config.train, config.data, config.device)
    yield from checkpoint.problems(config.checkpoint)


def to_tree(config: Config) -> dict[str, Any]:
    """The whole tree as plain dictionaries; `reading.from_tree` gives the same configuration back."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree
