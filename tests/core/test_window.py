"""How many microbatches an owner drives at once: as many as bandwidth times delay asks for, by what the steps before have shown."""

from __future__ import annotations

import pytest

from shoal.core.messages import Settings
from shoal.core.trainer.window import FIRST, LEAST, MOST, Window

AUTO = Settings(stages=3, microbatches=96, steps=9, inflight=0)


def step(window: Window, trip_s: float, most_per_s: float, count: int = 60) -> int:
    """A step of microbatches that take `trip_s` each without queues, and are finished at that rate at most. Then the next begins."""
    ends = [0.0] * window.size
    for index in range(count):
        start = ends[-window.size]
        window.start(index, start)
        ends.append(max(start + trip_s, ends[-1] + 1 / most_per_s))
        window.finish(index, ends[-1])
    window.begin()
    return window.size


def test_a_given_number_stays() -> None:
    window = Window(Settings(stages=3, microbatches=96, steps=9, inflight=6))
    assert [step(window, 3.0, 0.5), step(window, 0.1, 100.0)] == [6, 6]


@pytest.mark.parametrize(("trip_s", "most_per_s", "expected"), [(3.0, 1.0, 9), (3.0, 2.0, 18), (0.5, 1.0, LEAST)])
def test_it_follows_rate_times_trip(trip_s: float, most_per_s: float, expected: int) -> None:
    window = Window(AUTO)
    assert window.size == FIRST
    sizes = [step(window, trip_s, most_per_s) for _ in range(6)]
    assert sizes[-1] == pytest.approx(expected, abs=1) and sizes[-2] == sizes[-1]


def test_it_grows_while_only_latency_limits_and_is_bounded() -> None:
    window = Window(AUTO)
    assert [step(window, 1.0, 1e6, 200) for _ in range(6)] == [8, 16, 32, 64, MOST, MOST]


def test_it_follows_a_line_that_becomes_slower() -> None:
    window = Window(AUTO)
    for _ in range(5):
        step(window, 2.0, 4.0)
    assert window.size > 20
    assert [step(window, 2.0, 0.5) for _ in range(3)][-1] <= 4


def test_what_it_drives_fits_into_the_stores() -> None:
    """Two tensors a stage of each, as config.narrow_store says; the smallest size told counts, whoever lies."""
    window = Window(Settings(stages=3, microbatches=96, steps=9, inflight=0, activation_store_bytes=6 * 1000 * 5))
    window.made(1000)
    window.made(1 << 60)
    assert [step(window, 1.0, 1e6) for _ in range(3)] == [5, 5, 5]
    narrow = Window(Settings(stages=3, microbatches=96, steps=9, inflight=0, activation_store_bytes=10))
    narrow.made(1000)
    assert step(narrow, 1.0, 1e6) == 1
