"""Drives one peer's machine: everything that happens becomes an event, every command is carried out. It decides nothing.

One TaskGroup: what the transport receives, what tasks found out, the machine's deadline, directory look-ups and the report.
`handle` never waits, so events are handled one at a time whichever task brings them. Tensors stay in the task runner; what
comes off the network is checked there before the machine hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

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
    Found,
    Join,
    Lead,
    Message,
    Override,
    Peer,
    Propose,
    Pulse,
    Received,
    Redirect,
    Send,
    StandingRequest,
    Tick,
    Unreachable,
    View,
    Vote,
    VoteRequest,
)
from shoal.core.peer import PeerMachine
from shoal.runtime.measure import Meter
from shoal.runtime.passes import Gate
from shoal.runtime.records.record import Record
from shoal.runtime.records.report import Progress, Told
from shoal.runtime.signing import Signatures
from shoal.runtime.tasks.coding import Held
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.traffic import Kept, Size, Tally
from shoal.transport.base import Blob, Incoming, Transport
from shoal.transport.directory.directory import Directory

REPORT_S = 0.5
LOOK_UP_S = 0.5  # between two look-ups, however often they are asked for
ANNOUNCE_S = 20.0  # well within the time for which a directory keeps a record
FROM_OUTSIDE = (
    Join,
    VoteRequest,
    StandingRequest,
    Override,
    Redirect,
    Accept,
    Vote,
)  # all small but Override, which is signed


class Node:
    """One peer at work. Whoever makes it starts and closes transport, directory and runner."""

    def __init__(
        self,
        machine: PeerMachine,
        runner: TaskRunner,
        transport: Transport,
        directory: Directory,
        record: Record,
        signing: Signatures,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: where passes count."""
        self.machine, self.runner, self.transport, self.signing = machine, runner, transport, signing
        self.directory, self.record = directory, record
        self.meter = Meter(transport)
        self.gate = gate
        self._found: tuple[Peer, ...] = ()  # by the last look-up
        self._news = asyncio.Event()  # something to announce at once
        self.tally = Tally()
        self.finish: Finish | None = None
        self._activations_most = 0  # bytes that the machine has kept for a step at most
        self._view: View | None = None
        self._serial = 0
        self._armed: float | None = None  # the deadline that _ticks sleeps until
        self._wake = asyncio.Event()
        self._find = asyncio.Event()
        self._over = asyncio.Event()
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()  # what tasks found out, and messages to myself

    async def run(self) -> Finish:
        """Take part until the machine says that it is over."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            works = (
                self._receive(),
                self._read_inbox(),
                self._ticks(),
                self._look_up(),
                self._announce(),
                self._report(),
                self.meter.serve(),
            )
            tasks = [group.create_task(work) for work in works]
            if self.gate is not None:
                tasks.append(group.create_task(self._serve_gate(self.gate)))
            self.handle(Tick())
            await self._over.wait()
            for task in tasks:
                task.cancel()
        self._tell_traffic(time.monotonic())
        self.record.tell(self._progress())
        assert self.finish is not None
        return self.finish

    def leave(self, reason: str) -> None:
        """Ask the machine to go at the next step boundary."""
        self.handle(Asked(reason=reason))

    def handle(self, event: Event) -> None:
        if self.finish is not None:
            return
        now = time.monotonic()
        commands = self.machine.handle(event, now)
        self.record.event(now, event, commands)
        self._activations_most = max(self._activations_most, self.machine.server.kept_bytes)
        if self.machine.view is not self._view and self.machine.view is not None:
            if self._view is None or self.machine.view.step != self._view.step:
                self._tell_traffic(now)
            self._view = self.machine.view
            self.record.view(now, self._view)
            self._bar()
        for command in commands:
            self._carry_out(command)
        deadline = self.machine.deadline
        if deadline is not None and (self._armed is None or deadline < self._armed):
            self._wake.set()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send(peer=peer) if peer == self.machine.name:
                # Handled after this event, as if it had travelled; own names for the blobs, since a Drop may follow.
                refs = tuple(self._keep(self.runner.get(name)) for name in command.blobs)
                self._inbox.put_nowait(Received(peer=peer, message=command.message, blobs=refs))
            case Send():
                blobs = tuple(self.runner.blob(name) for name in command.blobs)
                message = self.signing.seal(command.peer, command.message)
                sent = self.transport.send(command.peer, message, blobs)
                if sent:
                    self.tally.sent(command.message, _sizes(blobs), sent)
            case Do():
                self.runner.submit(command.task, self._on_result)
            case Drop():
                for name in command.blobs:
                    self.runner.drop(name)
            case Find():
                self._find.set()
            case Finish():
                self.finish = command
                self._over.set()

    def _on_result(self, result: Done | Failed) -> None:
        """Called on the task runner's threads."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this peer's part is over
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, result)

    async def _read_inbox(self) -> None:
        while True:
            self.handle(await self._inbox.get())
            await asyncio.sleep(0)

    async def _receive(self) -> None:
        while True:
            incoming = await self.transport.receive()
            if isinstance(incoming, Incoming):
                refused = self.gate is not None and self.gate.takes(incoming)
                if not refused and not self.meter.takes(incoming):
                    self._on_message(incoming)
            else:
                if self.gate is not None:
                    self.gate.lost(incoming.peer, incoming.reason)
                self.handle(Unreachable(peer=incoming.peer))
                self._find.set()  # its address may not be known here yet
            await asyncio.sleep(0)  # a flood of messages starves neither deadlines nor results

    def _on_message(self, incoming: Incoming) -> None:
        self.tally.received(incoming.message, _sizes(incoming.blobs), incoming.nbytes)
        heard = of_use(self.machine, incoming)
        message = self.signing.check(incoming.peer, heard) if heard is not None else None
        if message is None:
            return
        fault = self.runner.check(message, incoming.blobs)
        if not trace.finite(message):
            if not incoming.blobs:
                return  # nobody honest sends such a number; a machine would only have to guess what it means
            fault = fault or "a number in the message is not finite"
        refs = () if fault else tuple(self._keep(blob) for blob in incoming.blobs)
        self.handle(Received(peer=incoming.peer, message=message, blobs=refs, fault=fault))

    def _keep(self, value: Held) -> BlobRef:
        """Under a name of its own: what the driver names begins with 'r'."""
        self._serial += 1
        name = f"r/{self._serial}"
        return BlobRef(id=name, nbytes=self.runner.put(name, value))

    async def _ticks(self) -> None:
        while True:
            self._wake.clear()
            self._armed = self.machine.deadline
            if self._armed is not None and self._armed <= time.monotonic():
                self.handle(Tick())
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout_at(self._armed):
                    await self._wake.wait()
            except TimeoutError:
                self.handle(Tick())

    async def _look_up(self) -> None:
        while True:
            await self._find.wait()
            self._find.clear()
            records = await self.directory.peers()
            self._found = tuple(record.peer for record in records)
            self.handle(Found(peers=tuple(record.peer for record in records if record.peer != self.machine.name)))
            await asyncio.sleep(LOOK_UP_S)

    async def _announce(self) -> None:
        while True:
            self._news.clear()
            await self.directory.announce()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._news.wait()

    # ---------------------------------------------------------------------------------------------------- passes

    async def _serve_gate(self, gate: Gate) -> None:
        gate.known = lambda: (*self._in_view(), *self._found)
        gate.changed, gate.refused = self._on_passes, self._on_refused
        gate.tell = lambda text: self.record.tell(Told(time.monotonic(), self.machine.name, "passes", text))
        gate.inside = lambda: self.machine.view is not None
        await gate.serve()

    def _on_passes(self) -> None:
        """Somebody was revoked, or my pass was renewed."""
        self._news.set()
        self._bar()

    def _on_refused(self, reason: str) -> None:
        self.finish = self.finish or Finish(ok=False, reason=reason)
        self._over.set()

    def _in_view(self) -> tuple[Peer, ...]:
        view = self._view
        return tuple(each.peer for each in view.members + view.joining) if view is not None else ()

    def _bar(self) -> None:
        """Whoever leads is to remove those of the view that were revoked."""
        if self.gate is None:
            return
        revoked = tuple(peer for peer in self._in_view() if self.gate.membership.revoked(peer) is not None)
        if revoked:
            self._inbox.put_nowait(Barred(peers=revoked))

    async def _report(self) -> None:
        while True:
            self.record.tell(self._progress())
            await asyncio.sleep(REPORT_S)

    @property
    def kept(self) -> Kept:
        return self.runner.kept(self.machine.server.kept_bytes)

    @property
    def kept_most(self) -> Kept:
        return self.runner.kept_most(self._activations_most)

    def _progress(self) -> Progress:
        sent, received = self.tally.totals()
        return msgspec.structs.replace(
            progress(self.machine), sent=sent, received=received, kept=self.kept, kept_most=self.kept_most
        )

    def _tell_traffic(self, now: float) -> None:
        step = self._view.step if self._view is not None else 0
        self.record.traffic(now, step, *self.tally.totals(), self.kept_most)


