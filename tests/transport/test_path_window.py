"""What the window of one connection promises: senders to one receiver fill its line together and do not overflow it; on a modelled line."""

from __future__ import annotations

import random
from collections import deque

import pytest

from shoal.transport.congestion.windows import (
    LEAST_BYTES,
    LEAST_WINDOW_BYTES,
    PATH_ALLOWED_S,
    POOR_S,
    QUEUED_BYTES,
    PathSample,
    PathWindow,
)

PIECE_BYTES = 16 << 10
TICK_S = 0.004
LINE_BPS, BUFFER_S = 6.25e6, 0.4  # 50 Mbit/s


class Sender:
    """A connection that has data without end while it is active. The system knows the way's first length, `base_s`."""

    def __init__(self, base_s: float) -> None:
        self.window = PathWindow()
        self.base_s = self.way_s = self.trip_s = base_s
        self.active = True
        self.outstanding = self.delivered = self.lost = 0
        self.sent: deque[tuple[float, float]] = deque()  # when acknowledged, its round trip


class Receiver:
    """Its line, which all senders share."""

    def __init__(self, *bases_s: float) -> None:
        self.senders = [Sender(base_s) for base_s in bases_s]
        self.now = self.free = 0.0  # `free`: when all that was sent is through
        self.most_queue_s = 0.0

    def run(self, seconds: float) -> list[float]:
        """Parts of the line that each sender got."""
        before = [each.delivered for each in self.senders]
        until, self.most_queue_s = self.now + seconds, 0.0
        while self.now < until:
            for sender in self.senders:
                self._send(sender)
            self.most_queue_s = max(self.most_queue_s, self.free - self.now)
            self.now += TICK_S
            for sender in self.senders:
                self._acknowledge(sender)
        return [(each.delivered - was) / seconds / LINE_BPS for each, was in zip(self.senders, before, strict=True)]

    def _send(self, sender: Sender) -> None:
        # As little as the system takes at once: else the first would send all of it before the next had its turn
        for _ in range(4):
            full = self.free - self.now > BUFFER_S  # what came then would be lost, and sent again
            if full or not sender.active or not sender.window.room_bytes(sender.outstanding):
                return
            self.free = max(self.free, self.now) + PIECE_BYTES / LINE_BPS
            trip_s = self.free - self.now + sender.way_s
            sender.sent.append((self.now + trip_s, trip_s))
            sender.outstanding += PIECE_BYTES

    def _acknowledge(self, sender: Sender) -> None:
        if not sender.sent:
            return
        while sender.sent and sender.sent[0][0] <= self.now:
            sender.trip_s = sender.sent.popleft()[1]
            sender.outstanding -= PIECE_BYTES
            sender.delivered += PIECE_BYTES
        sample = PathSample(sender.delivered, sender.trip_s, sender.base_s, False, True, sender.lost)
        sender.window.look(sample, sender.outstanding, self.now)


def queue_s(senders: int) -> float:
    return PATH_ALLOWED_S + senders * (QUEUED_BYTES + PIECE_BYTES) / LINE_BPS


@pytest.mark.parametrize("senders", [1, 2, 5])
def test_senders_to_one_receiver_fill_its_line_in_like_parts_and_its_buffer_little(senders: int) -> None:
    """BBR alone kept 200 to 300 ms there, and a fifth of the bytes were sent again."""
    receiver = Receiver(*[0.1] * senders)
    receiver.run(10.0)
    parts = receiver.run(10.0)
    assert sum(parts) > 0.97
    assert max(parts) < 1.25 * min(parts)
    assert receiver.most_queue_s < 1.2 * queue_s(senders)


def test_ways_of_unlike_length_share_a_line() -> None:
    receiver = Receiver(0.02, 0.1, 0.3)
    receiver.run(20.0)
    parts = receiver.run(20.0)
    assert sum(parts) > 0.97 and min(parts) > 0.15


def test_what_others_leave_is_used_at_once() -> None:
    receiver = Receiver(*[0.4] * 8)
    receiver.run(10.0)
    for sender in receiver.senders[1:]:
        sender.active = False
    receiver.run(2.0)
    assert receiver.run(0.4)[0] > 0.95


def test_a_window_without_a_queue_is_open_and_one_that_is_not_used_does_not_grow() -> None:
    window = PathWindow()
    assert window.room_bytes(1 << 30) >= LEAST_BYTES
    window.look(PathSample(0, 0.1, 0.1, False, True), 1 << 20, 0.0)
    window.look(PathSample(1 << 20, 0.1, 0.1, False, True), 1 << 20, 1.0)
    assert window.room_bytes(1 << 30) >= LEAST_BYTES, "nothing waits"
    window.look(PathSample(1 << 21, 0.3, 0.1, False, True), 1 << 20, 2.0)
    window.look(PathSample(1 << 21, 0.3, 0.1, False, True), 1 << 20, 3.0)
    size = window.size_bytes
    assert size < 1 << 20
    for second in range(4, 100):
        window.look(PathSample(1 << 22, 0.1, 0.1, False, True), 0, float(second))
    assert window.size_bytes == size


def test_a_way_that_has_become_longer_is_no_queue() -> None:
    """The system remembers the shortest round trip for five minutes; with the rest taken for a queue a tenth of the line was used."""
    receiver = Receiver(0.02)
    receiver.run(10.0)
    (sender,) = receiver.senders
    sender.way_s = 0.4
    receiver.run(2 * POOR_S + 5.0)
    assert receiver.run(5.0)[0] > 0.9


def test_a_way_on_which_bytes_are_lost_is_full() -> None:
    """Then what looks like a longer way is others' queue."""
    receiver = Receiver(0.02)
    receiver.run(10.0)
    (sender,) = receiver.senders
    sender.way_s = 0.4
    for _ in range(30):
        sender.lost += 1
        receiver.run(1.0)
    assert receiver.run(5.0)[0] < 0.5


@pytest.mark.parametrize("seed", range(20))
def test_with_nothing_on_its_way_there_is_room_whatever_was_seen(seed: int) -> None:
    """Nothing is measured while nothing is on its way: a window below what is worth sending would stay closed for ever."""
    rng, window, delivered = random.Random(seed), PathWindow(), 0
    for step in range(300):
        delivered += rng.choice((0, 0, 1000, 1 << 20))
        trip_s = rng.choice((0.0, 0.01, 0.1, 0.2, 30.0))
        sample = PathSample(delivered, trip_s, rng.choice((0.0, 0.01, 0.1)), False, True, rng.randrange(3))
        window.look(sample, rng.choice((0, 1, 1000, 1 << 20)), step * rng.choice((0.01, 1.0)))
        window.room_bytes(rng.choice((0, 1 << 30)))
        assert window.room_bytes(0) >= LEAST_BYTES and window.size_bytes >= LEAST_WINDOW_BYTES
