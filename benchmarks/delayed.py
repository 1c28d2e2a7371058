"""Does averaging hide behind compute? Step time with delayed updates, against the larger of compute and averaging.

    python benchmarks/delayed.py [--steps 8] [--ratios 0.5,1,2] [a.b=c ...]

`shoal run configs/lab.toml` on real processes and real TLS with executors that sleep: two stages of two replicas behind modelled
lines of 20 Mbit/s, boundary tensors of 4 KB, so that a step is compute and averaging and little else. Three runs for each ratio
of averaging to compute:

    compute     a gradient of 1 KB: the step that averaging would be added to
    in time     train.staleness = 0; averaging is measured in its trace, from the first part cut to the last sum gathered
    late        train.staleness = 1

Step times are medians between commits; the first two steps are not counted. Two replicas exchange one gradient's worth of bytes
each way, so a ratio r asks for a gradient of r * compute * bandwidth bytes. The last line is one JSON object: the step with
delayed updates over the larger of compute and averaging where they are equal, or at the first ratio asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import overhead
from averaging import averagings
from report import at_most, parse, report
from shoal import trace

LINE_Bps = 20e6 / 8
COMPUTE_S = 6.0  # of a replica of the first stage: its share of forwards and backwards
MICROBATCHES = 32
MOST = 1.1  # of the larger of the two


def measure(values: int, staleness: int, steps: int, words: list[str]) -> tuple[float, float]:
    """Median seconds of a step, and of its averaging."""
    forward_s = COMPUTE_S / (MICROBATCHES / 2) / 3
    given = [
        "run.peers=4",
        "run.stages=2",
        f"run.steps={steps}",
        f"train.batch={MICROBATCHES}",
        "train.microbatch=1",
        f"train.staleness={staleness}",
        f"device.emulated_s={forward_s}",
        "device.emulated_values=1024",
        f"device.emulated_gradient={values}",
        f"network.bandwidth_Bps={LINE_Bps}",
        "network.delay_s=10 ms",
        "checkpoint.at_end=false",
        "checkpoint.every=0",
        *words,
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal.cli.main", "run", str(overhead.LAB), *given]
        subprocess.run(command, cwd=folder, env=overhead.environment(), check=True, stdout=sys.stderr)
        directory = Path(folder) / "runs/lab"
        heard = [json.loads(line)["heard_s"] for line in (directory / "commits.jsonl").read_bytes().splitlines()]
        averaging_s = statistics.median(averagings(trace.find(directory)))
    return statistics.median([late - early for early, late in pairwise(heard[1:])]), averaging_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--ratios", default="0.5,1,2", help="of averaging to compute; default: 0.5,1,2")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    asked = parse(parser)
    compute_s, _ = measure(256, 0, asked.steps, asked.settings)
    rows: dict[str, dict[str, float]] = {}
    for ratio in map(float, asked.ratios.split(",")):
        values = int(ratio * compute_s * LINE_Bps / 4)
        in_time_s, averaging_s = measure(values, 0, asked.steps, asked.settings)
        late_s, _ = measure(values, 1, asked.steps, asked.settings)
        larger_s = max(compute_s, averaging_s)
        rows[f"{ratio:g}"] = {
            "averaging_s": round(averaging_s, 3),
            "in_time_s": round(in_time_s, 3),
            "late_s": round(late_s, 3),
            "of_the_larger": round(late_s / larger_s, 3),
        }
        print(
            f"compute {compute_s:.2f} s, averaging {averaging_s:.2f} s: in time {in_time_s:.2f} s, late {late_s:.2f} s,"
            f" {late_s / larger_s:.2f} of the larger",
            file=sys.stderr,
            flush=True,
        )
    told = rows.get("1", next(iter(rows.values())))
    setting = {"compute_s": round(compute_s, 3), "microbatches": MICROBATCHES, "peers": 4, "stages": 2, "ratios": rows}
    report(
        "delayed", told["of_the_larger"], "of the larger of compute and averaging", at_most(MOST), setting, asked.record
    )


if __name__ == "__main__":
    main()
