"""A receiver's shares: its line is full and hardly longer, whoever comes and goes, and whatever a sender claims. On a modelled line."""

from __future__ import annotations

import math

import pytest

from shoal.transport.congestion.shares import LEAST_BPS, ROUND_S, SILENT_S, Report, Share, Shares
from shoal.transport.streams.uplink import PACE

MB = 1e6
BACKLOG = 10_000_000
BUFFER_S = 0.3  # of queue; what is more is dropped
LATE_S = 0.1  # until a share is followed, and a report is here


class Line:
    """Senders that always have something to send, each as fast as it was told or, without a share, as it likes. One queue."""

    def __init__(self, rate_Bps: float, **likes_Bps: float) -> None:
        self.shares, self.rate_Bps, self.likes_Bps = Shares(), rate_Bps, likes_Bps
        self.told_Bps = dict.fromkeys(likes_Bps, math.inf)
        self.most_Bps = dict.fromkeys(likes_Bps, math.inf)  # that they report
        self.silent: set[str] = set()  # they claim to have bytes, and send none
        self.now, self.queue_bytes = 1.0, 0.0
        self._later: list[tuple[float, str, float]] = []

    def run(self, seconds: float) -> dict[str, float]:
        """Bytes per second that came of each."""
        until, rates = self.now + seconds, dict.fromkeys(self.likes_Bps, 0.0)
        while self.now < until:
            self.now += 0.01
            for at, peer, rate_Bps in [each for each in self._later if each[0] <= self.now]:
                self._later.remove((at, peer, rate_Bps))
                self.told_Bps[peer] = rate_Bps
            sends = {
                peer: 0.0 if peer in self.silent else 0.01 * min(like, PACE * self.told_Bps[peer])
                for peer, like in self.likes_Bps.items()
            }
            self.queue_bytes = min(self.queue_bytes + sum(sends.values()), BUFFER_S * self.rate_Bps)
            passed = min(self.queue_bytes, 0.01 * self.rate_Bps)
            part = passed / self.queue_bytes if self.queue_bytes else 0.0
            for peer, nbytes in sends.items():
                got = passed * nbytes / sum(sends.values()) if sum(sends.values()) else 0.0
                rates[peer] += got
                report = Report(BACKLOG, self.most_Bps[peer], self.queue_bytes / self.rate_Bps)
                if nbytes or self.shares._senders.get(peer) is None:
                    self.shares.heard(peer, report, self.now)
                    self.shares.arrived(peer, int(got), self.now)
            self.queue_bytes *= 1 - part
            for share in self.shares.told(self.now):
                self._later.append((self.now + LATE_S, share.peer, share.rate_Bps))
        return {peer: nbytes / seconds for peer, nbytes in rates.items()}

    def leave(self, peer: str) -> None:
        del self.likes_Bps[peer]
        self.shares.heard(peer, Report(0, math.inf, 0.0), self.now)
        self.shares.ended(peer)


def test_nothing_is_told_before_the_line_was_full() -> None:
    line = Line(10 * MB, a=3 * MB, b=4 * MB)
    line.run(10.0)
    assert set(line.told_Bps.values()) == {math.inf}


@pytest.mark.parametrize("rate_MBps", [0.5, 6, 100])
def test_those_that_overrun_the_line_together_get_equal_parts_of_all_of_it(rate_MBps: float) -> None:
    line = Line(rate_MBps * MB, a=5 * rate_MBps * MB, b=3 * rate_MBps * MB, c=rate_MBps * MB)
    line.run(5.0)
    rates = line.run(20.0)
    assert sum(rates.values()) > 0.93 * rate_MBps * MB
    assert all(rate == pytest.approx(rate_MBps * MB / 3, rel=0.1) for rate in rates.values())
    assert line.queue_bytes / line.rate_Bps < 0.15


def test_one_late_report_is_no_full_line() -> None:
    line = Line(10 * MB, a=3 * MB, b=4 * MB)
    line.run(5.0)
    line.queue_bytes = 0.08 * line.rate_Bps  # gone in a quarter of a second
    line.run(5.0)
    assert set(line.told_Bps.values()) == {math.inf}


def test_what_a_narrow_uplink_leaves_is_the_others() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB, c=MB)
    line.most_Bps["c"] = MB
    line.run(5.0)
    rates = line.run(20.0)
    assert rates["a"] > 2.2 * MB and rates["b"] > 2.2 * MB and rates["c"] > 0.8 * MB


def test_when_one_ends_another_has_its_part_at_once() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB)
    line.run(10.0)
    line.leave("b")
    line.run(2 * ROUND_S + LATE_S)
    assert line.run(1.0)["a"] > 5 * MB


def test_who_claims_bytes_and_sends_none_keeps_nobody_waiting() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB)
    line.run(10.0)
    line.silent.add("b")
    line.run(SILENT_S + 2 * ROUND_S + LATE_S)
    assert line.run(0.5)["a"] > 4.5 * MB, "and not when its trickle is noticed, a second later"


