"""Plays a run message by message with the inputs of the aggregated forecaster: `shoal forecast --exact`.

Every peer is its machine of core/, in virtual time (sim/): its hops take the job's seconds, its tensors the job's bytes on its own
lines, each pair of machines has its delay and bandwidth, machines come and go as in the presences. So requests that time out, queues that
are full, routes, votes and downloads beside the work are in it. Not in it: lost messages, faults other than deaths, writing of
checkpoints. Where the seconds went is told by what the view and the rounds say (clock.py), not by a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.core import messages as m
from shoal.core.consensus.certificates import can_agree
from shoal.forecasting.arrivals import HOUR_S
from shoal.forecasting.churn import Presence
from shoal.forecasting.clock import Clock
from shoal.forecasting.crew import no_majority
from shoal.forecasting.forecaster import History, Tally
from shoal.forecasting.job import Job
from shoal.forecasting.models.step_time import MEAN_LATE
from shoal.planner.inputs.cluster import Device
from shoal.sim.checkers import Watch
from shoal.sim.lines import LineRates, Wire, part_values
from shoal.sim.node import Node, Process, Who
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.pace import SECONDS, Pace
from shoal.sim.tasks.storage import Blob

ROUND_TASKS = (m.Cut, m.AddRow, m.Add, m.Gather, m.Apply)
CODED_TASKS = (m.Cut, m.Add, m.Gather)  # each has a third of a round's encoding and decoding
# Incarnations between two machines on one slot: a process that ends itself is started again as the next one
AGAIN = 1000
SETTLED_S = 30.0  # from when the first start; whose machine goes before is not waited for at the beginning
VALUE_BYTES = 12  # of a parameter and its moments


class JobWire(Wire, frozen=True, kw_only=True):
    """Bytes and links of a job. Peers by key: the plan's seats in order."""

    job: Job
    kinds: tuple[int, ...]  # by key
    lengths: tuple[int, ...]  # of each stage's gradient, in values
    chunks: int

    def link(self, source: m.Peer, target: m.Peer) -> tuple[float, float]:
        pair = self.kinds[_key(source)], self.kinds[_key(target)]
        machines = self.job.machines
        return float(machines.delay_s[pair]) / MEAN_LATE, float(machines.bandwidth_Bps[pair]) or math.inf

    def nbytes(self, blob: tuple[Any, ...], chunks: int) -> int:
        """Asked for every tensor that is sent, hence no `match`."""
        seats, kind = self.job.seats, blob[0]
        if kind == "part":
            _, stage, low, high, *_ = blob
            return int((high - low) * seats.gradient_bytes[stage] / self.lengths[stage])
        if kind == "x" and blob[3] == 0:
            return int(seats.tokens_bytes)
        if kind == "state":
            return int(self.job.state_bytes[blob[1][1]] / self.chunks)
        return int(seats.back_bytes if kind == "g" else seats.boundary_bytes)


class JobPace(Pace):
    """Seconds of a peer's tasks; `busy` counts those of hops, by stage, for all peers together."""

    def __init__(self, job: Job, device: Device, kind: int, busy: list[float]) -> None:
        super().__init__(None, job.stages)
        self._job, self._device, self._kind, self._busy = job, device, kind, busy
        usual_s = sum(SECONDS[each] for each in (m.Fetch, m.Cut, m.Add, m.Gather, m.Apply))
        self._round = job.round_s / usual_s  # how much longer a round's own tasks take than the simulator's usual ones
        self._averaged_s = 0.0  # when the round's own thread is idle, with delayed updates

    def seconds(self, task: m.Task, inputs: Sequence[Blob], length: int) -> float:
        job = self._job
        if isinstance(task, (m.RunForward, m.RunBackward)):
            table = job.forward_s if isinstance(task, m.RunForward) else job.backward_s
            seconds = float(table[self._kind, task.stage])
            self._busy[task.stage] += seconds
            return seconds
        if isinstance(task, m.Init) and task.step:
            return SECONDS[m.Init] + job.state_bytes[task.stage] / (
                self._device.disk_Bps or self._device.down_Bps or math.inf
            )
        if not isinstance(task, (*ROUND_TASKS, m.Fetch)):
            return SECONDS[type(task)]
        if isinstance(task, m.Apply):
            return self._round * SECONDS[m.Apply] + job.seats.updating_s
        share = 1.0 if isinstance(task, m.Fetch) else _handled_values(task, inputs) / max(1, length)
        coded_s = job.seats.averaging_codec_s / len(CODED_TASKS) if isinstance(task, CODED_TASKS) else 0.0
        return share * (self._round * SECONDS[type(task)] + coded_s)

    def wait_s(self, task: m.Task, seconds: float, now: float) -> float:
        """With delayed updates what a round brings is added up beside the next step's hops, in a thread of its own (runtime/tasks/)."""
        if not self._job.seats.staleness or task.lane != "average":
            return super().wait_s(task, seconds, now)
        self._averaged_s = max(self._averaged_s, now) + seconds
        return self._averaged_s - now


