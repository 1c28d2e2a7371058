"""`shoal replay TRACE`: feed a recorded run, real or simulated, to fresh machines and compare every command.

Prints 'identical' or the first command that differs, with the counts; the exit code is 1 when any differs. trace.py
does it. A peer of whose trace lines are missing is replayed up to there, and that is said.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal import trace
from shoal.escaping import escaped_lines


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="trace.jsonl, or the directory of a run")


def main(args: argparse.Namespace) -> int:
    path = Path(args.trace)
    found = trace.replay(trace.find(path) if path.is_dir() else path)
    counted = f"{found.commands:,} commands on {found.events:,} events of {found.peers:,} peers"
    if found.missing:
        print(
            f"{sum(found.missing.values()):,} lines of {len(found.missing)} peers are not in this trace any more (run.trace_bytes);"
            " those peers were replayed up to there"
        )
    if found.events == 0 and found.missing:
        raise ValueError(
            f"{path}: none of its peers has its beginning, so nothing can be replayed; it can be read (trace.read)"
        )
    if found.differing == 0:
        print(f"identical: {counted}")
        return 0
    print(escaped_lines(f"{found.differing:,} differing: {counted}\nfirst: {found.first}"))
    return 1
