"""Ten minutes of a SIGKILL and a join every 15 s: 8 real peers, 4 stages, beside the same training undisturbed.

    python benchmarks/churn.py [--minutes 10] [--every 15] [--keep DIRECTORY]

What is measured, and how, says tests/churn.py. The last line is one JSON object. Its value is the longest pause without a commit, its
target 10 s beyond one step's time; `setting` has the account. The exit code says whether all of it holds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from report import at_most, parse, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.churn

from tests import churn  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds between two kills")
    parser.add_argument("--keep", metavar="DIRECTORY", help="an empty directory for the runs, which then stay there")
    args = parse(parser)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.keep or folder)
        directory.mkdir(parents=True, exist_ok=True)
        found = churn.churned(directory, args.minutes * 60, args.every)
    setting = {
        **msgspec.to_builtins(found),
        "every_s": args.every,
        "peers": churn.PEERS,
        "stages": churn.STAGES,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    report(
        "churn",
        found.longest_pause_s,
        "s, longest pause without a commit",
        at_most(found.pause_bound_s),
        setting,
        args.record,
    )
    return 0 if found.holds and found.longest_pause_s < found.pause_bound_s else 1


if __name__ == "__main__":
    sys.exit(main())
