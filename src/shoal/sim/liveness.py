"""The demand of progress: a healed run must commit, finish, and have everybody back within the scenario's bounds."""

from __future__ import annotations

from shoal.core.consensus.certificates import can_agree
from shoal.core.leader.evictions import pause_s
from shoal.core.messages import Peer, Phase, View
from shoal.sim.checkers import progress
from shoal.sim.context import Context
from shoal.sim.delivery import Delivery
from shoal.sim.faults.strangers import Strangers
from shoal.sim.node import Node
from shoal.sim.processes import Processes

CHECK_S = 5.0  # between looks at the progress
HOME_BEATS = 90  # after that long without disturbance a peer must belong to the run: retries, a download, a held step
MOST_BLOBS = 12  # blobs that a machine may hold after the last step: those that arrive later are dropped then


class Liveness:
    """`stuck` says why progress cannot be demanded. `veterans`: the processes that lived when the run was over."""

    def __init__(self, context: Context, processes: Processes, delivery: Delivery, strangers: Strangers | None) -> None:
        self.stuck = ""
        self.veterans: list[Node] = []
        self._listed_s: dict[Peer, float] = {}  # when a view had each peer last, by the looks
        self._context = context
        self._processes = processes
        self._delivery = delivery
        self._strangers = strangers

    def begin(self) -> None:
        self._context.kernel.after(CHECK_S, self._look)

    def end(self) -> None:
        """The run has ended: what its checkers still demand."""
        context = self._context
        honest = [node.name for node in self._processes.nodes.values() if node.mask is None]
        context.watch.end(self._processes.finished, honest)
        newest, timeline = context.watch.newest, context.timeline
        assert newest is not None and timeline.over_s is not None and timeline.healed_s is not None
        known = {one.peer for one in newest.members + newest.joining}
        for node in self.veterans:
            if node.mask is not None or (self._strangers is not None and self._strangers.excused(node)):
                continue
            undisturbed_s = timeline.over_s - max(timeline.healed_s, node.process.born_s)
            barred_s = pause_s(newest.evicted, node.name, context.settings)  # two may not have reached it
            if undisturbed_s < HOME_BEATS * context.settings.heartbeat_s + barred_s:
                continue
            if node.condition.leaving:
                self._check_leaver(node.name, newest)
                continue
            out_s = timeline.over_s - self._listed_s.get(
                node.name, 0.0
            )  # it may have been left out of late, for a narrow line
            if node.name not in known and out_s >= HOME_BEATS * context.settings.heartbeat_s + barred_s:
                text = f"lives since {node.process.born_s:.0f} s and is no member of {progress(newest)}"
                context.watch.report(node.name, "home", text)
            blobs = sorted(node.runner.blobs)
            if len(blobs) > MOST_BLOBS:
                context.watch.report(node.name, "leak", f"holds {len(blobs)} blobs after the last step: {blobs[:8]}")

    def _check_leaver(self, name: Peer, view: View) -> None:
        """It was asked to leave longer ago than removal.LEAVE_S, so it is out, unless its stage has nobody else."""
        stage = next((one.stage for one in view.members if one.peer == name), None)
        if stage is not None and sum(one.stage == stage for one in view.members) > 1:
            self._context.watch.report(name, "leaves", f"was asked to leave and is still a member of {progress(view)}")

    def describe(self) -> str:
        """How far the run is, in words."""
        newest = self._context.watch.newest
        nodes = self._processes.nodes.values()
        views = ", ".join(f"{node.name}:{node.view.number if node.view else '-'}" for node in nodes)
        return f"{progress(newest) if newest else 'no view'}; views held: {views}"

    def _look(self, _: object) -> None:
        """Is the run where it should be by now? If not, the simulation ends."""
        kernel, watch = self._context.kernel, self._context.watch
        watch.leavers.look(watch.newest)
        if watch.newest is not None:
            listed = watch.newest.members + watch.newest.joining
            self._listed_s |= dict.fromkeys((one.peer for one in listed), kernel.now)
        text = self._late()
        if text:
            self.stuck = self.hopeless()
            if not self.stuck:
                watch.report("", "progress", f"{text}: {self.describe()}")
            kernel.stop()
        if watch.violations:
            kernel.stop()
        kernel.after(CHECK_S, self._look)

    def _late(self) -> str:
        """Which bound the run has missed; empty: none."""
        context = self._context
        case, scenario, now = context.case, context.case.scenario, context.kernel.now
        timeline = context.timeline
        if timeline.began_s is None:
            if now > scenario.start_s / 2:
                context.network.heal()
            return "the run has not begun" if now > scenario.start_s else ""
        if timeline.over_s is not None or timeline.healed_s is None:
            return ""
        since_s = now - max([timeline.healed_s, *context.watch.commits.times_s[-1:]])
        newest = context.watch.newest
        saves = (
            newest is not None and newest.phase is Phase.SAVING
        )  # at the end, and each copy takes a slow disk's time anew
        if since_s > scenario.progress_s * case.patience * (1 + case.settings.copies if saves else 1):
            return f"no commit for {since_s:.0f} s after healing"
        if now - timeline.healed_s > scenario.finish_s * case.patience:
            return f"not finished {now - timeline.healed_s:.0f} s after healing"
        return ""

    def hopeless(self) -> str:
        """Why no run could go on: fewer peers than stages, or no quorum left."""
        nodes, stages = self._processes.nodes, self._context.case.settings.stages
        for view in self._delivery.current_views():
            alive = [peer for peer in view.voters if peer in nodes]
            if not can_agree(view, alive):
                return f"{len(alive)} of {len(view.voters)} voters live"
            if len(nodes) < stages:
                return f"{len(nodes)} peers live for {stages} stages"
        return self._strangers.alone() if self._strangers is not None else ""
