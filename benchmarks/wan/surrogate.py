"""Hosts, lines and TCP connections of a run, played in seconds instead of minutes, to try windows of bulk. For wan_surrogate.py.

The planner's play (planner/prediction/play.py) says what is sent where and when, with core's own choices. Here is what carries it:

    Line        rate and buffer, first come first served; what would wait longer than the buffer is dropped
    Network     pieces of 16 KB pass the sender's uplink, the way and the receiver's downlink; their acknowledgements the receiver's uplink,
                the way and the sender's downlink; control messages wait among both
    Flow        a connection: BBR as in Linux, and the answers of TCP_INFO, for the Uplink of uplink.py, which runs unchanged on it,
                like each receiver's Shares
    Round       one of averaging over these lines
    Fluid       instead of all that: lines that all pairs share max-min fairly and at once, without queues: a perfect transport

Not modelled: processors (a host sends at once), TLS, delayed and lost acknowledgements, timeouts of TCP and of requests, joining.
A loss costs a round trip and no more, so what loses much looks better here than on real lines.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from shoal.core.allreduce.layout import SLICES
from shoal.transport.congestion.downlink import DownlinkQueue
from shoal.transport.congestion.shares import Report, Shares
from shoal.transport.streams.channel import WRITE_BYTES
from shoal.transport.streams.engine import Connection, Steps, WaitFor
from shoal.transport.streams.uplink import (
    BBR_INFO,
    CRUISING,
    NO_LIMIT,
    SO_MAX_PACING_RATE,
    TCP_CC_INFO,
    TCP_INFO,
    Uplink,
)
from shoal.transport.wire import FRAGMENT_BYTES

PIECE_BYTES = 16 << 10
SEGMENT_BYTES = 1448
FRAMING = 1500 / 1448 * 1.0015  # TCP and IP, and TLS
ACK_BYTES = 52
CONTROL_BYTES = 400
ADDING_S = 0.02  # of a chunk of a round
LATE_S = 0.005  # at most, until a program handles a message
ZEROS = memoryview(bytes(WRITE_BYTES))
Act = Callable[[float], None]
At = Callable[[float, Act], None]
# BBR, as in Linux
HIGH_GAIN, DRAIN_GAIN, CWND_GAIN = 2.885, 1 / 2.885, 2.0
CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
RATE_ROUNDS, BASE_S, PROBE_S = 10, 10.0, 0.2


class Carrier(Protocol):
    """What play's messages go over. `act` is called when one has arrived."""

    def send(self, source: int, target: int, nbytes: int, rank: int, now: float, act: Act) -> None: ...

    def control(self, source: int, target: int, now: float, act: Act) -> None: ...


class Round:
    """One round of averaging: of every slice each host has a chunk from each other one, and sends its sum to all."""

    def __init__(self, carrier: Carrier, at: At, hosts: int, chunk_bytes: int) -> None:
        self._carrier, self._at, self._hosts, self._chunk_bytes = carrier, at, hosts, chunk_bytes
        self._parts = {(host, slice_): hosts - 1 for host in range(hosts) for slice_ in range(SLICES)}
        self._sums = dict.fromkeys(range(hosts), SLICES * (hosts - 1))
        self.gathered_s: list[float] = []  # by whom does not matter

    def begin(self, host: int, now: float) -> None:
        for slice_ in range(SLICES):
            for other in self._others(host):
                self._carrier.send(host, other, self._chunk_bytes, 0, now, partial(self._part, other, slice_))

    def _others(self, host: int) -> list[int]:
        return [(host + place) % self._hosts for place in range(1, self._hosts)]

    def _part(self, host: int, slice_: int, now: float) -> None:
        self._parts[host, slice_] -= 1
        if not self._parts[host, slice_]:
            self._at(now + ADDING_S, partial(self._summed, host))

    def _summed(self, host: int, now: float) -> None:
        for other in self._others(host):
            self._carrier.send(host, other, self._chunk_bytes, 1, now, partial(self._sum, other))

    def _sum(self, host: int, now: float) -> None:
        self._sums[host] -= 1
        if not self._sums[host]:
            self.gathered_s.append(now)