class _Watch(Watch):
    """Only which view is the newest, and when a round is opened: invariants are for the tests."""

    opens: Callable[[], None]

    def sent(self, peer: m.Peer, to: m.Peer, message: m.Message) -> None:
        if type(message) is m.Round:
            self.opens()

    def agreed(self, peer: m.Peer, view: m.View) -> None:
        if self.newest is None or view.number > self.newest.number:
            if view.last is not None and (self.newest is None or self.newest.last != view.last):
                self.commits.times_s.append(self._now())
            self.newest = view

    def applying(self, peer: m.Peer, view: m.View | None, task: m.Apply) -> None: ...

    def holds(self, peer: m.Peer, epoch: int, stage: int, version: int, digest: str) -> None: ...

    def published(self, peer: m.Peer, step: int, digests: Sequence[str]) -> None: ...


class ExactRun(Swarm):
    """One history. `play` plays it, and goes on from where it ended; `history` says what came of it so far."""

    def __init__(self, job: Job, presences: Sequence[Presence], start_s: float, seed: int) -> None:
        self._job = job
        self._seated = job.seats.seated
        self._key_of = {slot: key for key, slot in enumerate(self._seated)}
        self._presences = [one for one in presences if one.slot in self._key_of]
        self._start_s = start_s
        super().__init__(case_of(job, _gathered(self._presences, job.stages, start_s), seed))
        world = self.context.world
        assert self.case.wire is not None and isinstance(self.case.wire, JobWire)
        world.lengths, world.chunks, world.listed = self.case.wire.lengths, self.case.wire.chunks, False
        self.context.watch = watch = _Watch(self.settings, world, lambda: self.kernel.now)
        watch.opens = self._open
        self.delivery.sample = 1 << 62  # messages are the tests' to encode
        # Connections, when a machine goes; else silence
        self._breaks = job.patience.detection_s < job.patience.heartbeat_timeout_s
        self.delivery.refused = float(self._breaks)
        self.clock = Clock(job)
        self.tally = Tally()
        self._asked: dict[int, tuple[int, float]] = {}  # by key: the incarnation that is there, and when it came
        self._hours = [0.0] * len(job.machines.kinds)  # by kind of machine
        self._redone = 0
        self._hopeless_s = 0.0  # since when nothing can be agreed any more
        self._steps = 1 << 40  # until so many are committed
        self._progress: Callable[[float], None] = lambda now: None
        self._schedule()

    # ------------------------------------------------------------------------------------------------------------ play

    def play(
        self, horizon_s: float, progress: Callable[[float], None] = lambda now: None, steps: int = 1 << 40
    ) -> None:
        """Until the horizon, or until so many steps are committed. `progress` is told every simulated second."""
        view, kernel = self.watch.newest, self.kernel
        if horizon_s < kernel.now or (view is not None and (view.step >= steps or view.finished)):
            return
        self._steps, self._progress, kernel.stopped = steps, progress, False
        kernel.run(until=horizon_s, events=1 << 62)
        if not kernel.stopped:
            kernel.now = horizon_s
        self._spend()
        if self.watch.violations:
            raise RuntimeError(f"the simulation of every message broke an invariant: {self.watch.violations[0]}")

    def history(self, seed: int, horizon_s: float) -> History:
        view, job = self.watch.newest, self._job
        steps = view.step if view is not None else 0
        stuck = ""
        if view is not None:
            stuck = view.failed or self.liveness.hopeless()
            if not can_agree(view, self.nodes) and not view.failed:
                lives = sum(peer in self.nodes for peer in view.voters)
                stuck = no_majority(lives, len(view.voters), self._hopeless_s)
        return History(
            seed=seed,
            seconds=horizon_s,
            steps=steps,
            tokens=steps * job.microbatches * job.tokens,
            parts=self.clock.end(),
            deaths=self.tally.deaths,
            joins=self.tally.joins,
            moves=self.tally.moves,
            lost_stages=self.tally.lost_stages,
            undone_steps=view.account.undone // job.microbatches if view is not None else 0,
            peer_hours=self._peer_hours(),
            sent_bytes=self._sent_bytes(),
            stuck=stuck,
            digest=self.context.history.digest(),
        )

    def _peer_hours(self) -> tuple[float, ...]:
        """By kind of machine, with those that are there."""
        hours = self._hours.copy()
        for key, (_, since_s) in self._asked.items():
            hours[self._kind_of(key)] += (self.kernel.now - since_s) / HOUR_S
        return tuple(hours)

    def _sent_bytes(self) -> tuple[float, ...]:
        """By kind of machine."""
        sent_bytes = [0.0] * len(self._hours)
        for peer, nbytes in self.delivery.sent_bytes.items():
            sent_bytes[self._kind_of(_key(peer))] += nbytes
        return tuple(sent_bytes)

    @property
    def seconds(self) -> float:
        """From the beginning of training to the newest commit."""
        times_s, began_s = self.watch.commits.times_s, self.context.timeline.began_s
        return times_s[-1] - began_s if times_s and began_s is not None else 0.0

    def _second(self, _: object) -> None:
        self._progress(self.kernel.now)
        self.kernel.after(1.0, self._second)

    def _kind_of(self, key: int) -> int:
        return self._job.machines.kind_of[self._seated[key]]

    # ------------------------------------------------------------------------------------------------- coming and going

    def _schedule(self) -> None:
        incarnations = Counter[int]()
        for change in self._presences:
            key = self._key_of[change.slot]
            if not change.joins:
                self.kernel.at(change.at_s, self._go, key)
                continue
            who = key, incarnations[key] * AGAIN
            if not incarnations:
                self.processes.founders = {who}
            incarnations[key] += 1
            self.kernel.at(change.at_s, self._come, who)
        self.kernel.after(0.0, self._second)

    def _come(self, who: Who) -> None:
        self._asked[who[0]] = who[1], self.kernel.now
        self.kernel.after(self._start_s, self._start, who)

    def _start(self, who: Who) -> None:
        if self._asked.get(who[0], (-1, 0.0))[0] == who[1]:
            self.tally.joins += 1
            self.boot(who)

    def _go(self, key: int) -> None:
        self._spend()
        _, since_s = self._asked.pop(key)
        self._hours[self._kind_of(key)] += (self.kernel.now - since_s) / HOUR_S
        for node in list(self.nodes.values()):
            if node.process.key == key:
                self.tally.deaths += 1
                self.kill(node)
                if self._breaks:
                    self._break(node.name)
        view = self.watch.newest
        if view is not None and view.started and not self._hopeless_s and not can_agree(view, self.nodes):
            self._hopeless_s = self.kernel.now

    def _break(self, gone: m.Peer) -> None:
        """What a process leaves behind are broken connections: everybody is told, its own delay later."""
        assert self.case.wire is not None
        for name, node in self.nodes.items():
            link = self.case.wire.link(gone, name)
            self.kernel.after(link[0] if link else 0.0, node.receive, m.Unreachable(gone))

    def boot(self, who: Who) -> None:
        if who[0] in self._asked:  # a process that ended itself is started again only where its machine still is
            super().boot(who)

    # ------------------------------------------------------------------------------------------------------------ looks

    def _new_node(self, process: Process) -> Node:
        node = super()._new_node(process)
        kind = self._kind_of(process.key)
        node.runner.pace = JobPace(self._job, self._job.machines.kinds[kind], kind, self.clock.busy)
        return node

    def _begin_faults(self) -> None:
        self.context.timeline.began_s = self.kernel.now

    def _open(self) -> None:
        """A leader asks for a round."""
        if not self.clock.round_open:
            self._spend()
            self.clock.round_open, self.clock.failed = True, False

    def agreed(self, node: Node, view: m.View) -> None:
        before = self.watch.newest
        if before is None or view.number > before.number:
            self._spend()
            if before is not None:
                self._look(before, view)
        super().agreed(node, view)
        if view.step >= self._steps:
            self.kernel.stop()

    def _look(self, before: m.View, view: m.View) -> None:
        clock = self.clock
        if view.epoch > before.epoch and not view.kept:
            self.tally.lost_stages += 1
            clock.back(view.step)
        elif view.last is not None and view.last != before.last:
            clock.commit(view, view.account.redone - self._redone)
            self._redone = view.account.redone
        elif clock.round_open and view.members != before.members:
            clock.round_open, clock.failed = False, True  # a round that lists who is gone ends
        stage_of = {one.peer: one.stage for one in before.members}
        self.tally.moves += sum(
            one.stage != stage_of.get(one.peer, one.stage) and one not in before.joining for one in view.joining
        )

    def _spend(self) -> None:
        self.clock.spend(self.kernel.now, self.watch.newest, set(self.nodes))


