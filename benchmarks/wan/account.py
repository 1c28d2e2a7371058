"""Where the uplinks of a run's hosts spend a step: seconds busy, and idle by cause. For wan_hops.py, from its hosts' traces and lines.

How long a line carried something the emulator says, so `busy` holds what is sent twice and acknowledgements, too. What is left of a second
belongs to the first cause that applies:

    commit      every microbatch is booked: averaging, agreeing, and the view that begins the next step
    fill        this host has made no tensor of the step yet
    drain       the last tensor that it makes in this step has left
    receiver    bytes wait here while the line of one of their receivers is full
    transport   bytes wait here and neither end's line is full
    compute     nothing waits here, a hop is running
    starved     nothing waits and nothing runs: the next input has not arrived, or another replica serves it

Bytes wait where tensors were to be sent and the line has not carried them yet. `uneven` is no idle time: what this host serves beyond
its stage's mean takes its line so long. `down` is how long its downlink is busy, `late` how long that is idle while tensors are under
way to it, `dropped` how many packets its line has dropped.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

import msgspec

from shoal import trace
from shoal.core.messages import BoundaryTensor, Do, Done, Fetch, Received, RunBackward, RunForward, Send
from wan.lab import Counted, Lab

EVERY_S = 0.05
FULL = 0.95  # of a quarter of a second: a line that is busy for so long is full
CAUSES = ("busy", "commit", "fill", "drain", "receiver", "transport", "compute", "starved", "down", "late", "dropped")
FRAMING = 1.035  # bytes on the line for one of a tensor: TLS, TCP and IP, and what is sent twice
LEAST_PART = 0.1  # of a tensor: less than this does not wait
Spans = list[tuple[float, float]]


class Counters:
    """What the lines of each host have carried, sampled inside the `with` statement."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._over = lab, threading.Event()
        self.samples: list[tuple[float, dict[str, Counted]]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Counters:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            self.samples.append(
                (time.monotonic(), {host: self._lab.counted(host) for host in self._lab.topology.hosts})
            )


class Host(msgspec.Struct):
    """What one host did, by step. Times are the machine's, which all hosts share."""

    begins: dict[int, float] = {}
    booked: dict[int, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))
    sent: dict[int, Spans] = msgspec.field(default_factory=lambda: defaultdict(list))  # asked to leave, left
    receivers: list[tuple[float, float, str]] = []
    hops: Spans = []
    stage: int = 0


class Carried:
    """How much of what was to be sent the line has not carried yet; it begins anew when everything has arrived."""

    def __init__(self, sent: Spans, tensor_bytes: int) -> None:
        self._asked = sorted(start for start, _ in sent)
        self._left = sorted(end for _, end in sent)
        self._tensor_bytes = tensor_bytes
        self._bytes = 0.0

    def waiting(self, now: float, nbytes: int) -> bool:
        asked, left = bisect_right(self._asked, now), bisect_right(self._left, now)
        self._bytes = max(self._bytes + nbytes / FRAMING, float(left * self._tensor_bytes))
        self._bytes = min(self._bytes, float(asked * self._tensor_bytes))
        return asked * self._tensor_bytes - self._bytes > LEAST_PART * self._tensor_bytes


def read(traces: dict[str, Path], delays_s: dict[tuple[str, str], float]) -> dict[str, Host]:
    hosts = {host: Host() for host in traces}
    host_of: dict[str, str] = {}
    asked: dict[tuple[object, ...], tuple[float, str]] = {}
    arrived: dict[tuple[object, ...], tuple[float, str]] = {}
    running: dict[tuple[str, str], tuple[float, RunForward | RunBackward]] = {}
    for name, path in traces.items():
        host = hosts[name]
        for item in trace.read(path):
            if isinstance(item, trace.Header):
                host_of[item.peer] = name
            if not isinstance(item, trace.TraceRecord):
                continue
            now, event = item.time_s, item.event
            if isinstance(event, Received) and isinstance(event.message, BoundaryTensor):
                arrived[event.peer, item.peer, _tensor(event.message)] = now, name
            if isinstance(event, Done) and (name, event.id) in running:
                start, task = running.pop((name, event.id))
                host.hops.append((start, now))
                if isinstance(task, RunBackward):
                    host.booked[task.step].append(now)
            for command in item.commands:
                if isinstance(command, Send) and isinstance(command.message, BoundaryTensor):
                    asked.setdefault((item.peer, command.peer, _tensor(command.message)), (now, name))
                if isinstance(command, Do) and isinstance(command.task, RunForward | RunBackward):
                    running[name, command.task.id] = now, command.task
                    host.stage = command.task.stage
                if isinstance(command, Do) and isinstance(command.task, Fetch):
                    host.begins.setdefault(command.task.step, now)
    for key, (start, source) in asked.items():
        end, target = arrived.get(key, (start, ""))
        if target and target != source:
            left = end - delays_s[source, target]
            hosts[source].sent[key[2][0]].append((start, left))  # type: ignore[index]
            hosts[source].receivers.append((start, left, target))
    return hosts


