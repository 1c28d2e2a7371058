"""One simulated process: its machine, its task runner, its clock; on virtual time, what runtime/node.py does on a real peer."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec

from shoal.core import messages as m
from shoal.core.consensus import certificates
from shoal.core.member.judge import EVICTS
from shoal.core.peer import PeerMachine
from shoal.kept import Kept
from shoal.sim import signatures
from shoal.sim.context import Context, Values
from shoal.sim.faults.garbled import garble
from shoal.sim.tasks.storage import Blob
from shoal.sim.tasks.task_runner import BAD, TaskRunner, overflown

SPINS = 50  # Ticks in a row at one moment after which a machine is said to spin
REBOOT_S = 5.0  # until a hostile process that has ended is started again
Who = tuple[int, int]  # a process: key, incarnation


class Mask(Protocol):
    """Of a hostile process."""

    def sends(self, target: m.Peer, message: m.Message, values: Values) -> tuple[m.Message, Values] | None:
        """What leaves instead of that message; None: it is withheld."""

    def answers(self, source: m.Peer, message: m.Message) -> bool:
        """Does it answer that message in its machine's place, which never gets it?"""


class Host(Protocol):
    """What a node needs of the simulation around it."""

    def carry(
        self, source: m.Peer, target: m.Peer, message: m.Message, values: Values, *, honest: bool = True
    ) -> None: ...

    def withdraw(self, source: m.Peer, voids: Callable[[m.Peer, m.Message], bool]) -> None: ...

    def names(self) -> list[m.Peer]: ...

    def boot(self, who: Who) -> None: ...

    def kill(self, node: Node) -> None: ...

    def agreed(self, node: Node, view: m.View) -> None: ...

    def proposed(self, view: m.View) -> None: ...

    def ended(self, node: Node) -> None: ...

    def trapped(self, node: Node, commands: Sequence[m.Command]) -> int | None: ...


class Process(msgspec.Struct, frozen=True):
    """Which process it is. `serial` counts the processes of the simulation; a restarted one keeps `key`."""

    key: int
    incarnation: int
    serial: int
    born_s: float
    founder: bool = False  # it founds the run

    @property
    def name(self) -> m.Peer:
        return f"p{self.key}.{self.incarnation}"

    @property
    def successor(self) -> Who:
        """The process that takes its place."""
        return self.key, self.incarnation + 1


class Condition(msgspec.Struct):
    """What faults do to a process."""

    away: bool = False  # its membership is at risk: no other fault may rely on it
    slow: bool = False
    leaving: bool = False
    lies: float = 0.0  # probability that a message it sends is faulty
    was_unlike: bool = False  # it had other bits, was slower or sent faulty messages: it was evicted for a reason


class Pause:
    """A stopped process: what ends and what arrives meanwhile waits here."""

    def __init__(self) -> None:
        self.stopped = False
        self.deaf = False  # the system keeps no more messages for it
        self.ended: list[tuple[Callable[[Any], None], Any]] = []  # ends of tasks
        self.events: list[m.Event] = []


class Clock:
    """A machine's clock, and the kernel time at which the machine next wants to be called."""

    def __init__(self) -> None:
        self.armed_s: float | None = None
        self.offset_s = 0.0
        self.rate = 1.0  # its seconds in one of the kernel's
        self._spins = 0
        self._spun_at_s = -1.0

    def reads(self, now: float) -> float:
        return now * self.rate + self.offset_s

    def when(self, time_s: float) -> float:
        """At which kernel time it reads that."""
        return (time_s - self.offset_s) / self.rate

    def jump(self, seconds: float) -> None:
        self.offset_s += seconds

    def drift(self, rate: float, now: float) -> None:
        self.offset_s, self.rate = self.reads(now) - now * rate, rate

    def spins(self, now: float) -> bool:
        """Counts one more Tick now; true when there have been too many at this moment."""
        self._spins = self._spins + 1 if self._spun_at_s == now else 0
        self._spun_at_s = now
        return self._spins > SPINS


