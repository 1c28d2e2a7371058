"""What a line carries is measured while bytes wait for it, and in no other time."""

from __future__ import annotations

import pytest

from shoal.transport.congestion.busy_rate import KEEP_S, KNOWN, SAMPLE_S, BusyRate

LINE_Bps = 2.5e6
PIECE = 256 << 10


def piece(rate: BusyRate, now: float, took_s: float, nbytes: int = PIECE) -> float:
    rate.begin(now)
    rate.end(nbytes, now + took_s)
    return now + took_s


def test_the_time_between_pieces_does_not_count() -> None:
    rate, now = BusyRate(), 0.0
    for _ in range(5 * KNOWN):
        now = piece(rate, now, PIECE / LINE_Bps) + 3.0
    assert rate.rate_Bps(now) == pytest.approx(LINE_Bps)


def test_pieces_of_several_senders_at_once_count_together() -> None:
    rate, now = BusyRate(), 0.0
    for _ in range(3 * KNOWN):  # each has half of the line, and they overlap
        rate.begin(now)
        rate.begin(now + 0.01)
        now += 2 * PIECE / LINE_Bps
        rate.end(PIECE, now)
        rate.end(PIECE, now)
    assert rate.rate_Bps(now) == pytest.approx(LINE_Bps)


def test_the_highest_counts_for_a_while_as_others_lines_may_be_the_narrow_ones() -> None:
    rate, now = BusyRate(), 0.0
    for share in (0.25, 1.0, 0.5):
        for _ in range(5 * KNOWN):
            now = piece(rate, now, PIECE / LINE_Bps / share)
    assert rate.rate_Bps(now) == pytest.approx(LINE_Bps)
    assert rate.rate_Bps(now + KEEP_S) == 0.0


def test_one_short_piece_says_nothing() -> None:
    rate = BusyRate()
    piece(rate, 0.0, SAMPLE_S / 2)
    assert rate.rate_Bps(1.0) == 0.0


def test_a_piece_that_breaks_off_ends_the_busy_time() -> None:
    rate = BusyRate()
    piece(rate, 0.0, 0.0, nbytes=0)
    now = 100.0
    for _ in range(5 * KNOWN):
        now = piece(rate, now, PIECE / LINE_Bps)
    assert rate.rate_Bps(now) == pytest.approx(LINE_Bps)


def test_a_young_connection_says_nothing_of_its_line() -> None:
    """Its window still grows: a joiner was taken for one with a third of its line, and left out of the run."""
    rate, now = BusyRate(), 0.0
    for carried in (0.2, 0.35, 0.6, 0.85, *[1.0] * (KNOWN - 4)):
        assert rate.rate_Bps(now) == 0.0
        now = piece(rate, now, SAMPLE_S, nbytes=round(carried * LINE_Bps * SAMPLE_S))
    assert rate.rate_Bps(now) == pytest.approx(LINE_Bps)
    now = piece(rate, now + KEEP_S, SAMPLE_S, nbytes=round(0.3 * LINE_Bps * SAMPLE_S))
    assert rate.rate_Bps(now) == 0.0, "after a pause it is a young one again"
