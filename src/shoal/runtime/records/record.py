"""Writes the trace of a peer's machine, and reports the peer's state to its launcher.

For runtime/node.py, whose loop must never wait for a disk or a full pipe: lines go into a bounded buffer in memory, and a
thread writes them. When the disk is full or too slow, training goes on: the trace stops, and a notice says so.
runtime/records/tape.py bounds the trace on disk; trace.py and runtime/records/report.py define the lines.
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
from shoal.runtime.records.report import Agreed, AnyLine, Ended, Listening, Notice, encode
from shoal.runtime.records.tape import Tape
from shoal.traffic import StoredBytes, Traffic

BUFFER_BYTES = 256 << 20  # of trace waiting for the disk: minutes of a busy run
FLUSH_S = 0.2
CLOSE_S = 10.0
TRACE_BYTES = 256 << 20  # of one peer's trace on the disk; run.trace_bytes


class NodeRecord(Protocol):
    """The node's interface to its recorder."""

    def event(self, time_s: float, event: Event, commands: list[Command]) -> None: ...

    def view(self, time_s: float, view: View) -> None: ...

    def traffic(self, time_s: float, step: int, sent: Traffic, received: Traffic, kept: StoredBytes) -> None: ...

    def tell(self, line: AnyLine) -> None: ...


class Recorder:
    """`out`: the report's stream (None: no report). `eager`: write the trace at once, for `shoal chaos`, which reads it. There is no
    trace before `trace`."""

    def __init__(self, peer: Peer, out: IO[bytes] | None, eager: bool = False) -> None:
        self.peer = peer
        self._tape: Tape | None = None
        self._skipped = 0  # lines dropped because the buffer was full
        self._path: Path | None = None
        self._out = out
        self._eager = eager
        self._lines: list[bytes] = []
        self._nbytes = 0
        self._report_lines: list[bytes] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="record", daemon=True)
        self._thread.start()

    def trace(
        self,
        header: trace.Header,
        path: Path,
        most_bytes: int = TRACE_BYTES,
        reserve: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin the trace in the file `path`, once. `most_bytes`: its limit on disk (0: no trace); `reserve`: bytes that must stay free
        there (tape.py). OSError: the first line cannot be written."""
        self._path = path
        self._tape = Tape(path, header, most_bytes, reserve) if most_bytes else None

    def event(self, time_s: float, event: Event, commands: list[Command]) -> None:
        if self._tape is not None:
            self._buffer(trace.line_of(time_s, self.peer, event, commands))
            if self._eager:
                self._wake.set()
        for command in commands:
            if isinstance(command, Note):
                self.tell(Notice(time_s=time_s, peer=self.peer, kind=command.kind, text=command.text))

    def view(self, time_s: float, view: View) -> None:
        self.tell(Agreed(time_s=time_s, view=view))

    def traffic(self, time_s: float, step: int, sent: Traffic, received: Traffic, kept: StoredBytes) -> None:
        """Record the bytes sent and received so far, and the peak of stored ones, at the end of `step`."""
        if self._tape is not None:
            self._buffer(trace.line(trace.TrafficRecord(time_s, self.peer, step, sent, received, kept)))

    def _buffer(self, text: bytes) -> None:
        """Buffer a line for the thread. A full buffer ends the trace."""
        with self._lock:
            if self._nbytes + len(text) > BUFFER_BYTES:
                self._skipped += 1
            elif self._skipped:  # after a gap nothing is buffered until the gap is recorded
                self._skipped += 1
            else:
                self._nbytes += len(text)
                self._lines.append(text)

    def note(self, kind: str, time_s: float, text: str) -> None:
        """Report a notice of the peer itself, from any thread."""
        self.tell(Notice(time_s=time_s, peer=self.peer, kind=kind, text=text))

    def tell(self, line: AnyLine) -> None:
        if isinstance(line, Notice):  # a reason may quote another peer's text
            line = msgspec.structs.replace(line, kind=escaped(line.kind), text=escaped(line.text))
        if self._out is not None:
            with self._lock:
                self._report_lines.append(encode(line))
            if isinstance(line, (Agreed, Listening, Ended)):
                self._wake.set()

    def close(self) -> None:
        """Write all buffered lines."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)  # a blocked reader must not block this process
        if self._tape is not None and not self._thread.is_alive():
            self._tape.close()

    def _write(self) -> None:
        while True:
            closing = self._closing
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            with self._lock:
                report_lines, self._report_lines = self._report_lines, []
                lines, self._lines = self._lines, []
                skipped, self._skipped = self._skipped, 0
                self._nbytes = 0
            try:
                if report_lines and self._out is not None:
                    self._out.write(b"".join(report_lines))
                    self._out.flush()
            except OSError:  # the launcher has ended, which ends this process, too
                self._out = None
            if self._tape is not None:
                news = [self._tape.write(lines) if lines else ""]
                if skipped:
                    news.append(self._tape.skip(skipped, f"the disk does not keep up with {self._path}"))
                for text in filter(None, news):
                    self.note("trouble", 0.0, text)
            if closing:
                return
