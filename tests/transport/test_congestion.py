"""What the window of bulk promises: the line stays full, control hardly waits, and nothing gets stuck; on a modelled line."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from shoal.transport.congestion.windows import (
    ACK_BYTES,
    ALLOWED_PART,
    ALLOWED_S,
    BASE_S,
    CEILING_BYTES,
    FLOOR_BYTES,
    CongestionWindow,
)

MB = 1e6


class Line:
    """One way at `rate_Bps`, `trip_s` there and back; `late` of the acknowledgements come 100 ms after that."""

    def __init__(self, rate_Bps: float, trip_s: float, late: float = 0.0) -> None:
        self.window = CongestionWindow()
        self.rate_Bps, self.trip_s, self.late = rate_Bps, trip_s, late
        self.now = self.free = 0.0  # `free`: when all that was sent has left
        self.sent = 0
        self._acks: deque[float] = deque()
        self._chance = Random(7)

    def run(self, seconds: float) -> tuple[float, float]:
        """MB/s that were acknowledged, and the longest that a control message would have waited, in seconds."""
        begin, arrived, waits = self.now, 0, [0.0]
        while self.now < begin + seconds:
            while room := self.window.room_bytes():
                self.window.sent(room, self.now)
                waits.append(self.free - self.now)
                self.free = max(self.free, self.now) + room / self.rate_Bps
                before, self.sent = self.sent // ACK_BYTES, self.sent + room
                if self.sent // ACK_BYTES > before:
                    held = 0.1 if self._chance.random() < self.late else 0.0
                    arrival_s = self.free + self.trip_s + held
                    self._acks.append(max(arrival_s, self._acks[-1] if self._acks else arrival_s))  # in order
            assert self._acks, "nothing is on its way and nothing may be sent"
            self.now = max(self.now, self._acks.popleft())
            self.window.acknowledged(1, self.now)
            arrived += ACK_BYTES
        return arrived / (self.now - begin) / MB, max(waits)


@pytest.mark.parametrize(("rate_MBps", "trip_s"), [(25, 0.1), (25, 0.005), (125, 0.1), (800, 0.0002), (3, 0.3)])
def test_a_line_is_filled_and_control_hardly_waits(rate_MBps: float, trip_s: float) -> None:
    line = Line(rate_MBps * MB, trip_s)
    line.run(30 * trip_s)  # finds the window
    got_MBps, wait_s = line.run(20 * trip_s)
    floor_s = FLOOR_BYTES / rate_MBps / MB
    assert got_MBps > 0.95 * rate_MBps
    assert wait_s < max(1.2 * ALLOWED_PART * (trip_s + floor_s), 1.2 * ALLOWED_S, floor_s)


@pytest.mark.parametrize(("rate_MBps", "trip_s"), [(25, 0.1), (25, 0.005), (3, 0.3)])
def test_to_measure_the_base_anew_costs_little(rate_MBps: float, trip_s: float) -> None:
    line = Line(rate_MBps * MB, trip_s)
    line.run(BASE_S / 2)
    got_MBps, wait_s = line.run(BASE_S)
    assert got_MBps > 0.95 * rate_MBps
    assert wait_s < max(trip_s / 2, 1.2 * FLOOR_BYTES / rate_MBps / MB)


def test_a_new_line_is_full_within_some_round_trips() -> None:
    line = Line(25 * MB, 0.1)
    line.run(2.0)
    got_MBps, _ = line.run(1.0)
    assert got_MBps > 0.9 * 25


def test_late_packets_do_not_close_the_window() -> None:
    line = Line(25 * MB, 0.1, late=0.002)  # a packet of 64 KiB in 500 is sent again
    line.run(5.0)
    got_MBps, _ = line.run(20.0)
    assert got_MBps > 0.8 * 25


def test_a_way_that_has_become_longer_is_found_out() -> None:
    line = Line(25 * MB, 0.01)
    line.run(5.0)
    line.trip_s = 0.1
    line.run(BASE_S + 5)
    got_MBps, _ = line.run(BASE_S)
    assert got_MBps > 0.9 * 25


def test_a_way_that_has_become_slower_is_not_flooded() -> None:
    line = Line(100 * MB, 0.05)
    line.run(5.0)
    line.rate_Bps = 10 * MB
    line.run(5.0)
    _, wait_s = line.run(BASE_S)
    assert wait_s < 2 * FLOOR_BYTES / (10 * MB)


def test_a_reader_that_stops_for_long_does_not_close_it_for_good() -> None:
    line = Line(25 * MB, 0.1)
    line.run(5.0)
    line.free += 60.0
    line.run(70.0)
    got_MBps, _ = line.run(BASE_S)
    assert got_MBps > 0.9 * 25


def test_the_window_has_bounds_on_any_line() -> None:
    for rate_MBps, trip_s in ((1e6, 5.0), (1e-1, 1e-3)):
        line = Line(rate_MBps * MB, trip_s)
        for _ in range(50):
            line.run(1.0)
            assert FLOOR_BYTES <= line.window.size_bytes <= CEILING_BYTES


def test_it_does_not_grow_while_it_is_not_used() -> None:
    window = CongestionWindow()
    for index in range(1000):
        window.sent(ACK_BYTES, now := index * 0.1)
        window.acknowledged(1, now + 0.01)
    assert window.size_bytes == FLOOR_BYTES


def test_an_acknowledgement_of_what_was_not_sent_is_refused() -> None:
    window = CongestionWindow()
    window.sent(2 * ACK_BYTES - 1, 0.0)
    with pytest.raises(ValueError, match="2 acknowledgements where there can be 1"):
        window.acknowledged(2, 1.0)
