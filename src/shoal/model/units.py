"""A stage as a row of units (the embedding, each block, the norm with the head), any consecutive ones of which can run alone.

For the swapping executor. A group of units is a cut.Stage, cut as in stages.py: parts outside the group pass their input on.
The executor binds parameters unit by unit, because a shared one may have several copies on the device: tied embeddings belong
to the first and the last unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from shoal.model.cut import Stage
from shoal.model.sequential import SequentialStage
from shoal.model.stages import HuggingFaceStage, Parts, Passthrough, refuse_more_than_blocks


class Row(Protocol):
    """The units of one stage, made of the stage's modules: the stage itself must not run meanwhile."""

    units: tuple[tuple[str, ...], ...]  # per unit, the names of the parameters that it uses

    def group(self, start: int, stop: int) -> Stage:
        """The units from `start` up to `stop` as a stage. Invalidates the group returned before."""
        ...

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        """Use that tensor as the unit's parameter `name`."""
        ...

    def buffers_to(self, device: str) -> int:
        """Move all buffers (tables of positions) to the device. Returns their bytes."""
        ...


def row(stage: Stage) -> Row:
    if isinstance(stage, HuggingFaceStage):
        return HuggingFaceRow(stage)
    if isinstance(stage, SequentialStage):
        return SequentialRow(stage)
    raise ValueError(f"a {type(stage).__name__} is not made of units that could pass through a device one by one")


class ParameterSlots:
    """The modules that hold each parameter, collected while each parameter is still one tensor."""

    def __init__(self, stage: Stage, units: list[list[nn.Module]]) -> None:
        named = (*stage.named_parameters(), *stage.named_frozen())
        names = {parameter: name for name, parameter in named}
        self._at: list[dict[str, list[tuple[nn.Module, str]]]] = []
        for modules in units:
            slots: dict[str, list[tuple[nn.Module, str]]] = {}
            for owner, attribute, parameter in _owned(modules):
                slots.setdefault(names[parameter], []).append((owner, attribute))
            self._at.append(slots)
        self.units = tuple(tuple(slots) for slots in self._at)

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        for owner, attribute in self._at[unit][name]:
            setattr(owner, attribute, parameter)


def _owned(modules: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in modules:
        for owner in module.modules():
            for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                yield owner, attribute, parameter


ChildSlot = tuple[nn.Module, str | int, nn.Module]  # a module, the name or index of one of its children, that child


class HuggingFaceRow:
    """Units of a stage of a Hugging Face model."""

    def __init__(self, stage: HuggingFaceStage) -> None:
        self._model, self._first, self._last = stage.model, stage.first, stage.last
        self._document_end = stage.document_end
        parts = Parts(stage.model)
        units: list[list[ChildSlot]] = []
        if stage.first:
            units.append([(parts.base, name, part) for name, part in parts.before.items()])
        units += [
            [(parts.block_list, index, part)]
            for index, part in enumerate(parts.blocks)
            if not isinstance(part, Passthrough)
        ]
        if stage.last:
            after: list[ChildSlot] = [(parts.base, name, part) for name, part in parts.after.items()]
            units.append(after + [(parts.model, name, part) for name, part in parts.head.items()])
        self._unit_slots = [
            [
                (owner, place, part, parts.passthrough(place if isinstance(place, str) else "", part))
                for owner, place, part in unit
            ]
            for unit in units
        ]
        self._places = ParameterSlots(stage, [[part for _, _, part in unit] for unit in units])
        self.units = self._places.units
        parts.remove_parts()
        refuse_more_than_blocks(stage.model, parts, "device.executor=resident")
        self._present = range(0)

    def group(self, start: int, stop: int) -> Stage:
        for unit, slots in enumerate(self._unit_slots):
            if (unit in self._present) != (start <= unit < stop):
                for owner, place, part, elsewhere in slots:
                    _set_child(owner, place, part if start <= unit < stop else elsewhere)
        self._present = range(start, stop)
        first, last = self._first and start == 0, self._last and stop == len(self._unit_slots)
        return HuggingFaceStage(self._model, first=first, last=last, document_end=self._document_end)

    def bind(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        self._places.bind(unit, name, parameter)

    def buffers_to(self, device: str) -> int:
        return _buffers_to(device, [self._model, *(part for unit in self._unit_slots for _, _, part, _ in unit)])


class SequentialRow:
    """Units of a stage of a plain nn.Sequential: its children."""

    def __init__(self, stage: SequentialStage) -> None:
        self._stage, self._first, self._last = stage, stage.first, stage.last
        self._children = list(stage.model)
        self._places = ParameterSlots(stage, [[child] for child in self._children])
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


def _set_child(owner: nn.Module, place: str | int, part: nn.Module) -> None:
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
