"""Boundary tensors straight from server to server: goodput and bytes, for several links.

    python benchmarks/hops.py [--links 100:50,200:10,200:50,200:100,500:50] [--batch 64] [--steps 3] [--planned] [a.b=c ...]

It is `shoal run configs/lab.toml` for each link in Mbit/s : ms each way: real
processes and real TLS, executors that sleep, boundary tensors of 8 MB (A). Value: microbatches per second between the first
commit and the last, so with averaging, filling and draining inside.

The bounds are overhead.py's. With equally many replicas the middle stages' links bound both ways, and the ends' are half idle.
`--planned` places the peers as `shoal plan` does (more where more is sent) and runs its plan; the bounds are then of those replicas.

Bytes are counted by the peers themselves, of every message with tensors that leaves a process; per microbatch and in units of A
they are compared with 2 (S - 1), the least possible (6A over 3 boundaries).

The last line is one JSON object, about the link of 200 Mbit/s and 50 ms when it is among those asked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import overhead
from report import at_least, parse, report
from shoal import config as configuration
from shoal.config import Config
from shoal.planner.strategy import plan

LINKS = "100:50,200:10,200:50,200:100,500:50"
WANTED = 0.92  # of the bound


def bound(config: Config, replicas: Sequence[int] = ()) -> float:
    return min(overhead.network_bound(config, replicas), overhead.compute_bound(config, replicas))


def boundary_bytes(config: Config, summary: dict[str, Any]) -> float:
    """Of activations and gradients, per microbatch in units of A."""
    sent = summary.get("sent", {})
    total = sum(sent.get(kind, 0) for kind in ("activations", "gradients"))
    return float(total) / (4 * config.device.emulated_values * max(1, summary["committed"]))


def measure(words: list[str], planned: bool) -> tuple[float, dict[str, Any], tuple[int, ...]]:
    """Microbatches per second after the first commit, the run's summary, and the replicas of each stage if planned."""
    replicas: tuple[int, ...] = ()
    with tempfile.TemporaryDirectory() as folder:

        def shoal(verb: str, *more: str) -> None:
            command = [sys.executable, "-m", "shoal.cli.main", verb, str(overhead.LAB), *words, *more]
            subprocess.run(command, cwd=folder, env=overhead.environment(), check=True, stdout=sys.stderr)

        if planned:
            stages = configuration.load(overhead.LAB, words).run.stages
            shoal("plan", "--stages", str(stages), "--wiring", "stochastic", "--out", "plan.json")
            replicas = tuple(len(stage.peers) for stage in plan.load(Path(folder) / "plan.json").stages)
        shoal("run", *(("--plan", "plan.json") if planned else ()))
        directory = Path(folder) / "runs/lab"
        steps = [json.loads(line) for line in (directory / "commits.jsonl").read_bytes().splitlines()]
        summary = json.loads((directory / "summary.json").read_bytes())
    seconds = steps[-1]["heard_s"] - steps[0]["heard_s"]
    return summary["committed"] * (len(steps) - 1) / len(steps) / seconds, summary, replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--links", default=LINKS, metavar="MBIT:MS,...", help=f"default: {LINKS}")
    parser.add_argument("--batch", type=int, default=64, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--planned", action="store_true", help="as many replicas of each stage as `shoal plan` says")
    asked = parse(parser)
    rows: dict[str, dict[str, Any]] = {}
    for link in asked.links.split(","):
        mbit, _, ms = link.partition(":")
        words = [
            f"train.batch={asked.batch}",
            f"run.steps={asked.steps}",
            f"device.emulated_values={overhead.VALUES}",
            f"network.bandwidth_Bps={mbit} Mbit/s",
            f"network.delay_s={ms} ms",
            *asked.settings,
        ]
        config = configuration.load(overhead.LAB, words)
        rate, summary, replicas = measure(words, asked.planned)
        row = {"rate": rate, "bound": bound(config, replicas), "boundary_bytes_A": boundary_bytes(config, summary)}
        rows[link] = {key: round(value, 3) for key, value in row.items()} | ({"replicas": replicas} if replicas else {})
        print(f"{link:>8} {rate:6.3f} of {row['bound']:6.3f} microbatches/s", file=sys.stderr, flush=True)
    told = "200:50" if "200:50" in rows else next(iter(rows))
    setting = {
        "link": told,
        "batch": asked.batch,
        "stages": config.run.stages,
        "peers": config.run.peers,
        "links": rows,
    }
    target = at_least(WANTED * rows[told]["bound"])
    report("hops", rows[told]["rate"], "microbatches/s, direct hops", target, setting, asked.record)


if __name__ == "__main__":
    main()
