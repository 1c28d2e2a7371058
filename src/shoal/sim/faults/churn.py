"""Who comes and goes in a simulated swarm: peers killed, killed and started again, asked to leave, joining late.

Nobody goes whom the run cannot lose: the survivors keep a majority of the members, without which the run rightly waits,
and every stage keeps a replica (`Injector.spares`) unless losing all of them is what is drawn.
"""

from __future__ import annotations

from random import Random

from shoal.core.messages import Asked, SaveAsked
from shoal.sim.faults.injector import Fault, Injector, PlannedFault, planned_faults
from shoal.sim.faults.preemption import read, record_path
from shoal.sim.node import Node
from shoal.sim.scenarios.scenario import Case

SHIFT_S = (1200.0, 2400.0)  # into the record, when its first nodes are there
LATER_S = 20.0
AGAIN_S = 2.0
TWIN = 500  # far from the incarnations of its other processes


def plan(case: Case) -> list[PlannedFault]:
    rng = case.rng("churn")
    drawn = case.happenings
    end_s = case.scenario.faults_s
    kinds = {
        "kill": drawn.kills,
        "restart": drawn.restarts,
        "leave": drawn.leaves,
        "join": drawn.joiners,
        "lose": drawn.losses,
    }
    planned = planned_faults(kinds, end_s, rng, lambda: rng.uniform(0.1, 5.0))
    # these are drawn apart, so that what is drawn besides stays as it was
    planned += planned_faults({"save": case.scenario.saves}, end_s, case.rng("saves"), lambda: 0.0)
    planned += planned_faults({"close": drawn.closures}, end_s, case.rng("closures"), lambda: 0.0)
    twins = case.rng("twins")
    return planned + planned_faults({"twin": drawn.twins}, end_s, twins, lambda: twins.uniform(0.1, 5.0))


def lives(case: Case) -> list[PlannedFault]:
    """Who comes and goes in a long scenario: as often as in its record of spot instances, or by mean life."""
    scenario, rng = case.scenario, case.rng("lives")
    planned: list[PlannedFault] = []
    if scenario.record:
        changes = read(record_path(scenario.record))
        for _ in range(scenario.copies):
            shift_s = rng.uniform(*SHIFT_S)
            planned += [
                PlannedFault(change.at_s - shift_s, "join" if change.joins else "take", 0.0)
                for change in changes
                if 0.0 < change.at_s - shift_s < scenario.faults_s
            ]
    if scenario.life_s:
        for kind in ("join", "take"):
            at_s = 0.0
            while (at_s := at_s + rng.expovariate(case.peers / scenario.life_s)) < scenario.faults_s:
                planned.append(PlannedFault(at_s, kind, 0.0))
    return planned


def take(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """One peer dies, later if nobody can be spared now: the record's cluster was another one."""
    node = injector.victim(rng)
    if node is None:
        injector.retry(planned, LATER_S)
    else:
        injector.processes.kill(node)


def kill(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        injector.processes.kill(node)


def restart(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """The process dies at once and another one of the same key comes back."""
    node = injector.victim(rng)
    if node is not None:
        injector.processes.kill(node)
        injector.reboot(node, planned.length_s)


def twin(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Two machines start with the same key at once, after its process has died or, one of them, beside it. A third waits by right."""
    node = injector.victim(rng)
    lives = [one.process.key for one in injector.processes.nodes.values()]
    if node is None or lives.count(node.process.key) > 1:
        injector.retry(planned, AGAIN_S)
        return
    key, incarnation = node.process.successor
    twins = [(key, incarnation), (key, incarnation + TWIN)]
    if rng.random() < 0.5:
        injector.processes.kill(node)
    else:
        twins.pop()
    for who in twins:
        injector.context.kernel.after(planned.length_s, injector.processes.boot, who)


def leave(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    node = injector.victim(rng)
    if node is not None:
        _ask(injector, [node])


def close(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """All replicas of one stage are asked to leave at once: peers of other stages take over."""
    _ask(injector, [node for node in injector.replicas(rng) if node.available])


def _ask(injector: Injector, nodes: list[Node]) -> None:
    watch = injector.context.watch
    for node in nodes:
        node.condition.away = node.condition.leaving = True
        watch.leavers.ask(node.name, watch.newest)
        node.receive(Asked(reason="drawn by the simulation"))


def lose(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """Every copy of one stage's state at once: the run must go back to its newest checkpoint by itself."""
    back = rng.random() < 0.7
    storage, whole = injector.context.world.storage, _whole_checkpoints(injector)
    damages = injector.context.case.scenario.damages
    nodes = injector.replicas(rng)
    if damages and (not nodes or len(whole) < 2):
        injector.retry(planned, LATER_S / 4)
        return
    if damages:
        storage.damaged.add(whole[-1])
    for node in nodes:
        injector.processes.kill(node)
        if back:
            injector.reboot(node, planned.length_s * (1 + rng.random()))


def _whole_checkpoints(injector: Injector) -> list[int]:
    """Steps of the checkpoints that this session of the run can go on from."""
    storage, first = injector.context.world.storage, max(1, injector.context.settings.first_step)
    return sorted(step for step in storage.published if step >= first and step not in storage.damaged)


def save(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    """A launcher asks its peers for a checkpoint."""
    for node in list(injector.processes.nodes.values()):
        node.receive(SaveAsked())


def join(injector: Injector, planned: PlannedFault, rng: Random) -> None:
    injector.processes.boot_new()


APPLY: dict[str, Fault] = {
    "kill": kill,
    "restart": restart,
    "twin": twin,
    "leave": leave,
    "close": close,
    "join": join,
    "take": take,
    "lose": lose,
    "save": save,
}
