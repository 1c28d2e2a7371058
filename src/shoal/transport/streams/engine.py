"""Threads that move bytes: each turns one selector over many connections, whose steps are written as generators.

For streams.py and its carriers. A step (channel.py has those of TLS) runs until its connection would block and yields what it waits for.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator

from shoal.transport.base import StreamKind

log = logging.getLogger(__name__)

SCRATCH_BYTES = 256 << 10  # one read from a socket
BULK_NICE = 3  # how much lower the threads for bulk rank
LONGEST_S = 3600.0  # asleep; the system takes no more than some weeks
FAULT_S = 0.01  # pause after a fault of the loop itself


class WaitFor(enum.Enum):
    """What a step waits for. A step may also be resumed for no reason, and looks again."""

    READ = selectors.EVENT_READ
    WRITE = selectors.EVENT_WRITE
    EITHER = selectors.EVENT_READ | selectors.EVENT_WRITE
    AGAIN = 4  # nothing: the other connections have their turn
    WOKEN = 8  # Engine.wake


Steps = Generator["WaitFor | Engine", None, None]  # yielding an engine: go on there


def _no_steps() -> Steps:
    yield from ()


class Connection:
    """One connection (or listening socket) and its steps. `failed` is called once, unless the connection is closed before."""

    def __init__(self, sock: socket.socket, failed: Callable[[Exception], None]) -> None:
        self.sock = sock
        self.failed = failed
        self.steps = _no_steps()
        self.engine: Engine | None = None
        self.deadline: float | None = None  # time.monotonic() by which it must have cleared this
        self.resume_at: float | None = None  # time.monotonic() at which to look again, whatever it waits for
        self.rank = 0  # of the bulk that it sends
        self.mask = 0
        self.closed = False
        self.relayed = False  # it was made by this side, and comes from a relay
        self.is_heard: Callable[[], bool] = lambda: False  # of bulk: control to that peer arrives


class Engine:
    def __init__(self, name: str, yields: bool = False) -> None:
        """`yields`: this thread has a lower priority."""
        self._yields = yields
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        # From `start` to the end: an engine that never starts has no descriptor that nobody would close
        self._selector: selectors.BaseSelector
        self._wake_receiver: socket.socket | None = None
        self._wake_sender: socket.socket
        self._connections: set[Connection] = set()
        self._ready: deque[Connection] = deque()
        self._queued: set[Connection] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._handed: deque[Connection] = deque()  # from another engine, not yet adopted
        self._stopping = self._over = False
        self._waking = True  # `start` wakes the thread for all calls that were posted before it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._wake_sender.send(b"!")
        self._thread.start()

    # ------------------------------------------------------------------------------------------- from other threads

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._waking:  # a race here wakes it twice, never too seldom: the thread clears it before it looks
            self._waking = True
            try:
                self._wake_sender.send(b"!")
            except OSError:  # full: the thread wakes already; closed: it has ended
                pass

    def hand(self, connection: Connection) -> None:
        """Another engine's connection is this one's from now on; closed if this one has ended."""
        self._handed.append(connection)
        self.post(self._take_over)
        if self._over:  # set before the thread takes its last look
            self._take_over()

    def wake(self, connection: Connection) -> None:
        self.post(lambda: self._enqueue(connection))

    def stop(self) -> None:
        """Close every connection and end the thread."""
        if not self._thread.is_alive():
            self._close()
            return
        self._stopping = True
        self.post(lambda: None)
        self._thread.join()

    def fail_if(self, broken: Callable[[Connection], bool], error: Exception) -> None:
        """End every connection of which this is true."""

        def end() -> None:
            for connection in list(self._connections):
                if broken(connection):
                    self._fail(connection, error)

        self.post(end)

    # ----------------------------------------------------------------------------------------------- in this thread

    def adopt(self, connection: Connection) -> None:
        if connection.closed:
            return
        if self._over:
            return self.drop(connection)
        connection.engine = self
        self._connections.add(connection)
        self._enqueue(connection)

    def drop(self, connection: Connection) -> None:
        """Close the connection; `failed` is not called any more."""
        if connection.closed:
            return
        connection.closed = True
        try:
            self._release(connection)
        finally:
            connection.sock.close()
            connection.steps.close()

    def _run(self) -> None:
        if self._yields:
            step_back()
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # every other connection depends on this thread
                log.exception("%s: an unforeseen fault; the thread goes on", self._thread.name)
                time.sleep(FAULT_S)  # a fault that repeats at once must not fill the log
        self._close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(0 if self._ready else self._timeout_s()):
            if key.data is None:
                self._clear_wake()
            else:
                self._enqueue(key.data)
        while self._calls:
            self._call(self._calls.popleft())
        self._expire()
        for _ in range(len(self._ready)):
            connection = self._ready.popleft()
            self._queued.discard(connection)
            if not connection.closed and connection.engine is self:
                self._step(connection)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:  # no descriptor left for a socket, a socket that the system has closed: one call is lost
            log.exception("%s: a posted call failed; the thread goes on", self._thread.name)

    def _take_over(self) -> None:
        while self._handed:
            self.adopt(self._handed.popleft())

    def _close(self) -> None:
        self._over = True
        self._take_over()
        for connection in list(self._connections):
            self.drop(connection)
        if self._wake_receiver is not None:
            self._selector.close()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _clear_wake(self) -> None:
        assert self._wake_receiver is not None
        try:
            self._wake_receiver.recv(64)
        except BlockingIOError:
            pass
        self._waking = False

    def _timeout_s(self) -> float | None:
        moments = (
            at
            for connection in self._connections
            for at in (connection.deadline, connection.resume_at)
            if at is not None
        )
        soonest = min(moments, default=None)
        return None if soonest is None else min(LONGEST_S, max(0.0, soonest - time.monotonic()))

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.resume_at is not None and connection.resume_at <= now:
                connection.resume_at = None
                self._enqueue(connection)
        for connection in list(self._connections):
            if connection.deadline is not None and connection.deadline <= now:
                self._fail(connection, TimeoutError("no answer in time"))

    def _enqueue(self, connection: Connection) -> None:
        if connection not in self._queued and not connection.closed:
            self._queued.add(connection)
            self._ready.append(connection)

    def _step(self, connection: Connection) -> None:
        try:
            want = next(connection.steps)
        except StopIteration:
            self.drop(connection)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._fail(connection, error)
        except Exception as error:  # a mistake of ours in one connection must not silence all the others
            log.exception("a connection failed in an unforeseen way")
            self._fail(connection, error)
        else:
            try:
                self._follow(connection, want)
            except (
                OSError,
                ValueError,
                KeyError,
            ) as error:  # its socket is closed, or the system watches no further one
                self._fail(connection, error)

    def _follow(self, connection: Connection, want: WaitFor | Engine) -> None:
        if isinstance(want, Engine):
            self._release(connection)
            want.hand(connection)
        elif want is WaitFor.AGAIN:
            self._enqueue(connection)
        else:
            self._register(connection, 0 if want is WaitFor.WOKEN else int(want.value))

    def _fail(self, connection: Connection, error: Exception) -> None:
        if connection.closed:
            return
        self.drop(connection)
        try:
            connection.failed(error)
        except Exception:  # the mistake of one connection's owner
            log.exception("%s: reporting a failed connection failed", self._thread.name)

    def _register(self, connection: Connection, mask: int) -> None:
        if mask == connection.mask:
            return
        if not mask:
            connection.mask = 0
            with contextlib.suppress(KeyError, ValueError, OSError):  # closed beneath us: it is watched no more
                self._selector.unregister(connection.sock)
        elif connection.mask:
            self._selector.modify(connection.sock, mask, connection)
        else:
            self._selector.register(connection.sock, mask, connection)
        connection.mask = mask

    def _release(self, connection: Connection) -> None:
        self._register(connection, 0)
        self._connections.discard(connection)


class Engines:
    """The four engines of a transport."""

    def __init__(self) -> None:
        self.control = Engine("shoal control")
        self.bulk_out = Engine("shoal bulk out", yields=True)
        self.bulk_in = Engine("shoal bulk in", yields=True)
        self.handshakes = Engine("shoal handshakes", yields=True)

    @property
    def all(self) -> tuple[Engine, ...]:
        return self.handshakes, self.control, self.bulk_out, self.bulk_in

    def sender(self, kind: StreamKind) -> Engine:
        return self.control if kind == "control" else self.bulk_out

    def reader(self, kind: StreamKind) -> Engine:
        return self.control if kind == "control" else self.bulk_in


def step_back() -> None:
    """With every core busy a waking thread waits its turn: on two cores a small message took 15 ms at the 99th percentile
    beside bulk of the same rank, 7 ms with bulk three steps lower. Only Linux ranks single threads."""
    if sys.platform == "linux":
        try:
            rank = min(19, os.getpriority(os.PRIO_PROCESS, 0) + BULK_NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), rank)
        except OSError as error:  # some sandboxes forbid it
            log.debug("this thread cannot rank lower: %s", error)
