"""The fault injector: what every fault of a simulation works with, and whom a fault may hit.

A fault is a function `(injector, planned, rng)`; churn.py, faults.py and strikes.py have them. A fault hits a peer only if the run can
go on without it: the survivors keep a majority of the voters, and every stage keeps a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import msgspec

from shoal.core import messages as m
from shoal.core.consensus import certificates
from shoal.sim.context import Context
from shoal.sim.delivery import Delivery
from shoal.sim.node import Node
from shoal.sim.processes import Processes
from shoal.sim.tasks.storage import Storage

LEADER = 0.3  # how often the leader is chosen before all others


class PlannedFault(msgspec.Struct, frozen=True):
    """A fault that happens `at_s` after training has begun; it lasts `length_s` where that means anything."""

    at_s: float
    kind: str
    length_s: float


def planned_faults(
    counts: Mapping[str, int], end_s: float, rng: Random, length_s: Callable[[], float]
) -> list[PlannedFault]:
    """So many faults of each kind, each at a time before `end_s`, as long as `length_s` draws."""
    return [
        PlannedFault(rng.uniform(0.0, end_s), kind, length_s()) for kind, count in counts.items() for _ in range(count)
    ]


class Trap(msgspec.Struct):
    """Waits for a peer that is about to do what `kind` names; lets `skip` such moments pass. `length_s`: of a fault that it survives."""

    kind: str
    skip: int
    length_s: float = 0.0


class Injector:
    """Carries out the planned faults until the network heals. `restart_run`: what the fault "wipes" calls, false: not now."""

    def __init__(
        self,
        context: Context,
        processes: Processes,
        delivery: Delivery,
        faults: Mapping[str, Fault],
        restart_run: Callable[[], bool],
    ) -> None:
        self.context = context
        self.processes = processes
        self.traps: list[Trap] = []
        self.restart_run = restart_run
        self._delivery = delivery
        self._faults = faults
        self._ends: list[Callable[[None], None]] = []

    # ------------------------------------------------------------------------------------------------------ carrying out

    def happen(self, planned: PlannedFault) -> None:
        """The fault begins, unless everything has healed."""
        if self.context.timeline.healed_s is None:
            self.context.note(f"====== {planned.kind} for {planned.length_s:.1f} s")
            self._faults[planned.kind](self, planned, self.context.chance)

    def retry(self, planned: PlannedFault, after_s: float) -> None:
        """Nobody can be spared for it now."""
        self.context.kernel.after(after_s, self.happen, planned)

    def until(self, seconds: float, end: Callable[[None], None]) -> None:
        """End a fault after that time, or at healing if that is earlier."""
        self.context.kernel.after(seconds, end)
        self._ends.append(end)

    def fill(self, storage: Storage, seconds: float) -> None:
        """No write succeeds there for so long."""
        storage.full = True

        def over(_: object) -> None:
            storage.full = False

        self.until(seconds, over)

    def heal(self) -> None:
        """End all faults."""
        self.traps.clear()
        for end in self._ends:
            end(None)

    def reboot(self, node: Node, after_s: float) -> None:
        """Another process of the same key starts then."""
        self.context.kernel.after(after_s, self.processes.boot, node.process.successor)

    # ------------------------------------------------------------------------------------------------------ choosing

    def victim(self, rng: Random) -> Node | None:
        """A living peer that the run can lose, or None."""
        happenings = self.context.case.happenings
        # A stage that may be lost at once may be lost bit by bit
        whole = not (happenings.losses or happenings.absences)
        candidates = [node for node in self.processes.nodes.values() if node.available]
        rng.shuffle(candidates)
        if rng.random() < LEADER:
            candidates.sort(key=lambda node: not node.machine.leading)
        return next((node for node in candidates if self.spares({node.name}, whole)), None)

    def spares(self, lost: set[m.Peer], whole: bool = True) -> bool:
        """Without these peers the newest views keep a majority of voters, and (`whole`) a replica of every stage."""
        stages = self.context.case.settings.stages
        for view in self._delivery.current_views():
            left = [one for one in view.members if self._available(one.peer) and one.peer not in lost]
            votes = sum(self._available(peer) and peer not in lost for peer in view.voters)
            if 2 * votes <= len(view.voters) + 1:
                return False
            if whole and view.started and len({one.stage for one in left}) < stages:
                return False
        return len(self.processes.nodes) - len(lost) >= stages

    def replicas(self, rng: Random) -> list[Node]:
        """Every process that holds the state of one stage, drawn; none if the run cannot lose them all at once."""
        nodes, stages = self.processes.nodes, self.context.case.settings.stages
        stage = rng.randrange(stages)
        views = self._delivery.current_views()
        holders = {one.peer for view in views for one in view.members + view.joining if one.stage == stage}
        if not self.spares(holders, whole=False) or len(nodes) - len(holders) < stages:
            return []
        return [node for node in nodes.values() if node.name in holders]

    def balanced(self, half: set[m.Peer]) -> bool:
        """These peers are half of the voters, so that the casting vote decides, and all voters are available."""
        views = self._delivery.current_views()
        return bool(views) and all(
            all(self._available(peer) for peer in view.voters)
            and 2 * sum(peer in half for peer in view.voters) == len(view.voters)
            for view in views
        )

    def half(self, rng: Random) -> list[m.Peer]:
        """Half of the voters, drawn, without whom the casting voter and the other half can go on; nobody if there is none."""
        views, nodes = self._delivery.current_views(), self.processes.nodes
        if len(views) != 1 or not self.balanced(set(views[0].voters[: len(views[0].voters) // 2])):
            return []
        view = views[0]
        casting = certificates.casting_voter(view.voters, view.founder)
        if not casting or len(nodes) - len(view.voters) // 2 < self.context.case.settings.stages:
            return []
        return rng.sample([peer for peer in view.voters if peer != casting], len(view.voters) // 2)

    def _available(self, peer: m.Peer) -> bool:
        node = self.processes.nodes.get(peer)
        return node is not None and node.available


Fault = Callable[[Injector, PlannedFault, Random], None]