def of_use(machine: PeerMachine, incoming: Incoming) -> Message | None:
    """What the machine is to hear of a message, asked before anything is spent on it. Whoever is in no view of mine may ask to be let in,
    tell of a newer view and be told of mine; all else that it sends is dropped: core/peer.py would make nothing of it. A machine without a
    view hears everything, and whoever has a say in the view to come (a voter of the one before) is no stranger."""
    peer, message = incoming.peer, incoming.message
    if machine.view is None or peer in machine.present or peer == machine.leader or machine.register.entitled(peer):
        return message
    if incoming.blobs:
        return None
    match message:
        case Pulse():  # that it is behind; its books are of no view
            return msgspec.structs.replace(message, books=(), closed=())
        case Lead():  # that I am behind: what follows is proven
            return msgspec.structs.replace(message, proof=None, votes=())
        case Propose():  # proven, and newer than mine
            return message if message.proof is not None and message.entry.view.number > machine.view.number else None
    return message if isinstance(message, FROM_OUTSIDE) else None


def _sizes(blobs: tuple[Blob, ...]) -> list[Size]:
    return [(blob.dtype, memoryview(blob.data).nbytes) for blob in blobs]


def progress(machine: PeerMachine) -> Progress:
    server, load = machine.server, machine.trainer.summary()
    return Progress(
        peer=machine.name,
        view=machine.view.number if machine.view is not None else 0,
        step=server.step,
        stage=server.stage if server.has_state else None,
        ready=server.ready,
        leading=machine.leading,
        queue_s=server.queue_s,
        rate=server.rate,
        booked=len(server.books),
        waiting=load.waiting,
        inflight=load.inflight,
    )
