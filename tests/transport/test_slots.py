"""A line passes everything in the time that it takes, and is never idle while there is something to pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.slots import Inflow, Slots


def test_a_small_one_in_the_middle_takes_its_own_time_and_no_more() -> None:
    slots = Slots()
    assert slots.take(4.0, 1.0) == 5.0  # came and went while the large one was on its way
    assert slots.take(0.0, 10.0) == 11.0
    assert slots.take(10.5, 1.0) == 12.0
    assert slots.take(20.0, 1.0) == 21.0
    assert slots.take(11.0, 8.5) == 21.5, "12 to 20, then half a second more"


def test_free_time_before_is_used_and_taken_time_is_not() -> None:
    slots = Slots()
    slots.take(10.0, 5.0)
    assert slots.take(0.0, 4.0) == 4.0
    assert slots.take(2.0, 8.0) == 17.0, "4 to 10, then 15 to 17"
    assert slots.take(0.0, 1.0) == 18.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=40))
def test_nothing_is_taken_twice_and_nothing_lies_idle(asked: list[tuple[int, int]]) -> None:
    """Beside the plain way: every second of 1,000 is free or not."""
    slots, taken = Slots(), [False] * 1000
    for start, seconds in asked:
        at, left = start, seconds
        while left:
            left -= not taken[at]
            taken[at] = True
            at += 1
        assert slots.take(float(start), float(seconds)) == at


def test_what_comes_alone_is_not_held_and_two_at_once_share_the_line() -> None:
    line = Inflow()
    assert line.through("a", 10.0, 10.0) == 10.0
    assert line.through("b", 10.0, 40.0) == 40.0
    assert line.through("c", 10.0, 40.0) == 50.0


def test_a_sender_that_is_faster_than_the_line_is_slowed_to_it() -> None:
    line = Inflow()
    assert line.through("a", 1.0, 100.0) == 100.0
    assert line.through("a", 10.0, 100.1) == 110.0, "idle time before its last message is no use to it"
    assert line.through("a", 10.0, 200.0) == 200.0


def test_what_overtook_a_message_says_nothing_of_when_that_began() -> None:
    line = Inflow()
    assert line.through("a", 0.5, 95.0, rank=0) == 95.0
    assert line.through("a", 10.0, 100.5, rank=1) == 101.0, "it was on its way when the other passed it"
    assert line.through("a", 10.0, 101.0, rank=0) > 101.0
