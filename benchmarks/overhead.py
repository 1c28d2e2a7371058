"""How much of what machines and links could do a run does: six peers that compute for a fixed time, over modelled links.

    python benchmarks/overhead.py [--batch 96] [--steps 3] [a.b=c ...]

It is `shoal run configs/lab.toml`: real processes and real TLS, executors that sleep 200 ms per microbatch and stage for a
forward and twice that for a backward, links of 200 Mbit/s and 50 ms each way for every peer, boundary tensors of 8 MB (A). Value:
microbatches per second between the first commit and the last, so with averaging, filling and draining inside.

The bound is the smaller of two rates, each of which nothing could beat.

*Compute.* A stage forwards and runs back every microbatch (the last one only runs back: its forward is part of that), and its
r replicas share them: r / 0.6 s, at the last stage r / 0.4 s.

*Network.* Each of the S - 1 boundaries carries A forward and A back, straight from replica to replica; the owner carries tokens,
which count nothing. A replica of stage s sends and receives, per microbatch that passes it,

    stage        sends                  receives
    first        output                 gradient            A up,  A down
    in between   output, gradient       input, gradient     2A up, 2A down
    last         gradient               input               A up,  A down

and with P peers in S stages each replica passes a share S / P of all: R <= bandwidth * P / (S * A * (2 if S > 2 else 1)). For 3 stages
of 2 that is one A per microbatch and link: 3.125 microbatches per second, while the compute would allow 3.33.

The last line is one JSON object. Its target is 0.85 of the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from report import at_least, parse, report
from shoal import config as configuration
from shoal.config import Config

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "configs/lab.toml"
WANTED = 0.85  # of the bound
VALUES = 2_000_000  # of a boundary tensor: 8 MB in float32


def compute_bound(config: Config, replicas: Sequence[float] = ()) -> float:
    """Microbatches per second if links were free. `replicas` of each stage: equally many by default."""
    stages = config.run.stages
    replicas = replicas or [config.run.peers // stages] * stages
    hops = [3] * (stages - 1) + [2]  # a forward is one, a backward two; the last stage only runs back
    return min(count / (each * config.device.emulated_s) for count, each in zip(replicas, hops, strict=True))


def network_bound(config: Config, replicas: Sequence[float] = ()) -> float:
    """Microbatches per second if computing took no time; see above. `replicas` of each stage: equally many by default."""
    stages = config.run.stages
    replicas = replicas or [config.run.peers / stages] * stages
    busiest = max((1 if stage in (0, stages - 1) else 2) / count for stage, count in enumerate(replicas))
    return config.network.bandwidth_Bps / (4 * config.device.emulated_values * busiest)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def measure(words: list[str]) -> tuple[float, dict[str, float]]:
    """Microbatches per second after the first commit, and what else the run says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal.cli.main", "run", str(LAB), *words]
        subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        directory = Path(folder) / "runs/lab"
        steps = [json.loads(line) for line in (directory / "commits.jsonl").read_bytes().splitlines()]
        summary = json.loads((directory / "summary.json").read_bytes())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = steps[-1]["heard_s"] - steps[0]["heard_s"]
    counted = summary["committed"] * (len(steps) - 1) / len(steps)
    return counted / seconds, {
        "seconds_per_step": round(seconds / (len(steps) - 1), 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "committed": summary["committed"],
        "redone": summary["redone"],
        "lost": summary["lost"],
        "counted_twice": summary["counted_twice"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--batch", type=int, default=96, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    asked = parse(parser)
    words = [
        f"train.batch={asked.batch}",
        f"run.steps={asked.steps}",
        f"device.emulated_values={VALUES}",
        *asked.settings,
    ]
    config = configuration.load(LAB, words)
    compute, network = compute_bound(config), network_bound(config)
    rate, told = measure(words)
    setting = {
        "peers": config.run.peers,
        "stages": config.run.stages,
        "batch": config.train.batch,
        "inflight": config.run.inflight,
        "boundary_bytes": 4 * config.device.emulated_values,
        "compute_bound": round(compute, 3),
        "network_bound": round(network, 3),
        **told,
    }
    report("overhead", rate, "microbatches/s", at_least(WANTED * min(compute, network)), setting, asked.record)


if __name__ == "__main__":
    main()
