"""`shoal simulate SCENARIO [seed=N | seeds=A:B]`: the same machines in virtual time, with the scenario's faults.

One seed is one history: the same digest on every machine. sim/run.py does it and prints; the exit code is 1 when an
invariant was broken, and the command that shows it again is printed.
"""

from __future__ import annotations

import argparse
import re

_SEEDS = re.compile(r"\d+(:\d+)?")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a built-in name (calm, churn, network, chaos, ...), all, or a TOML file")
    parser.add_argument(
        "seeds", nargs="?", default="seed=0", metavar="seed=N | seeds=A:B", help="one seed, or seeds A to B-1 (seed=0)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per seed")
    parser.add_argument("--notes", action="store_true", help="print what the peers decided and why, with virtual times")
    parser.add_argument("--trace", metavar="FILE", help="write the last seed's trace to this file, for `shoal replay`")
    parser.add_argument(
        "--staleness", choices=("0", "1"), help="0 or 1 (delayed updates) for every seed; default drawn from the seed"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="play this many seeds at once, one process each (1)"
    )


def main(args: argparse.Namespace) -> int:
    name, sign, seeds = args.seeds.partition("=")
    if name not in ("seed", "seeds") or not sign or not _SEEDS.fullmatch(seeds):
        raise ValueError(f"{args.seeds!r} names no seeds; write seed=8812, or seeds=0:100 for the first hundred")

    from shoal.sim import run
    from shoal.sim.scenarios import catalogue

    catalogue.suite(args.scenario)  # refuses what is neither a file nor a built-in name
    words = ["--scenario", args.scenario, "--seeds", seeds]
    words += [f"--{flag}" for flag in ("json", "notes") if getattr(args, flag)]
    words += ["--staleness", args.staleness] if args.staleness else []
    words += ["--keep-going"] if args.keep_going else []
    words += ["--jobs", str(args.jobs)]
    words += ["--trace", args.trace] if args.trace else []
    return run.main(words)