class Line:
    """One direction of a host's line."""

    def __init__(self, rate_Bps: float, buffer_s: float) -> None:
        self.rate_Bps, self.buffer_s = rate_Bps, buffer_s
        self.free_at = self.used_s = 0.0
        self.dropped = 0

    def leaves(self, nbytes: float, now: float, *, always: bool = False) -> float | None:
        """When its last byte has left. None: the buffer is full."""
        start = max(now, self.free_at)
        if start - now > self.buffer_s and not always:
            self.dropped += 1
            return None
        self.free_at = start + nbytes / self.rate_Bps
        self.used_s += nbytes / self.rate_Bps
        return self.free_at

    def queue_s(self, now: float) -> float:
        return max(0.0, self.free_at - now)


class Piece:
    """Of what a connection sends, and what Linux notes with it to measure a rate."""

    __slots__ = ("delivered", "delivered_at", "limited", "nbytes", "sent_at", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self.sent_at = self.delivered_at = 0.0
        self.delivered, self.limited = 0, False


class Bbr:
    """Its first version: a pace and a window from the highest rate of ten rounds and the shortest round trip of ten seconds."""

    def __init__(self, base_s: float, cwnd: float, now: float = 0.0) -> None:
        self.cwnd, self.base_s, self.base_at = cwnd, base_s, now
        self.rates: deque[tuple[int, float]] = deque()
        self.rounds, self.next_round = 0, 0
        self.mode, self.full_Bps, self.full_rounds, self.full = "startup", 0.0, 0, False
        self.pacing_gain = self.cwnd_gain = HIGH_GAIN
        self.cycle, self.cycle_at = 0, 0.0
        self.probe_until, self.before = 0.0, cwnd
        self.first_Bps = HIGH_GAIN * cwnd / max(base_s, 1e-3)
        self.most_Bps = math.inf  # SO_MAX_PACING_RATE

    @property
    def rate_Bps(self) -> float:
        return self.rates[0][1] if self.rates else 0.0

    @property
    def pacing_Bps(self) -> float:
        if not self.rates:
            return min(self.first_Bps, self.most_Bps)
        pace = 0.99 * self.pacing_gain * self.rate_Bps
        return min(max(pace, self.first_Bps) if not self.full else pace, self.most_Bps)

    def acked(self, flow: Flow, piece: Piece, rate_Bps: float, trip_s: float, now: float) -> None:
        if began := piece.delivered >= self.next_round:
            self.next_round, self.rounds = flow.delivered, self.rounds + 1
        if not piece.limited or rate_Bps >= self.rate_Bps:
            while self.rates and self.rates[-1][1] <= rate_Bps:
                self.rates.pop()
            self.rates.append((self.rounds, rate_Bps))
        while len(self.rates) > 1 and self.rates[0][0] < self.rounds - RATE_ROUNDS:
            self.rates.popleft()
        self._look_for_base(flow, trip_s, now)
        if began and not piece.limited and not self.full:
            if self.rate_Bps >= 1.25 * self.full_Bps:
                self.full_Bps, self.full_rounds = self.rate_Bps, 0
            else:
                self.full_rounds += 1
                self.full = self.full_rounds >= 3
        bdp = self.rate_Bps * self.base_s
        if self.mode == "startup" and self.full:
            self.mode, self.pacing_gain, self.cwnd_gain = "drain", DRAIN_GAIN, HIGH_GAIN
        if self.mode == "drain" and flow.inflight <= bdp:
            self._cruise(now)
        if self.mode == "cruise":
            self._turn(flow, bdp, now)
        self._set_window(flow, piece, bdp, now)

    def _cruise(self, now: float) -> None:
        self.mode, self.cwnd_gain = ("cruise", CWND_GAIN) if self.full else ("startup", HIGH_GAIN)
        self.cycle, self.cycle_at = 2, now
        self.pacing_gain = 1.0 if self.full else HIGH_GAIN

    def _turn(self, flow: Flow, bdp: float, now: float) -> None:
        over = now - self.cycle_at > self.base_s
        if self.pacing_gain > 1:
            over = over and flow.inflight >= self.pacing_gain * bdp
        elif self.pacing_gain < 1:
            over = over or flow.inflight <= bdp
        if over:
            self.cycle, self.cycle_at = (self.cycle + 1) % 8, now
            self.pacing_gain = CYCLE[self.cycle]

    def _look_for_base(self, flow: Flow, trip_s: float, now: float) -> None:
        expired = now > self.base_at + BASE_S
        if trip_s <= self.base_s or expired:
            self.base_s, self.base_at = trip_s, now
        if expired and self.mode != "probe" and not flow.idle_restart:
            self.mode, self.pacing_gain, self.before, self.probe_until = "probe", 1.0, self.cwnd, 0.0
        if self.mode == "probe":
            if not self.probe_until and flow.inflight <= 4 * PIECE_BYTES:
                self.probe_until = now + PROBE_S
            if self.probe_until and now >= self.probe_until:
                self.base_at, self.cwnd = now, max(self.cwnd, self.before)
                self._cruise(now)
        flow.idle_restart = False

    def _set_window(self, flow: Flow, piece: Piece, bdp: float, now: float) -> None:
        target = self.cwnd_gain * bdp + 3 * PIECE_BYTES
        if self.full:
            self.cwnd = min(self.cwnd + piece.nbytes, target)
        elif self.cwnd < target or flow.delivered < 10 * SEGMENT_BYTES:
            self.cwnd += piece.nbytes
        self.cwnd = max(self.cwnd, 4 * SEGMENT_BYTES)
        if self.mode == "probe":
            self.cwnd = min(self.cwnd, PIECE_BYTES)


class Flow:
    """One connection, from the sender's side: its queue, its system, and what its receiver has. It is its connection's `sock`."""

    def __init__(self, network: Network, source: int, target: int) -> None:
        self.network, self.source, self.target = network, source, target
        self.base_s = network.delay_s[source][target] + network.delay_s[target][source]
        self.queue: list[deque[list[Any]]] = [deque(), deque()]  # by rank: bytes left, act
        self.unsent, self.lowat, self.written, self.delivered = 0, 128 << 10, 0, 0
        self.sent, self.inflight, self.again, self.limited_until = 0, 0, 0, 0
        self.to_repeat: deque[Piece] = deque()
        self.delivered_at = self.acked_at = network.now
        self.trip_s, self.min_s, self.rate_Bps = self.base_s, self.base_s, 0.0
        self.bbr = Bbr(self.base_s, 10 * SEGMENT_BYTES)
        self.pace_at = 0.0
        self.paced = self.idle_restart = False
        self.ends: deque[tuple[int, Act]] = deque()  # of messages
        self.heads: deque[tuple[int, Report | None]] = deque()  # where a fragment begins, and where it ends
        self.holes: set[int] = set()
        self.reached = 0
        self.connection: Any = Connection(self, lambda error: None)  # type: ignore[arg-type]
        self.connection.engine = SimpleNamespace(
            wake=lambda _: network.at(network.now, self.run), fail_if=lambda *_: None
        )
        network.uplinks[source].join(self.connection)
        self.connection.steps = self.steps()
        self.asleep_until = 0.0
        self.want = WaitFor.READ

    # --------------------------------------------------------------------------------------- the program
    def put(self, nbytes: int, rank: int, act: Act) -> None:
        self.queue[rank].append([nbytes, act])
        self.run(self.network.now)

    def steps(self) -> Steps:
        uplink = self.network.uplinks[self.source]
        while True:
            rank = next((rank for rank, frames in enumerate(self.queue) if frames), None)
            if rank is None:
                uplink.watch(self.connection)
                yield WaitFor.READ
                continue
            frame = self.queue[rank][0]
            nbytes = min(FRAGMENT_BYTES, frame[0])
            frame[0] -= nbytes
            if not frame[0]:
                self.queue[rank].popleft()
            self.connection.rank = rank
            left_bytes = sum(each[0] for frames in self.queue for each in frames)
            self.heads.append((self.written, uplink.report(self.connection, left_bytes)))
            yield from uplink.write(self.connection, ZEROS[:nbytes])
            self.heads.append((self.written, None))
            if not frame[0]:
                self.ends.append((self.written, frame[1]))
            yield WaitFor.AGAIN

    def run(self, now: float) -> None:
        """A turn of the engine. Another one comes at `resume_at`, or when it is woken."""
        self.connection.resume_at = None
        self.want = next(self.connection.steps)
        while self.want is WaitFor.AGAIN or (self.want is WaitFor.EITHER and 2 * self.unsent < self.lowat):
            self.want = next(self.connection.steps)
        self._sleep(now)

    def _sleep(self, now: float) -> None:
        resume_at = self.connection.resume_at
        if resume_at is not None and (resume_at < self.asleep_until or self.asleep_until <= now):
            self.asleep_until = resume_at
            self.network.at(resume_at, self._resume)

    def _resume(self, now: float) -> None:
        if self.connection.resume_at is not None and self.connection.resume_at <= now:
            self.run(now)
        else:
            self._sleep(now)

    # ----------------------------------------------------------------------------------------- the socket
    def send(self, data: memoryview) -> int:
        if self.unsent >= self.lowat:
            raise BlockingIOError
        nbytes = min(len(data), self.lowat - self.unsent)
        if not self.unsent and self.inflight < self.bbr.cwnd:
            self.limited_until = self.delivered + self.inflight or 1
            self.idle_restart = not self.inflight
        self.unsent += nbytes
        self.written += nbytes
        self.transmit(self.network.now)
        return nbytes

    def getsockopt(self, level: int, name: int, nbytes: int) -> bytes:
        if name == socket.TCP_CONGESTION:
            return b"bbr"
        if name == TCP_CC_INFO:
            gain = CRUISING if self.bbr.mode == "cruise" else 0
            return BBR_INFO.pack(int(self.bbr.rate_Bps), 0, gain)
        now = self.network.now
        unacked, silent_ms = -(-self.inflight // SEGMENT_BYTES), int(1e3 * (now - self.acked_at))
        trip_us, base_us = int(1e6 * self.trip_s), int(1e6 * self.min_s)
        return TCP_INFO.pack(
            SEGMENT_BYTES,
            unacked,
            0,
            silent_ms,
            trip_us,
            self.again,
            self.delivered,
            self.unsent,
            base_us,
            int(self.rate_Bps),
        )

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if name == socket.TCP_NOTSENT_LOWAT:
            self.lowat = value
        elif name == socket.TCP_CONGESTION and value == b"bbr":
            most_Bps = self.bbr.most_Bps
            self.bbr = Bbr(self.min_s, self.bbr.cwnd, self.network.now)
            self.bbr.most_Bps = most_Bps
        elif name == SO_MAX_PACING_RATE:
            self.bbr.most_Bps = math.inf if value == NO_LIMIT else value

    # ----------------------------------------------------------------------------------------- the system
    def transmit(self, now: float) -> None:
        network = self.network
        while (self.unsent or self.to_repeat) and self.inflight < self.bbr.cwnd:
            if self.pace_at > now:
                if not self.paced:
                    self.paced = True
                    network.at(self.pace_at, self._paced)
                break
            if self.to_repeat:
                piece = self.to_repeat.popleft()
                self.again += -(-piece.nbytes // SEGMENT_BYTES)
            else:
                piece = Piece(self.sent, min(PIECE_BYTES, self.unsent))
                self.sent += piece.nbytes
                self.unsent -= piece.nbytes
            if not self.inflight:
                self.delivered_at = now
            piece.sent_at, piece.delivered, piece.delivered_at = now, self.delivered, self.delivered_at
            piece.limited = self.limited_until > 0
            self.inflight += piece.nbytes
            self.pace_at = max(now, self.pace_at) + piece.nbytes / self.bbr.pacing_Bps
            network.carry(self, piece, now)
        if self.want is WaitFor.EITHER and 2 * self.unsent < self.lowat:
            self.want = WaitFor.READ
            network.at(now, self.run)

    def _paced(self, now: float) -> None:
        self.paced = False
        self.transmit(now)

    def lost(self, piece: Piece, now: float) -> None:
        self.inflight -= piece.nbytes
        self.to_repeat.append(piece)
        self.transmit(now)

    def acknowledged(self, piece: Piece, now: float) -> None:
        self.inflight -= piece.nbytes
        self.delivered += piece.nbytes
        self.delivered_at = self.acked_at = now
        if self.limited_until and self.delivered > self.limited_until:
            self.limited_until = 0
        trip_s = now - piece.sent_at
        self.trip_s += (trip_s - self.trip_s) / 8
        self.min_s = min(self.min_s, trip_s)
        interval_s = max(now - piece.delivered_at, 1e-4)
        if interval_s >= self.min_s:
            self.rate_Bps = (self.delivered - piece.delivered) / interval_s
            self.bbr.acked(self, piece, self.rate_Bps, trip_s, now)
        else:
            self.bbr.acked(self, piece, 0.0, trip_s, now)
        self.transmit(now)

    # --------------------------------------------------------------------------------------- the receiver
    def received(self, piece: Piece, now: float) -> None:
        self.holes.discard(piece.start)
        self.reached = max(self.reached, piece.start + piece.nbytes)
        whole = min(self.holes, default=self.reached)
        self._tell(piece.nbytes, whole, now)
        while self.ends and self.ends[0][0] <= whole:
            self.ends.popleft()[1](now)

    def _tell(self, nbytes: int, whole: int, now: float) -> None:
        shares = self.network.shares.get(self.target)
        if shares is None:
            return
        shares.arrived(str(self.source), nbytes, now)
        while self.heads and self.heads[0][0] <= whole - (self.heads[0][1] is not None):
            report = self.heads.popleft()[1]
            if report is None:
                shares.ended(str(self.source))
            else:
                shares.heard(str(self.source), report, now)
        for share in shares.told(now):
            flow = self.network.flows[int(share.peer), self.target]
            self.network.control(self.target, flow.source, now, partial(flow.told, share.rate_Bps, now))

    def told(self, rate_Bps: float, sent_s: float, now: float) -> None:
        self.network.uplinks[self.source].take_share(self.connection, rate_Bps, sent_s)

    @property
    def waits(self) -> bool:
        return bool(self.unsent or self.to_repeat or any(self.queue) or self.want is not WaitFor.READ)


class Network:
    """`at`: calls what it is given at a time."""

    def __init__(
        self,
        at: At,
        delay_s: list[list[float]],
        rates_Bps: tuple[float, float],
        buffer_s: float,
        rng: np.random.Generator,
        *,
        sharing: bool = True,
    ) -> None:
        self.at_time, self.delay_s, self.now = at, delay_s, 0.0
        self.rng = rng
        hosts = range(len(delay_s))
        self.up = [Line(rates_Bps[0], buffer_s) for _ in hosts]
        self.down = [Line(rates_Bps[1], buffer_s) for _ in hosts]
        queues = [DownlinkQueue() for _ in hosts]
        self.shares = {host: Shares(queues[host].queue_s) for host in hosts if sharing}
        self.uplinks = [
            Uplink(self.shares[host].queue_s if sharing else lambda now: 0.0, queues[host], clock=lambda: self.now)
            for host in hosts
        ]
        self.flows: dict[tuple[int, int], Flow] = {}

    def at(self, when: float, act: Act) -> None:
        def acts(now: float) -> None:
            self.now = now
            act(now)

        self.at_time(when, acts)

    def flow(self, source: int, target: int) -> Flow:
        if (source, target) not in self.flows:
            self.flows[source, target] = Flow(self, source, target)
        return self.flows[source, target]

    def send(self, source: int, target: int, nbytes: int, rank: int, now: float, act: Act) -> None:
        self.now = now
        self.flow(source, target).put(nbytes, rank, act)

    def control(self, source: int, target: int, now: float, act: Act) -> None:
        up = self.up[source].leaves(CONTROL_BYTES, now, always=True) or now
        delay_s = self.delay_s[source][target] + self.rng.uniform(0.0, LATE_S)
        self.at(
            up + delay_s, lambda then: self.at(self.down[target].leaves(CONTROL_BYTES, then, always=True) or then, act)
        )

    def carry(self, flow: Flow, piece: Piece, now: float) -> None:
        up = self.up[flow.source].leaves(piece.nbytes * FRAMING, now)
        if up is None:
            return self._drop(flow, piece, now)
        self.at(up + self.delay_s[flow.source][flow.target], partial(self._reach, flow, piece))

    def _reach(self, flow: Flow, piece: Piece, now: float) -> None:
        down = self.down[flow.target].leaves(piece.nbytes * FRAMING, now)
        if down is None:
            return self._drop(flow, piece, now)
        self.at(down, partial(self._arrive, flow, piece))

    def _drop(self, flow: Flow, piece: Piece, now: float) -> None:
        flow.holes.add(piece.start)
        self.at(piece.sent_at + max(flow.trip_s, flow.base_s) * 1.1, partial(flow.lost, piece))

    def _arrive(self, flow: Flow, piece: Piece, now: float) -> None:
        flow.received(piece, now)
        up = self.up[flow.target].leaves(ACK_BYTES, now, always=True) or now
        back = up + self.delay_s[flow.target][flow.source]
        self.at(back, partial(self._acknowledge, flow, piece))

    def _acknowledge(self, flow: Flow, piece: Piece, now: float) -> None:
        down = self.down[flow.source].leaves(ACK_BYTES, now, always=True) or now
        self.at(down, partial(flow.acknowledged, piece))


class Transfer:
    __slots__ = ("act", "left", "rank", "source", "target")

    def __init__(self, source: int, target: int, nbytes: float, rank: int, act: Act) -> None:
        self.source, self.target, self.left, self.rank, self.act = source, target, nbytes, rank, act


class Fluid:
    """Of a pair's tensors the first by rank goes, and all pairs share max-min fairly."""

    def __init__(
        self, at: At, delay_s: list[list[float]], rates_Bps: tuple[float, float], rng: np.random.Generator
    ) -> None:
        self.rng = rng
        self._at, self.delay_s = at, delay_s
        self._rates = {"up": rates_Bps[0] / FRAMING, "down": rates_Bps[1] / FRAMING}
        self._pairs: dict[tuple[int, int], list[Transfer]] = {}
        self._speeds: dict[tuple[int, int], float] = {}
        self._since, self._serial = 0.0, 0

    def send(self, source: int, target: int, nbytes: int, rank: int, now: float, act: Act) -> None:
        self._progress(now)
        line = self._pairs.setdefault((source, target), [])
        line.append(Transfer(source, target, nbytes, rank, act))
        line[1:] = sorted(line[1:], key=lambda each: each.rank)
        self._share(now)

    def control(self, source: int, target: int, now: float, act: Act) -> None:
        self._at(now + self.delay_s[source][target] + self.rng.uniform(0.0, LATE_S), act)

    def _progress(self, now: float) -> None:
        for pair, speed in self._speeds.items():
            self._pairs[pair][0].left -= speed * (now - self._since)
        self._since = now

    def _share(self, now: float) -> None:
        pairs = [pair for pair, line in self._pairs.items() if line]
        left = {("up", one): self._rates["up"] for one, _ in pairs} | {
            ("down", two): self._rates["down"] for _, two in pairs
        }
        self._speeds = {}
        while len(self._speeds) < len(pairs):
            open_pairs = [pair for pair in pairs if pair not in self._speeds]
            counts: dict[tuple[str, int], int] = {}
            for one, two in open_pairs:
                for key in (("up", one), ("down", two)):
                    counts[key] = counts.get(key, 0) + 1
            narrow = min(counts, key=lambda key: (left[key] / counts[key], key))
            speed = left[narrow] / counts[narrow]
            for one, two in open_pairs:
                if narrow in (("up", one), ("down", two)):
                    self._speeds[one, two] = speed
                    left["up", one] -= speed
                    left["down", two] -= speed
        if self._speeds:
            self._serial += 1
            over = min(self._pairs[pair][0].left / max(speed, 1e-9) for pair, speed in self._speeds.items())
            self._at(now + max(over, 0.0), partial(self._end, self._serial))

    def _end(self, serial: int, now: float) -> None:
        if serial != self._serial:
            return
        self._progress(now)
        for (source, target), line in self._pairs.items():
            if line and line[0].left <= 1.0:
                self._at(now + self.delay_s[source][target], line.pop(0).act)
        self._share(now)
