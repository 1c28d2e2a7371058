"""`shoal leaderboard [CONFIG | DIRECTORY]`: who contributed what to a run, from the commits that its members agreed on."""

from __future__ import annotations

import argparse

import msgspec

from shoal import config as configuration
from shoal.dashboard.leaderboard import as_csv, leaderboard, text
from shoal.launcher.files import rundir
from shoal.launcher.files.standing import directory_of, evictions
from shoal.launcher.invites import titles
from shoal.runtime.records.account import credits_of, surviving


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="runs", help="the run's directory or its TOML file; else the newest in runs/"
    )
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--by-key", action="store_true", help="a line for each key, not for each person that has an invite"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--csv", action="store_true", help="print it as CSV")


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args.run, args.settings)
    steps = surviving(rundir.commits(directory))
    if not steps:
        raise ValueError(f"{directory}: no step is committed yet, so that nobody has contributed")
    config = configuration.load(directory / "config.toml")
    credits, credited = credits_of(steps)
    board = leaderboard(
        config.run.name,
        credits,
        (steps[-1].commit.step + 1, credited),
        titles(directory),
        (config.train.microbatch * config.data.sequence * config.train.local_steps, config.run.stages),
        evictions(directory),
        by_person=not args.by_key,
    )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(board), indent=1).decode())
    elif args.csv:
        print(as_csv(board), end="")
    else:
        print(text(board))
    return 0
