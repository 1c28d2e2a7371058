"""What goes wrong around peers that live: stopped, cut off, slow, a jumping clock, lies, a full disk.

Each fault ends by itself, at the latest when the swarm heals. Peers that a fault may cost their membership are chosen
like those to be killed, so that the run can always go on without them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

from shoal.core import messages as m
from shoal.sim.faults.churn import Planned

if TYPE_CHECKING:
    from shoal.sim.scenario import Case
    from shoal.sim.swarm import Node, Swarm

GARBLED = (
    m.Forward, m.Backward, m.Output, m.Gradient, m.Recall, m.Cancel, m.Cancelled, m.Query, m.Pending,
    m.Busy, m.Refused,
    m.Boundary, m.Pull, m.Coming, m.Gone, m.Missing, m.ReduceChunk, m.GatherChunk,
    m.Resend, m.ChunkRequest, m.Offer, m.Chunk,
)  # fmt: skip
EXACT = 0.5  # how often as many peers are on one side as on the other
FIELDS = ("epoch", "step", "attempt", "index", "stage", "round", "chunk")


def plan(case: Case) -> list[Planned]:
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
    }
    return [
        Planned(rng.uniform(0.0, end_s), kind, rng.choice((0.5, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.0))
        for kind, count in kinds.items()
        for _ in range(count)
    ]


def garble(message: m.Message, rng: Random) -> m.Message:
    """The message with one number changed into one that means nothing here."""
    if not isinstance(message, GARBLED):
        return message
    fields = [field for field in FIELDS if field in message.__struct_fields__]
    field = rng.choice(fields)
    return msgspec.structs.replace(message, **{field: (getattr(message, field) + rng.choice((1, 3, 1000))) % 4096})


def pause(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        node.away = True
        node.stop()
        swarm.until(planned.length_s, node.resume)


def absent(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """Nobody can reach a stage for a while: its replicas all stand still, or all are cut off from the others."""
    nodes = [node for node in swarm.replicas(rng) if not node.away and not node.stopped]
    if not nodes:
        return
    if rng.random() < 0.5:
        _part(swarm, planned, rng, tuple(node.name for node in nodes), whole=True)
        return
    for node in nodes:
        node.away = True
        node.stop()
        swarm.until(planned.length_s, node.resume)


def halve(swarm: Swarm, planned: Planned, rng: Random) -> None:
    """Two halves: the members of the larger one can go on, or neither's can (then both wait)."""
    names = list(swarm.nodes)
    for _ in range(8):
        exact = rng.random() < EXACT
        small = rng.sample(names, len(names) // 2 if exact else rng.randint(1, max(1, len(names) // 2)))
        if swarm.spares(set(small)) or swarm.balanced(set(small)):
            _part(swarm, planned, rng, tuple(small))
            return


def one_way(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        _part(swarm, planned, rng, (node.name,))


def _part(swarm: Swarm, planned: Planned, rng: Random, small: tuple[str, ...], *, whole: bool = False) -> None:
    rest = [name for name in swarm.nodes if name not in small]
    if len(small) == 1 and not whole and rng.random() < 0.5:  # only some do not hear it: the leader may or may not
        rest = rng.sample(rest, rng.randint(1, len(rest)))
    kind = rng.choice(("both", "in", "out")) if len(small) == 1 and not whole else "both"
    cut(swarm, planned, small, tuple(rest), way=kind)


def cut(swarm: Swarm, planned: Planned, small: tuple[str, ...], rest: tuple[str, ...], *, way: str) -> None:
    """Nothing passes between them for a while: in "both" directions, only "in" to the small side, or only "out" of it."""
    pairs = swarm.network.part((rest, small) if way == "in" else (small, rest), both=way == "both")
    nodes = [swarm.nodes[name] for name in small]
    for node in nodes:
        node.away = True

    def over(_: object) -> None:
        swarm.network.join(pairs)
        for node in nodes:
            node.away = False

    swarm.until(planned.length_s, over)


def slow(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = _anyone(swarm, rng)
    if node is not None and not node.slow:
        usual = node.runner.slowness
        node.runner.slowness = usual * 10
        node.slow = True

        def over(_: object) -> None:
            node.runner.slowness = usual
            node.slow = False

        swarm.until(planned.length_s, over)


def jump(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = _anyone(swarm, rng)
    if node is not None:
        node.jump(planned.length_s)


def full_disk(swarm: Swarm, planned: Planned, rng: Random) -> None:
    storage = swarm.world.storage
    storage.full = True

    def over(_: object) -> None:
        storage.full = False

    swarm.until(planned.length_s, over)


def liar(swarm: Swarm, planned: Planned, rng: Random) -> None:
    node = swarm.victim(rng)
    if node is not None:
        node.away = True
        node.lies = rng.choice((0.05, 0.3, 1.0))

        def over(_: object) -> None:
            node.lies = 0.0
            node.away = False

        swarm.until(planned.length_s, over)


def _anyone(swarm: Swarm, rng: Random) -> Node | None:
    living = [node for node in swarm.nodes.values() if node.lives]
    return rng.choice(living) if living else None


APPLY: dict[str, Callable[[Swarm, Planned, Random], None]] = {
    "pause": pause,
    "absent": absent,
    "halve": halve,
    "one_way": one_way,
    "slow": slow,
    "jump": jump,
    "full_disk": full_disk,
    "liar": liar,
}
