"""Drives one peer's machine: turns what happens into events and carries out the commands. It decides nothing.

One TaskGroup receives from the transport, waits for task results and the machine's deadline, queries the directory (contacts.py)
and writes the report (records/reporter.py). `handle` never blocks, so events are handled one at a time. Tensors stay in the task
runner, which checks received blobs before the machine gets the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from functools import partial

import msgspec

from shoal import trace
from shoal.core.messages import (
    Accept,
    Asked,
    Barred,
    BlobRef,
    Command,
    Do,
    Done,
    Drop,
    Event,
    Failed,
    Find,
    Finish,
    Generate,
    Heartbeat,
    Join,
    JoinRefused,
    Lead,
    LineMeasured,
    Message,
    Override,
    Peer,
    Propose,
    Received,
    Redirect,
    SaveAsked,
    Send,
    StandingRequest,
    Tick,
    Unreachable,
    Vote,
    VoteRequest,
    Withdraw,
    WithdrawState,
)
from shoal.core.peer import PeerMachine
from shoal.runtime.contacts import Contacts
from shoal.runtime.measure import Meter
from shoal.runtime.passes import Gate
from shoal.runtime.records.record import NodeRecord
from shoal.runtime.records.reporter import Reporter
from shoal.runtime.signing import Signatures
from shoal.runtime.tasks.coding import Held, Pending
from shoal.runtime.tasks.kinds import sendable
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.traffic import Size
from shoal.transport.base import Blob, Incoming, Lost, Transport
from shoal.transport.directory.directory import Directory

REPORT_S = 0.5
LINE_STEPS = 4  # for each doubling of a line's rate
FROM_OUTSIDE = (
    Join,
    JoinRefused,
    VoteRequest,
    StandingRequest,
    Override,
    Redirect,
    Accept,
    Vote,
    Generate,
)  # all small but Override, which is signed


class Node:
    """One running peer. The caller starts and closes transport, directory and task runner."""

    def __init__(
        self,
        machine: PeerMachine,
        runner: TaskRunner,
        transport: Transport,
        directory: Directory,
        record: NodeRecord,
        signing: Signatures,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: keeps passes current; None: no passes."""
        self.machine, self.runner, self.transport, self.signing = machine, runner, transport, signing
        self.contacts = Contacts(machine.name, directory)
        self.reporter = Reporter(machine, runner, record)
        self.meter = Meter(transport)
        self.gate = gate
        self.finish: Finish | None = None
        self._serial = 0
        self._timer_deadline: float | None = None  # the deadline that _ticks waits for
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()  # task results, and messages to this peer itself

    async def run(self) -> Finish:
        """Run until the machine returns Finish, and return it."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            works = (
                self._receive(),
                self._read_inbox(),
                self._ticks(),
                self.contacts.look_up(self.handle),
                self.contacts.announce(),
                self._report(),
                self.meter.serve(),
            )
            tasks = [group.create_task(work) for work in works]
            if self.gate is not None:
                tasks.append(group.create_task(self._serve_gate(self.gate)))
            self.handle(Tick())
            await self._finished.wait()
            for task in tasks:
                task.cancel()
        self.reporter.traffic(time.monotonic())
        self.reporter.progress(time.monotonic())
        assert self.finish is not None
        return self.finish

    def leave(self, reason: str) -> None:
        """Ask the machine to leave at the end of the step, or within 20 s."""
        self.handle(Asked(reason=reason))

    def save(self) -> None:
        """Ask for a checkpoint, since the run is about to be ended."""
        self.handle(SaveAsked())

    def handle(self, event: Event) -> None:
        if self.finish is not None:
            return
        now = time.monotonic()
        commands = self.machine.handle(event, now)
        if self.reporter.handled(now, event, commands):
            self._report_revoked()
        for command in commands:
            self._carry_out(command)
        deadline = self.machine.deadline
        if deadline is not None and (self._timer_deadline is None or deadline < self._timer_deadline):
            self._wake.set()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send(peer=peer) if peer == self.machine.name:
                # Handled after this event, as if received; the blobs get new names, since a Drop may follow.
                refs = tuple(self._store(self.runner.get(name)) for name in command.blobs)
                self._events.put_nowait(Received(peer=peer, message=command.message, blobs=refs))
            case Send():
                self._send(command, tuple(self.runner.get(name) for name in command.blobs))
            case Do():
                self.runner.submit(command.task, self._on_result)
            case Withdraw() | WithdrawState():
                self.transport.withdraw(command.voids)
            case Drop():
                for name in command.blobs:
                    self.runner.drop(name)
            case Find():
                self.contacts.find()
            case Finish():
                self.finish = command
                self._finished.set()

    def _send(self, command: Send, values: tuple[Held, ...]) -> None:
        """At once, or when the last value that is pending is on the host."""
        for value in values:
            if isinstance(value, Pending) and not value.done():
                return value.add_done_callback(lambda _: self._call(partial(self._send, command, values)))
            if isinstance(value, Pending) and value.exception() is not None:
                return  # the task runner has reported it, and fails the next hop
        blobs = tuple(map(sendable, values))
        message = self.signing.seal(command.peer, command.message)
        sent = self.transport.send(command.peer, message, blobs)
        if sent:
            self.reporter.tally.sent(command.message, _sizes(blobs), sent)

    def _on_result(self, result: Done | Failed) -> None:
        """Runs on the task runner's threads."""
        self._call(partial(self._events.put_nowait, result))

    def _call(self, work: Callable[[], None]) -> None:
        """From any thread, on the loop's."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node has finished
            self._loop.call_soon_threadsafe(work)

    async def _read_inbox(self) -> None:
        while True:
            self.handle(await self._events.get())
            await asyncio.sleep(0)

    async def _receive(self) -> None:
        while True:
            incoming = await self.transport.receive()
            if isinstance(incoming, Incoming):
                refused = self.gate is not None and self.gate.takes(incoming)
                if not refused and not self.meter.takes(incoming):
                    self._on_message(incoming)
            elif isinstance(incoming, Lost):
                if self.gate is not None:
                    self.gate.lost(incoming.peer, incoming.reason)
                self.handle(Unreachable(peer=incoming.peer))
                self.contacts.find()  # its address may be another by now
            else:
                self.contacts.find()
            await asyncio.sleep(0)  # a flood of messages must not delay deadlines and results

    def _on_message(self, incoming: Incoming) -> None:
        self.reporter.tally.received(incoming.message, _sizes(incoming.blobs), incoming.nbytes)
        admitted = admissible(self.machine, incoming)
        message = self.signing.check(incoming.peer, admitted) if admitted is not None else None
        if message is None:
            return
        fault = self.runner.check(message, incoming.blobs)
        if not trace.finite(message):
            if not incoming.blobs:
                return  # an honest peer never sends such a number
            fault = fault or "a number in the message is not finite"
        refs = () if fault else tuple(self._store(blob) for blob in incoming.blobs)
        self.handle(Received(peer=incoming.peer, message=message, blobs=refs, fault=fault))

    def _store(self, value: Held) -> BlobRef:
        """Store a blob under a new name; the driver's names begin with 'r'."""
        self._serial += 1
        name = f"r/{self._serial}"
        return BlobRef(id=name, nbytes=self.runner.put(name, value))

    async def _ticks(self) -> None:
        while True:
            self._wake.clear()
            self._timer_deadline = self.machine.deadline
            if self._timer_deadline is not None and self._timer_deadline <= time.monotonic():
                self.handle(Tick())
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout_at(self._timer_deadline):
                    await self._wake.wait()
            except TimeoutError:
                self.handle(Tick())

    # ---------------------------------------------------------------------------------------------------- passes

    async def _serve_gate(self, gate: Gate) -> None:
        gate.known = lambda: (*self._in_view(), *self.contacts.listed)
        gate.changed, gate.refused = self._on_passes_changed, self._on_refused
        gate.notices.show = lambda text: self.reporter.notice(time.monotonic(), "passes", text)
        gate.inside = lambda: self.machine.view is not None
        await gate.serve()

    def _on_passes_changed(self) -> None:
        """A peer was revoked, or this peer's pass was renewed."""
        self.contacts.announce_now()
        self._report_revoked()

    def _on_refused(self, reason: str) -> None:
        self.finish = self.finish or Finish(ok=False, reason=reason)
        self._finished.set()

    def _in_view(self) -> tuple[Peer, ...]:
        view = self.reporter.view
        return tuple(each.peer for each in view.members + view.joining) if view is not None else ()

    def _report_revoked(self) -> None:
        """Report revoked peers of the view to the machine, whose leader removes them."""
        if self.gate is None:
            return
        revoked = tuple(peer for peer in self._in_view() if self.gate.membership.revoked(peer) is not None)
        if revoked:
            self._events.put_nowait(Barred(peers=revoked))

    async def _report(self) -> None:
        while True:
            self._measure_line()
            self.reporter.progress(time.monotonic())
            await asyncio.sleep(REPORT_S)

    def _measure_line(self) -> None:
        """Report what the line carries when that has changed."""
        up_Bps, down_Bps = self.transport.line_Bps()
        line = LineMeasured(_rounded_kBps(up_Bps), _rounded_kBps(down_Bps))
        if line != self.machine.heartbeat.line:
            self.handle(line)


