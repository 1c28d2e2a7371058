"""Boundary tensors over real networks: a run of six hosts in the laboratory (docs/wan.md) beside a plain socket. Needs root.

    python benchmarks/wan_hops.py [--line even] [--batch 96] [--steps 3] [a.b=c ...]
    python benchmarks/wan_hops.py --line regions --values 500000 [--placed] run.peers=8 run.stages=4

It is `shoal run configs/lab.toml` on one host and `shoal join` on five, without modelled links: real processes and real TLS over one of
wan_bulk.py's lines, executors that sleep, boundary tensors of 8 MB. Value: microbatches per second between the first commit and the last,
over the bound. The bound is overhead.py's, with the rate of a plain socket that was measured in the same lab just before; the setting also
has what the planner predicts with that rate, and each uplink's seconds of a step by cause (wan/account.py).

`regions`: eight hosts in as many regions of the world, each behind 50 Mbit/s. They serve what the order of their arrival gives them, or
(--placed) what the planner thinks best: `run.placement`, as a plan sets it.

Six processes and the emulator need two idle cores for this. On a busy machine `--line 50 --values 500000` moves tensors of a quarter over a
line of a quarter of the rate: every time is the same, with a quarter of the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import overhead
from report import at_least, parse, report
from shoal import config as configuration
from shoal import trace, units
from shoal.config import Config
from shoal.planner.inputs.cluster import Device, from_matrices
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict
from wan.account import Counters, account, read, table
from wan.lab import ANY, Lab, PathRule, Topology, missing
from wan_bulk import LINES, plain_Bps

WANTED = {"regions": 0.85}  # of the bound; elsewhere:
WANTED_ELSEWHERE = 0.92
# Milliseconds one way, half of what ping says: Virginia, Ohio, Oregon, Ireland, Frankfurt, Sao Paulo, Tokyo, Sydney
REGIONS_MS = (
    (),
    (6,),
    (33, 25),
    (35, 41, 62),
    (45, 50, 72, 13),
    (58, 63, 88, 92, 102),
    (78, 70, 49, 102, 113, 128),
    (100, 94, 70, 130, 143, 155, 52),
)
INVITE_S = 60.0  # until the founder shows one


def topology_of(line: str, hosts: int) -> Topology:
    names = tuple(f"h{i}" for i in range(hosts))
    if line != "regions":
        return Topology(names, LINES[line].access, LINES[line].path)
    paths = [
        PathRule(sender=names[one], receiver=names[other], delay=f"{REGIONS_MS[max(one, other)][min(one, other)]} ms")
        for one, other in itertools.permutations(range(hosts), 2)
    ]
    return Topology(names, LINES["50"].access, tuple(paths))


def delays_s(topology: Topology) -> dict[tuple[str, str], float]:
    delays = {}
    for rule in topology.path:
        for pair in itertools.permutations(topology.hosts, 2):
            if all(one in (ANY, other) for one, other in zip((rule.sender, rule.receiver), pair, strict=True)):
                delays[pair] = units.parse(rule.delay, "_s")
    return delays


def predicted(config: Config, stages: dict[str, int], delays: dict[tuple[str, str], float], line_Bps: float) -> float:
    """Microbatches per second, by the planner: of hosts with these stages, on lines of that rate."""
    names, forward_s = list(stages), config.device.emulated_s
    devices = tuple(Device(name=name, flops=1.0, up_Bps=line_Bps, down_Bps=line_Bps) for name in names)
    delay_s = np.array([[delays.get((one, other), 0.0) for other in names] for one in names])
    backward_s = config.device.emulated_backward_s or 2 * forward_s
    seats = Seats(
        tuple(stages.values()),
        (forward_s,) * len(names),
        (backward_s,) * len(names),
        (4.0 * config.device.emulated_gradient,) * config.run.stages,
        4.0 * config.device.emulated_values,
        0.0,
        config.train.batch,
        configuration.inflight(config.run),
    )
    machines = from_matrices(devices, delay_s, np.full(delay_s.shape, 1e12)).over_tcp()
    return seats.microbatches / predict(seats, machines, np.random.default_rng(0)).step_s


def placement(
    config: Config, names: tuple[str, ...], delays: dict[tuple[str, str], float], line_Bps: float
) -> dict[str, int]:
    """The stage of each host: two are exchanged as long as the planner expects a gain from it."""
    stages = {name: at % config.run.stages for at, name in enumerate(names)}
    rate, gains = predicted(config, stages, delays, line_Bps), True
    while gains:
        gains = False
        for one, other in itertools.combinations(names, 2):
            tried = stages | {one: stages[other], other: stages[one]}
            if tried != stages and (tried_rate := predicted(config, tried, delays, line_Bps)) > rate * (1 + 1e-6):
                stages, rate, gains = tried, tried_rate, True
    return stages


def run(
    lab: Lab, folder: Path, words: list[str], device: list[str], placed: dict[str, int] | None = None
) -> dict[str, Any]:
    """The run's commits and summary."""
    shoal = [sys.executable, "-m", "shoal.cli.main"]
    founder, *guests = lab.topology.hosts

    def machine(host: str) -> list[str]:
        return [f"device.machine={host}"] if placed else []

    if placed:
        words = [*words, "run.placement={" + ", ".join(f"{name} = {stage}" for name, stage in placed.items()) + "}"]
    options: dict[str, Any] = {"cwd": folder, "env": overhead.environment(), "stderr": subprocess.STDOUT}
    with (folder / "founder.log").open("w") as log:
        command = [*shoal, "run", str(overhead.LAB), "--here", "1", *words, *device, *machine(founder)]
        process = lab.start(founder, command, stdout=log, **options)
    invite = wait_for_invite(folder / "founder.log", process)
    for guest in guests:
        with (folder / f"{guest}.log").open("w") as log:
            (folder / guest).mkdir()
            join = [*shoal, "join", invite, *device, *machine(guest)]
            lab.start(guest, join, stdout=log, **(options | {"cwd": folder / guest}))
    if process.wait():
        raise RuntimeError((folder / "founder.log").read_text()[-2000:])
    directory = folder / "runs/lab"
    steps = [json.loads(line) for line in (directory / "commits.jsonl").read_bytes().splitlines()]
    return {"commits": steps, **json.loads((directory / "summary.json").read_bytes())}


