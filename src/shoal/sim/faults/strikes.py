"""Deaths at the worst moment, and of several peers at once: in the middle of averaging (in a large group: in each of its exchanges, in
a row, between rows, in the row again), of the optimizer's step, of a checkpoint.

A trap waits for a peer that is about to do what it is set for; that peer's process ends with some of its commands carried out and the
others not, or its disk is full from then on. Who is struck is chosen as in churn.py, so that the run can go on; a trap whose next peer
cannot be spared stays set. Regions (network.py) die or are cut off whole. A wipe kills everybody; the same command is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from shoal.core import messages as m
from shoal.core.allreduce.layout import of_row
from shoal.sim.faults import faults
from shoal.sim.faults.injector import Fault, Injector, PlannedFault, Trap
from shoal.sim.network import region
from shoal.sim.node import Node
from shoal.sim.scenarios.scenario import Case, place_of

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
    "copying": (
        (m.OfferShard, m.ReadShard, m.WriteChunk, m.RunCopy),
        (m.CopyRequest, m.Saved, m.PublishRequest, m.Published),
    ),
    "downloading": ((m.CheckChunk, m.Import), (m.ChunkRequest,)),
    "uploading": ((m.Export, m.ReadChunk), (m.Offer, m.Chunk)),
    "leading": ((), (m.Propose, m.Round, m.SaveRequest, m.PublishRequest)),
    "training": ((m.Fetch,), (m.Forward, m.Backward)),
    "filling": ((m.RunSave, m.RunPublish, m.WriteChunk, m.RunCopy), ()),
}


def plan(case: Case) -> list[PlannedFault]:
    rng = case.rng("strikes")
    planned = []
    for kind in case.strikes.__struct_fields__:
        for _ in range(getattr(case.strikes, kind)):
            length_s = rng.choice((0.5, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.0)
            planned.append(PlannedFault(rng.uniform(0.0, case.scenario.faults_s), kind, length_s))
    return planned


def sprung(injector: Injector, node: Node, commands: Sequence[m.Command]) -> int | None:
    """How many of these commands the peer still carries out before it dies; None: it lives."""
    for trap in list(injector.traps):
        for at, command in enumerate(commands):
            if not _meant(injector, node, trap.kind, command):
                continue
            if trap.skip:
                trap.skip -= 1
                continue
            if trap.kind == "filling":
                injector.traps.remove(trap)
                injector.context.count(trap.kind)
                injector.fill(node.runner.copies.storage, trap.length_s)
                break
            if not node.available or not injector.spares({node.name}):
                break
            injector.traps.remove(trap)
            injector.context.count(trap.kind)
            _replace(injector, node, injector.context.chance)
            return at + injector.context.chance.randint(0, 1)
    return None


def _meant(injector: Injector, node: Node, kind: str, command: m.Command) -> bool:
    tasks, messages = MOMENTS[kind]
    if type(command) is m.Do:
        return isinstance(command.task, tasks)
    if type(command) is not m.Send or not isinstance(command.message, messages):
        return False
    message = command.message
    if isinstance(message, m.ReduceChunk) and kind != "averaging":
        group = injector.context.watch.rounds.group_of(node.name, message)
        return of_row(message.chunk, len(group)) is (kind == "rows")
    return True


def trap(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    injector.traps.append(Trap(planned.kind, rng.randrange(SKIPS), planned.length_s))


def pair(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Two replicas of one stage at once."""
    newest = injector.context.watch.newest
    groups: dict[int, list[str]] = {}
    for one in newest.members if newest is not None else ():
        if one.peer in injector.processes.nodes:
            groups.setdefault(one.stage, []).append(one.peer)
    for stage in rng.sample(sorted(groups), len(groups)):
        names = rng.sample(groups[stage], min(2, len(groups[stage])))
        if len(names) == 2 and injector.spares(set(names)):
            _kill(injector, planned, names, rng)
            return
    injector.retry(planned, AGAIN_S)


def a_region(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Everybody in one region, and with them perhaps the last replica of a stage."""
    names = _region(injector, rng)
    if names:
        _kill(injector, planned, names, rng)
    else:
        injector.retry(planned, AGAIN_S)


def machine(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Everybody on one machine, and its disk."""
    places, world = injector.context.case.places, injector.context.world
    for number in rng.sample(range(places), places):
        place = place_of(number, places)
        nodes = injector.processes.nodes
        names = [name for name, node in nodes.items() if place_of(node.process.key, places) == place]
        if names and injector.spares(set(names), whole=False):
            world.storages.pop(place, None)
            _kill(injector, planned, names, rng)
            injector.context.watch.durability.machine_lost()
            return
    injector.retry(planned, AGAIN_S)


def region_cut(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """One region neither receives from the others nor reaches them."""
    names = _region(injector, rng)
    if names:
        _isolate(injector, planned, names, both=True)
    else:
        injector.retry(planned, AGAIN_S)


def cut(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        _isolate(injector, planned, [node.name], both=True)


def way(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """One peer does not reach the others, or receives nothing from them."""
    node = injector.victim(rng)
    if node is not None:
        _isolate(injector, planned, [node.name], both=False, out=rng.random() < 0.5)


def half(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Half of the voters, without the casting one, die or are cut off at once."""
    names = injector.half(rng)
    if not names:
        injector.retry(planned, AGAIN_S)
    elif rng.random() < 0.5:
        _isolate(injector, planned, names, both=True)
    else:
        _kill(injector, planned, names, rng)


def wipe(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    if injector.restart_run():
        injector.context.count(planned.kind)


def _region(injector: Injector, rng: Random) -> list[str]:
    """Who lives in a region, drawn, that the run can lose; nobody if there is none."""
    for number in rng.sample(range(injector.context.case.regions), injector.context.case.regions):
        names = [name for name in injector.processes.nodes if region(name, injector.context.case.regions) == number]
        if names and injector.spares(set(names), whole=False):
            return names
    return []


def _kill(injector: Injector, planned: PlannedFault, names: Sequence[str], rng: Random) -> None:
    injector.context.count(planned.kind)
    for name in names:
        node = injector.processes.nodes[name]
        injector.processes.kill(node)
        _replace(injector, node, rng)


def _replace(injector: Injector, node: Node, rng: Random) -> None:
    if rng.random() < BACK:
        injector.reboot(node, rng.uniform(0.5, 8.0))


def _isolate(injector: Injector, planned: PlannedFault, names: Sequence[str], *, both: bool, out: bool = True) -> None:
    injector.context.count(planned.kind)
    rest = tuple(name for name in injector.processes.nodes if name not in names)
    faults.cut(injector, planned, tuple(names), rest, way="both" if both else "out" if out else "in")


APPLY: dict[str, Fault] = {
    **dict.fromkeys(MOMENTS, trap),
    "pairs": pair,
    "regions": a_region,
    "machines": machine,
    "region_cuts": region_cut,
    "cuts": cut,
    "ways": way,
    "halves": half,
    "wipes": wipe,
}
