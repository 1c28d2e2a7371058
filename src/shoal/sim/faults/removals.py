"""Peers that a simulated run removed while they lived: whom, when, why, and whether a fault had its hands on it.

For tests and benchmarks: where nobody lies, no peer is to be convicted that no fault has touched.
"""

from __future__ import annotations

import msgspec

from shoal.core.messages import Peer, View
from shoal.core.names import key_of
from shoal.sim.node import Node
from shoal.sim.scenarios.scenario import Case
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.task_runner import UNLIKE

RECENT_S, LOOK_S = 30.0, 0.5  # a fault is remembered for so long, and looked for so often


NARROW = "is not needed: its line"  # rules/lines.py: it may not join for a while, and has done nothing wrong


class Removed(msgspec.Struct, frozen=True):
    """A process that lived. `disturbed`: lately a fault touched it (stopped, cut off from whoever leads, ten times slower, its messages
    garbled, other bits in its optimizer). `convicted`: for what it did, and not for silence alone."""

    peer: Peer
    at_s: float
    disturbed: bool
    convicted: bool
    why: str


class WatchedSwarm(Swarm):
    """Writes down who is removed while it lives."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.disturbed_s: dict[Peer, float] = {}
        self.known: dict[Peer, Node] = {}
        self.removed: list[Removed] = []
        self.newest: View | None = None
        self.kernel.after(LOOK_S, self._look)

    def _look(self, _: object) -> None:
        leading = [name for name, node in self.nodes.items() if node.machine.leading]
        for pair in self.network.cut:
            if pair[0] in leading or pair[1] in leading:
                self.disturbed_s.update(dict.fromkeys((one for one in pair if one not in leading), self.kernel.now))
        for name, node in self.nodes.items():
            self.known[name] = node
            if self._disturbed(node):
                self.disturbed_s[name] = self.kernel.now
        self.kernel.after(LOOK_S, self._look)

    def _disturbed(self, node: Node) -> bool:
        condition = node.condition
        other = node.runner.digest.startswith(UNLIKE)  # what it once computed otherwise is in its parameters
        return not node.available or condition.slow or condition.leaving or condition.lies > 0.0 or other

    def agreed(self, node: Node, view: View) -> None:
        before = self.newest
        if before is None or view.number > before.number:
            self.newest = view
            if before is not None and not view.finished and view.epoch == before.epoch:
                self._compare(before, view)
        super().agreed(node, view)

    def _compare(self, before: View, view: View) -> None:
        absent = {one.peer for one in before.members + before.joining} - {
            one.peer for one in view.members + view.joining
        }
        times = [{one.key: one.times for one in of.evicted} for of in (before, view)]
        for peer in sorted(absent):
            node = self.nodes.get(peer)
            if node is None or not node.lives or node.condition.leaving:
                continue
            disturbed = self._disturbed(node) or self.kernel.now - self.disturbed_s.get(peer, -RECENT_S) < RECENT_S
            key = key_of(peer)
            why = why_of(peer, view.reason)
            convicted = times[1].get(key, 0) > times[0].get(key, 0) and NARROW not in why
            self.removed.append(Removed(peer, self.kernel.now, disturbed, convicted, why))


def why_of(peer: Peer, reason: str) -> str:
    """What a view's reason says of that peer."""
    return next((part for part in reason.split("; ") if part.startswith(peer)), reason)