def evicted(folder: Path) -> str:
    """Who, and why: honest peers here, so that it is a fault, and no figure of these hosts; '': nobody."""
    path = folder / "runs/lab/evictions.json"
    known = json.loads(path.read_bytes()) if path.exists() else []
    return "; ".join(f"{one['peer']} in step {one['step']}: {one['reason']}" for one in known)


def traced(folder: Path, host: str, topology: Topology) -> Path:
    return trace.find((folder if host == topology.hosts[0] else folder / host) / "runs/lab")


def wait_for_invite(log: Path, process: subprocess.Popen[Any]) -> str:
    until = time.monotonic() + INVITE_S
    while time.monotonic() < until and process.poll() is None:
        if match := re.search(r"^  (shoal1\w+)\n", log.read_text(), re.MULTILINE):
            return match[1]
        time.sleep(0.1)
    raise RuntimeError(f"the founder has shown no invite: {log.read_text()[-2000:]}")


def bound(config: Config, socket_Bps: float) -> float:
    replicas = config.run.peers / config.run.stages
    network = socket_Bps * replicas / (4 * config.device.emulated_values * (2 if config.run.stages > 2 else 1))
    return min(network, overhead.compute_bound(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--line", default="even", choices=[*LINES, "regions"])
    parser.add_argument("--batch", type=int, default=96, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--values", type=int, default=overhead.VALUES, help="of a boundary tensor, 4 bytes each")
    parser.add_argument("--placed", action="store_true", help="hosts serve what the planner thinks best")
    parser.add_argument("--logs", type=Path, help="keep the processes' output here")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    device = ["device.executor=emulated", f"device.emulated_values={asked.values}", "device.emulated_s=200 ms"]
    words = [f"train.batch={asked.batch}", f"run.steps={asked.steps}", "network.bandwidth_Bps=0", "network.delay_s=0"]
    words += asked.settings
    config = configuration.load(overhead.LAB, [*words, *device])
    topology = topology_of(asked.line, config.run.peers)
    with tempfile.TemporaryDirectory() as temporary, Lab(topology) as lab:
        folder = asked.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        socket_Bps = plain_Bps(lab)
        delays = delays_s(topology)
        with Counters(lab) as counters:
            placed = placement(config, topology.hosts, delays, socket_Bps) if asked.placed else None
            result = run(lab, folder, words, device, placed)
        if reasons := evicted(folder):
            kept = (
                f"; what the processes print is in {folder}" if asked.logs else "; --logs FOLDER keeps what they print"
            )
            raise SystemExit(f"honest peers were evicted, so that this is no figure of hops: {reasons}{kept}")
        hosts = read({host: traced(folder, host, topology) for host in topology.hosts}, delays)
        rows = account(hosts, counters, socket_Bps, 4 * asked.values)
        print(table(rows), file=sys.stderr, flush=True)
    commits, stages = result["commits"], {name: host.stage for name, host in hosts.items()}
    seconds = commits[-1]["heard_s"] - commits[0]["heard_s"]
    rate = result["committed"] * (len(commits) - 1) / len(commits) / seconds
    most, expected = bound(config, socket_Bps), predicted(config, stages, delays, socket_Bps)
    setting = {
        "line": asked.line,
        "peers": config.run.peers,
        "stages": config.run.stages,
        "batch": asked.batch,
        "inflight": config.run.inflight,
        "stage_of": stages,
        "boundary_bytes": 4 * asked.values,
        "microbatches_per_s": round(rate, 3),
        "bound": round(most, 3),
        "predicted": round(expected, 3),
        "measured_over_predicted": round(rate / expected, 3),
        "plain_MBps": round(socket_Bps / 1e6, 1),
        "uplinks": rows,
        **{key: result[key] for key in ("committed", "redone", "lost", "counted_twice")},
    }
    report(
        "hops over real lines",
        rate / most,
        "of the plain socket's bound",
        at_least(WANTED.get(asked.line, WANTED_ELSEWHERE)),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
