"""One simulation: a drawn case, its processes and network, the faults until healing; `simulate` is the way in.

In the first phase faults happen and only safety is demanded; then everything heals and the run must progress and finish within the
scenario's bounds. The parts: node.py (a process), processes.py (who lives), delivery.py (messages), faults/injector.py (faults),
liveness.py (progress), context.py (what they share).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shoal.core import messages as m
from shoal.sim.checkers import Violation, Watch
from shoal.sim.context import Context, Recorder, Values
from shoal.sim.delivery import Delivery
from shoal.sim.faults import churn, faults, strikes
from shoal.sim.faults.injector import Fault, Injector
from shoal.sim.faults.strangers import Strangers
from shoal.sim.kernel import Kernel
from shoal.sim.liveness import Liveness
from shoal.sim.network import CLEAN, Network
from shoal.sim.node import REBOOT_S, Node, Process, Who
from shoal.sim.processes import Processes
from shoal.sim.readers import Readers
from shoal.sim.scenarios.catalogue import load
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Scenario
from shoal.sim.tasks.task_runner import World

AFTERWARDS_S = 60.0  # that a simulation goes on after the run is over
HAPPEN: dict[str, Fault] = {**churn.APPLY, **faults.APPLY, **strikes.APPLY}


class Outcome(msgspec.Struct, frozen=True):
    """`digest` is the same whenever scenario, seed and program are. `stuck` says why progress could not be demanded."""

    digest: str
    violations: tuple[Violation, ...]
    committed: int
    redone: int
    virtual_s: float
    events: int
    stuck: str = ""
    node_hours: float = 0.0
    struck: dict[str, int] = {}  # by kind: aimed faults (strikes.py) and hostile acts (strangers.py)
    wronged: tuple[str, ...] = ()  # honest peers that were evicted though they lived (strangers.py)
    texts: tuple[tuple[int, int], ...] = ()  # of each client's text: tokens added, times that it was sent again
    evicted: dict[str, list[float]] = {}  # hostile peers: seconds from each beginning to the eviction


class Swarm:
    """All of one simulation. Put together here: its parts know one another only through what they are given."""

    def __init__(self, case: Case, record: Recorder | None = None) -> None:
        self.context = Context(case, record)
        self.processes = Processes(self.context, self._new_node)
        self.delivery = Delivery(self.context, self.processes)
        self.injector = Injector(self.context, self.processes, self.delivery, HAPPEN, self.restart_run)
        self.strangers = Strangers(self.context, self.processes, self.delivery) if case.hostile else None
        if self.strangers is not None:
            self.delivery.swallows = self.strangers.swallows
        self.readers = Readers(self.context, self.processes, self.delivery)
        self.liveness = Liveness(self.context, self.processes, self.delivery, self.strangers)
        self._committed_before = 0  # steps, before the run was started again

    @property
    def case(self) -> Case:
        return self.context.case

    @property
    def settings(self) -> m.Settings:
        return self.context.settings

    @property
    def kernel(self) -> Kernel:
        return self.context.kernel

    @property
    def network(self) -> Network:
        return self.context.network

    @property
    def watch(self) -> Watch:
        return self.context.watch

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def nodes(self) -> dict[m.Peer, Node]:
        return self.processes.nodes

    # -------------------------------------------------------------------------------------------------- the whole

    def run(self) -> Outcome:
        """Play the case to its end."""
        case, kernel = self.case, self.kernel
        rng = case.rng("boot")
        self.network.faults = case.messages if case.messages != CLEAN else CLEAN  # CLEAN itself is quicker
        self.boot((0, 0))
        for key in range(1, case.peers):
            kernel.at(rng.uniform(0.0, 2.0), self.boot, (key, 0))
        self.liveness.begin()
        most = case.scenario.events
        kernel.run(until=float("inf"), events=most)
        watch = self.watch  # another one if the run was started again
        if kernel.events >= most:
            watch.report("", "progress", f"{most} events and no end: {self.liveness.describe()}")
        elif not self.liveness.stuck and not watch.violations:
            self.liveness.end()
        return self._outcome()

    def restart_run(self) -> bool:
        """Every process is killed and the same command started again: it resumes from the newest checkpoint.

        False if the run is over, or nothing would be left to do."""
        published = self.world.readable()
        first_step = max(published, default=self.settings.first_step)
        if self.context.over or first_step >= self.settings.steps:
            return False
        self.processes.kill_all()
        self._committed_before += len([step for _, step in self.watch.commits.known if step < first_step])
        self.context.restart(first_step, published.get(first_step, ()))
        self.delivery.forget_proposals()
        self.heal(None)
        self.processes.boot_all()
        return True

    def heal(self, _: object) -> None:
        """All faults end, and none follows."""
        timeline = self.context.timeline
        if timeline.healed_s is not None:
            return
        timeline.healed_s = self.kernel.now
        self.network.heal()
        if self.strangers is not None:
            self.strangers.heal()
        self.injector.heal()
        self.context.note("====== healed")

    def _begin_faults(self) -> None:
        kernel, case = self.kernel, self.case
        self.context.timeline.began_s = kernel.now
        self.readers.begin()
        for planned in [*churn.plan(case), *churn.lives(case), *faults.plan(case), *strikes.plan(case)]:
            kernel.after(planned.at_s, self.injector.happen, planned)
        kernel.after(case.scenario.faults_s, self.heal)
        if self.strangers is not None:
            self.strangers.begin()

    def _outcome(self) -> Outcome:
        newest = self.watch.newest
        return Outcome(
            digest=self.context.history.digest(),
            violations=tuple(self.watch.violations),
            committed=self._committed_before + len(self.watch.commits.known),
            redone=newest.account.redone if newest is not None else 0,
            virtual_s=self.kernel.now,
            events=self.context.history.events,
            stuck=self.liveness.stuck,
            node_hours=self.processes.lived_s() / 3600,
            struck=self.context.struck,
            texts=self.readers.outcome(),
            wronged=tuple(self.strangers.wronged) if self.strangers is not None else (),
            evicted=self.strangers.evicted if self.strangers is not None else {},
        )

    def _new_node(self, process: Process) -> Node:
        node = Node(self.context, self, process)
        if self.strangers is not None:
            self.strangers.put_on(node)
        return node

    # ---------------------------------------------------------------------------------------- what a node needs (Host)

    def boot(self, who: Who) -> None:
        self.processes.boot(who)

    def kill(self, node: Node) -> None:
        self.processes.kill(node)

    def names(self) -> list[m.Peer]:
        return list(self.processes.nodes)

    def carry(self, source: m.Peer, target: m.Peer, message: m.Message, values: Values, *, honest: bool = True) -> None:
        self.delivery.carry(source, target, message, values, honest=honest)

    def withdraw(self, source: m.Peer, voids: Callable[[m.Peer, m.Message], bool]) -> None:
        self.delivery.withdraw(source, voids)

    def trapped(self, node: Node, commands: Sequence[m.Command]) -> int | None:
        """How many of these commands the node carries out before it dies; None: all, and it lives."""
        return strikes.sprung(self.injector, node, commands) if self.injector.traps else None

    def proposed(self, view: m.View) -> None:
        """A machine that leads proposes that view."""
        if self.strangers is not None:
            self.strangers.propose(view)

    def agreed(self, node: Node, view: m.View) -> None:
        """An honest peer has a view that is new to it."""
        timeline = self.context.timeline
        self.watch.agreed(node.name, view)
        if self.strangers is not None:
            self.strangers.agreed(node, view)
        if timeline.began_s is None and view.started:
            self._begin_faults()
        if view.finished and timeline.over_s is None:
            timeline.over_s = self.kernel.now
            self.liveness.veterans = list(self.nodes.values())
            self.kernel.after(AFTERWARDS_S, lambda _: self.kernel.stop())
            self.heal(None)

    def ended(self, node: Node) -> None:
        """A machine has finished: its process ends, and if it was not the run's end another one takes its place."""
        assert node.finish is not None
        self.kill(node)
        if node.mask is not None and not self.context.over:
            self.kernel.after(REBOOT_S, self.boot, node.process.successor)
        elif node.finish.ok:
            newest = self.watch.newest
            if node.mask is None and not node.condition.leaving and not (newest is not None and newest.finished):
                self.watch.report(node.name, "ended", f"ends before the run does: {node.finish.reason}")
            self.processes.finished.append(node.name)
            if all(other.mask is not None for other in self.nodes.values()):
                self.kernel.stop()
        else:
            self.kernel.after(2.0, self.boot, node.process.successor)


def simulate(scenario: Scenario | str, seed: int, record: Recorder | None = None) -> Outcome:
    """Run one seed of a scenario to its end."""
    drawn = draw(load(scenario) if isinstance(scenario, str) else scenario, seed)
    return Swarm(drawn, record).run()
