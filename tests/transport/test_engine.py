"""Nothing that a peer or the system brings about ends a thread on which every other connection lives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from shoal.transport.congestion.windows import PathWindow
from shoal.transport.streams.engine import Connection, Engine, WaitFor
from shoal.transport.streams.uplink import UNSENT_BYTES, UNSENT_MOST_BYTES, UNSENT_S, Sent, Uplink, _info, _take_ahead


@pytest.fixture
def engine() -> Iterator[Engine]:
    running_engine = Engine("test", yields=True)
    yield running_engine
    running_engine.stop()


def alive(engine: Engine) -> bool:
    answered = threading.Event()
    engine.post(answered.set)
    return answered.wait(60)


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), ValueError("x"), KeyError("x"), RuntimeError("x")]
)
def test_a_posted_call_that_fails_is_told_and_the_thread_goes_on(
    engine: Engine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start()
    with caplog.at_level(logging.ERROR):
        engine.post(lambda: fail(error))
        assert alive(engine)
    assert "a posted call failed" in caplog.text


def test_an_engine_that_never_starts_leaves_no_descriptor_behind() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        Engine("test").post(lambda: None)
        gc.collect()
    assert [str(one.message) for one in warned if one.category is ResourceWarning] == []


def test_a_call_that_is_posted_before_the_thread_starts_is_made(engine: Engine) -> None:
    called = threading.Event()
    engine.post(called.set)
    engine.start()
    assert called.wait(60)


def test_a_socket_that_the_system_has_closed_fails_its_own_link_only(engine: Engine) -> None:
    engine.start()
    failed = threading.Event()

    def waits(link: Connection) -> Any:
        link.sock.close()  # the selector knows no such socket now
        yield WaitFor.READ

    link = Connection(socket.socket(), lambda error: failed.set())
    link.steps = waits(link)
    engine.post(lambda: engine.adopt(link))
    assert failed.wait(60) and link.closed and alive(engine)


def test_an_owner_that_fails_when_it_is_told_of_a_failure_does_not_end_the_thread(engine: Engine) -> None:
    engine.start()

    def breaks() -> Any:
        yield WaitFor.AGAIN
        raise ConnectionError("gone")

    link = Connection(socket.socket(), lambda error: fail(RuntimeError("an owner's mistake")))
    link.steps = breaks()
    engine.post(lambda: engine.adopt(link))
    assert alive(engine) and alive(engine)


def test_a_fault_of_the_loop_itself_does_not_end_the_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = iter([OSError(9, "Bad file descriptor"), RuntimeError("x")])
    plain = engine._expire

    def expire() -> None:
        for error in faults:
            raise error
        plain()

    monkeypatch.setattr(engine, "_expire", expire)
    engine.start()
    assert alive(engine) and alive(engine) and alive(engine)
    assert next(faults, None) is None


def test_a_system_that_does_not_let_threads_rank_lower_is_put_up_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "setpriority", lambda *_: fail(PermissionError("not allowed")))
    engine.start()
    assert alive(engine)


def test_a_link_is_resumed_at_its_time_though_nothing_happens(engine: Engine) -> None:
    async def story() -> None:
        loop, resumed = asyncio.get_running_loop(), asyncio.Event()
        link = Connection(socket.socket(), lambda error: None)

        def waits() -> Any:
            link.resume_at = 0.0
            yield WaitFor.WOKEN
            loop.call_soon_threadsafe(resumed.set)

        link.steps = waits()
        engine.start()
        engine.post(lambda: engine.adopt(link))
        await asyncio.wait_for(resumed.wait(), 60)

    asyncio.run(story())


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a connection's rate")


def taken_bytes(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


@linux
def test_the_system_takes_as_much_bulk_as_it_sends_in_a_moment() -> None:
    """With 128 KiB a line of 200 Mbit/s was idle whenever this side woke 5 ms late."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        other, _ = listener.accept()
        with other:
            sent = Sent(0)
            _take_ahead(sock, sent, int(10 * UNSENT_BYTES / UNSENT_S))
            assert taken_bytes(sock) == 10 * UNSENT_BYTES
            _take_ahead(sock, sent, 10**12)
            assert taken_bytes(sock) == UNSENT_MOST_BYTES
            _take_ahead(sock, sent, 0)
            assert taken_bytes(sock) == UNSENT_BYTES
            sock.sendall(bytes(1 << 16))
            other.recv(1 << 16, socket.MSG_WAITALL)
            assert _info(sock).delivered_bytes >= 1 << 16, "acknowledged"
            assert _info(sock).rate_Bps > 0, "the loopback carries gigabytes per second"
            assert _info(sock).again == 0, "and loses nothing"


@linux
def test_bulk_of_several_connections_passes_the_uplink_in_turn_and_one_that_breaks_leaves_its_place(
    engine: Engine,
) -> None:
    """All start with more than the window's first bytes: whoever waited for another for ever would hang."""
    sizes = 4 << 20, 3 << 20, 5 << 20
    uplink, received, failed = Uplink(), [0] * len(sizes), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        threads = []
        for index, nbytes in enumerate((*sizes, 1 << 20)):
            sock = socket.create_connection(listener.getsockname())
            sock.setblocking(False)
            other = stack.enter_context(listener.accept()[0])
            connection = Connection(sock, lambda error: failed.set())
            uplink.join(connection)
            connection.steps = uplink.write(connection, memoryview(bytes(nbytes)))
            if index == len(sizes):
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                other.close()  # a reset
            else:
                threads.append(threading.Thread(target=_drain, args=(other, received, index)))
            engine.post(partial(engine.adopt, connection))
        engine.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert tuple(received) == sizes and failed.wait(60)


@linux
def test_a_connection_whose_way_is_full_leaves_its_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    uplink, received, nbytes = Uplink(), [0, 0], 4 << 20
    full: list[PathWindow] = []
    room_bytes = PathWindow.room_bytes
    monkeypatch.setattr(PathWindow, "room_bytes", lambda one, nbytes: 0 if one in full else room_bytes(one, nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        threads = []
        for index in range(2):
            sock = socket.create_connection(listener.getsockname())
            sock.setblocking(False)
            connection = Connection(sock, fail)
            uplink.join(connection)
            full.append(uplink._sent[connection].path)
            connection.steps = uplink.write(connection, memoryview(bytes(nbytes)))
            other = stack.enter_context(listener.accept()[0])
            threads.append(threading.Thread(target=_drain, args=(other, received, index)))
            engine.post(partial(engine.adopt, connection))
        full.pop()  # the second has room
        for thread in threads:
            thread.start()
        engine.start()
        threads[1].join(60)
        assert received == [0, nbytes], "the first, which came first, is passed over"
        full.clear()
        threads[0].join(60)
    assert received == [nbytes, nbytes]


def _drain(sock: socket.socket, received: list[int], index: int) -> None:
    while data := sock.recv(1 << 16):
        received[index] += len(data)