def _settings_of(job: Job) -> m.Settings:
    """The run's, or what the job says where it knows no run."""
    patience = job.patience
    return job.settings or m.Settings(
        stages=job.stages,
        microbatches=job.microbatches,
        steps=1,
        heartbeat_s=patience.heartbeat_s,
        heartbeat_timeout_s=patience.heartbeat_timeout_s,
        lost_stage_wait_s=patience.lost_stage_wait_s,
        home=job.stages == 1,
    )


def _planned_of(job: Job) -> dict[str, Any]:
    """Settings that say what the plan says."""
    seats, machines = job.seats, job.machines
    seat_of = {slot: seat for seat, slot in enumerate(seats.seated)}
    routes = [seats.routes[slot] for slot in seats.seated] if seats.routes else []
    return {
        "stage_seconds": tuple(
            max(float(job.hop_s[machines.kind_of[slot], stage]) for slot in seats.replicas(stage))
            for stage in range(job.stages)
        ),
        "seats": tuple(job.stage_of[slot] for slot in seats.seated),
        "routes": tuple(tuple(tuple(seat_of[device] for device in turns) for turns in each) for each in routes),
        "line_rates": tuple(seats.line_rates[slot] for slot in seats.seated) if seats.line_rates else (),
    }


def case_of(job: Job, peers: int, seed: int) -> Case:
    """`peers`: training begins when so many are there."""
    seats, machines = job.seats, job.machines
    seated = seats.seated
    lengths = tuple(max(1, round(nbytes / VALUE_BYTES)) for nbytes in job.state_bytes)
    settings = msgspec.structs.replace(
        _settings_of(job),
        **_planned_of(job),
        stages=job.stages,
        home=job.stages == 1 and not seats.routes,
        microbatches=job.microbatches,
        steps=int(job.steps) if math.isfinite(job.steps) else 1 << 40,
        peers=peers,
        inflight=seats.inflight,
        queue_limit=seats.queue_limit,
        probation=0,  # its machines come by their owner's invite, not as strangers
        save_every=job.save_every,
        save_last=False,
        staleness=seats.staleness,
        heldout=0,
        heldout_every=0,
        patience=0,
        tokens=0,
        place="",
        copies=1,
    )
    kinds = tuple(machines.kind_of[slot] for slot in seated)
    wire = JobWire(
        lines=tuple(LineRates(machines.kinds[kind].up_Bps, machines.kinds[kind].down_Bps) for kind in kinds),
        boundary_values=1,
        gradient_values=lengths[0],
        job=job,
        kinds=kinds,
        lengths=lengths,
        chunks=job.state_chunks,
    )
    endless = Scenario(name="forecast", start_s=math.inf, progress_s=math.inf, finish_s=math.inf)
    return Case(
        scenario=endless,
        seed=seed,
        settings=settings,
        peers=len(seated),
        speeds=(1.0,),
        forward_s=1.0,
        messages=Messages(),
        happenings=Happenings(),
        wire=wire,
    )