def _tensor(message: BoundaryTensor) -> tuple[int, int, int, bool]:
    return message.step, message.index, message.stage, message.gradient


def account(
    hosts: dict[str, Host], counters: Counters, plain_Bps: float, tensor_bytes: int
) -> dict[str, dict[str, float]]:
    """By host: seconds of a step, in the mean of all steps but the first and the last."""
    began: dict[int, float] = {}  # by the first; a host that begins with what it has already is not seen to
    for host in hosts.values():
        for step, at in host.begins.items():
            began[step] = min(at, began.get(step, at))
    steps = sorted(began)
    inner = steps[1:-1] or steps[:-1]
    rows = {name: dict.fromkeys(CAUSES, 0.0) for name in hosts}
    for step in inner:
        start, end = began[step], began[step + 1]
        booked = max(max(host.booked[step]) for host in hosts.values())
        carried = {name: Carried(host.sent[step], tensor_bytes) for name, host in hosts.items()}
        for (before, old), (now, new) in zip(counters.samples, counters.samples[1:], strict=False):
            if not start <= now < end:
                continue
            full = _full(counters, now)
            coming = {
                target for host in hosts.values() for since, left, target in host.receivers if since <= now < left
            }
            for name, host in hosts.items():
                busy_s = min(new[name].up.busy_s - old[name].up.busy_s, now - before)
                row = rows[name]
                row["busy"] += busy_s
                waiting = carried[name].waiting(now, new[name].sent_bytes - old[name].sent_bytes)
                row[_cause(host, step, now, booked, full, waiting)] += now - before - busy_s
                down_s = min(new[name].down.busy_s - old[name].down.busy_s, now - before)
                row["dropped"] += new[name].up.dropped - old[name].up.dropped
                row["dropped"] += new[name].down.dropped - old[name].down.dropped
                row["down"] += down_s
                row["late"] += now - before - down_s if name in coming else 0.0
    for name, host in hosts.items():
        served = {other: sum(len(hosts[other].booked[step]) for step in inner) for other in hosts}
        replicas = [other for other in hosts if hosts[other].stage == host.stage]
        crossings = sum(len(host.sent[step]) for step in inner) / max(1, served[name])
        more = served[name] - sum(served[other] for other in replicas) / len(replicas)
        rows[name]["uneven"] = more * crossings * tensor_bytes / plain_Bps
        rows[name] = {"stage": host.stage, **{key: round(value / len(inner), 2) for key, value in rows[name].items()}}
    return rows


def _cause(host: Host, step: int, now: float, booked: float, full: set[str], waits: bool) -> str:
    sent = host.sent[step]
    if now > booked:
        return "commit"
    if not sent or now < min(start for start, _ in sent):
        return "fill"
    if now > max(end for _, end in sent):
        return "drain"
    if waits:
        targets = {target for start, end, target in host.receivers if start <= now < end}
        return "receiver" if targets & full else "transport"
    return "compute" if any(start <= now < end for start, end in host.hops) else "starved"


def _full(counters: Counters, now: float) -> set[str]:
    """Hosts whose downlink is full."""
    window = [sample for sample in counters.samples if abs(sample[0] - now) <= 0.15]
    (first, old), (last, new) = window[0], window[-1]
    return {name for name in old if new[name].down.busy_s - old[name].down.busy_s >= FULL * (last - first)}


def table(rows: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [" ".join(f"{name:>9}" for name in ("host", *names))]
    return "\n".join(lines + [" ".join(f"{value:>9}" for value in (host, *row.values())) for host, row in rows.items()])