def test_who_sends_a_trickle_holds_no_equal_part() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB, c=60 * MB)
    line.run(10.0)
    line.likes_Bps["c"] = 0.01 * MB
    line.run(5.0)
    rates = line.run(10.0)
    assert rates["a"] + rates["b"] > 5 * MB


def test_a_line_that_changes_is_followed() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB)
    line.run(10.0)
    line.rate_Bps = 24 * MB
    line.run(5.0)
    assert sum(line.run(1.0).values()) > 20 * MB
    line.rate_Bps = 6 * MB
    line.run(5.0)
    assert sum(line.run(5.0).values()) > 5 * MB
    assert line.queue_bytes / line.rate_Bps < 0.15


def test_a_queue_on_the_senders_side_does_not_close_the_line() -> None:
    """Its uplink was full with what it sent elsewhere: the line was thought a quarter of what it carries."""
    shares = Shares()
    line = Line(6 * MB, a=60 * MB, b=60 * MB)
    line.run(10.0)
    shares, before_Bps = line.shares, line.shares.line_Bps
    shares.heard("b", Report(0, math.inf, 0.0), line.now)
    shares.ended("b")
    for _ in range(20):
        line.now += ROUND_S + 0.01
        shares.heard("a", Report(BACKLOG, math.inf, 0.1), line.now)
        shares.arrived("a", int(0.1 * MB), line.now)
        shares.told(line.now)
    assert shares.line_Bps > 0.75 * before_Bps


def test_a_queue_in_its_own_uplink_does_not_close_the_line() -> None:
    """Senders see it, as what they send is acknowledged behind it; the machine knows better. h7 in eight regions had 0.7 of its line so."""
    line = Line(10 * MB, a=20 * MB, b=20 * MB)
    line.run(5.0)
    line.likes_Bps = {"a": 3 * MB, "b": 3 * MB}
    line.run(2.0)
    known_Bps, shares = line.shares.line_Bps, line.shares
    shares._own_queue_s = lambda now: 0.001
    for number in range(300):
        now = line.now + 0.05 * number
        for peer in line.likes_Bps:
            shares.heard(peer, Report(BACKLOG, math.inf, 0.2), now)
            shares.arrived(peer, int(0.05 * 3 * MB), now)
        shares.told(now)
    assert shares.line_Bps >= known_Bps
    assert shares.queue_s(now) == 0.001


def test_a_line_is_not_thought_to_carry_more_than_has_come() -> None:
    line = Line(10 * MB, a=20 * MB, b=20 * MB)
    line.run(5.0)
    line.likes_Bps = {"a": 4.95 * MB, "b": 4.95 * MB}  # nearly full, without a queue
    line.run(20.0)
    assert line.shares.line_Bps < 1.19 * 10 * MB


def test_senders_are_told_all_the_time_when_it_is_without_a_limit() -> None:
    """By what they are told they know their own downlinks."""
    line = Line(10 * MB, a=3 * MB, b=4 * MB)
    line.run(1.0)
    tells = [share for _ in range(100) for share in told_at(line, 0.01)]
    assert {share.peer for share in tells} == {"a", "b"} and {share.rate_Bps for share in tells} == {math.inf}
    assert 2 * 3 <= len(tells) <= 2 * 4


def told_at(line: Line, after_s: float) -> list[Share]:
    line.now += after_s
    for peer, like_Bps in line.likes_Bps.items():
        line.shares.heard(peer, Report(BACKLOG, math.inf, 0.0), line.now)
        line.shares.arrived(peer, int(after_s * like_Bps), line.now)
    return line.shares.told(line.now)


def test_reports_that_are_lies_or_unknown_end_nothing() -> None:
    shares, now, newest = Shares(), 1.0, list[Share]()
    for number in range(200):
        now += 0.06
        for peer, report in {
            "zero": Report(1, 0.0, 0.2),
            "vast": Report((1 << 32) - 1, math.inf, 65.0),
            "mute": Report(5, math.inf, math.inf),
        }.items():
            shares.heard(peer, report, now)
            shares.arrived(peer, 1000 * (number % 3), now)
        newest = shares.told(now) or newest
        assert all(LEAST_BPS <= share.rate_Bps for share in newest)
    assert all(share.rate_Bps < math.inf for share in newest)
    shares.forget("zero")
    shares.ended("nobody")
    assert shares.line_Bps < math.inf


def test_only_a_queue_that_was_seen_lately_is_the_downlinks() -> None:
    line = Line(6 * MB, a=60 * MB, b=60 * MB)
    line.run(0.5)
    assert line.shares.queue_s(line.now) > 0.1
    assert line.shares.queue_s(line.now + 5.0) == 0.0
