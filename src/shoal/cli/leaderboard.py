"""`shoal leaderboard [CONFIG | DIRECTORY]`: who contributed what to a run, from the commits that its members agreed on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.dashboard.leaderboard import as_csv, text
from shoal.escaping import escaped
from shoal.exit_codes import ExitCode
from shoal.launcher.files import rundir
from shoal.launcher.files.contributions import board_of
from shoal.launcher.files.proofs import verified
from shoal.launcher.files.standing import directory_of
from shoal.runtime.records.account import credits_of, signed_only, surviving
from shoal.transport.identity.invite import Authority

SHOWN = 10  # lines that prove nothing, in words


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="runs", help="the run's directory or its TOML file; else the newest in runs/"
    )
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--by-key", action="store_true", help="a line for each key, not for each person that has an invite"
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="RUN_ID",
        help="credit only what the run's voters have signed, to peers that its key admits; RUN_ID: if the key is not here",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--csv", action="store_true", help="print it as CSV")


def run_id(directory: Path) -> str:
    """Of the key that founded the run here. ValueError: it was founded elsewhere."""
    path = directory / "authority.key"
    if not path.exists():
        raise ValueError(
            f"{path} is not there: give --verify the run's id, which every invite and checkpoint of it names"
        )
    return Authority.load(path).run


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args.run, args.settings)
    steps = surviving(rundir.commits(directory))
    if not steps:
        raise ValueError(f"{directory}: no step is committed yet, so that nobody has contributed")
    count, wrong = steps[-1].commit.step + 1, list[str]()
    if args.verify is not None:
        proven, wrong = verified(directory, args.verify or run_id(directory))
        steps = tuple(signed_only(steps, proven))
    config = configuration.load(directory / "config.toml")
    credits = credits_of(steps)
    board = board_of(directory, config, credits, count, by_person=not args.by_key)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(board), indent=1).decode())
    elif args.csv:
        print(as_csv(board), end="")
    else:
        print(text(board))
    for fault in wrong[:SHOWN]:
        print(escaped(f"not proven: {fault}"), file=sys.stderr)
    if args.verify is not None:
        said = f"{credits[1]:,} of {count:,} steps are proven by signatures of their voters"
        print(f"{said}; {len(wrong):,} lines prove nothing", file=sys.stderr)
    return ExitCode.FAILED if wrong else ExitCode.OK
