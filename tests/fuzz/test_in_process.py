"""Whole peers in one process, and somebody who sends them every message with each field at each of its edges while they train."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.runtime.test_node import TINY, Swarm, text  # noqa: F401  every test has its file of text

from shoal.core import messages as m
from shoal.runtime.measure import MOST_BYTES
from shoal.sim.faults import edges
from shoal.sim.faults.strangers import coups
from shoal.transport.base import Blob
from shoal.transport.emulated.memory import MemoryTransport

changed = msgspec.structs.replace
# With seconds of silence: a peer that an attack has thrown out comes back by itself or not at all.
CONFIG = changed(TINY, run=changed(TINY.run, steps=24, heartbeat_timeout_s=4.0))
AT_ONCE = 40  # attacks between two times that the peers have their turn
VALUES = Blob("float32", (4,), bytes(16))


def outsider(swarm: Swarm, kinds: tuple[type[m.Message], ...]) -> Iterator[tuple[m.Peer, m.Message]]:
    """Each attack once, each at another peer than the one before; what is known when it is its turn."""
    names = itertools.cycle(swarm.names)

    def facts() -> edges.Facts:
        leading = next((node for node in swarm.nodes if node.machine.leading), swarm.nodes[0])
        view = leading.machine.view
        assert view is not None
        return edges.Facts("z" * 32 + ".9", next(names), view, leading.machine.register.term)

    for attack in coups(facts()):
        yield next(names), attack
    for kind in kinds:
        for _, attack in edges.attacks(kind, facts()):
            yield next(names), attack


async def attacked(swarm: Swarm, kinds: tuple[type[m.Message], ...]) -> tuple[list[m.Finish], int]:
    stranger = MemoryTransport(swarm.hub, "z" * 32 + ".9")
    sent = 0

    async def attack() -> None:
        nonlocal sent
        await stranger.start()
        while not all(node.machine.view is not None and node.machine.view.started for node in swarm.nodes):
            await asyncio.sleep(0.01)
        for to, message in outsider(swarm, kinds):
            if isinstance(message, m.Ping) and message.answer_bytes > MOST_BYTES // 64:
                continue  # what a visitor may ask for; not here
            with contextlib.suppress(ValueError):  # longer than its kind may be, which no receiver would read
                stranger.send(to, message)
                if isinstance(message, m.BULK):
                    stranger.send(to, message, (VALUES,))
            sent += 1
            if sent % AT_ONCE == 0:
                await asyncio.sleep(0)
                unmoved(swarm, message)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(swarm.run())
        attacking = group.create_task(attack())
        finishes = await running
        assert attacking.done(), f"the run is over and {sent} attacks are sent: let it have more steps"
    return finishes, sent


def unmoved(swarm: Swarm, message: m.Message) -> None:
    """Nobody follows the stranger, or believes it that time has passed: said at once, for a run that is lost does not end."""
    for node in swarm.nodes:
        register = node.machine.register
        where = f"{node.machine.name[:6]}, after {message!r:.300}"
        assert register.term < 100, f"term {register.term} at {where}"
        assert register.leader is None or register.leader in swarm.names, f"{register.leader} leads {where}"
        view = node.machine.view
        assert view is None or (view.epoch == 0 and view.number < 1000), f"view {view!r:.300} at {where}"


@pytest.mark.parametrize("quarter", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_an_outsider_neither_ends_nor_stops_nor_crashes_a_run(quarter: int, tmp_path: Path) -> None:
    swarm = Swarm(CONFIG, tmp_path)
    for _ in range(CONFIG.run.peers):
        swarm.add()
    finishes, sent = asyncio.run(attacked(swarm, edges.KINDS[quarter::4]))
    swarm.close()
    assert sent > 300
    assert all(finish.ok for finish in finishes)
    totals = swarm.books().totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.issued, totals.committed) == (24, 96, 96)
    assert all(record.views[-1].finished for record in swarm.records)
