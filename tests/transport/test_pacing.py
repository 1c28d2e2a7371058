"""What the pacing of bulk over TCP promises: the line stays full, its queue stays short, and nothing gets stuck; on a modelled line."""

from __future__ import annotations

import math
import socket
import struct
import sys

import pytest

from shoal.transport.streams.pacing import ALLOWED_PART, LEAST_BASE_S, PATIENCE, Pacer, SocketPacing

MB = 1e6
BUFFER_S = 0.5


class Line:
    """Streams that always have something to send share a line; a round is a millisecond of all, and each stream's own round trip."""

    def __init__(self, rate_Bps: float, trip_s: float, streams: int = 1, greed_Bps: float = math.inf) -> None:
        self.rate_Bps, self.trip_s = rate_Bps, trip_s
        self.greed_Bps = min(greed_Bps, 2 * rate_Bps)  # of a stream that nothing limits, such as BBR's first rounds
        self.foreign_Bps = 0.0  # that others send into the same queue
        self.queue_bytes = 0.0
        self.pacers = [Pacer() for _ in range(streams)]
        for pacer in self.pacers:
            pacer.restart(trip_s)
        self.limits = [math.inf] * streams
        self._delivered = [0.0] * streams
        self._due = [(1 + i / streams) * trip_s for i in range(streams)]
        self._since = [0.0] * streams
        self.now = 0.0

    def run(self, seconds: float) -> tuple[float, float]:
        """The part of the line that was used, and the longest that a control message waited, in seconds."""
        begin, used, longest_s = self.now, 0.0, 0.0
        while self.now < begin + seconds:
            step_s = 1e-3
            rates = [min(limit, self.greed_Bps) for limit in self.limits]
            offered = self.queue_bytes + step_s * (sum(rates) + self.foreign_Bps)
            carried = min(offered, step_s * self.rate_Bps)
            self.queue_bytes = min(offered - carried, BUFFER_S * self.rate_Bps)
            used += carried
            longest_s = max(longest_s, self.queue_bytes / self.rate_Bps)
            self.now += step_s
            for i, rate in enumerate(rates):
                self._delivered[i] += carried * rate / (sum(rates) + self.foreign_Bps)
                if self.now >= self._due[i]:
                    self._look(i)
        return used / (self.now - begin) / self.rate_Bps, longest_s

    def _look(self, i: int) -> None:
        trip_s = self.trip_s + self.queue_bytes / self.rate_Bps
        self.limits[i] = self.pacers[i].limit_Bps(trip_s, self._delivered[i] / (self.now - self._since[i]))
        self._due[i], self._since[i], self._delivered[i] = self.now + trip_s, self.now, 0.0


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("rate_MBps", "trip_s"), [(25, 0.1), (2.5, 0.3), (125, 0.02)])
def test_a_line_stays_full_and_control_hardly_waits(rate_MBps: float, trip_s: float, streams: int) -> None:
    line = Line(rate_MBps * MB, trip_s, streams)
    line.run(40 * trip_s)
    used, wait_s = line.run(100 * trip_s)
    assert used > 0.97
    assert wait_s < trip_s / 2, "control below one and a half round trips"


def test_a_line_that_becomes_wider_is_used_and_one_that_becomes_narrower_does_not_drown() -> None:
    line = Line(5 * MB, 0.1)
    line.run(4)
    line.rate_Bps, line.greed_Bps = 25 * MB, 50 * MB
    line.run(4)
    assert line.run(2)[0] > 0.95
    line.rate_Bps = 5 * MB
    line.run(8)
    used, wait_s = line.run(2)
    assert used > 0.95 and wait_s < 0.05


def test_a_way_that_becomes_longer_is_no_queue_for_ever() -> None:
    line = Line(25 * MB, 0.05)
    line.run(2)
    line.trip_s = 0.15
    line.run(4 * PATIENCE * 0.15)
    used, wait_s = line.run(3)
    assert used > 0.95 and wait_s < 0.075


def test_a_stream_keeps_its_place_beside_a_queue_that_others_make() -> None:
    line = Line(25 * MB, 0.1)
    line.run(2)
    line.foreign_Bps = 12 * MB
    line.queue_bytes = 0.2 * 25 * MB
    line.run(10)
    assert sum(line.limits) > 8 * MB


def test_streams_that_share_a_line_come_to_equal_parts_of_it() -> None:
    line = Line(25 * MB, 0.1, streams=3)
    line.run(1)
    line.limits = [20 * MB, 4 * MB, 1 * MB]
    line.run(6)
    assert min(line.limits) > 0.5 * max(line.limits)


def test_a_stream_fills_the_line_some_round_trips_after_a_pause() -> None:
    line = Line(25 * MB, 0.1, streams=4)
    line.run(6)
    line.pacers, line.limits = line.pacers[:1], [line.pacers[0].restart(0.1)]
    assert line.run(1.5)[0] > 0.8


def test_a_round_without_deliveries_does_not_stop_the_stream() -> None:
    """BBR sends next to nothing for a fifth of a second every ten, and a busy machine may stop the process."""
    pacer = Pacer()
    assert math.isinf(pacer.limit_Bps(0.1, 25 * MB))
    assert pacer.limit_Bps(0.1 * (1 + 2 * ALLOWED_PART), 25 * MB) > 10 * MB
    assert pacer.limit_Bps(0.1, 0.0) > 25 * MB


def test_short_lines_are_not_paced() -> None:
    """A busy machine delays more there than a queue does; less and less would be sent."""
    pacer = Pacer()
    assert math.isinf(pacer.limit_Bps(LEAST_BASE_S / 2, 25 * MB))
    assert math.isinf(pacer.limit_Bps(10 * LEAST_BASE_S, 25 * MB))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")
def test_the_kernel_accepts_the_limit_and_tells_what_was_delivered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as receiver:
            limits: list[float] = []
            pacing = SocketPacing(sender)
            pacing._pacer.limit_Bps = lambda trip_s, delivered_Bps: limits.append(delivered_Bps) or 5e6  # type: ignore[method-assign]
            while not limits:
                sender.sendall(bytes(1000))
                receiver.recv(1000)
                pacing.sent()
            (limit,) = struct.unpack("=Q", sender.getsockopt(socket.SOL_SOCKET, 47, 8))
            assert limit == 5_000_000
            assert limits[0] > 0
