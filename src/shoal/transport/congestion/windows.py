"""Congestion windows of bulk on a line that it shares with control messages: enough to fill the line, hardly more.

`CongestionWindow` is for libp2p.py, where all streams to a peer share one connection. Its queues (unix sockets, 64 frames in each
daemon, TCP) hold megabytes, and a small message waits behind all of them. So the reader of bulk acknowledges every ACK_BYTES with one
byte, and the sender keeps within a window that follows the round trip of its own bytes, as in FAST TCP (Wei, Jin, Low and Hegde 2006):
w <- w * (base + allowance) / rtt. FAST allows a number of packets in the queues; here the allowance is a time, as control waits for
that long. The base is measured again from time to time, with a small window.

`UplinkWindow` and `PathWindow` are for uplink.py: TCP connections of their own to each peer, which share this machine's uplink, and each
receiver's downlink with the connections of other machines. All decide only: no clock, no socket.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal.transport.congestion.busy_rate import BusyRate

ACK_BYTES = 64 << 10
FLOOR_BYTES = 8 * ACK_BYTES  # with half of it, 40 % less through the loopback of a busy machine
CEILING_BYTES = 16 << 20  # what one libp2p stream takes unread
ALLOWED_S = 1e-3  # that bulk may wait in queues, and control behind it; on long lines
ALLOWED_PART = 1 / 8  # of the round trip
FIRST_GROWTH, GROWTH = 2.0, 1.25  # of the window, until it was too large for the first time; later
BASE_S = 30.0  # after which the base is measured anew, at a few round trips' loss

FIRST_BYTES = 128 << 10  # of an uplink that has not been measured
MOST_BYTES = 256 << 10  # at once, over one connection
LEAST_WINDOW_BYTES = 64 << 10  # of any
LEAST_BYTES = 16 << 10  # that are worth a call of the system
# Of queue: a time, and a part of the round trip; a busy machine writes late
UPLINK_ALLOWED_S, UPLINK_ALLOWED_PART = 0.01, 1 / 10
ROUND_S = 0.02  # at least
START_GROWTH = 1.6  # of the window in a round trip, while it is not known what the line carries
FIRST_SIGN = 1 / 4  # of the queue that is allowed: the line is nearly full, as bytes come in bursts
STEP = 1.125  # of the window, from round to round, while there is no queue: acknowledgements show it two rounds later
MOST_TRIPS = 2.0  # of what is delivered in a round trip: as much as BBR has on its way
RATE_ROUNDS = 3  # that make a rate: the looks are some milliseconds apart, and bytes come late together
RATES_S = 10.0  # whose highest rate counts: others' bursts in a receiver's downlink pass in this time
RESTART_ROUNDS = 2  # round trips in which a way could have carried more
RESTART_S, RESTART_MOST_S = 1.0, 60.0  # between two restarts of a connection
SHORT, SHORT_S = 0.9, 0.1  # of a receiver's share, and between two restarts for it
ROOMY = 0.75  # of the window
# Of the window, or so many bytes, if more, in the system: it holds them back. In a line that the window limits hardly any wait there
HELD, HELD_BYTES = 1 / 8, 32 << 10
LONG_QUEUE = 3.0  # times what is allowed: the window shrinks by all that is too much, else by half of it
LONG_ROUND = 3.0  # times what a round takes at least
# Of queue on one way. Acknowledgements wait in the receiver's uplink and in this machine's downlink, which no window of this way empties
PATH_ALLOWED_S = 0.1
QUEUED_BYTES = 64 << 10  # that every connection may have in a full way beside that: so they get as much as one another
# Of the best rate, less than as many senders would leave, for so long and without a lost byte: what looks like a queue is a longer way
POOR, POOR_S = 1 / 16, 10.0
FOREIGN = 30  # rounds in which a queue has stayed: it may not be this machine's
STAYS = 0.75  # of a queue: it has
FOREIGN_S = 30.0  # after which that is looked at again


class CongestionWindow:
    """Of one stream. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self.size_bytes = FLOOR_BYTES
        self._aim_bytes = FLOOR_BYTES  # what the size grows to, as fast as acknowledgements come: no bursts
        self._sent = self._acked = 0  # bytes since the stream began
        self._marks: deque[float] = deque()  # when each whole ACK_BYTES in flight was sent
        self._base_s = math.inf  # round trip with a small window
        self._base_until = 0.0
        self._base_after: int | None = FLOOR_BYTES  # while it is measured: the window's size before
        self._growth = FIRST_GROWTH
        self._round = (0, FLOOR_BYTES)  # the bytes sent since the window last changed, as many as it holds
        self._trips_s: list[float] = []  # of these
        self._used = False  # all of the window was, in this round

    def room_bytes(self) -> int:
        """Bytes that may be sent now, up to the next acknowledgement. 0: wait for an acknowledgement."""
        room = self.size_bytes - (self._sent - self._acked)
        if room <= 0:
            self._used = True
        return min(max(0, room), ACK_BYTES - self._sent % ACK_BYTES)

    def sent(self, nbytes: int, now: float) -> None:
        whole = self._sent // ACK_BYTES
        self._sent += nbytes
        self._marks.extend([now] * (self._sent // ACK_BYTES - whole))

    def acknowledged(self, count: int, now: float) -> None:
        """`count` times ACK_BYTES. ValueError when fewer are in flight."""
        if count > len(self._marks):
            raise ValueError(f"{count} acknowledgements where there can be {len(self._marks)}")
        for _ in range(count):
            self._acked += ACK_BYTES
            trip_s = now - self._marks.popleft()
            if self._acked - ACK_BYTES >= self._round[0]:
                self._trips_s.append(trip_s)
        self.size_bytes = min(self._aim_bytes, self.size_bytes + count * ACK_BYTES)
        if self._acked >= self._round[1]:
            self._next_round(now)

    def _next_round(self, now: float) -> None:
        self._base_s = min(self._base_s, *self._trips_s)
        if self._base_after is not None:
            aim = self._base_after
            self._base_after, self._base_until = None, now + BASE_S
        elif now >= self._base_until:
            self._base_after, self._base_s = self.size_bytes, math.inf
            aim = FLOOR_BYTES
        else:
            # The median: some are late because of lost packets or a busy machine, not because of a queue.
            aim = int(self._aim_bytes * self._factor(statistics.median_low(self._trips_s)))
        self._aim_bytes = min(CEILING_BYTES, max(FLOOR_BYTES, aim))
        self.size_bytes = min(self.size_bytes, self._aim_bytes)
        self._round = (self._sent, self._sent + self._aim_bytes)
        self._trips_s, self._used = [], False

    def _factor(self, trip_s: float) -> float:
        allowed_s = max(ALLOWED_S, ALLOWED_PART * self._base_s)
        if trip_s > self._base_s + allowed_s:
            self._growth = GROWTH
            return (self._base_s + allowed_s) / trip_s
        return self._growth if self._used and trip_s < self._base_s + allowed_s / 2 else 1.0


class Acknowledged(NamedTuple):
    """What one connection's receiver has acknowledged lately. `base_s`: its shortest round trip, `trip_s` the present one."""

    nbytes: int
    trip_s: float
    base_s: float


class Look(NamedTuple):
    """What all connections' receivers have acknowledged since the look before. `base_s`: of a byte; `queue_s`: common to all."""

    at: float
    nbytes: int
    base_s: float
    queue_s: float


class PathSample(NamedTuple):
    """Of one connection, at one moment. `waits`: bytes wait unsent in the system. `room`: the uplink carries more. `again`: segments that
    have been sent once more."""

    delivered_bytes: int
    trip_s: float
    base_s: float
    waits: bool
    room: bool
    again: int = 0


class Restarts:
    """When a connection is to forget the rate that it has measured, and measure it anew: it sends less than its way carries.

    BBR learns the part of a receiver's line that others' bursts leave it, and looks for more by a quarter every eight round trips: seconds
    in which neither end's line is full. A way without a queue, data that waits and room in the uplink say that there is more.
    A restart that was of no use, as the way is as narrow as that, doubles the pause before the next."""

    def __init__(self) -> None:
        self._round = (0.0, 0)  # when it began; delivered until then
        self._rounds = 0  # in a row in which the way could have carried more
        self._again_at = 0.0
        self._pause_s = RESTART_S
        self._before_Bps = 0.0  # at the last restart

    def look(self, sample: PathSample, now: float) -> bool:
        began, delivered_bytes = self._round
        free = sample.trip_s <= sample.base_s + UPLINK_ALLOWED_S + UPLINK_ALLOWED_PART * sample.base_s
        if not (sample.waits and sample.room and free):
            self._round, self._rounds = (now, sample.delivered_bytes), 0
            return False
        if now - began < max(ROUND_S, sample.base_s):
            return False
        rate_Bps = (sample.delivered_bytes - delivered_bytes) / (now - began)
        self._round, self._rounds = (now, sample.delivered_bytes), self._rounds + 1
        if self._rounds < RESTART_ROUNDS or now < self._again_at:
            return False
        return self._restart(rate_Bps, RESTART_S, now)

    def short_of(self, share_Bps: float, believed_Bps: float, trip_s: float, now: float) -> bool:
        """The receiver has said what its line has for this connection, and BBR believes in less."""
        if believed_Bps >= SHORT * share_Bps:
            self._before_Bps = 0.0
            return False
        if now < self._again_at:
            return False
        return self._restart(believed_Bps, max(SHORT_S, MOST_TRIPS * trip_s), now)

    def _restart(self, rate_Bps: float, least_s: float, now: float) -> bool:
        useful = rate_Bps < self._before_Bps / GROWTH or rate_Bps > GROWTH * self._before_Bps
        self._pause_s = least_s if useful else min(RESTART_MOST_S, 2 * self._pause_s)
        self._again_at, self._before_Bps, self._rounds = now + self._pause_s, rate_Bps, 0
        return True


class PathWindow:
    """How many bytes of one connection may be on their way, so that the senders to one receiver do not overflow its line together.

    BBR looks for the rate of a way by overrunning it, and what the uplink's window allows to several such ways is more than one of them
    holds. Here as in FAST TCP w <- w * (base + allowance) / trip + QUEUED_BYTES, by halves: N connections whose only narrow place is one
    line keep N * QUEUED_BYTES in its buffer beside the allowance. While there is no queue the window grows by half in a round trip."""

    def __init__(self) -> None:
        self.size_bytes = math.inf  # until there is a queue: the system looks for the rate of a new connection
        self._used = False  # all of the window was, in this round
        self._began: tuple[float, int] | None = None  # the round: when, and delivered until then
        self._trips_s: list[float] = []  # in this round
        self._best_Bps = 0.0
        # Since when all of the window was used and nothing was sent again; what was delivered until then, and sent again
        self._steady = (0.0, 0, 0)
        self._longer_s = 0.0  # of the queue: the way has become longer

    def room_bytes(self, outstanding_bytes: int) -> int:
        """Bytes that may be sent beside those. 0: wait for acknowledgements."""
        room = self.size_bytes - outstanding_bytes
        if room >= LEAST_BYTES:
            return int(min(room, MOST_BYTES))
        self._used = True
        return 0

    def look(self, sample: PathSample, outstanding_bytes: int, now: float) -> None:
        if self._began is None:
            self._began = now, sample.delivered_bytes
        began, delivered_bytes = self._began
        self._trips_s.append(sample.trip_s)
        # What was allowed before shows after a round trip; of a queue of seconds not all is waited for
        if now - began < max(ROUND_S, min(sample.trip_s, MOST_TRIPS * (sample.base_s + self._longer_s))):
            return
        trip_s = statistics.median_low(self._trips_s)
        self._longer_s = min(self._longer_s, max(0.0, trip_s - sample.base_s))
        self._best_Bps = max(self._best_Bps, (sample.delivered_bytes - delivered_bytes) / (now - began))
        self._look_for_a_longer_way(sample, now)
        self._follow(trip_s, sample.base_s + self._longer_s, outstanding_bytes)
        self._began, self._trips_s, self._used = (now, sample.delivered_bytes), [], False

    def _follow(self, trip_s: float, base_s: float, outstanding_bytes: int) -> None:
        allowed_s = base_s + PATH_ALLOWED_S
        if math.isinf(self.size_bytes):
            if trip_s <= allowed_s:
                return
            self.size_bytes = max(LEAST_WINDOW_BYTES, outstanding_bytes)
        wanted = self.size_bytes * allowed_s / max(trip_s, base_s, 1e-6) + QUEUED_BYTES
        if trip_s < base_s + PATH_ALLOWED_S / 4:
            wanted = max(wanted, self.size_bytes * FIRST_GROWTH)
        if self._used or wanted < self.size_bytes:
            self.size_bytes = max(LEAST_WINDOW_BYTES, (self.size_bytes + wanted) / 2)

    def _look_for_a_longer_way(self, sample: PathSample, now: float) -> None:
        """The system remembers the shortest round trip for five minutes."""
        since, delivered_bytes, again = self._steady
        if not self._used or sample.again != again:
            self._steady = now, sample.delivered_bytes, sample.again
        elif now - since >= POOR_S:
            if sample.delivered_bytes - delivered_bytes < POOR * self._best_Bps * (now - since):
                self._longer_s = max(0.0, min(self._trips_s) - sample.base_s)
                self._best_Bps = 0.0
            self._steady = now, sample.delivered_bytes, sample.again


class Trial(NamedTuple):
    """Whether a queue is this machine's: it sends less until then, and had that queue before."""

    until: float
    queue_s: float
    size_bytes: int


class Start:
    """Of an uplink's window, while no queue has shown what the line carries, or when that was forgotten.

    It grows with what is delivered, as long as nothing waits, and hardly from the first sign of a queue on. What is allowed last shows a
    round trip later. So the end is one step down to what the line has carried lately."""

    def __init__(self) -> None:
        self.goes_on = True
        self._looks: deque[Look] = deque()  # in the last half of a round trip

    def grow(self, size_bytes: int, lately: Sequence[Acknowledged], used: bool, now: float) -> tuple[int, float | None]:
        """The window's size from now on, and at the end what the line carries. `used`: all of the window was."""
        look = Look(now, _nbytes(lately), _base_s(lately), min(each.trip_s - each.base_s for each in lately))
        if self._looks and now - self._looks[-1].at > max(ROUND_S, look.base_s):
            self._looks.clear()  # nothing was on its way
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at <= now - max(ROUND_S, look.base_s / 2):
            self._looks.popleft()
        allowed_s = _allowed_s(look.base_s)
        stays_s = min(each.queue_s for each in self._looks if each.at > now - ROUND_S)  # that of a burst is over sooner
        if stays_s > allowed_s and now - self._looks[0].at >= ROUND_S:
            return self._end(size_bytes, now)
        growth = START_GROWTH if look.queue_s < FIRST_SIGN * allowed_s else STEP
        return size_bytes + int((growth - 1) * look.nbytes * used), None

    def _end(self, size_bytes: int, now: float) -> tuple[int, float]:
        first, *later = self._looks
        rate_Bps, base_s = _nbytes(later) / (now - first.at), _base_s(later)
        self.goes_on = False
        self._looks.clear()
        return max(LEAST_WINDOW_BYTES, min(size_bytes, int(rate_Bps * (base_s + _allowed_s(base_s))))), rate_Bps


class UplinkWindow:
    """How many bytes of all bulk connections of a machine together may be on their way: its rate times (base + allowance).

    For uplink.py. Each connection alone (BBR) holds up to twice rate times base, hence several of them a round trip of queue; CUBIC fills
    any buffer. The sum is limited, not each: a connection that pauses leaves its part to the others at once. The queue is what all
    connections see beyond their base: a line of one receiver that is full slows nobody else."""

    def __init__(self) -> None:
        self.size_bytes = FIRST_BYTES
        self._start = Start()
        self._full = False  # all of the window was used, in this round
        self._used = False  # and not by bytes that the system holds back
        self._round_s = (0.0, 0.0)  # when it began, and when it may end
        self._acknowledged: list[Acknowledged] = []  # in this round
        self._came: deque[tuple[int, float]] = deque(maxlen=RATE_ROUNDS)  # in the last rounds: bytes, seconds
        self._rates_Bps: deque[tuple[float, float]] = deque()  # when they were; of rounds in which the window was full
        self._queues_s: deque[float] = deque(maxlen=FOREIGN)  # of rounds that used the window
        self.queue_s = 0.0  # common to all connections, in the last round
        self.busy = BusyRate()
        # Of the queue: it belongs to others, or the way has become longer; and for how long
        self._foreign_s = self._foreign_until = 0.0
        self._trial: Trial | None = None
        self._trial_at = 0.0  # no earlier than that

    def is_roomy(self, outstanding_bytes: int) -> bool:
        """Far from full, beside those."""
        return outstanding_bytes < ROOMY * self.size_bytes

    def room_bytes(self, outstanding_bytes: int, unsent_bytes: int) -> int:
        """Bytes that may be sent beside those. 0: wait for acknowledgements. `unsent_bytes` of them wait in the system, which holds them
        back for a receiver: while they are many, it is not the window that is too small."""
        room = self.size_bytes - outstanding_bytes
        if room >= LEAST_BYTES:
            return room
        self._full = True
        if unsent_bytes <= max(HELD_BYTES, HELD * self.size_bytes):
            self._used = True
        return 0

    def acknowledged(self, lately: Sequence[Acknowledged], now: float) -> None:
        self._acknowledged += lately
        if self._start.goes_on and lately:
            self.size_bytes, rate_Bps = self._start.grow(self.size_bytes, lately, self._used, now)
            if rate_Bps and not self._rates_Bps:
                self._rates_Bps.append((now, rate_Bps))
        if self._acknowledged and now >= self._round_s[1]:
            self._next_round(now)

    def _next_round(self, now: float) -> None:
        nbytes, base_s = _nbytes(self._acknowledged), _base_s(self._acknowledged)
        self.queue_s = min(each.trip_s - each.base_s for each in self._acknowledged)
        allowed_s = _allowed_s(base_s)
        before_Bps = self._highest_Bps(now)
        self._start.goes_on |= not self._rates_Bps  # what the line carries has been forgotten
        passed_s = now - self._round_s[0]
        if passed_s >= LONG_ROUND * max(ROUND_S, base_s):  # nothing was on its way for a part of it
            self._came.clear()
        elif self._full:
            self.busy.carried(nbytes, passed_s, now)
        self._came.append((nbytes, max(ROUND_S, passed_s)))
        rate_Bps = sum(each for each, _ in self._came) / sum(seconds for _, seconds in self._came)
        if self._full or rate_Bps > before_Bps:
            self._rates_Bps.append((now, rate_Bps))
        self._look_for_others(base_s, now)
        if self._trial is not None:
            self.size_bytes = self._trial.size_bytes
        elif not self._start.goes_on:
            self._follow(base_s + self._foreign_s, self.queue_s - self._foreign_s, allowed_s, now)
        self._round_s = (now, now + max(ROUND_S, base_s))
        self._acknowledged, self._full, self._used = [], False, False

    def _follow(self, base_s: float, queue_s: float, allowed_s: float, now: float) -> None:
        room_s = base_s + allowed_s
        if queue_s < allowed_s / 2:
            room_s = max(room_s, base_s * GROWTH)
        # Bytes that are sent again, or wait unsent, take longer than a round trip and no place in a queue
        factor = min(1.0, (base_s + allowed_s) / (base_s + queue_s))
        if queue_s < LONG_QUEUE * allowed_s:
            factor = (1 + factor) / 2  # the last change shows a round later
        if self._used and queue_s < allowed_s / 2:
            factor = STEP
        most_bytes = max(self.size_bytes, MOST_TRIPS * self._highest_Bps(now) * (base_s + allowed_s))
        follows_queue = int(min(self.size_bytes * factor, most_bytes))
        self.size_bytes = max(LEAST_WINDOW_BYTES, follows_queue, int(self._highest_Bps(now) * room_s))

    def _highest_Bps(self, now: float) -> float:
        while self._rates_Bps and self._rates_Bps[0][0] < now - RATES_S:
            self._rates_Bps.popleft()
        return max((rate_Bps for _, rate_Bps in self._rates_Bps), default=0.0)

    def _look_for_others(self, base_s: float, now: float) -> None:
        """A queue that stays although half as much is sent is not this machine's."""
        self._foreign_s = min(self._foreign_s, self.queue_s)
        if now >= self._foreign_until:
            self._foreign_s, self._foreign_until = 0.0, now + FOREIGN_S
            self._queues_s.clear()
        if self._trial is not None:
            if now >= self._trial.until:
                if self.queue_s > STAYS * self._trial.queue_s:
                    self._foreign_s, self._foreign_until = self.queue_s, now + FOREIGN_S
                self._trial, self._trial_at = None, now + FOREIGN_S
                self._queues_s.clear()
        elif self._used:
            self._queues_s.append(self.queue_s)
            stays = len(self._queues_s) == FOREIGN and min(self._queues_s) > self._foreign_s + 2 * _allowed_s(base_s)
            if stays and now >= self._trial_at:
                until = now + MOST_TRIPS * (base_s + self.queue_s)
                self._trial = Trial(until, self.queue_s, max(LEAST_WINDOW_BYTES, self.size_bytes // 2))


def _allowed_s(base_s: float) -> float:
    """Of queue in this machine's line."""
    return UPLINK_ALLOWED_S + UPLINK_ALLOWED_PART * base_s


def _nbytes(lately: Sequence[Acknowledged | Look]) -> int:
    return sum(each.nbytes for each in lately)


def _base_s(lately: Sequence[Acknowledged | Look]) -> float:
    """Of a byte."""
    return sum(each.base_s * each.nbytes for each in lately) / _nbytes(lately)
