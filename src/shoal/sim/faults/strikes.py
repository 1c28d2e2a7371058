"""Deaths at the worst moment, and of several peers at once: in the middle of averaging (in a large group: in each of its exchanges, in
a row, between rows, in the row again), of the optimizer's step, of a checkpoint.

A trap waits for a peer that is about to do what it is set for; that peer's process ends with some of its commands carried out and the
others not. Who is struck is chosen as in churn.py, so that the run can go on; a trap whose next peer cannot be spared stays set.
Regions (network.py) die or are cut off whole. A wipe kills everybody; the same command is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from shoal.core import messages as m
from shoal.core.allreduce.layout import of_row
from shoal.sim.faults import faults
from shoal.sim.faults.churn import Planned
from shoal.sim.network import region

if TYPE_CHECKING:
    from shoal.sim.scenario import Case
    from shoal.sim.swarm import Node, Swarm

BACK = 0.7  # how often another process takes the place of one that was struck
AGAIN_S = 2.0  # after which something that nobody could be spared for is tried again
SKIPS = 6  # a trap lets up to so many of its moments pass

# What a peer is about to do, as tasks or as messages that it sends.
MOMENTS: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "averaging": ((m.Cut, m.AddRow, m.Add, m.Gather), (m.ReduceChunk, m.GatherChunk, m.Reduced)),
    "rows": ((m.Cut, m.AddRow), (m.ReduceChunk,)),
    "columns": ((m.Add,), (m.ReduceChunk,)),
    "tellings": ((m.Gather,), (m.GatherChunk,)),
    "applying": ((m.Apply,), ()),
    "saving": ((m.RunSave, m.RunPublish), (m.Saved, m.Published)),
    "downloading": ((m.CheckChunk, m.Import), (m.ChunkRequest,)),
    "uploading": ((m.Export, m.ReadChunk), (m.Offer, m.Chunk)),
    "leading": ((), (m.Propose, m.Round, m.SaveRequest, m.PublishRequest)),
    "training": ((m.Fetch,), (m.Forward, m.Backward)),
}


class Trap(msgspec.Struct):
    """`skip`: moments of its kind that it lets pass."""

    kind: str
    skip: int


def plan(case: Case) -> list[Planned]:
    rng = case.rng("strikes")
    planned = []
    for kind in case.strikes.__struct_fields__:
        for _ in range(getattr(case.strikes, kind)):
            length_s = rng.choice((0.5, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.0)
            planned.append(Planned(rng.uniform(0.0, case.scenario.faults_s), kind, length_s))
    return planned


def sprung(swarm: Swarm, node: Node, commands: Sequence[m.Command]) -> int | None:
    """How many of these commands the peer still carries out before it dies; None: no trap has caught it."""
    for trap in swarm.traps:
        for at, command in enumerate(commands):
            if not _meant(swarm, node, trap.kind, command):
                continue
            if trap.skip:
                trap.skip -= 1
                continue
            if node.away or node.stopped or not swarm.spares({node.name}):
                break
            swarm.traps.remove(trap)
            _count(swarm, trap.kind)
            _replace(swarm, node, swarm.chance)
            return at + swarm.chance.randint(0, 1)
    return None


def _meant(swarm: Swarm, node: Node, kind: str, command: m.Command) -> bool:
    tasks, messages = MOMENTS[kind]
    if type(command) is m.Do:
        return isinstance(command.task, tasks)
    if type(command) is not m.Send or not isinstance(command.message, messages):
        return False
    message = command.message
    if isinstance(message, m.ReduceChunk) and kind != "averaging":
        group = swarm.watch.group_of(node.name, message)
        return of_row(message.chunk, len(group)) is (kind == "rows")
    return True


def trap(swarm: Swarm, planned: Planned, rng: Random) -> None:
    swarm.traps.append(Trap(planned.kind, rng.randrange(SKIPS)))


def pair(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """Two replicas of one stage at once."""
    newest = swarm.watch.newest
    groups: dict[int, list[str]] = {}
    for one in newest.members if newest is not None else ():
        if one.peer in swarm.nodes:
            groups.setdefault(one.stage, []).append(one.peer)
    for stage in rng.sample(sorted(groups), len(groups)):
        names = rng.sample(groups[stage], min(2, len(groups[stage])))
        if len(names) == 2 and swarm.spares(set(names)):
            _kill(swarm, planned, names, rng)
            return
    swarm.kernel.after(AGAIN_S, swarm.happen, planned)


def a_region(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """Everybody in one region, and with them perhaps the last replica of a stage."""
    names = _region(swarm, rng)
    if names:
        _kill(swarm, planned, names, rng)
    else:
        swarm.kernel.after(AGAIN_S, swarm.happen, planned)


def region_cut(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """One region hears nobody else and is not heard."""
    names = _region(swarm, rng)
    if names:
        _isolate(swarm, planned, names, both=True)
    else:
        swarm.kernel.after(AGAIN_S, swarm.happen, planned)


def cut(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        _isolate(swarm, planned, [node.name], both=True)


def way(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """One peer is not heard by the others, or hears nothing of them."""
    node = swarm.victim(rng)
    if node is not None:
        _isolate(swarm, planned, [node.name], both=False, out=rng.random() < 0.5)


def wipe(swarm: Swarm, planned: Planned, rng: Random) -> None:
    if swarm.wipe():
        _count(swarm, planned.kind)


def _region(swarm: Swarm, rng: Random) -> list[str]:
    """Who lives in a region, drawn, that the run can lose; nobody if there is none."""
    for number in rng.sample(range(swarm.case.regions), swarm.case.regions):
        names = [name for name in swarm.nodes if region(name, swarm.case.regions) == number]
        if names and swarm.spares(set(names), whole=False):
            return names
    return []


def _kill(swarm: Swarm, planned: Planned, names: Sequence[str], rng: Random) -> None:
    _count(swarm, planned.kind)
    for name in names:
        node = swarm.nodes[name]
        swarm.kill(node)
        _replace(swarm, node, rng)


def _replace(swarm: Swarm, node: Node, rng: Random) -> None:
    if rng.random() < BACK:
        swarm.kernel.after(rng.uniform(0.5, 8.0), swarm.boot, (node.key, node.incarnation + 1))


def _isolate(swarm: Swarm, planned: Planned, names: Sequence[str], *, both: bool, out: bool = True) -> None:
    _count(swarm, planned.kind)
    rest = tuple(name for name in swarm.nodes if name not in names)
    faults.cut(swarm, planned, tuple(names), rest, way="both" if both else "out" if out else "in")


def _count(swarm: Swarm, kind: str) -> None:
    swarm.struck[kind] = swarm.struck.get(kind, 0) + 1


APPLY: dict[str, Callable[[Swarm, Planned, Random], None]] = {
    **dict.fromkeys(MOMENTS, trap),
    "pairs": pair,
    "regions": a_region,
    "region_cuts": region_cut,
    "cuts": cut,
    "ways": way,
    "wipes": wipe,
}
