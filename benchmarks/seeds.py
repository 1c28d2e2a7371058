"""How many seeds of a scenario the simulator plays without a broken invariant: `shoal simulate`, counted and recorded.

    python benchmarks/seeds.py [fleet] [--seeds 0:20] [--jobs 2]

Every seed is played, also after one that fails. The last line is one JSON object; its value is the number of seeds that hold,
its target all of them, and `rerun` in `setting` has the command for each that does not. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from overhead import environment
from report import at_least, parse, report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="?", default="fleet")
    parser.add_argument("--seeds", default="0:20", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=2, help="seeds played at once")
    asked = parse(parser)
    played = simulated(asked.scenario, asked.seeds, asked.jobs)
    held = [one for one in played if one["ok"]]
    setting: dict[str, Any] = {
        "seeds": asked.seeds,
        "node_hours": round(sum(one["node_hours"] for one in played), 1),
        "events": sum(one["events"] for one in played),
        "committed_steps": sum(one["committed"] for one in played),
        "redone": sum(one["redone"] for one in played),
        "rerun": [one["rerun"] for one in played if not one["ok"]],
    }
    name = f"simulated seeds, {asked.scenario}"
    report(name, len(held), "seeds without a broken invariant", at_least(len(played)), setting, asked.record)
    return 0 if len(held) == len(played) else 1


def simulated(scenario: str, seeds: str, jobs: int) -> list[dict[str, Any]]:
    """One line per seed, as `shoal simulate --json` prints it."""
    words = ["simulate", scenario, f"seeds={seeds}", f"--jobs={jobs}", "--json", "--keep-going"]
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"`{' '.join(words)}` played no seed")
    return lines


if __name__ == "__main__":
    sys.exit(main())