class Node:
    """One process. A node with a `mask` is hostile; no checker believes it."""

    def __init__(self, context: Context, host: Host, process: Process) -> None:
        case = context.case
        self.context, self.host, self.process = context, host, process
        self.name = process.name
        settings = context.settings_of(process.key)
        self.machine = PeerMachine(self.name, settings, case.rng(self.name), process.founder)
        self.runner = TaskRunner(context.world, self._later, self._now, settings.place)
        pace = self.runner.pace
        pace.forward_s, pace.backward = case.forward_s, case.scenario.backward
        pace.kept = Kept(case.kept, math.inf)
        pace.rounds, pace.states = case.rounds, case.states
        pace.slowness = case.speeds[process.key % len(case.speeds)]
        self.runner.fails = context.task_fails
        self.lives = True
        self.mask: Mask | None = None
        self.condition = Condition()
        self.finish: m.Finish | None = None
        self.line = m.LineMeasured()
        self.view: m.View | None = None
        self._pause = Pause()
        self._clock = Clock()
        self._blob_numbers = count(1)

    @property
    def stopped(self) -> bool:
        return self._pause.stopped

    @property
    def available(self) -> bool:
        """Neither stopped nor at risk by another fault."""
        return not self.condition.away and not self._pause.stopped

    # ---------------------------------------------------------------------------------------------- from outside

    def receive(self, event: m.Event) -> None:
        """Hand an event to the machine; a stopped process handles it later."""
        if not self.lives:
            return
        if self._pause.stopped:
            if not (self._pause.deaf and isinstance(event, m.Received)):
                self._pause.events.append(event)
            return
        self._handle(event)

    def deliver(self, source: m.Peer, message: m.Message, values: Values) -> None:
        """Hand a message to the machine if its signatures hold, as the driver of a real peer does."""
        if self.mask is not None and self.mask.answers(source, message):
            return
        if type(message) in certificates.SIGNED:
            checked = certificates.checked(self.name, source, message, signatures.verify)
            if checked is None:
                return
            message = checked
        if values:
            for value in values:
                if value is BAD or overflown(value):
                    self.receive(m.Received(source, message, (), "blob 0: values are not finite"))
                    return
            refs: list[m.BlobRef] = []
            for value in values:  # one, mostly
                name = f"r/{next(self._blob_numbers)}"
                self.runner.blobs[name] = value
                refs.append(m.BlobRef(name, 100))
            self.receive(m.Received(source, message, tuple(refs)))
        else:
            self.receive(m.Received(source, message))

    def stop(self) -> None:
        self._pause.stopped = True

    def deafen(self, _: object = None) -> None:
        """What others send to this stopped process from now on is lost: the buffers of its connections are full."""
        self._pause.deaf = self._pause.stopped

    def resume(self, _: object = None) -> None:
        if not self._pause.stopped or not self.lives:
            return
        pause, self._pause = self._pause, Pause()
        self.condition.away = False
        for action, argument in pause.ended:  # tasks end in the order in which they were given
            action(argument)
        events = pause.events
        if self.context.chance.random() < 0.5:
            events.insert(0, m.Tick())
        for event in events:
            self.receive(event)
        self._ring()

    def jump(self, seconds: float) -> None:
        """Move the clock ahead."""
        self._clock.jump(seconds)
        self._clock.armed_s = None
        self._arm()

    def drift(self, rate: float) -> None:
        """From now on the clock runs so many times as fast as time."""
        self._clock.drift(rate, self.context.kernel.now)
        self._clock.armed_s = None
        self._arm()

    # ----------------------------------------------------------------------------------------------- the machine

    def _handle(self, event: m.Event) -> None:
        context, host, machine = self.context, self.host, self.machine
        now, clock = context.kernel.now, self._clock
        try:
            commands = machine.handle(event, now * clock.rate + clock.offset_s)
        except Exception:  # noqa: BLE001  whatever a machine raises is a finding, not an end of the simulation
            self._crash(event)
            return
        context.history.add(now, self.process.serial, len(commands))
        if context.record is not None:
            context.record(self._clock.reads(now), self.name, event, commands)
        view = machine.roster.view
        if view is not self.view:
            self.view = view
            if view is not None and self.mask is None:
                host.agreed(self, view)
        if commands:  # as after every second event
            cut = host.trapped(self, commands)
            for command in commands if cut is None else commands[:cut]:
                _CARRY_OUT[type(command)](self, command)
            if cut is not None:
                host.kill(self)
                return
        if self.finish is not None:
            host.ended(self)
        elif self.lives:
            self._arm()

    def _crash(self, event: m.Event) -> None:
        self._report("crash", f"on {event!r:.1500}:\n{traceback.format_exc(limit=-6)}")
        self.host.kill(self)
        if self.mask is not None:
            self.context.kernel.after(REBOOT_S, self.host.boot, self.process.successor)

    def _arm(self) -> None:
        """Ask the kernel for a call at the machine's deadline."""
        deadline = self.machine.deadline
        if deadline is None:
            return
        clock, kernel = self._clock, self.context.kernel
        at = clock.when(deadline) + 1e-9  # rounding must not make it a moment early
        if at < kernel.now:
            at = kernel.now
        if clock.armed_s is None or at < clock.armed_s - 1e-9:
            clock.armed_s = at
            kernel.at(at, self._ring, at)

    def _ring(self, at: float | None = None) -> None:
        clock = self._clock
        if at is not None and at != clock.armed_s:
            return  # an earlier call has replaced it
        clock.armed_s = None
        if self._pause.stopped or not self.lives:
            return
        now = self.context.kernel.now
        deadline = self.machine.deadline
        if deadline is None or deadline > clock.reads(now):
            self._arm()
        elif clock.spins(now):
            self._report("spin", f"deadline stays {deadline - clock.reads(now):+.3f} s from now")
            self.host.kill(self)
        else:
            self._handle(m.Tick())

    def _report(self, checker: str, text: str) -> None:
        if self.mask is None:
            self.context.watch.report(self.name, checker, text)

    # -------------------------------------------------------------------------------------------------- commands

    def _send(self, command: m.Send) -> None:
        """Every message of this peer's machine leaves here."""
        context, message = self.context, command.message
        values = tuple([self._value(name, message) for name in command.blobs]) if command.blobs else ()
        if type(message) is m.Propose:
            self.host.proposed(message.entry.view)
        if self.mask is not None:
            if type(message) is m.Round:  # a hostile leader's round says whose chunks go to whom
                context.watch.sent(self.name, command.peer, message)
            changed = self.mask.sends(command.peer, message, values)
            if changed is not None:  # it signs like anybody else, with its own key
                sealed = self._sealed(command.peer, changed[0])
                self.host.carry(self.name, command.peer, sealed, changed[1], honest=False)
            return
        context.watch.sent(self.name, command.peer, message)
        if self.condition.lies and context.chance.random() < self.condition.lies:
            message = garble(message, context.chance) if context.chance.random() < 0.2 else message
            values = tuple(BAD for _ in values)
        if type(message) in certificates.SIGNED:
            message = self._sealed(command.peer, message)
        self.host.carry(self.name, command.peer, message, values)

    def _sealed(self, target: m.Peer, message: m.Message) -> m.Message:
        return certificates.seal(self.name, target, message, partial(signatures.sign, self.name))

    def _value(self, name: str, message: m.Message) -> Blob:
        value = self.runner.blobs.get(name)
        if value is None:
            self._report("blobs", f"sends blob {name!r}, which is not held, with {message}")
            return BAD
        return value

    def _do(self, command: m.Do) -> None:
        task = command.task
        if isinstance(task, m.Apply) and self.mask is None:
            self.context.watch.applying(self.name, self.view, task)
        self.runner.submit(task, self._done)
        self._report_tasks()

    def _done(self, result: m.Done | m.Failed) -> None:
        self._report_tasks()
        if isinstance(result, m.Done) and result.result.record.startswith("checkpoints/") and self.mask is None:
            step = int(result.result.record.rpartition("-")[2])
            self.context.watch.published(self.name, step, self.runner.copies.storage.published[step])
        self.receive(result)
        if isinstance(result, m.Done) and result.result.digest and self.mask is None:
            self._report_state()

    def _report_tasks(self) -> None:
        faults = self.context.world.faults
        if faults:
            for text in faults:
                self._report("tasks", text)
            faults.clear()

    def _report_state(self) -> None:
        """The task may have given the stage new parameters. What the machine does not take for its state is void."""
        runner, server = self.runner, self.machine.server
        if server.ready and (server.stage, server.step) == (runner.stage, runner.version):
            self.context.watch.holds(self.name, server.epoch, runner.stage, runner.version, runner.digest)

    def _withdraw(self, command: m.Withdraw | m.WithdrawState) -> None:
        self.host.withdraw(self.name, command.voids)

    def _drop(self, command: m.Drop) -> None:
        for name in command.blobs:
            if self.runner.blobs.pop(name, None) is None:
                self._report("blobs", f"drops blob {name!r}, which is not held")

    def _find(self, command: m.Find) -> None:
        self.context.kernel.after(self.context.chance.uniform(0.05, 0.5), self._found)

    def _found(self, _: object) -> None:
        names = [name for name in self.host.names() if name != self.name]
        self.receive(m.Found(peers=tuple(self.context.chance.sample(names, min(len(names), 8)))))

    def _finish(self, command: m.Finish) -> None:
        self.finish = command

    def _note(self, command: m.Note) -> None:
        if command.kind == "audit" and self.context.watch.trusting:
            self._report("audited", f"nobody lies, and an audit says: {command.text}")
        if command.kind == "refused" and self.context.watch.trusting and EVICTS not in command.text:
            self._report("refused", f"nobody lies, and a view is refused: {command.text}")
        if command.kind == "checkpoint" and self.mask is None:
            self.context.watch.durability.reported(self.name, command.text)
        if self.context.notes is not None:
            self.context.note(f"{self.name:6} {command.kind}: {command.text}")

    # ----------------------------------------------------------------------------------------- the task runner's time

    def _now(self) -> float:
        return self.context.kernel.now

    def _later(self, seconds: float, action: Callable[[Any], None], argument: Any) -> None:
        """Act after so many seconds: a stopped process when it goes on, a dead one never."""

        def act(_: object) -> None:
            if self._pause.stopped:
                self._pause.ended.append((action, argument))
            elif self.lives:
                action(argument)

        self.context.kernel.after(seconds, act)


_CARRY_OUT: dict[type, Callable[[Node, Any], None]] = {
    m.Send: Node._send, m.Do: Node._do, m.Drop: Node._drop, m.Find: Node._find, m.Finish: Node._finish,
    m.Note: Node._note, m.Withdraw: Node._withdraw, m.WithdrawState: Node._withdraw,
}  # fmt: skip
