"""The processes of a simulation: who lives, under which name; starting and killing them."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core import messages as m
from shoal.sim.context import Context
from shoal.sim.node import Node, Process, Who


class Processes:
    """`nodes` are the living processes by name, in the order in which they began. `keys`: how many keys are in use."""

    def __init__(self, context: Context, new_node: Callable[[Process], Node]) -> None:
        self.nodes: dict[m.Peer, Node] = {}
        self.finished: list[m.Peer] = []  # whose machine ended with the run
        self.booted = 0
        self.keys = max([context.case.peers, *(one.key + 1 for one in context.case.hostile)])
        self.died_s: dict[m.Peer, float] = {}
        self.founders: set[Who] = {(0, 0)}
        self._context = context
        self._new_node = new_node
        self.on_death: Callable[[m.Peer], None] = lambda _: None
        self._ended_s = 0.0  # seconds that all dead processes have lived

    def boot(self, who: Who) -> None:
        """Start a process, unless the run is over."""
        if self._context.over:
            return
        self.booted += 1
        key, incarnation = who
        process = Process(key, incarnation, self.booted, self._context.kernel.now, who in self.founders)
        node = self._new_node(process)
        self.nodes[node.name] = node
        node.receive(m.Tick())

    def boot_new(self) -> None:
        """Start a process with a key of its own."""
        self.keys += 1
        self.boot((self.keys - 1, 0))

    def kill(self, node: Node) -> None:
        node.lives = False
        self.died_s[node.name] = self._context.kernel.now
        if self.nodes.pop(node.name, None) is not None:
            self._ended_s += self._context.kernel.now - node.process.born_s
            self.on_death(node.name)

    def kill_all(self) -> None:
        for node in list(self.nodes.values()):
            self.kill(node)
        self.finished = []

    def boot_all(self) -> None:
        """Start the same command again: as many peers as at first, under names never used before."""
        incarnation = 1 + max(self.booted, 1000)
        self.founders = {(0, incarnation)}
        for key in range(self._context.case.peers):
            self._context.kernel.after(0.1 * key, self.boot, (key, incarnation))

    def lived_s(self) -> float:
        """Seconds that all processes have lived, added up."""
        now = self._context.kernel.now
        return self._ended_s + sum(now - node.process.born_s for node in self.nodes.values())
