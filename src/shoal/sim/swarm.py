"""One simulation: a drawn case, its nodes and network, the faults until healing; `simulate` is the way in.

A node does for a machine what runtime/node.py does on a real peer, on virtual time. In the first phase faults happen
and only safety is demanded; then everything heals and the run must progress and finish within the scenario's bounds.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec

from shoal.core import messages as m
from shoal.core.consensus import certificates
from shoal.core.peer import PeerMachine
from shoal.sim.checkers import Violation, Watch, progress
from shoal.sim.faults import churn, faults, strikes
from shoal.sim.faults.strangers import AGAIN_S, Strangers
from shoal.sim.kernel import Kernel
from shoal.sim.lines import Wire
from shoal.sim.network import CLEAN, Network
from shoal.sim.scenario import Case, Scenario, draw, load
from shoal.sim.task_runner import BAD, CHUNKS, Blob, TaskRunner, World, overflown

SPINS = 50  # Ticks in a row at one moment after which a machine is said to spin
SAMPLE = 61  # every so many messages one is encoded, decoded and compared
SAMPLE_HOSTILE = 7  # the same where somebody tries to make them other messages
STRANGER = "stranger.0"
LEADER = 0.3  # how often the leader is chosen before all others
CHECK_S = 5.0  # between looks at the progress
HOME_BEATS = 90  # after that long without disturbance a peer must belong to the run: retries, a download, a held step
KEPT = 12  # blobs that a machine may hold after the last step: what is on its way is dropped when it comes
Parcel = tuple[m.Peer, m.Peer, m.Message, tuple[Blob, ...]]  # from, to
Record = Callable[[float, m.Peer, m.Event, list[m.Command]], None]


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
    struck: dict[str, int] = {}  # of what strikes.py does
    wronged: tuple[str, ...] = ()  # honest peers that were evicted though they lived (strangers.py)
    evicted: dict[str, list[float]] = {}  # hostile ones, and how many seconds after they began, or came back


class Node:
    """One process: its machine, task runner and clock. `away`: its membership is at risk, do not rely on it. `mask`: it is hostile, and no
    checker listens to it."""

    def __init__(self, swarm: Swarm, key: int, incarnation: int, found: bool) -> None:
        case = swarm.case
        self.swarm, self.key, self.incarnation = swarm, key, incarnation
        self.name = f"p{key}.{incarnation}"
        self.serial = swarm.booted
        self.found = found
        self.machine = PeerMachine(self.name, swarm.settings_of(key), case.rng(self.name), found)
        self.runner = TaskRunner(swarm.world, self._later, self._clock)
        self.runner.forward_s, self.runner.backward = case.forward_s, case.scenario.backward
        self.runner.rounds, self.runner.states = case.rounds, case.states
        self.runner.slowness = case.speeds[key % len(case.speeds)]
        self.runner.fails = swarm.fails
        self.lives = True
        self.mask = swarm.strangers.mask_of(key, self) if swarm.strangers is not None else None
        self.away = swarm.strangers is not None and key in swarm.strangers.by_key
        self.stopped = False
        self._held: list[tuple[Callable[[Any], None], Any]] = []  # what ends while the process is stopped
        self.finish: m.Finish | None = None
        self.lies = 0.0
        self.slow = False
        self.born_s = swarm.kernel.now
        self.leaving = False
        self.view: m.View | None = None
        self._ahead_s = 0.0  # of its clock
        self._missed: list[m.Event] = []
        self._armed: float | None = None  # kernel time of the next wanted call of _ring
        self._names = 0
        self._spins = 0
        self._spun_at = -1.0

    # ---------------------------------------------------------------------------------------------- from outside

    def told(self, event: m.Event) -> None:
        """Something happened to this peer."""
        if not self.lives:
            return
        if self.stopped:
            self._missed.append(event)
            return
        self._handle(event)

    def deliver(self, source: m.Peer, message: m.Message, values: tuple[Blob, ...]) -> None:
        """Every message to this peer comes through here."""
        checked = certificates.checked(self.name, source, message, _holds)
        if checked is None:
            return
        message = checked
        if values:
            bad = any(value is BAD or overflown(value) for value in values)
            refs = () if bad else tuple(m.BlobRef(self._keep(value), 100) for value in values)
            self.told(m.Received(source, message, refs, "blob 0: values are not finite" if bad else ""))
        else:
            self.told(m.Received(source, message))

    def stop(self) -> None:
        self.stopped = True

    def resume(self, _: object = None) -> None:
        if not self.stopped or not self.lives:
            return
        self.stopped = self.away = False
        held, self._held = self._held, []
        for action, argument in held:  # tasks end in the order in which they were given
            action(argument)
        missed, self._missed = self._missed, []
        if self.swarm.chance.random() < 0.5:
            missed.insert(0, m.Tick())
        for event in missed:
            self.told(event)
        self._ring()

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._armed = None
        self._arm()

    # ------------------------------------------------------------------------------------------------- private

    def _clock(self) -> float:
        return self.swarm.kernel.now

    def _later(self, seconds: float, action: Callable[[Any], None], argument: Any) -> None:
        """For the runner: a stopped process works no further, a dead one never."""

        def act(_: object) -> None:
            if self.stopped:
                self._held.append((action, argument))
            elif self.lives:
                action(argument)

        self.swarm.kernel.after(seconds, act)

    def _keep(self, value: Blob) -> str:
        self._names += 1
        name = f"r/{self._names}"
        self.runner.blobs[name] = value
        return name

    def _handle(self, event: m.Event) -> None:
        swarm = self.swarm
        now = swarm.kernel.now
        machine = self.machine
        try:
            commands = machine.handle(event, now + self._ahead_s)
        except Exception:  # noqa: BLE001  whatever a machine raises is a finding, not an end of the simulation
            self._report("crash", f"on {event!r:.1500}:\n{traceback.format_exc(limit=-6)}")
            swarm.kill(self)
            if self.mask is not None:
                swarm.kernel.after(AGAIN_S, swarm.boot, (self.key, self.incarnation + 1))
            return
        swarm.handled += 1
        swarm.mix(self.serial, len(commands))
        if swarm.record is not None:
            swarm.record(now + self._ahead_s, self.name, event, commands)
        if machine.view is not self.view:
            self.view = machine.view
            if self.view is not None and self.mask is None:
                swarm.agreed(self, self.view)
        cut = strikes.sprung(swarm, self, commands) if swarm.traps else None
        for command in commands if cut is None else commands[:cut]:
            _CARRY[type(command)](self, command)
        if cut is not None:
            swarm.kill(self)
        elif self.finish is not None:
            swarm.ended(self)
        elif self.lives:
            self._arm()

    def _arm(self) -> None:
        deadline = self.machine.deadline
        if deadline is None:
            return
        at = max(deadline - self._ahead_s + 1e-9, self.swarm.kernel.now)  # rounding must not make it a moment early
        if self._armed is None or at < self._armed - 1e-9:
            self._armed = at
            self.swarm.kernel.at(at, self._ring, at)

    def _ring(self, at: float | None = None) -> None:
        if at is not None and at != self._armed:
            return  # overtaken by an earlier one
        self._armed = None
        if self.stopped or not self.lives:
            return
        now = self.swarm.kernel.now
        deadline = self.machine.deadline
        if deadline is not None and deadline <= now + self._ahead_s:
            self._spins = self._spins + 1 if self._spun_at == now else 0
            self._spun_at = now
            if self._spins > SPINS:
                self._report("spin", f"deadline stays {deadline - now - self._ahead_s:+.3f} s from now")
                self.swarm.kill(self)
                return
            self._handle(m.Tick())
        else:
            self._arm()

    def _report(self, checker: str, text: str) -> None:
        if self.mask is None:
            self.swarm.watch.report(self.name, checker, text)

    def _send(self, command: m.Send) -> None:
        """Every message of this peer's machine leaves here."""
        swarm = self.swarm
        message = command.message
        values = tuple([self._value(name, message) for name in command.blobs])
        if type(message) is m.Propose and swarm.strangers is not None:
            swarm.strangers.propose(message.entry.view)
        if self.mask is not None:
            if type(message) is m.Round:
                swarm.watch.sent(self.name, command.peer, message)  # it leads: who meets whom is told by it
            sent = self.mask.sends(message, values)
            if sent is not None:  # it signs like anybody else, with its own key
                swarm.carry(self.name, command.peer, self._sealed(command.peer, sent[0]), sent[1], honest=False)
            return
        swarm.watch.sent(self.name, command.peer, message)
        if self.lies and swarm.chance.random() < self.lies:
            message = faults.garble(message, swarm.chance) if swarm.chance.random() < 0.2 else message
            values = tuple(BAD for _ in values)
        swarm.carry(self.name, command.peer, self._sealed(command.peer, message), values)

    def _sealed(self, to: m.Peer, message: m.Message) -> m.Message:
        return certificates.seal(self.name, to, message, partial(Swarm.sign, self.name))

    def _value(self, name: str, message: m.Message) -> Blob:
        value = self.runner.blobs.get(name)
        if value is None:
            self._report("blobs", f"sends blob {name!r}, which is not held, with {message}")
            return BAD
        return value

    def _do(self, command: m.Do) -> None:
        task = command.task
        if isinstance(task, m.Apply) and self.mask is None:
            self.swarm.watch.applying(self.name, self.view, task)
        self.runner.submit(task, self._done)
        self._faults()

    def _done(self, result: m.Done | m.Failed) -> None:
        self._faults()
        runner, swarm = self.runner, self.swarm
        if isinstance(result, m.Done):
            if result.result.record.startswith("checkpoints/") and self.mask is None:
                step = int(result.result.record.rpartition("-")[2])
                swarm.watch.published(self.name, step, runner.world.storage.published[step])
        self.told(result)
        if isinstance(result, m.Done) and result.result.digest and self.mask is None:
            swarm.holds(self)

    def _faults(self) -> None:
        for text in self.runner.world.faults:
            self._report("tasks", text)
        self.runner.world.faults.clear()

    def _drop(self, command: m.Drop) -> None:
        for name in command.blobs:
            if self.runner.blobs.pop(name, None) is None:
                self._report("blobs", f"drops blob {name!r}, which is not held")

    def _find(self, command: m.Find) -> None:
        self.swarm.kernel.after(self.swarm.chance.uniform(0.05, 0.5), self._found)

    def _found(self, _: object) -> None:
        names = [name for name in self.swarm.nodes if name != self.name]
        self.told(m.Found(peers=tuple(self.swarm.chance.sample(names, min(len(names), 8)))))

    def _finish(self, command: m.Finish) -> None:
        self.finish = command

    def _note(self, command: m.Note) -> None:
        if self.swarm.notes is not None:
            self.swarm.notes.append(f"{self.swarm.kernel.now:9.3f} {self.name:6} {command.kind}: {command.text}")


