"""The queue of a downlink by how long shares are on their way: clocks that begin anywhere, and queues that are elsewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shoal.transport.congestion.downlink import BASE_S, FRESH_S, KNOWN_S, MOST_WORDS, DownlinkQueue, Way

WAYS_S = {"near": 0.006, "far": 0.15, "other": 0.09}
CLOCKS_S = {"near": 0.0, "far": -7e6, "other": 3e8}  # that the receivers' clocks are ahead


class Downlink:
    """Receivers say something every tenth of a second. What is late in reading it is late by chance."""

    def __init__(self, *receivers: str) -> None:
        self.queue, self.receivers, self.now = DownlinkQueue(), receivers, 1000.0
        self.up_s = dict.fromkeys(receivers, 0.0)  # in their uplinks
        self.down_s = 0.0
        self._rng = np.random.default_rng(0)

    def run(self, seconds: float) -> float | None:
        for number in itertools.count():
            if number * 0.1 >= seconds:
                return self.queue.queue_s(self.now)
            self.now += 0.1
            for each in self.receivers:
                took_s = WAYS_S[each] + self.up_s[each] + self.down_s + self._rng.exponential(0.003)
                self.queue.heard(each, self.now - took_s + CLOCKS_S[each], self.now)


def test_it_is_what_all_ways_have_in_common() -> None:
    line = Downlink("near", "far", "other")
    assert line.run(5.0) == pytest.approx(0.0, abs=0.005)
    line.down_s = 0.08
    assert line.run(1.0) == pytest.approx(0.08, abs=0.005)
    line.up_s = {"near": 0.2, "far": 0.0, "other": 0.1}
    assert line.run(1.0) == pytest.approx(0.08, abs=0.005)
    line.down_s = 0.0
    assert line.run(FRESH_S) == pytest.approx(0.0, abs=0.005)


def test_one_way_has_the_queue_of_its_receiver_too() -> None:
    line = Downlink("far")
    line.run(1.0)
    line.up_s["far"] = 0.1
    assert line.run(1.0) == pytest.approx(0.1, abs=0.005)


def test_a_way_that_has_become_longer_is_no_queue_after_a_minute() -> None:
    line = Downlink("far")
    line.run(1.0)
    line.up_s["far"] = 0.1
    assert line.run(BASE_S - 2.0) == pytest.approx(0.1, abs=0.01)
    assert line.run(3.0) == pytest.approx(0.0, abs=0.005)


def test_nothing_is_known_before_and_some_time_after_a_word() -> None:
    line = Downlink("near")
    assert line.queue.queue_s(0.0) is None
    assert line.run(1.0) is not None
    assert line.queue.queue_s(line.now + KNOWN_S) is None


def test_who_is_silent_says_nothing_and_is_forgotten() -> None:
    line = Downlink("near", "far")
    line.run(1.0)
    line.receivers, line.down_s = ("far",), 0.05
    assert line.run(1.0) == pytest.approx(0.05, abs=0.005)
    line.run(BASE_S)
    assert set(line.queue._ways) == {"far"}


def test_a_flood_of_words_is_not_kept() -> None:
    way = Way()
    for number in range(3 * MOST_WORDS):
        way.heard(1e-3 * number, 1000.0 + 1e-5 * number)
    assert len(way._base) == len(way._fresh) == MOST_WORDS


@pytest.mark.parametrize("sent_s", [0.0, 1.8e13, 1e3])
def test_a_receiver_that_lies_cannot_make_it_longer(sent_s: float) -> None:
    line = Downlink("near", "far")
    line.run(1.0)
    line.queue.heard("liar", line.now - 5.0, line.now)
    for _ in range(20):
        line.run(0.1)
        line.queue.heard("liar", sent_s, line.now)
    known_s = line.queue.queue_s(line.now)
    assert known_s is not None and known_s < 0.01