def _rounded_kBps(rate_Bps: float) -> int:
    """In steps of 19 %: it is measured no better, and a change is an event in the trace."""
    return round(2 ** (round(LINE_STEPS * math.log2(rate_Bps / 1e3)) / LINE_STEPS)) if rate_Bps >= 1e3 else 0


def admissible(machine: PeerMachine, incoming: Incoming) -> Message | None:
    """The part of a message that the machine gets, or None, decided before its blobs and signatures cost anything.

    A peer outside the view may ask to join, send a newer view and request the present one; core/peer.py would ignore the rest. A
    machine without a view gets every message, and voters of the view before count as members."""
    peer, message = incoming.peer, incoming.message
    if machine.view is None or peer in machine.present or peer == machine.leader or machine.register.entitled(peer):
        return message
    if incoming.blobs:
        return None
    match message:
        case Heartbeat():  # it shows that the sender is behind; its books belong to no view
            return msgspec.structs.replace(message, books=(), closed=())
        case Lead():  # it shows that this peer is behind
            return msgspec.structs.replace(message, proof=None, votes=())
        case Propose():  # proven, and newer
            return message if message.proof is not None and message.entry.view.number > machine.view.number else None
    return message if isinstance(message, FROM_OUTSIDE) else None


def _sizes(blobs: tuple[Blob, ...]) -> list[Size]:
    return [(blob.dtype, memoryview(blob.data).nbytes) for blob in blobs]
