"""A stage as units in a row, any consecutive ones of which run alone: the embedding, each block, and the norm with the head.

For an executor that holds only some of them on its device at a time. A group of units is a cut.Stage like any other, made
as stages.py cuts a model: what is not in the group hands its input through. Parameters are bound from outside, unit by
unit, because the same one may lie in several places on the device: tied embeddings belong to the first and the last unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from shoal.model.cut import Stage
from shoal.model.sequential import SequentialStage
from shoal.model.stages import Elsewhere, HuggingFaceStage, Parts, refuse_more_than_blocks


class Row(Protocol):
    """The units of one stage. Its modules are those of the stage, which must not be run beside it."""

    units: tuple[tuple[str, ...], ...]  # per unit, the names of the parameters that it uses

    def group(self, start: int, stop: int) -> Stage:
        """The units from `start` up to `stop` as a stage. The group asked for before is no longer one."""
        ...

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        """Let a unit compute with that tensor as its parameter `name`."""
        ...

    def buffers_to(self, device: str) -> int:
        """Move what is not a parameter (positions' tables) to the device, for good. Returns its bytes."""
        ...


def row(stage: Stage) -> Row:
    if isinstance(stage, HuggingFaceStage):
        return HuggingFaceRow(stage)
    if isinstance(stage, SequentialStage):
        return SequentialRow(stage)
    raise ValueError(f"a {type(stage).__name__} is not made of units that could pass through a device one by one")


class Places:
    """Which modules hold which parameter, found once, while each parameter is still one tensor."""

    def __init__(self, stage: Stage, units: list[list[nn.Module]]) -> None:
        names = {parameter: name for name, parameter in stage.named_parameters()}
        self._at: list[dict[str, list[tuple[nn.Module, str]]]] = []
        for modules in units:
            found: dict[str, list[tuple[nn.Module, str]]] = {}
            for owner, attribute, parameter in _owned(modules):
                found.setdefault(names[parameter], []).append((owner, attribute))
            self._at.append(found)
        self.units = tuple(tuple(found) for found in self._at)

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        for owner, attribute in self._at[unit][name]:
            setattr(owner, attribute, parameter)


def _owned(modules: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in modules:
        for owner in module.modules():
            for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                yield owner, attribute, parameter


Place = tuple[nn.Module, str | int, nn.Module]  # a module, the name or index of one of its children, that child


class HuggingFaceRow:
    """Units of a stage of a Hugging Face model."""

    def __init__(self, stage: HuggingFaceStage) -> None:
        self._model, self._first, self._last = stage.model, stage.first, stage.last
        parts = Parts(stage.model)
        held: list[list[Place]] = []
        if stage.first:
            held.append([(parts.base, name, part) for name, part in parts.before.items()])
        held += [
            [(parts.held, index, part)] for index, part in enumerate(parts.blocks) if not isinstance(part, Elsewhere)
        ]
        if stage.last:
            after: list[Place] = [(parts.base, name, part) for name, part in parts.after.items()]
            held.append(after + [(parts.model, name, part) for name, part in parts.head.items()])
        self._held = [[(owner, place, part, Elsewhere(part)) for owner, place, part in unit] for unit in held]
        self._places = Places(stage, [[part for _, _, part in unit] for unit in held])
        self.units = self._places.units
        parts.take_out()
        refuse_more_than_blocks(stage.model, parts, "device.executor=resident")
        self._in = range(0)

    def group(self, start: int, stop: int) -> Stage:
        for unit, held in enumerate(self._held):
            if (unit in self._in) != (start <= unit < stop):
                for owner, place, part, elsewhere in held:
                    _put(owner, place, part if start <= unit < stop else elsewhere)
        self._in = range(start, stop)
        first, last = self._first and start == 0, self._last and stop == len(self._held)
        return HuggingFaceStage(self._model, first=first, last=last)

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        self._places.bind(unit, name, parameter)

    def buffers_to(self, device: str) -> int:
        return _buffers_to(device, [self._model, *(part for unit in self._held for _, _, part, _ in unit)])


class SequentialRow:
    """Units of a stage of a plain nn.Sequential: its children."""

    def __init__(self, stage: SequentialStage) -> None:
        self._stage, self._first, self._last = stage, stage.first, stage.last
        self._children = list(stage.model)
        self._places = Places(stage, [[child] for child in self._children])
        self.units = self._places.units

    def group(self, start: int, stop: int) -> Stage:
        self._stage.model = nn.Sequential(*self._children[start:stop])
        self._stage.first = self._first and start == 0
        self._stage.last = self._last and stop == len(self._children)
        return self._stage

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        self._places.bind(unit, name, parameter)

    def buffers_to(self, device: str) -> int:
        return _buffers_to(device, self._children)


def _put(owner: nn.Module, place: str | int, part: nn.Module) -> None:
    if isinstance(place, int):
        assert isinstance(owner, nn.ModuleList)
        owner[place] = part
    else:
        setattr(owner, place, part)


def _buffers_to(device: str, modules: list[nn.Module]) -> int:
    owners = {id(owner): owner for module in modules for owner in module.modules()}
    nbytes = 0
    for owner in owners.values():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device))
            nbytes += buffer.nbytes
    return nbytes