def forecast_exact(
    job: Job,
    presences: Sequence[Presence],
    start_s: float,
    horizon_s: float,
    seed: int,
    progress: Callable[[float], None] = lambda now: None,
) -> History:
    """One seed's run until the horizon, message by message."""
    run = ExactRun(job, presences, start_s, seed)
    run.play(horizon_s, progress)
    return run.history(seed, horizon_s)


def _handled_values(task: m.Task, inputs: Sequence[Blob]) -> int:
    """Values of the gradient that a task of a round reads or writes: as many as the gradient has, for all tasks of a kind together."""
    if isinstance(task, m.Cut):
        return int(task.bounds[-1] - task.bounds[0])
    parts = inputs[: len(task.sums)] if isinstance(task, m.Gather) else inputs
    return sum(map(part_values, parts))


def _key(peer: m.Peer) -> int:
    """`p7.2` is the third process of key 7."""
    return int(peer[1 : peer.index(".")])


def _gathered(presences: Sequence[Presence], stages: int, start_s: float) -> int:
    """Who is waited for before training begins: the machines that are there first, but for those that go at once."""
    first_s = min((one.at_s for one in presences if one.joins), default=0.0)
    there = {one.slot for one in presences if one.joins and one.at_s <= first_s}
    settled_s = first_s + start_s + SETTLED_S
    soon = {one.slot for one in presences if not one.joins and one.at_s <= settled_s}
    return max(stages, len(there - soon))
