"""Seconds from `shoal run` to the first committed step of six local peers: forked from one process, and each started by itself.

    python benchmarks/start.py [--rounds 3]

The quickstart's model and data with four steps, in an empty directory, both ways in turn. `first_step_s` is what the run says; also the
processor seconds of the whole command, and the peers' memory at the first step, shared pages divided among those who share them (PSS).

The bound is what cannot be shared or left out: one process's imports (the server's, measured in the same round) and one step. The
alternative is a process per peer, as before. The last line is one JSON object; value is the median `first_step_s` with the fork
server; the target is 8 s on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from report import at_most, parse, report

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "src/shoal/cli/quickstart.toml"
WANTED_S = 8.0
LONGEST_S = 300.0
FORKED = "from shoal.cli.main import main; main()"
ALONE = "from shoal.launcher import launch; launch.usable = lambda here: False; " + FORKED
IMPORTS = """
import time; began = time.perf_counter()
from shoal import build, config
build.preload(config.load({path!r}))
print(time.perf_counter() - began)
"""


class Started(NamedTuple):
    first_step_s: float
    processor_s: float
    pss_mib: float


def start(program: str) -> Started:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        words = ["run", str(QUICKSTART), "run.steps=4", "checkpoint.at_end=false", "checkpoint.every=0"]
        run = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        commits, until = Path(directory, "runs/quickstart/commits.jsonl"), time.monotonic() + LONGEST_S
        while not (commits.exists() and commits.stat().st_size) and run.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        memory = sum(map(pss_mib, descendants(run.pid)))
        said, _ = run.communicate(timeout=LONGEST_S)
    if run.returncode or not (match := re.search(r"first step after ([\d.]+) s", said)):
        raise RuntimeError(f"the run failed:\n{said}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Started(float(match[1]), now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime, memory)


def descendants(process: int) -> list[int]:
    """And itself."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            found += descendants(int(child))
    return found


def pss_mib(process: int) -> float:
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0.0
    return int(re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[1]) / 1024  # type: ignore[index]


def imports_s() -> float:
    program = IMPORTS.format(path=str(QUICKSTART))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(said.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser)
    ways: dict[str, list[Started]] = {"forked": [], "alone": []}
    imports = []
    for number in range(args.rounds):
        imports.append(imports_s())
        for way, program in (("forked", FORKED), ("alone", ALONE)):
            ways[way].append(start(program))
            print(
                f"round {number + 1}, {way}: {json.dumps(ways[way][-1]._asdict())}, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    medians = {
        way: {field: round(statistics.median(getattr(each, field) for each in all_), 2) for field in Started._fields}
        for way, all_ in ways.items()
    }
    value = medians["forked"]["first_step_s"]
    setting = medians | {
        "imports_s": round(statistics.median(imports), 2),
        "rounds": args.rounds,
        "load": os.getloadavg()[0],
    }
    report("start", value, "s", at_most(WANTED_S), setting=setting, record=args.record)


if __name__ == "__main__":
    main()
