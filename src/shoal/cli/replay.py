"""`shoal replay TRACE`: feed a recorded run, real or simulated, to fresh machines and compare every command.

Prints 'identical' or the first command that differs, with the counts; the exit code is 1 when any differs. trace.py
does it. A peer of whose trace lines are missing is replayed up to there, and that is said.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal import trace
from shoal.escaping import escaped_lines
from shoal.exit_codes import ExitCode


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="trace.jsonl, or the directory of a run")


def main(args: argparse.Namespace) -> int:
    path = Path(args.trace)
    replayed = trace.replay(trace.find(path) if path.is_dir() else path)
    counted = f"{replayed.commands:,} commands on {replayed.events:,} events of {replayed.peers:,} peers"
    if replayed.missing:
        print(
            f"{sum(replayed.missing.values()):,} lines of {len(replayed.missing)} peers are not in this trace any more (run.trace_bytes);"
            " those peers were replayed up to there"
        )
    if replayed.events == 0 and replayed.missing:
        raise ValueError(
            f"{path}: none of its peers has its beginning, so nothing can be replayed; it can be read (trace.read)"
        )
    if replayed.differing == 0:
        print(f"identical: {counted}")
        return 0
    print(escaped_lines(f"{replayed.differing:,} differing: {counted}\nfirst: {replayed.first}"))
    return ExitCode.FAILED
