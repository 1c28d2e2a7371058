"""What the windows of bulk make of wan_hops.py's runs, in seconds on one core: the surrogate of wan/surrogate.py. No root, no processes.

    python benchmarks/wan_surrogate.py [--lines 50,regions] [--seeds 2] [--steps 3] [--inflight 0] [--parts]
    python benchmarks/wan_surrogate.py --averaging [--megabytes 30] ...      # rounds among the hosts instead, as in wan_averaging.py

For each line and seed: microbatches per second over the plain socket's bound with receivers' shares and our windows, with the windows
alone, with BBR alone (`unlimited`), and over a perfect transport's lines (`fluid`); how long tensors are on their way; segments sent again.
`--parts`: also where each uplink spends a step, as in wan/account.py. Value: the smallest ratio of `shares` to `fluid`.

The hops' play is the planner's, so routes, replicas and the number in flight are core's. Between two steps there are AGREEING_S without
bulk.
Compare variants here and believe them on real lines only: what is lost costs a round trip here, and seconds there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from report import at_least, parse, report
from shoal import units
from shoal.core.allreduce.layout import SLICES
from shoal.planner.inputs.cluster import Cluster, Device, from_matrices
from shoal.planner.prediction.play import GRADIENT, Play
from shoal.planner.prediction.seats import Seats
from shoal.transport.congestion.windows import PathWindow, UplinkWindow
from wan.lab import Topology
from wan.surrogate import Act, At, Carrier, Fluid, Network, Round
from wan_hops import delays_s, topology_of

WANTED = 0.9  # of fluid
SHAPES = {"regions": (8, 4)}  # hosts and stages; elsewhere:
SHAPE = (6, 3)
FORWARD_S, BACKWARD_S, TENSOR_BYTES, BATCH = 0.2, 0.4, 2_000_000, 96  # of wan_hops.py with --values 500000
PLAIN_BYTES = 32_000_000  # that a plain socket is measured with
AGREEING_S = {"regions": 0.9}  # averaging and agreeing, by the planner; elsewhere:
AGREEING_ELSEWHERE_S = 0.4
TRANSPORTS = ("shares", "windows", "unlimited", "fluid")
START_S = 1.0  # of the first step: 0 says that nothing was measured yet; and between rounds
BEGUN_S = 0.1  # in which all hosts begin with a round
MOST_BYTES = 1 << 20  # that may be written at once without our windows
LOOK_S = 0.05  # between two samples of the lines
QUEUED_S = 2e-3  # a line with a longer queue is full


class Lab(Play):
    """A play over those lines."""

    def __init__(self, seats: Seats, cluster: Cluster, seed: int, carrier: Callable[[At], Carrier]) -> None:
        super().__init__(seats, cluster, np.random.default_rng(seed))
        self.carrier = carrier(self._at)
        self.ways_s: list[float] = []  # of tensors

    def _send(self, source: int, target: int, tensors: tuple[str, ...], now: float, act: Act) -> None:
        nbytes = int(sum(self._nbytes[tensor] for tensor in tensors))
        if source == target:
            self._at(now, act)
        elif not nbytes:
            self.carrier.control(source, target, now, act)
        else:

            def arrived(then: float) -> None:
                self.ways_s.append(then - now)
                act(then)

            self.carrier.send(source, target, nbytes, 0 if GRADIENT in tensors else 1, now, arrived)


class Parts:
    """Seconds of each uplink: busy, and idle while bytes wait for a full line, for none, or not at all."""

    def __init__(self, network: Network, hosts: int) -> None:
        self._network, self._until = network, 0.0
        self.rows = [dict.fromkeys(("busy", "receiver", "transport", "idle"), 0.0) for _ in range(hosts)]

    def begin(self, now: float) -> None:
        self.end()
        self._until, self._since = float("inf"), now
        self._before = self._sent(now)
        self._network.at(now + LOOK_S, self._look)

    def end(self) -> None:
        self._until = 0.0

    def _sent(self, now: float) -> list[float]:
        return [line.used_s - line.queue_s(now) for line in self._network.up]

    def _look(self, now: float) -> None:
        if now > self._until:
            return
        passed_s, sent = now - self._since, self._sent(now)
        full = {host for host, line in enumerate(self._network.down) if line.queue_s(now) > QUEUED_S}
        for host, row in enumerate(self.rows):
            busy_s = min(max(0.0, sent[host] - self._before[host]), passed_s)
            targets = {flow.target for flow in self._network.flows.values() if flow.source == host and flow.waits}
            row["busy"] += busy_s
            row["receiver" if targets & full else "transport" if targets else "idle"] += passed_s - busy_s
        self._since, self._before = now, sent
        self._network.at(now + LOOK_S, self._look)


def cluster_of(topology: Topology) -> tuple[Cluster, list[list[float]], tuple[float, float], float]:
    """The hosts, the delays of their pairs, the rates of their lines up and down, and the lines' buffers."""
    rule, delays = topology.access[0], delays_s(topology)
    delay_s = [[delays.get((one, other), 0.0) for other in topology.hosts] for one in topology.hosts]
    rates_Bps = units.parse(rule.up, "_Bps"), units.parse(rule.down, "_Bps")
    devices = tuple(Device(name=name, flops=1.0, up_Bps=rates_Bps[0], down_Bps=rates_Bps[1]) for name in topology.hosts)
    cluster = from_matrices(devices, np.array(delay_s), np.full((len(devices), len(devices)), 1e12))
    return cluster, delay_s, rates_Bps, units.parse(rule.up_buffer, "_s")


