"""When a connection measures its way anew: soon after others have left it, seldom where the way is narrow; on a modelled BBR."""

from __future__ import annotations

import socket

import pytest

from shoal.transport.congestion.windows import RESTART_MOST_S, PathSample, Restarts
from shoal.transport.streams import uplink

BASE_S = 0.1
STEP_S = 0.01


class Way:
    """A connection under BBR: it sends at the rate that it knows, finds a quarter more in eight round trips, and doubles after a restart
    until the way is full."""

    def __init__(self, restarts: bool = True) -> None:
        self.restarts, self.allowed = Restarts(), restarts
        self.now, self.delivered, self.known, self.doubling = 0.0, 0.0, 1.0, False
        self.waits = self.room = True
        self.count = 0

    def run(self, seconds: float, capacity: float) -> None:
        """Rates are parts of a line."""
        until = self.now + seconds
        while self.now < until - STEP_S / 2:
            self.now += STEP_S
            self.delivered += 1e6 * STEP_S * min(self.known, capacity)
            full = self.known >= capacity
            if full:
                self.known, self.doubling = capacity, False
            self.known *= (2 if self.doubling else 1.25 ** (1 / 8)) ** (STEP_S / BASE_S)
            trip_s = BASE_S + (0.05 if full and capacity < 1 else 0.0)  # others' bytes are before it
            sample = PathSample(int(self.delivered), trip_s, BASE_S, self.waits, self.room)
            if self.restarts.look(sample, self.now) and self.allowed:
                self.count, self.doubling = self.count + 1, True

    def until(self, part: float) -> float:
        """Seconds until it sends that much again."""
        began = self.now
        while self.known < part:
            self.run(STEP_S, 1.0)
        return self.now - began


def test_a_way_that_others_have_left_is_used_within_a_second() -> None:
    seconds = []
    for allowed in (True, False):
        way = Way(allowed)
        way.run(5.0, 0.1)
        seconds.append(way.until(0.9))
    assert seconds[0] < 1.0 < 7.0 < seconds[1]


def test_a_narrow_way_is_measured_anew_seldom() -> None:
    way = Way()

    def without_queue(seconds: float) -> None:  # BBR alone on a narrow way has none, most of the time
        for _ in range(int(seconds / STEP_S)):
            way.now += STEP_S
            way.delivered += 1e6 * STEP_S
            way.count += way.restarts.look(PathSample(int(way.delivered), BASE_S, BASE_S, True, True), way.now)

    without_queue(120.0)
    assert way.count <= 8, "the pauses double"
    way.count = 0
    without_queue(600.0)
    assert way.count <= 600 / RESTART_MOST_S + 1


@pytest.mark.parametrize("lacks", ["bytes that wait", "room in the uplink", "a way without a queue"])
def test_nothing_is_measured_anew_without(lacks: str) -> None:
    restarts = Restarts()
    for step in range(1000):
        trip_s = BASE_S + (0.05 if lacks == "a way without a queue" else 0.0)
        sample = PathSample(step, trip_s, BASE_S, lacks != "bytes that wait", lacks != "room in the uplink")
        assert not restarts.look(sample, step * STEP_S)


@pytest.mark.skipif(not uplink.can_restart(), reason="this system does not let this process choose BBR")
def test_a_restarted_connection_has_its_congestion_control_and_its_data() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        other = listener.accept()[0]
        with other:
            for name, now in ((b"bbr", b"bbr"), (b"cubic", b"cubic")):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                sock.sendall(b"first")
                uplink.restart(sock)
                sock.sendall(b"second")
                assert other.recv(11, socket.MSG_WAITALL) == b"firstsecond"
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == now
