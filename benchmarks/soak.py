"""A long run with churn: are memory, descriptors, threads and disk as large at its end as near its beginning?

    python benchmarks/soak.py                              5,000 steps of six emulated peers, one killed every 20 s
    python benchmarks/soak.py --steps 500 --minutes 5      fewer, or as many as fit into that time

`shoal run` itself, with emulated compute (a step takes milliseconds) and traces of 1 MiB a peer, so that everything that rotates does so
many times. Every 5 s the launcher, the server that forks peers, and the peers are measured from /proc. Printed: medians of the first and
the last quarter of the samples after the first tenth, since peers need a while to have all they ever have. The value is the largest growth
of any of them but the file of commits, which has a short line for every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Target, parse, report
from shoal.launcher.fork_server import MODULE

SETTINGS = {
    "run.name": "soak",
    "run.peers": 6,
    "run.stages": 3,
    "run.trace_bytes": 1 << 20,
    "train.batch": 8,
    "train.microbatch": 1,
    "device.executor": "emulated",
    "device.emulated_s": 0.001,
    "device.emulated_values": 256,
    "network.host": "127.0.0.1",
    "network.discovery": "gossip",
    "checkpoint.every": 250,
    "checkpoint.keep": 2,
}
SAMPLE_S = 5.0
KILL_EVERY_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=120)
    given = parse(parser)
    steps, minutes = given.steps, given.minutes
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        empty = Path(folder) / "soak.toml"
        empty.touch()
        command = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            "run",
            str(empty),
            *settings,
            f"run.steps={steps}",
            f"run.dir={folder}",
        ]
        command += ["--kill-every", str(KILL_EVERY_S), "--time", f"{minutes} min"]
        log = Path(folder) / "out.txt"
        with open(log, "wb") as out:
            run = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            samples = []
            while run.poll() is None:
                time.sleep(SAMPLE_S)
                if (sample := measured(run.pid, Path(folder) / "soak")) is not None:
                    samples.append(sample)
                    if len(samples) % 12 == 0:
                        print(json.dumps(sample), file=sys.stderr, flush=True)
        summary = json.loads((Path(folder) / "soak/summary.json").read_text())
        print(log.read_text()[-1500:], file=sys.stderr)
    growth = growths(samples)
    print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, {summary['killed']} killed, {summary['joined']} joined,"
        f" lost {summary['lost']}, counted twice {summary['counted_twice']}"
    )
    value = max((ratio for name, ratio in growth.items() if name != "disk commits_MB"), default=0.0)
    setting = {"steps": summary["steps"], "killed": summary["killed"], "growth": growth}
    report(
        "soak", value, "times as large at the end as near the beginning", Target(1.1, "lower"), setting, given.record
    )
    return 0 if summary["balanced"] or summary["early"] else 1


def measured(launcher: int, directory: Path) -> dict[str, float] | None:
    """The launcher, the largest of its peers, and the disk; None before training has begun."""
    try:
        step = json.loads((directory / "status.json").read_text())["step"]
        own = process(launcher)
        others = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(launcher)}
        peers = [process(pid) for pid, line in others.items() if line.startswith(MODULE.encode())]
        servers = [process(pid) for pid, line in others.items() if not line.startswith(MODULE.encode())]
    except (OSError, ValueError, KeyError):  # a process has just ended, or a file is not there yet
        return None
    if not step or not peers or not servers:
        return None
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    sizes = {path: size(path) for path in files}
    kinds = {
        "launcher": own,
        "server": {name: max(each[name] for each in servers) for name in own},
        "peer": {name: statistics.median(peer[name] for peer in peers) for name in own},
        "disk": {
            "traces_MB": sum(nbytes for path, nbytes in sizes.items() if "traces" in path.parts) / 1e6,
            "commits_MB": size(directory / "commits.jsonl") / 1e6,
            "rest_MB": sum(
                nbytes for path, nbytes in sizes.items() if "traces" not in path.parts and path.name != "commits.jsonl"
            )
            / 1e6,
            "files": len(files),
        },
    }
    return {"step": step} | {
        f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()
    }


def process(number: int) -> dict[str, float]:
    place = Path(f"/proc/{number}")
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return {
        "memory_MB": int(status["VmRSS"].split()[0]) / 1e3,
        "descriptors": len(os.listdir(place / "fd")),
        "threads": int(status["Threads"]),
    }


def descendants(number: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # rotated away meanwhile
        return 0


def growths(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure: the last quarter's median over the first's."""
    later = samples[len(samples) // 10 :]
    quarter = max(1, len(later) // 4)
    growth = {}
    for name in later[0] if later else ():
        if name == "step":
            continue
        first, last = (
            statistics.median(sample[name] for sample in part) for part in (later[:quarter], later[-quarter:])
        )
        growth[name] = round(last / first if first else 0.0, 3)
        print(f"{name:22} {first:12,.1f} {last:12,.1f} {growth[name]:8.2f}x")
    return growth


if __name__ == "__main__":
    sys.exit(main())
