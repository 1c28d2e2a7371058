"""What the window of all bulk on an uplink promises: the line stays full, control hardly waits, nothing gets stuck; on a modelled line."""

from __future__ import annotations

import math
from collections import deque

import pytest

from shoal.transport.congestion.windows import (
    FIRST_BYTES,
    FOREIGN_S,
    LEAST_BYTES,
    LEAST_WINDOW_BYTES,
    RATES_S,
    ROUND_S,
    UPLINK_ALLOWED_PART,
    UPLINK_ALLOWED_S,
    Acknowledged,
    Start,
    UplinkWindow,
)
from shoal.transport.streams.uplink import Info, Sent, outstanding_bytes

MB = 1e6
PIECE_BYTES = 16 << 10


class Uplink:
    """Connections with these round trips share a line; all have data without end. `foreign_s`: what others hold in its buffer."""

    def __init__(self, rate_Bps: float, *trips_s: float) -> None:
        self.window = UplinkWindow()
        self.rate_Bps, self.trips_s = rate_Bps, trips_s
        self.base_s = trips_s
        self.foreign_s = 0.0
        self.late_s = 0.0  # for which bytes wait unsent, or until they are sent again: no round trip shows it
        self.now = self.free = 0.0  # `free`: when all that was sent has left
        self.most_wait_s = 0.0
        self.outstanding = 0
        self._sent: deque[tuple[float, int, float]] = deque()  # when acknowledged, by whom, its round trip

    def run(self, seconds: float) -> tuple[float, float]:
        """MB/s that were acknowledged, and the mean time that a control message would have waited here, in seconds."""
        until, arrived, waits, turn = self.now + seconds, 0, [], 0
        while self.now < until:
            while self.window.room_bytes(self.outstanding, 0):
                self.free = max(self.free, self.now) + PIECE_BYTES / self.rate_Bps
                who = turn = (turn + 1) % len(self.trips_s)
                trip_s = self.free - self.now + self.trips_s[who] + self.foreign_s
                self._sent.append((self.now + trip_s + self.late_s, who, trip_s))
                self.outstanding += PIECE_BYTES
            waits.append(max(0.0, self.free - self.now))
            self.now += 0.004
            lately = []
            for each in [each for each in self._sent if each[0] <= self.now]:
                self._sent.remove(each)
                lately.append(Acknowledged(PIECE_BYTES, each[2], self.base_s[each[1]]))
                self.outstanding -= PIECE_BYTES
                arrived += PIECE_BYTES
            self.window.acknowledged(lately, self.now)
        self.most_wait_s = max(waits)
        return arrived / seconds / MB, sum(waits) / len(waits)


def allowed_s(base_s: float) -> float:
    return UPLINK_ALLOWED_S + UPLINK_ALLOWED_PART * base_s


@pytest.mark.parametrize(
    ("rate_MBps", "trips_s"),
    [(25, (0.1,)), (25, (0.1,) * 4), (25, (0.02, 0.1, 0.3)), (2.5, (0.04, 0.04)), (12, (0.3,)), (60, (0.002,))],
)
def test_a_line_is_filled_and_control_waits_for_the_allowance(rate_MBps: float, trips_s: tuple[float, ...]) -> None:
    line = Uplink(rate_MBps * MB, *trips_s)
    line.run(30 * max(ROUND_S, *trips_s))  # finds the window
    got_MBps, wait_s = line.run(5.0)
    assert got_MBps > 0.95 * rate_MBps
    assert wait_s < 1.5 * allowed_s(max(trips_s)) + LEAST_WINDOW_BYTES / rate_MBps / MB
    assert line.window.busy.rate_Bps(line.now) == pytest.approx(rate_MBps * MB, rel=0.2), "and so it is known"


@pytest.mark.parametrize(
    ("rate_MBps", "trip_s"), [(25, 0.1), (25, 0.02), (12, 0.2), (12.5, 0.1), (6.25, 0.1), (25, 0.3)]
)
def test_a_new_line_is_full_soon_and_control_waits_half_a_round_trip_at_most(rate_MBps: float, trip_s: float) -> None:
    """With a window that doubled once a round it was full after 18 round trips: what was allowed last is delivered a round later, and the
    rate of the round before looked like the most that the line carries. With one that grew until as much as is allowed waited, and shrank
    by halves, control waited for 0.8 of a round trip on real lines (here on the second)."""
    line = Uplink(rate_MBps * MB, trip_s)
    full_s = max(0.0, math.log(rate_MBps * MB * trip_s / FIRST_BYTES) / math.log(1.4)) * trip_s
    line.run(full_s + 4 * trip_s)
    assert line.most_wait_s < max(0.5 * trip_s, allowed_s(trip_s)) + LEAST_BYTES / rate_MBps / MB
    got_MBps, _ = line.run(4 * trip_s)
    assert got_MBps > 0.9 * rate_MBps


def test_a_pause_does_not_count_when_the_start_ends() -> None:
    """What the line carries would be what came since before the pause."""
    start, trip_s = Start(), 0.1
    start.grow(FIRST_BYTES, [Acknowledged(PIECE_BYTES, trip_s, trip_s)], True, 0.0)
    size, rate_Bps, now = 1 << 21, None, 5.0
    while rate_Bps is None:
        size, rate_Bps = start.grow(size, [Acknowledged(50_000, 2 * trip_s, trip_s)], True, now)
        now += 0.005
    assert rate_Bps > 5 * MB and size > 5 * MB * trip_s


