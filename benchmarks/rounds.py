"""How near to the line's bound a stage's replicas average: 100 MB among 4 and 16 peers over 200 Mbit/s and 50 ms.

    python benchmarks/rounds.py [--megabytes 100] [--peers 4,16] [--steps 3]

Real processes, real TLS over modelled lines, executors that compute nothing. Measured: from the first part that is asked for to the
last sum that is gathered. In a butterfly each of n replicas sends the n - 1 others its part of their chunks, and its own chunk's sum to
them: 2 (n - 1) / n of the gradient leaves every uplink and comes through every downlink, whatever else is done, so

    bound = 2 (n - 1) / n * gradient / bandwidth

and the last of each trip's delay is added by no bound. 0.85 of it is wanted.

The last line is one JSON object, about the smaller group.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from averaging import averagings
from overhead import LAB, environment
from report import report

MBIT, DELAY_MS = 200, 50
BANDWIDTH_Bps = MBIT * 1e6 / 8


def bound_s(peers: int, megabytes: float) -> float:
    return 2 * (peers - 1) / peers * megabytes * 1e6 / BANDWIDTH_Bps


def command(peers: int, megabytes: float, steps: int) -> list[str]:
    settings = {
        "run.name": "rounds",
        "run.peers": peers,
        "run.stages": 1,
        "run.steps": steps,
        "train.batch": peers,
        "train.microbatch": 1,
        "device.executor": "emulated",
        "device.emulated_s": 0.01,
        "device.emulated_values": 256,
        "device.emulated_gradient": int(megabytes * 1e6 / 4),
        "network.bandwidth_Bps": BANDWIDTH_Bps,
        "network.delay_s": DELAY_MS / 1000,
        "checkpoint.every": 0,
        "checkpoint.last": "false",
    }
    return [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "run",
        str(LAB),
        *(f"{key}={value}" for key, value in settings.items()),
    ]


def played(folder: Path, peers: int, megabytes: float, steps: int) -> list[float]:
    subprocess.run(command(peers, megabytes, steps), cwd=folder, env=environment(), check=True, stdout=sys.stderr)
    return averagings(folder / "runs/rounds/trace.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--peers", default="4,16")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    asked = parser.parse_args()
    told: dict[str, dict[str, float]] = {}
    for peers in map(int, asked.peers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            spans = played(Path(folder), peers, asked.megabytes, asked.steps)
        least, median = bound_s(peers, asked.megabytes), sorted(spans)[len(spans) // 2]
        told[str(peers)] = {
            "measured_s": round(median, 3),
            "bound_s": round(least, 3),
            "ratio": round(least / median, 4),
        }
        print(f"{peers:3} peers: {median:6.2f} s, bound {least:6.2f} s ({least / median:.1%})", flush=True)
    first = told[asked.peers.split(",")[0]]
    setting = {"megabytes": asked.megabytes, "Mbit_per_s": MBIT, "delay_ms": DELAY_MS, "groups": told}
    rate, most = asked.megabytes / first["measured_s"], asked.megabytes / first["bound_s"]
    report("rounds", rate, "MB of gradient averaged per second", most, setting)


if __name__ == "__main__":
    main()
