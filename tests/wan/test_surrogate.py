"""The surrogate of real lines (benchmarks/wan/surrogate.py): lines fill and drop, connections fill them, a perfect transport shares."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

DELAY_S = [[0.0, 0.05, 0.05], [0.05, 0.0, 0.05], [0.05, 0.05, 0.0]]
RATES_Bps = (6.25e6, 6.25e6)  # 50 Mbit/s


class Events:
    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = itertools.count()

    def at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), act))

    def run_until(self, over: list[float], count: int) -> None:
        while len(over) < count:
            now, _, act = heapq.heappop(self._events)
            act(now)


def test_a_packet_that_would_wait_longer_than_the_buffer_is_dropped(surrogate: ModuleType) -> None:
    line = surrogate.Line(1e6, 0.25)
    assert [line.leaves(1e5, 1.0) for _ in range(4)] == pytest.approx([1.1, 1.2, 1.3, None])
    assert line.leaves(1e5, 1.15) == pytest.approx(1.4)
    assert line.dropped == 1


def test_a_connection_alone_carries_what_a_plain_socket_does_in_the_laboratory(surrogate: ModuleType) -> None:
    """32 MB over 50 Mbit/s and 50 ms each way: 5.4 MB/s, of 6.02 that the line carries."""
    events, ends_s = Events(), list[float]()
    network = surrogate.Network(events.at, DELAY_S, RATES_Bps, 0.2, np.random.default_rng(0))
    network.send(0, 1, 32_000_000, 0, 1.0, ends_s.append)
    events.run_until(ends_s, 1)
    assert 5.2e6 < 32e6 / (ends_s[0] - 1.0) < 5.6e6


def test_bytes_that_are_lost_are_sent_again_and_a_message_arrives_when_all_of_it_has(
    surrogate: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two senders fill the line of one receiver, whose buffer holds 20 ms."""
    events, ends = Events(), list[float]()
    pieces: dict[int, dict[int, int]] = {0: {}, 1: {}}  # by sender and where they begin
    received = surrogate.Flow.received

    def counted(flow: Any, piece: Any, now: float) -> None:
        pieces[flow.source][piece.start] = piece.nbytes
        received(flow, piece, now)

    monkeypatch.setattr(surrogate.Flow, "received", counted)
    network = surrogate.Network(events.at, DELAY_S, RATES_Bps, 0.02, np.random.default_rng(0))
    order: list[tuple[int, int]] = []
    for source, number in itertools.product((0, 1), range(4)):

        def arrived(now: float, key: tuple[int, int] = (source, number)) -> None:
            order.append(key)
            ends.append(now)
            end = (key[1] + 1) * 2_000_000
            assert sum(nbytes for start, nbytes in pieces[key[0]].items() if start < end) >= end

        network.send(source, 2, 2_000_000, 1, 1.0, arrived)
    events.run_until(ends, 8)
    assert all([number for one, number in order if one == source] == [0, 1, 2, 3] for source in (0, 1))
    assert sum(flow.again for flow in network.flows.values()) > 0
    assert 16e6 * surrogate.FRAMING / 6.25e6 < ends[-1] - 1.0 < 2 * 16e6 / 6.25e6


def test_a_perfect_transport_shares_lines_max_min_fairly(surrogate: ModuleType) -> None:
    """0 and 1 send to 2, each at half its line's rate; what 1 sends to 0 takes the other half of its own."""
    events, ends = Events(), list[float]()
    fluid = surrogate.Fluid(events.at, DELAY_S, RATES_Bps, np.random.default_rng(0))
    times_s: dict[tuple[int, int], float] = {}
    for pair in ((0, 2), (1, 2), (1, 0)):

        def arrived(now: float, pair: tuple[int, int] = pair) -> None:
            times_s[pair] = now - 1.0 - 0.05
            ends.append(now)

        fluid.send(*pair, 3_000_000, 1, 1.0, arrived)
    events.run_until(ends, 3)
    assert list(times_s.values()) == pytest.approx([6e6 * surrogate.FRAMING / 6.25e6] * 3)


def test_a_round_ends_when_every_host_has_every_sum(surrogate: ModuleType) -> None:
    """Three hosts with 3 MB each: two thirds of that leave each line twice, over perfect lines of 6.25 MB/s without a delay."""
    events, rng = Events(), np.random.default_rng(0)
    carrier = surrogate.Fluid(events.at, [[0.0] * 3] * 3, RATES_Bps, rng)
    one = surrogate.Round(carrier, events.at, 3, int(1e6 / surrogate.SLICES))
    for host in range(3):
        one.begin(host, 1.0)
    events.run_until(one.gathered_s, 3)
    least_s = 2 * 2e6 * surrogate.FRAMING / 6.25e6
    assert max(one.gathered_s) - 1.0 == pytest.approx(least_s, rel=0.1)