def _signature(peer: m.Peer, data: bytes) -> bytes:
    return f"{peer} {zlib.crc32(data)}".encode()[:64]


def _holds(one: m.Signed, data: bytes) -> bool:
    return one.signature == _signature(one.peer, data)


_CARRY: dict[type, Callable[[Node, Any], None]] = {
    m.Send: Node._send, m.Do: Node._do, m.Drop: Node._drop, m.Find: Node._find, m.Finish: Node._finish,
    m.Note: Node._note,
}  # fmt: skip


class Swarm:
    """All of one simulation. `nodes` are the living processes by name, in the order in which they began."""

    def __init__(self, case: Case, record: Record | None = None) -> None:
        self.case = case
        self.settings = case.settings
        self.kernel = Kernel()
        wire = case.wire
        values = wire.gradient_values if wire is not None else case.scenario.values
        self.world = World(case.settings.stages, values, case.settings.staleness, wire)
        self.watch = Watch(case.settings, self.world, lambda: self.kernel.now)
        self.watch.trusting = not (case.happenings.liars or case.hostile)
        self.network = Network(case.scenario, case.rng("network"), case.regions, wire)
        self.chance = case.rng("chance")
        self.record = record
        self.notes: list[str] | None = None
        self.nodes: dict[m.Peer, Node] = {}
        self.finished: list[m.Peer] = []
        self.booted = 0
        self.handled = 0
        self.keys = max([case.peers, *(one.key + 1 for one in case.hostile)])
        self.strangers = Strangers(self) if case.hostile else None
        self.healed_s: float | None = None
        self.traps: list[strikes.Trap] = []
        self.struck: dict[str, int] = {}
        self.founders = {(0, 0)}
        self.lived_s = 0.0  # of all processes that have ended
        self._before: int = 0  # steps committed before a wipe
        self.veterans: list[Node] = []  # who lived when the run was over
        self._digest = 0
        self._proposed: m.View | None = None
        self._messages = 0
        self._died_s: dict[m.Peer, float] = {}
        self._healers: list[Callable[[None], None]] = []
        self._began_s: float | None = None
        self._over_s: float | None = None
        self._progressed_s = 0.0
        self.stuck = ""

    # -------------------------------------------------------------------------------------------------- the whole

    def run(self) -> Outcome:
        rng = self.case.rng("boot")
        self.network.faults = self.case.messages if self.case.messages != CLEAN else CLEAN  # CLEAN itself is quicker
        self.boot((0, 0))
        for key in range(1, self.case.peers):
            self.kernel.at(rng.uniform(0.0, 2.0), self.boot, (key, 0))
        self.kernel.after(CHECK_S, self._look)
        most = self.case.scenario.events
        self.kernel.run(until=float("inf"), events=most)
        if self.kernel.events >= most:
            self.watch.report("", "progress", f"{most} events and no end: {self._state()}")
        elif not self.stuck and not self.watch.violations:
            self.watch.end(self.finished, [node.name for node in self.nodes.values() if node.mask is None])
            self._at_home()
        newest = self.watch.newest
        return Outcome(
            digest=f"{self._digest:016x}",
            violations=tuple(self.watch.violations),
            committed=self._before + len(self.watch.commits),
            redone=newest.account.redone if newest is not None else 0,
            virtual_s=self.kernel.now,
            events=self.handled,
            stuck=self.stuck,
            node_hours=(self.lived_s + sum(self.kernel.now - node.born_s for node in self.nodes.values())) / 3600,
            struck=self.struck,
            wronged=tuple(self.strangers.wronged) if self.strangers is not None else (),
            evicted=self.strangers.evicted if self.strangers is not None else {},
        )

    @staticmethod
    def sign(peer: m.Peer, data: bytes) -> m.Signed:
        """By the rules of the simulation nobody makes another's."""
        return m.Signed(peer, b"", _signature(peer, data))

    def boot(self, who: tuple[int, int]) -> None:
        """A process starts: (key, incarnation)."""
        if self._over_s is not None:
            return
        self.booted += 1
        node = Node(self, who[0], who[1], found=who in self.founders)
        self.nodes[node.name] = node
        node.told(m.Tick())

    def settings_of(self, key: int) -> m.Settings:
        """What that process is started with: after a wipe, the checkpoint's step."""
        return msgspec.structs.replace(self.case.settings_of(key), first_step=self.settings.first_step)

    def kill(self, node: Node) -> None:
        node.lives = False
        self._died_s[node.name] = self.kernel.now
        if self.nodes.pop(node.name, None) is not None:
            self.lived_s += self.kernel.now - node.born_s

    def wipe(self) -> bool:
        """Every process is killed and the same command started again: it goes on from the newest checkpoint."""
        published = self.world.storage.published
        first = max(published, default=self.settings.first_step)
        if self._over_s is not None or first >= self.settings.steps:
            return False
        for node in list(self.nodes.values()):
            self.kill(node)
        self.settings = msgspec.structs.replace(self.settings, first_step=first)
        self._before += len([step for _, step in self.watch.commits if step < first])
        violations = self.watch.violations
        self.watch = Watch(self.settings, self.world, lambda: self.kernel.now)
        self.watch.violations = violations
        self.watch.trusting = not (self.case.happenings.liars or self.case.hostile)
        self.watch.resumes(first, published.get(first, ()))
        self._proposed, self.finished = None, []
        self._heal(None)
        life = 1 + max(self.booted, 1000)  # no name of a process is used twice
        self.founders = {(0, life)}
        for key in range(self.case.peers):
            self.kernel.after(0.1 * key, self.boot, (key, life))
        return True

    def ended(self, node: Node) -> None:
        """A machine has finished: its process ends, and if it was not the run's end another one takes its place."""
        assert node.finish is not None
        self.kill(node)
        if node.mask is not None and not self.over:
            self.kernel.after(AGAIN_S, self.boot, (node.key, node.incarnation + 1))
        elif node.finish.ok:
            newest = self.watch.newest
            if node.mask is None and not node.leaving and not (newest is not None and newest.finished):
                self.watch.report(node.name, "ended", f"ends before the run does: {node.finish.reason}")
            self.finished.append(node.name)
            if all(other.mask is not None for other in self.nodes.values()):
                self.kernel.stop()
        else:
            self.kernel.after(2.0, self.boot, (node.key, node.incarnation + 1))

    @property
    def over(self) -> bool:
        """Some honest peer holds the run for finished."""
        return self._over_s is not None

    def agreed(self, node: Node, view: m.View) -> None:
        """An honest peer has a view that is new to it."""
        self.watch.agreed(node.name, view)
        if self.strangers is not None:
            self.strangers.agreed(node, view)
        if self._began_s is None and view.started:
            self._began_s = self.kernel.now
            for planned in [
                *churn.plan(self.case),
                *churn.lives(self.case),
                *faults.plan(self.case),
                *strikes.plan(self.case),
            ]:
                self.kernel.after(planned.at_s, self.happen, planned)
            self.kernel.after(self.case.scenario.faults_s, self._heal)
            if self.strangers is not None:
                self.strangers.begin()
        if view.finished and self._over_s is None:
            self._over_s = self.kernel.now
            self.veterans = list(self.nodes.values())
            self.kernel.after(60.0, lambda _: self.kernel.stop())
            self._heal(None)

    def holds(self, node: Node) -> None:
        """A task may have given the node's stage new parameters. What its machine does not take for its state is void."""
        runner, server = node.runner, node.machine.server
        if server.ready and (server.stage, server.step) == (runner.stage, runner.version):
            self.watch.holds(node.name, server.epoch, runner.stage, runner.version, runner.digest)

    # ---------------------------------------------------------------------------------------------------- the network

    def carry(
        self, source: m.Peer, target: m.Peer, message: m.Message, values: tuple[Blob, ...], *, honest: bool = True
    ) -> None:
        """Hand a message to the network."""
        kernel, case = self.kernel, self.case
        self._messages += 1
        if honest and self._messages % (SAMPLE if self.strangers is None else SAMPLE_HOSTILE) == 0:
            self._through_wire(source, message)
        if self.strangers is not None and self.strangers.swallows(source, target, values):
            return
        if (
            honest
            and type(message) is m.Propose
            and (self._proposed is None or message.entry.view.number > self._proposed.number)
        ):
            self._proposed = message.entry.view
        parcel = (source, target, message, values)
        if target == source:
            kernel.at(kernel.now, self._arrive, parcel)
            return
        nbytes = 0
        if values:
            part = isinstance(message, m.ReduceChunk | m.GatherChunk)
            nbytes = case.scenario.values if part else case.scenario.boundary_bytes * len(values)
        if values and case.wire is not None:
            self._on_the_line(parcel, case.wire)
            return
        arrivals = self.network.arrivals(source, target, nbytes, kernel.now, m.rank(message))
        for at in arrivals:
            kernel.at(at, self._arrive, parcel)
        stranger = self.network.faults.stranger
        if stranger and self.chance.random() < stranger and type(message) is not m.Join:
            parcel = (STRANGER, target, message, values)
            kernel.after(self.chance.uniform(0.0, 10.0), self._arrive, parcel)

    def _on_the_line(self, parcel: Parcel, wire: Wire) -> None:
        """Over the sender's uplink and the receiver's downlink. What had not left when its sender died never comes."""
        source, target, message, values = parcel
        nbytes, rank = sum(wire.nbytes(value, CHUNKS) for value in values), m.rank(message)
        for at in self.network.arrivals(source, target, nbytes, self.kernel.now, rank):
            left_s = self.network.left(source, rank)

            def reach(_: object, left_s: float = left_s) -> None:
                if self._died_s.get(source, left_s) >= left_s:
                    through_s = self.network.through(source, target, nbytes, rank, self.kernel.now)
                    self.kernel.at(through_s, self._arrive, parcel)

            self.kernel.at(at, reach)

    def _arrive(self, parcel: Parcel) -> None:
        source, target, message, values = parcel
        node = self.nodes.get(target)
        if node is not None:
            node.deliver(source, message, values)
        elif self.chance.random() < 0.7 and source in self.nodes:
            self.kernel.after(0.05, self._refused, (source, target))

    def _refused(self, pair: tuple[m.Peer, m.Peer]) -> None:
        node = self.nodes.get(pair[0])
        if node is not None:
            node.told(m.Unreachable(pair[1]))

    def _through_wire(self, peer: m.Peer, message: m.Message) -> None:
        try:
            same = _DECODER.decode(_ENCODER.encode(message)) == message
        except (msgspec.ValidationError, OverflowError) as error:  # beyond 64 bits: its driver would end
            self.watch.report(peer, "wire", f"{message}: {error}")
            return
        if not same and "nan" not in repr(message):
            self.watch.report(peer, "wire", f"{message} is another message after decoding")

    # ------------------------------------------------------------------------------------------------------- faults

    def victim(self, rng: Random) -> Node | None:
        """A living peer that the run can lose, or None."""
        whole = not (
            self.case.happenings.losses or self.case.happenings.absences
        )  # where a stage may be lost at once, it may also be lost bit by bit
        candidates = [node for node in self.nodes.values() if not node.away and not node.stopped]
        rng.shuffle(candidates)
        if rng.random() < LEADER:
            candidates.sort(key=lambda node: not node.machine.leading)
        return next((node for node in candidates if self.spares({node.name}, whole)), None)

    def spares(self, gone: set[m.Peer], whole: bool = True) -> bool:
        """Without these peers the newest views keep a majority of voters, and (`whole`) a replica of every stage."""
        for view in self._current():
            left = [one for one in view.members if self._sound(one.peer) and one.peer not in gone]
            votes = sum(self._sound(peer) and peer not in gone for peer in view.voters)
            if 2 * votes <= len(view.voters) + 1:
                return False
            if whole and view.started and len({one.stage for one in left}) < self.case.settings.stages:
                return False
        return len(self.nodes) - len(gone) >= self.case.settings.stages

    def replicas(self, rng: Random) -> list[Node]:
        """Everyone who holds the state of one stage, drawn; nobody if the run cannot lose them all at once."""
        stage = rng.randrange(self.case.settings.stages)
        holders = {one.peer for view in self._current() for one in view.members + view.joining if one.stage == stage}
        if not self.spares(holders, whole=False) or len(self.nodes) - len(holders) < self.case.settings.stages:
            return []
        return [node for node in self.nodes.values() if node.name in holders]

    def balanced(self, half: set[m.Peer]) -> bool:
        """Neither these peers nor the others are a majority of the members, and nobody is missing."""
        return bool(self._current()) and all(
            all(self._sound(peer) for peer in view.voters)
            and 2 * sum(peer in half for peer in view.voters) == len(view.voters)
            for view in self._current()
        )

    def until(self, seconds: float, over: Callable[[None], None]) -> None:
        """End a fault after that time, or at healing if that is earlier."""
        self.kernel.after(seconds, over)
        self._healers.append(over)

    def fails(self) -> bool:
        chance = self.network.faults.fail
        return chance > 0.0 and self.chance.random() < chance

    def mix(self, serial: int, commands: int) -> None:
        """One event more in the digest."""
        word = int(self.kernel.now * 1e9) * 1009 + serial * 31 + commands
        self._digest = ((self._digest ^ word) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF

    def _current(self) -> list[m.View]:
        """The views that a survivor may hold: the newest agreed one and what is proposed after it."""
        newest = self.watch.newest
        views = [newest] if newest is not None else []
        if newest is not None and self._proposed is not None and self._proposed.number > newest.number:
            views.append(self._proposed)
        return views

    def _sound(self, peer: m.Peer) -> bool:
        node = self.nodes.get(peer)
        return node is not None and not node.away and not node.stopped

    def happen(self, planned: churn.Planned) -> None:
        if self.healed_s is None:
            apply = HAPPEN[planned.kind]
            if self.notes is not None:
                self.notes.append(f"{self.kernel.now:9.3f} ====== {planned.kind} for {planned.length_s:.1f} s")
            apply(self, planned, self.chance)

    def _heal(self, _: object) -> None:
        if self.healed_s is not None:
            return
        self.healed_s = self.kernel.now
        self.network.heal()
        self.traps.clear()
        if self.strangers is not None:
            self.strangers.heal()
        for over in self._healers:
            over(None)
        self._progressed_s = self.kernel.now
        if self.notes is not None:
            self.notes.append(f"{self.kernel.now:9.3f} ====== healed")

    # -------------------------------------------------------------------------------------------------- progress

    def _look(self, _: object) -> None:
        """Is the run where it should be by now?"""
        scenario, now = self.case.scenario, self.kernel.now
        text = ""
        if self._began_s is None:
            if now > scenario.start_s / 2:
                self.network.heal()
            text = "the run has not begun" if now > scenario.start_s else ""
        elif self._over_s is None and self.healed_s is not None:
            since = max([self.healed_s, *self.watch.commit_times[-1:]])
            if now - since > scenario.progress_s * self.case.patience:
                text = f"no commit for {now - since:.0f} s after healing"
            elif now - self.healed_s > scenario.finish_s * self.case.patience:
                text = f"not finished {now - self.healed_s:.0f} s after healing"
        if text:
            self.stuck = self._hopeless()
            if not self.stuck:
                self.watch.report("", "progress", f"{text}: {self._state()}")
            self.kernel.stop()
        if self.watch.violations:
            self.kernel.stop()
        self.kernel.after(CHECK_S, self._look)

    def _at_home(self) -> None:
        """Whoever has lived undisturbed for long belongs to the run, and keeps no blob of a step long gone."""
        newest = self.watch.newest
        assert newest is not None and self._over_s is not None and self.healed_s is not None
        known = {one.peer for one in newest.members + newest.joining}
        for node in self.veterans:
            if node.mask is not None or (self.strangers is not None and self.strangers.excused(node)):
                continue
            if self._over_s - max(self.healed_s, node.born_s) < HOME_BEATS * self.settings.beat_s or node.leaving:
                continue
            if node.name not in known:
                self.watch.report(
                    node.name, "home", f"lives since {node.born_s:.0f} s and is no member of {progress(newest)}"
                )
            held = sorted(node.runner.blobs)
            if len(held) > KEPT:
                self.watch.report(node.name, "leak", f"holds {len(held)} blobs after the last step: {held[:8]}")

    def _hopeless(self) -> str:
        """Why nobody could go on: fewer peers than stages, or no majority left."""
        for view in self._current():
            alive = [peer for peer in view.voters if peer in self.nodes]
            if 2 * len(alive) <= len(view.voters):
                return f"{len(alive)} of {len(view.voters)} voters live"
            if len(self.nodes) < self.case.settings.stages:
                return f"{len(self.nodes)} peers live for {self.case.settings.stages} stages"
        return self.strangers.alone() if self.strangers is not None else ""

    def _state(self) -> str:
        newest = self.watch.newest
        views = ", ".join(f"{node.name}:{node.view.number if node.view else '-'}" for node in self.nodes.values())
        return f"{progress(newest) if newest else 'no view'}; views held: {views}"


HAPPEN = {**churn.APPLY, **faults.APPLY, **strikes.APPLY}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(m.Message)


def simulate(scenario: Scenario | str, seed: int, record: Record | None = None) -> Outcome:
    """Run one seed of a scenario to its end."""
    drawn = draw(load(scenario) if isinstance(scenario, str) else scenario, seed)
    return Swarm(drawn, record).run()
