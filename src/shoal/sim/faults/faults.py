"""What goes wrong around peers that live: stopped, cut off, slow, a clock that jumps or drifts, lies, a full disk, other bits.

Each fault ends by itself, at the latest when the swarm heals, but for clocks. Peers that a fault may cost their membership are chosen
like those to be killed, so that the run can always go on without them.
"""

from __future__ import annotations

from random import Random

from shoal.sim.faults.injector import Fault, Injector, PlannedFault, planned_faults
from shoal.sim.node import Node
from shoal.sim.scenarios.scenario import Case

EXACT = 0.5  # how often as many peers are on one side as on the other
FROZEN_S = 40.0, 240.0
BUFFERED_S = 3.0  # of messages are kept for a process that stands still; the rest is lost in half of the cases
DRIFTS = 0.1
FULL_S = 2.0, 10.0, 40.0


def plan(case: Case) -> list[PlannedFault]:
    rng = case.rng("faults")
    drawn = case.happenings
    end_s = case.scenario.faults_s
    kinds = {
        "pause": drawn.pauses,
        "absent": drawn.absences,
        "halve": drawn.halves,
        "one_way": drawn.one_ways,
        "slow": drawn.slows,
        "jump": drawn.jumps,
        "full_disk": drawn.full_disks,
        "liar": drawn.liars,
        "unlike": drawn.unlikes,
    }
    planned = planned_faults(kinds, end_s, rng, lambda: rng.choice((0.5, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.0))
    long = case.rng("freezes")  # apart, so that what is drawn besides stays as it was
    planned += planned_faults({"freeze": drawn.freezes}, end_s, long, lambda: long.uniform(*FROZEN_S))
    planned += planned_faults({"drift": drawn.drifts}, end_s, case.rng("drifts"), lambda: 0.0)
    disks = case.rng("fillings")
    return planned + planned_faults({"filling": drawn.fillings}, end_s, disks, lambda: disks.choice(FULL_S))


def pause(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        _stop(injector, planned, node)


def _stop(injector: Injector, planned: PlannedFault, node: Node) -> None:
    node.condition.away = True
    node.stop()
    injector.until(planned.length_s, node.resume)


def freeze(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """A process is stopped for so long that its run goes on without it by far, and its connections' buffers are full."""
    node = injector.victim(rng)
    if node is not None:
        _stop(injector, planned, node)
        if rng.random() < 0.5:
            injector.context.kernel.after(BUFFERED_S, node.deafen)


def absent(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Nobody can reach a stage for a while: its replicas all stand still, or all are cut off from the others."""
    nodes = [node for node in injector.replicas(rng) if node.available]
    if not nodes:
        return
    if rng.random() < 0.5:
        _part(injector, planned, rng, tuple(node.name for node in nodes), whole=True)
        return
    for node in nodes:
        _stop(injector, planned, node)


def halve(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Two halves: the members of the larger one can go on, or of two equal ones those with the casting voter."""
    names = list(injector.processes.nodes)
    for _ in range(8):
        exact = rng.random() < EXACT
        small = rng.sample(names, len(names) // 2 if exact else rng.randint(1, max(1, len(names) // 2)))
        if injector.spares(set(small)) or injector.balanced(set(small)):
            _part(injector, planned, rng, tuple(small))
            return


def one_way(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        _part(injector, planned, rng, (node.name,))


def _part(
    injector: Injector, planned: PlannedFault, rng: Random, small: tuple[str, ...], *, whole: bool = False
) -> None:
    rest = [name for name in injector.processes.nodes if name not in small]
    if len(small) == 1 and not whole and rng.random() < 0.5:  # only some do not hear it: the leader may or may not
        rest = rng.sample(rest, rng.randint(1, len(rest)))
    kind = rng.choice(("both", "in", "out")) if len(small) == 1 and not whole else "both"
    cut(injector, planned, small, tuple(rest), way=kind)


def cut(injector: Injector, planned: PlannedFault, small: tuple[str, ...], rest: tuple[str, ...], *, way: str) -> None:
    """Nothing passes between them for a while: in "both" directions, only "in" to the small side, or only "out" of it."""
    pairs = injector.context.network.part((rest, small) if way == "in" else (small, rest), both=way == "both")
    nodes = [injector.processes.nodes[name] for name in small]
    for node in nodes:
        node.condition.away = True

    def over(_: object) -> None:
        injector.context.network.join(pairs)
        for node in nodes:
            node.condition.away = False

    injector.until(planned.length_s, over)


def slow(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = _anyone(injector, rng)
    if node is not None and not node.condition.slow:
        pace = node.runner.pace
        usual, pace.slowness = pace.slowness, pace.slowness * 10
        node.condition.slow = node.condition.was_unlike = True

        def over(_: object) -> None:
            pace.slowness = usual
            node.condition.slow = False

        injector.until(planned.length_s, over)


def jump(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = _anyone(injector, rng)
    if node is not None:
        node.jump(planned.length_s)


def drift(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """For the rest of the run: another machine's clock is no disturbance."""
    node = _anyone(injector, rng)
    if node is not None:
        node.drift(1.0 + rng.choice((-DRIFTS, DRIFTS, rng.uniform(-DRIFTS, DRIFTS))))


def full_disk(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    storages = injector.context.world.storages or {"": injector.context.world.storage}
    storage = storages[rng.choice(sorted(storages))] if len(storages) > 1 else next(iter(storages.values()))
    injector.fill(storage, planned.length_s)


def liar(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        node.condition.away = node.condition.was_unlike = True
        node.condition.lies = rng.choice((0.05, 0.3, 1.0))

        def over(_: object) -> None:
            node.condition.lies = 0.0
            node.condition.away = False

        injector.until(planned.length_s, over)


def unlike(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Every optimizer step gives it other bits than the others, until everything heals."""
    node = injector.victim(rng)
    if node is not None:
        node.condition.away = node.condition.was_unlike = node.runner.oddities.unlike = True

        def over(_: object) -> None:
            node.condition.away = node.runner.oddities.unlike = False

        injector.until(injector.context.case.scenario.faults_s, over)


def _anyone(injector: Injector, rng: Random) -> Node | None:
    living = [node for node in injector.processes.nodes.values() if node.lives]
    return rng.choice(living) if living else None


APPLY: dict[str, Fault] = {
    "pause": pause,
    "freeze": freeze,
    "absent": absent,
    "halve": halve,
    "one_way": one_way,
    "slow": slow,
    "jump": jump,
    "drift": drift,
    "full_disk": full_disk,
    "liar": liar,
    "unlike": unlike,
}