def test_a_part_of_a_look_does_not_open_it() -> None:
    """A rate of one round trip counts bytes of a look too many, and the highest is believed for ten seconds."""
    line = Uplink(2.5 * MB, 0.1)
    line.run(5.0)
    _, wait_s = line.run(10.0)
    assert wait_s < 0.9 * allowed_s(0.1)


def test_a_change_that_shows_late_is_not_made_twice() -> None:
    line = Uplink(25 * MB, 0.1)
    line.late_s = 0.02
    line.run(5.0)
    got_MBps, _ = line.run(10.0)
    assert got_MBps > 0.99 * 25 and line.most_wait_s < 1.5 * allowed_s(0.1)


def test_bytes_that_the_system_holds_back_do_not_open_it() -> None:
    """A receiver's share is less than the line: when it became more, all that waited left at once."""
    sizes = []
    for unsent_bytes in (0, 128 << 10):
        line = Uplink(2.5 * MB, 0.1)
        line.run(3.0)
        line.rate_Bps = 2 * MB  # there is no queue, as the system sends no faster than that
        for _ in range(20):
            line.window.room_bytes(line.window.size_bytes, unsent_bytes)
            line.now += 0.1
            line.window.acknowledged([Acknowledged(200_000, 0.1, 0.1)], line.now)
        sizes.append(line.window.size_bytes)
        assert line.window.busy.rate_Bps(line.now) > 1.5 * MB, "what the line carries is known all the same"
    assert sizes[1] < 1.5 * 2.5 * MB * 0.1 < sizes[0]


def test_bytes_that_are_sent_again_do_not_close_it() -> None:
    """With 1 % loss one connection had 0.6 of its rate: its window followed its rate, and its rate its window."""
    line = Uplink(25 * MB, 0.1)
    line.late_s = 0.06
    line.run(20.0)
    got_MBps, wait_s = line.run(60.0)
    assert got_MBps > 0.92 * 25 and wait_s < 2 * allowed_s(0.1)


def test_a_line_that_becomes_slower_is_not_flooded_and_one_that_becomes_faster_is_used() -> None:
    line = Uplink(25 * MB, 0.1, 0.1)
    line.run(3.0)
    line.rate_Bps = 5 * MB
    line.run(1.5 * RATES_S)  # what it has measured counts for so long
    got_MBps, wait_s = line.run(3.0)
    assert got_MBps > 0.95 * 5 and wait_s < 1.5 * allowed_s(0.1)
    assert line.window.size_bytes < 1.3 * 5 * MB * 0.1
    line.rate_Bps = 25 * MB
    line.run(3.0)
    got_MBps, _ = line.run(3.0)
    assert got_MBps > 0.95 * 25


@pytest.mark.parametrize("change", ["longer", "others"])
def test_a_queue_of_others_or_a_longer_way_does_not_close_it(change: str) -> None:
    """The system remembers the shortest round trip for five minutes."""
    line = Uplink(25 * MB, 0.05, 0.05)
    line.run(3.0)
    if change == "longer":
        line.trips_s = (0.25, 0.25)
    else:
        line.foreign_s = 0.2
    got_MBps, _ = line.run(60.0)
    assert got_MBps > 0.85 * 25
    line.trips_s, line.foreign_s = (0.05, 0.05), 0.0
    line.run(RATES_S + 2 * FOREIGN_S)
    got_MBps, wait_s = line.run(3.0)
    assert got_MBps > 0.95 * 25 and wait_s < 1.5 * allowed_s(0.05)


def test_it_does_not_grow_while_it_is_not_used() -> None:
    window = UplinkWindow()
    for index in range(1000):
        window.acknowledged([Acknowledged(1000, 0.1, 0.1)], index * 0.1)
    assert window.size_bytes < 1 << 20
    assert window.busy.rate_Bps(100.0) == 0.0, "what a line carries that is not full says nothing of it"


@pytest.mark.parametrize(
    ("trips_s", "last_s", "outstanding"),
    [((0.2,), math.inf, 1.0), ((0.2, 0.1), 0.05, 1.5), ((0.2, 0.2), 0.05, 1.5), ((0.2, 0.2), math.inf, 2.0)],
)
def test_bytes_in_the_line_of_one_receiver_leave_room(
    trips_s: tuple[float, ...], last_s: float, outstanding: float
) -> None:
    """Of one connection nothing says where its bytes wait; what all wait, now and in the last round, is here. Each has 1 MB on its way, of
    0.1 s without a queue."""
    ways = [(Sent(0), Info(700, 0, int(1e6 * trip_s), 0, 0, 100_000, 0, 0)) for trip_s in trips_s]
    for sent, _ in ways:
        sent.written_bytes = 1_000_000
    assert outstanding_bytes(ways, last_s) == pytest.approx(outstanding * MB)


def test_a_line_that_was_not_used_for_long_and_is_faster_now_is_full_soon() -> None:
    """What it carried has been forgotten."""
    line = Uplink(25 * MB, 0.1)
    line.run(5.0)
    for _ in range(200):
        line.now += 0.1
        line.window.acknowledged([Acknowledged(10_000, 0.1, 0.1)], line.now)
    line.free, line.outstanding, line.rate_Bps = line.now, 0, 100 * MB
    line._sent.clear()
    line.run(0.8)
    got_MBps, _ = line.run(0.5)
    assert got_MBps > 0.9 * 100
