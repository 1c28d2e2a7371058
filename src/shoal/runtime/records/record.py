"""Writes down what a peer's machine was told and said (the trace) and tells whoever started the peer how it stands.

For runtime/node.py, whose loop must never wait for a disk or a full pipe: lines are appended to a bounded buffer in memory and
written by a thread of their own. When the disk cannot keep up or is full, training goes on: the trace stops there, and
that is told; how it is kept within its room is runtime/records/tape.py's. What the lines mean is decided by trace.py
and runtime/records/report.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

import msgspec

from shoal import trace
from shoal.core.messages import Command, Event, Note, Peer, View
from shoal.escaping import escaped
from shoal.runtime.records.report import Agreed, AnyLine, Ended, Listening, Told, encode
from shoal.runtime.records.tape import Tape
from shoal.traffic import Kept, Traffic

BUFFER_BYTES = 256 << 20  # of trace waiting for the disk: minutes of a busy run
FLUSH_S = 0.2
CLOSE_S = 10.0
TRACE_BYTES = 256 << 20  # of one peer's trace on the disk; run.trace_bytes


class Record(Protocol):
    """What the node asks of its record."""

    def event(self, time_s: float, event: Event, commands: list[Command]) -> None: ...

    def view(self, time_s: float, view: View) -> None: ...

    def traffic(self, time_s: float, step: int, sent: Traffic, received: Traffic, kept: Kept) -> None: ...

    def tell(self, line: AnyLine) -> None: ...


class Recorder:
    """`path` takes the trace (None: no trace is kept), `out` the report's lines (None: nobody listens). `eager`: the trace is
    written at once, for `shoal chaos`, which strikes when it sees something begin there."""

    def __init__(
        self,
        header: trace.Header,
        path: Path | None,
        out: IO[bytes] | None,
        eager: bool = False,
        most_bytes: int = TRACE_BYTES,
        reserve: Callable[[], int] = lambda: 0,
    ) -> None:
        """`most_bytes`: of the trace on the disk (0: none is kept); `reserve`: bytes that must stay free there (tape.py)."""
        self.peer: Peer = header.peer
        self._tape = Tape(path, header, most_bytes, reserve) if path is not None and most_bytes else None
        self._skipped = 0  # lines for which there was no room in memory
        self._path = path
        self._out = out
        self._eager = eager
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._told: list[bytes] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="record", daemon=True)
        self._thread.start()

    def event(self, time_s: float, event: Event, commands: list[Command]) -> None:
        if self._tape is not None:
            self._keep(trace.line_of(time_s, self.peer, event, commands))
            if self._eager:
                self._wake.set()
        for command in commands:
            if isinstance(command, Note):
                self.tell(Told(time_s=time_s, peer=self.peer, kind=command.kind, text=command.text))

    def view(self, time_s: float, view: View) -> None:
        self.tell(Agreed(time_s=time_s, view=view))

    def traffic(self, time_s: float, step: int, sent: Traffic, received: Traffic, kept: Kept) -> None:
        """Into the trace: bytes so far, and kept at most, at the end of `step`."""
        if self._tape is not None:
            self._keep(trace.line(trace.Carried(time_s, self.peer, step, sent, received, kept)))

    def _keep(self, text: bytes) -> None:
        """Until the thread writes it. A disk that does not keep up with a busy run for minutes costs the trace, not the memory."""
        with self._lock:
            if self._nbytes + len(text) > BUFFER_BYTES:
                self._skipped += 1
            elif self._skipped:  # what comes after a gap waits for the gap to be written down
                self._skipped += 1
            else:
                self._nbytes += len(text)
                self._lines.append(text)

    def note(self, kind: str, time_s: float, text: str) -> None:
        """Something of the peer's own, from any thread."""
        self.tell(Told(time_s=time_s, peer=self.peer, kind=kind, text=text))

    def tell(self, line: AnyLine) -> None:
        if isinstance(line, Told):  # a reason may quote what another peer sent
            line = msgspec.structs.replace(line, kind=escaped(line.kind), text=escaped(line.text))
        if self._out is not None:
            with self._lock:
                self._told.append(encode(line))
            if isinstance(line, (Agreed, Listening, Ended)):
                self._wake.set()

    def close(self) -> None:
        """Write what waits."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)  # a reader that has stopped reading keeps nobody here for good
        if self._tape is not None and not self._thread.is_alive():
            self._tape.close()

    def _write(self) -> None:
        while True:
            closing = self._closing
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            with self._lock:
                told, self._told = self._told, []
                lines, self._lines = self._lines, []
                skipped, self._skipped = self._skipped, 0
                self._nbytes = 0
            try:
                if told and self._out is not None:
                    self._out.write(b"".join(told))
                    self._out.flush()
            except OSError:  # nobody listens any more: the launcher's end takes this process with it
                self._out = None
            if self._tape is not None:
                news = [self._tape.write(lines) if lines else ""]
                if skipped:
                    news.append(self._tape.skip(skipped, f"the disk does not keep up with {self._path}"))
                for text in filter(None, news):
                    self.note("trouble", 0.0, text)
            if closing:
                return
