"""What one node reports: events and views as they happen, its traffic once per step, its state when that is asked for.

For runtime/node.py. It counts messages and remembers peaks; record.py writes the lines, report.py defines them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core.messages import Command, Event, View
from shoal.core.peer import PeerMachine
from shoal.runtime.records.record import NodeRecord
from shoal.runtime.records.report import Notice, PeerProgress, Proven
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.traffic import StoredBytes, TrafficCounter


class Reporter:
    """`tally`: the node adds each message that it sends or receives."""

    def __init__(self, machine: PeerMachine, runner: TaskRunner, record: NodeRecord) -> None:
        self.tally = TrafficCounter()
        self.view: View | None = None  # as reported last
        self._machine, self._runner, self._record = machine, runner, record
        self.prove: Callable[[View], Proven | None] = lambda view: None  # set by who knows signatures and passes
        self._most_stored_bytes = 0  # peak of the activation store

    def handled(self, now: float, event: Event, commands: list[Command]) -> bool:
        """The machine has answered `event` with `commands`; True: it has a new view."""
        self._record.event(now, event, commands)
        self._most_stored_bytes = max(self._most_stored_bytes, self._machine.server.kept_bytes)
        view = self._machine.view
        if view is self.view or view is None:
            return False
        if self.view is None or view.step != self.view.step:
            self.traffic(now)
        committed = view.last is not None and (self.view is None or view.last != self.view.last)
        self.view = view
        self._record.view(now, view)
        if committed and (proof := self.prove(view)) is not None:
            self._record.tell(proof)
        return True

    def traffic(self, now: float) -> None:
        step = self.view.step if self.view is not None else 0
        self._record.traffic(now, step, *self.tally.totals(), self.kept_most)

    def notice(self, now: float, kind: str, text: str) -> None:
        self._record.tell(Notice(now, self._machine.name, kind, text))

    @property
    def kept(self) -> StoredBytes:
        return self._runner.kept(self._machine.server.kept_bytes)

    @property
    def kept_most(self) -> StoredBytes:
        return self._runner.kept_most(self._most_stored_bytes)

    def progress(self, now: float) -> None:
        sent, received = self.tally.totals()
        figures = msgspec.structs.replace(
            progress(self._machine, now), sent=sent, received=received, kept=self.kept, kept_most=self.kept_most
        )
        self._record.tell(figures)


def progress(machine: PeerMachine, now: float) -> PeerProgress:
    server, load = machine.server, machine.trainer.summary()
    return PeerProgress(
        peer=machine.name,
        view=machine.view.number if machine.view is not None else 0,
        step=server.step,
        stage=server.stage if server.has_state else None,
        ready=server.ready,
        leading=machine.leading,
        leader=None if machine.alone else machine.leader,
        alone=machine.alone,
        heard=machine.heard(now),
        queue_s=server.queue_s,
        rate=server.rate,
        booked=len(server.books),
        waiting=load.waiting,
        inflight=load.inflight,
    )
