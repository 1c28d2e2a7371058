"""`shoal replay TRACE`: feed a recorded run, real or simulated, to fresh machines and compare every command.

Prints 'identical' or the first command that differs, with the counts; the exit code is 1 when any differs. trace.py
does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal import trace
from shoal.shown import escaped_lines


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="trace.jsonl, or the directory of a run")


def main(args: argparse.Namespace) -> int:
    path = Path(args.trace)
    found = trace.replay(path / "trace.jsonl" if path.is_dir() else path)
    counted = f"{found.commands:,} commands on {found.events:,} events of {found.peers:,} peers"
    if found.differing == 0:
        print(f"identical: {counted}")
        return 0
    print(escaped_lines(f"{found.differing:,} differing: {counted}\nfirst: {found.first}"))
    return 1
