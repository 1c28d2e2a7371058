"""Devices that a placement leaves out: each is used where it shortens the step; else the plan says by how much it would lengthen it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal import units
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy.pricing import Option, lacks_bytes, placed
from shoal.planner.strategy.problem import Problem

PLAYS_MOST = 128  # a search seats nearly all devices that help; this bounds what it may have missed among hundreds


class Idle(msgspec.Struct, frozen=True):
    """Devices alike that are left out, and what one of them would do."""

    devices: tuple[int, ...]
    step_s: float = 0.0  # of a step with one of them
    longer: float = 0.0  # by which share of the step without
    lacks_bytes: float = 0.0  # above 0: of memory, for the smallest stage
    played: bool = True

    def text(self, problem: Problem) -> str:
        names = [problem.cluster.devices[device].name for device in self.devices]
        several = len(names) > 1
        who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        who += " are left out" if several else " is left out"
        one = "one of them" if several else "it"
        if not self.played:
            return f"{who}: what {one} would do was not priced"
        if self.lacks_bytes:
            return f"{who}: {one} lacks {units.size(self.lacks_bytes)} for the smallest stage"
        more = f"{self.longer:.1%} more" if self.longer < 1 else f"{1 + self.longer:.3g} times as long"
        return f"{who}: with {one} a step would take {units.duration(self.step_s)}, {more}"


def employed(problem: Problem, best: Option, completed: Callable[[Option], Option]) -> tuple[Option, list[Idle]]:
    """The option with every idle device that shortens its played step; and those that do not."""
    plays = PLAYS_MOST
    while True:
        assert best.step is not None, "a caller hands in a played option"
        now_s = best.step.step_s
        idle: list[Idle] = []
        for group in _alike(problem.cluster, [d for d, stage in enumerate(best.seats.stage_of) if stage < 0]):
            lacks = [lacks_bytes(problem, span, problem.cluster.devices[group[0]]) for span in best.cut]
            if min(lacks) > 0:
                idle.append(Idle(group, lacks_bytes=min(lacks)))
                continue
            if not plays:
                idle.append(Idle(group, played=False))
                continue
            options = [_with(problem, best, group[0], stage) for stage, lack in enumerate(lacks) if lack <= 0]
            option = completed(min(options, key=lambda option: option.rough_s))
            plays -= 1
            assert option.step is not None
            if option.step.step_s < now_s:
                best = option
                break
            step_s = option.step.step_s
            idle.append(Idle(group, step_s, step_s / now_s - 1))
        else:
            return best, idle


def _with(problem: Problem, option: Option, device: int, stage: int) -> Option:
    stage_of = list(option.seats.stage_of)
    stage_of[device] = stage
    return placed(problem, option.cut, tuple(stage_of))


def _alike(cluster: Cluster, devices: list[int]) -> list[tuple[int, ...]]:
    """Devices by what the planner knows of them, the fastest first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for device in devices:
        machine = msgspec.structs.replace(cluster.devices[device], name="")
        links = [sorted(matrix[device].tolist()) for matrix in (cluster.delay_s, cluster.bandwidth_Bps)]
        key = (msgspec.structs.astuple(machine), *map(tuple, links))
        groups.setdefault(key, []).append(device)
    return sorted(map(tuple, groups.values()), key=lambda group: (-cluster.devices[group[0]].flops, group))
