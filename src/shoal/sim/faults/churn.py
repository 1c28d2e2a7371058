"""Who comes and goes in a simulated swarm: peers killed, killed and started again, asked to leave, joining late.

Nobody goes whom the run cannot lose: the survivors keep a majority of the members, without which the run rightly waits,
and every stage keeps a replica (`Swarm.spares`) unless losing all of them is what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

from shoal.core.messages import Asked
from shoal.sim.faults.preemption import found, read

if TYPE_CHECKING:
    from shoal.sim.scenario import Case
    from shoal.sim.swarm import Swarm


SHIFT_S = (1200.0, 2400.0)  # into the record, when its first nodes are there
LATER_S = 20.0


class Planned(msgspec.Struct, frozen=True):
    """Something that will happen `at_s` after training has begun, lasting `length_s` where that means anything."""

    at_s: float
    kind: str
    length_s: float


def plan(case: Case) -> list[Planned]:
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
    return [
        Planned(rng.uniform(0.0, end_s), kind, rng.uniform(0.1, 5.0))
        for kind, count in kinds.items()
        for _ in range(count)
    ]


def lives(case: Case) -> list[Planned]:
    """Who comes and goes in a long scenario: as often as in its record of spot instances, or by mean life."""
    scenario, rng = case.scenario, case.rng("lives")
    planned: list[Planned] = []
    if scenario.record:
        changes = read(found(scenario.record))
        for _ in range(scenario.copies):
            shift_s = rng.uniform(*SHIFT_S)
            planned += [
                Planned(change.at_s - shift_s, "join" if change.joins else "take", 0.0)
                for change in changes
                if 0.0 < change.at_s - shift_s < scenario.faults_s
            ]
    if scenario.life_s:
        for kind in ("join", "take"):
            at_s = 0.0
            while (at_s := at_s + rng.expovariate(case.peers / scenario.life_s)) < scenario.faults_s:
                planned.append(Planned(at_s, kind, 0.0))
    return planned


def take(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """One peer dies, later if nobody can be spared now: the record's cluster was another one."""
    node = swarm.victim(rng)
    if node is None:
        swarm.kernel.after(LATER_S, swarm.happen, planned)
    else:
        swarm.kill(node)


def kill(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        swarm.kill(node)


def restart(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """The process dies at once and another one of the same key comes back."""
    node = swarm.victim(rng)
    if node is not None:
        swarm.kill(node)
        swarm.kernel.after(planned.length_s, swarm.boot, (node.key, node.incarnation + 1))


def leave(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        node.away = node.leaving = True
        node.told(Asked(reason="drawn by the simulation"))


def lose(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """Every copy of one stage's state at once: the run must go back to its newest checkpoint by itself."""
    back = rng.random() < 0.7
    for node in swarm.replicas(rng):
        swarm.kill(node)
        if back:
            swarm.kernel.after(planned.length_s * (1 + rng.random()), swarm.boot, (node.key, node.incarnation + 1))


def join(swarm: Swarm, planned: Planned, rng: Random) -> None:
    swarm.keys += 1
    swarm.boot((swarm.keys - 1, 0))


APPLY: dict[str, Callable[[Swarm, Planned, Random], None]] = {
    "kill": kill,
    "restart": restart,
    "leave": leave,
    "join": join,
    "take": take,
    "lose": lose,
}