def plain_Bps(topology: Topology) -> float:
    """What one connection carries from the first host to the second, from its beginning."""
    _, delay_s, rates_Bps, buffer_s = cluster_of(topology)
    events: list[tuple[float, int, Act]] = []
    serial, ends_s = itertools.count(), list[float]()
    network = Network(
        lambda when, act: heapq.heappush(events, (when, next(serial), act)),
        delay_s,
        rates_Bps,
        buffer_s,
        np.random.default_rng(0),
    )
    network.send(0, 1, PLAIN_BYTES, 0, START_S, ends_s.append)
    while not ends_s:
        now, _, act = heapq.heappop(events)
        act(now)
    return PLAIN_BYTES / (ends_s[0] - START_S)


def carrier_of(transport: str, topology: Topology, at: At, rng: np.random.Generator) -> Carrier:
    _, delay_s, rates_Bps, buffer_s = cluster_of(topology)
    if transport == "fluid":
        return Fluid(at, delay_s, rates_Bps, rng)
    return Network(at, delay_s, rates_Bps, buffer_s, rng, sharing=transport == "shares")


def without_windows(transport: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    if transport == "unlimited":
        for window in (PathWindow, UplinkWindow):
            stack.enter_context(mock.patch.object(window, "room_bytes", lambda self, *nbytes: MOST_BYTES))
    return stack


def averaging(name: str, transport: str, seed: int, rounds: int, nbytes: float) -> dict[str, Any]:
    """Rounds with a pause of a second between them."""
    hosts = SHAPES.get(name, SHAPE)[0]
    topology, rng = topology_of(name, hosts), np.random.default_rng(seed)
    events: list[tuple[float, int, Act]] = []
    serial = itertools.count()

    def at(when: float, act: Act) -> None:
        heapq.heappush(events, (when, next(serial), act))

    carrier, chunk_bytes, now, seconds = carrier_of(transport, topology, at, rng), int(nbytes / hosts / SLICES), 0.0, []
    plain = plain_Bps(topology)
    with without_windows(transport):
        for _ in range(rounds):
            start = now = now + START_S
            played = Round(carrier, at, hosts, chunk_bytes)
            for host in range(hosts):
                at(start + rng.uniform(0.0, BEGUN_S), functools.partial(played.begin, host))
            while len(played.gathered_s) < hosts:
                now, _, act = heapq.heappop(events)
                act(now)
            seconds.append(now - start)
    bound_s = 2 * (hosts - 1) / hosts * nbytes / plain
    row = {"ratio": bound_s / statistics.mean(seconds[1:]), "plain_MBps": plain / 1e6, "first_s": seconds[0]}
    row["longest_s"] = max(seconds[1:])
    if isinstance(carrier, Network):
        row["again"] = sum(flow.again for flow in carrier.flows.values())
    return {key: float(f"{value:.3g}") for key, value in row.items()}


def measure(name: str, transport: str, seed: int, steps: int, inflight: int) -> dict[str, Any]:
    hosts, stages = SHAPES.get(name, SHAPE)
    topology = topology_of(name, hosts)
    cluster = cluster_of(topology)[0]
    stage_of = tuple(host % stages for host in range(hosts))
    times_s = (FORWARD_S,) * hosts, (BACKWARD_S,) * hosts
    seats = Seats(stage_of, *times_s, (1.0,) * stages, float(TENSOR_BYTES), 0.0, BATCH, inflight)
    rng = np.random.default_rng(seed)
    plain = plain_Bps(topology)
    with without_windows(transport):
        play = Lab(seats, cluster, seed, lambda at: carrier_of(transport, topology, at, rng))
        parts = Parts(play.carrier, hosts) if isinstance(play.carrier, Network) else None
        start, seconds = START_S, []
        for step in range(steps):
            if parts is not None and step:
                parts.begin(start)
            end = play.run(BATCH, start) + AGREEING_S.get(name, AGREEING_ELSEWHERE_S)
            seconds.append(end - start)
            start = end
    network_bound = plain * hosts / stages / (TENSOR_BYTES * (2 if stages > 2 else 1))
    rate = BATCH * (steps - 1) / sum(seconds[1:])
    row: dict[str, Any] = {
        "ratio": rate / min(network_bound, hosts / stages / (FORWARD_S + BACKWARD_S)),
        "plain_MBps": plain / 1e6,
        "way_p50_s": statistics.median(play.ways_s),
        "way_p90_s": float(np.quantile(play.ways_s, 0.9)),
        "way_most_s": max(play.ways_s),
    }
    if isinstance(play.carrier, Network):
        row["again"] = sum(flow.again for flow in play.carrier.flows.values())
    row = {key: float(f"{value:.3g}") for key, value in row.items()}
    if parts is not None:
        row["parts"] = {
            f"h{host}": {"stage": stage_of[host], **{key: round(value / (steps - 1), 1) for key, value in each.items()}}
            for host, each in enumerate(parts.rows)
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", default="50,regions", help="wan_bulk.py's, or regions")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--inflight", type=int, default=0, help="of each owner; 0: as run.inflight = auto")
    parser.add_argument("--parts", action="store_true", help="where each uplink spends a step")
    parser.add_argument("--averaging", action="store_true", help="rounds among the hosts, as many as `--steps`")
    parser.add_argument("--megabytes", type=float, default=30.0, help="that are averaged")
    asked = parse(parser)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in asked.lines.split(","):
        for transport in TRANSPORTS:
            for seed in range(asked.seeds):
                if asked.averaging:
                    row = averaging(name, transport, seed, asked.steps, 1e6 * asked.megabytes)
                else:
                    row = measure(name, transport, seed, asked.steps, asked.inflight)
                rows.setdefault(f"{name} {transport}", []).append(row)
                words = [f"{key} {value:g}" for key, value in row.items() if key != "parts"]
                print(f"{name:>8} {transport:9}", *words, file=sys.stderr, flush=True)
                for host, each in row.get("parts", {}).items() if asked.parts else ():
                    print(f"  {host}", *(f"{key} {value:g}" for key, value in each.items()), file=sys.stderr)
    means = {key: statistics.mean(row["ratio"] for row in each) for key, each in rows.items()}
    worst = min(means[f"{name} shares"] / means[f"{name} fluid"] for name in asked.lines.split(","))
    setting = {"inflight": asked.inflight, "seeds": asked.seeds, "lines": rows}
    what = "averaging" if asked.averaging else "hops"
    report(f"{what} in the surrogate", worst, "of a perfect transport", at_least(WANTED), setting, asked.record)


if __name__ == "__main__":
    main()
