"""Boundary tensors over real networks: a run of six hosts in the laboratory (docs/wan.md) beside a plain socket. Needs root.

    python benchmarks/wan_hops.py [--line even] [--batch 96] [--steps 3] [a.b=c ...]

It is `shoal run configs/lab.toml` on one host and `shoal join` on five, without modelled links: real processes and real TLS over one of
wan_bulk.py's lines, executors that sleep, boundary tensors of 8 MB. Value: microbatches per second between the first commit and the last,
over the bound. The bound is overhead.py's, with the rate of a plain socket that was measured in the same lab just before.

Six processes and the emulator need two idle cores for this. On a busy machine `--line 50 --values 500000` moves tensors of a quarter over a
line of a quarter of the rate: every time is the same, with a quarter of the work.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import overhead
from report import at_least, parse, report
from shoal import config as configuration
from shoal import trace, units
from shoal.config import Config
from wan.account import Counters, account, read, table
from wan.lab import Lab, Topology, missing
from wan_bulk import LINES, plain_Bps

WANTED = 0.92  # of the bound
INVITE_S = 60.0  # until the founder shows one


def topology_of(line: str, hosts: int) -> Topology:
    line_of = LINES[line]
    return Topology(tuple(f"h{i}" for i in range(hosts)), line_of.access, line_of.path)


def run(lab: Lab, folder: Path, words: list[str], device: list[str]) -> dict[str, Any]:
    """The run's commits and summary."""
    shoal = [sys.executable, "-m", "shoal.cli.main"]
    founder, *guests = lab.topology.hosts
    options: dict[str, Any] = {"cwd": folder, "env": overhead.environment(), "stderr": subprocess.STDOUT}
    with (folder / "founder.log").open("w") as log:
        command = [*shoal, "run", str(overhead.LAB), "--here", "1", *words, *device]
        process = lab.start(founder, command, stdout=log, **options)
    invite = wait_for_invite(folder / "founder.log", process)
    for guest in guests:
        with (folder / f"{guest}.log").open("w") as log:
            (folder / guest).mkdir()
            join = [*shoal, "join", invite, *device]
            lab.start(guest, join, stdout=log, **(options | {"cwd": folder / guest}))
    if process.wait():
        raise RuntimeError((folder / "founder.log").read_text()[-2000:])
    directory = folder / "runs/lab"
    steps = [json.loads(line) for line in (directory / "commits.jsonl").read_bytes().splitlines()]
    return {"commits": steps, **json.loads((directory / "summary.json").read_bytes())}


def traced(folder: Path, host: str, topology: Topology) -> Path:
    return trace.find((folder if host == topology.hosts[0] else folder / host) / "runs/lab")


def delay_s(topology: Topology) -> float:
    return units.parse(topology.path[0].delay, "_s")


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
    parser.add_argument("--line", default="even", choices=LINES)
    parser.add_argument("--batch", type=int, default=96, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--values", type=int, default=overhead.VALUES, help="of a boundary tensor, 4 bytes each")
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
        socket_Bps = plain_Bps(lab)
        with Counters(lab) as counters:
            result = run(lab, folder, words, device)
        hosts = read({host: traced(folder, host, topology) for host in topology.hosts}, delay_s(topology))
        rows = account(hosts, counters, socket_Bps, 4 * asked.values)
        print(table(rows), file=sys.stderr, flush=True)
    commits = result["commits"]
    seconds = commits[-1]["heard_s"] - commits[0]["heard_s"]
    rate = result["committed"] * (len(commits) - 1) / len(commits) / seconds
    most = bound(config, socket_Bps)
    setting = {
        "line": asked.line,
        "peers": config.run.peers,
        "stages": config.run.stages,
        "batch": asked.batch,
        "inflight": config.run.inflight,
        "boundary_bytes": 4 * asked.values,
        "microbatches_per_s": round(rate, 3),
        "bound": round(most, 3),
        "plain_MBps": round(socket_Bps / 1e6, 1),
        "uplinks": rows,
        **{key: result[key] for key in ("committed", "redone", "lost", "counted_twice")},
    }
    report("hops over real lines", rate / most, "of the plain socket's bound", at_least(WANTED), setting, asked.record)


if __name__ == "__main__":
    main()
