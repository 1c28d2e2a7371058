"""`shoal status [CONFIG | DIRECTORY]`: how a run stands, as its launcher last wrote it down, or how it ended."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from shoal.dashboard import account
from shoal.dashboard.leaderboard import line
from shoal.dashboard.terminal import render, rows
from shoal.exit_codes import ExitCode
from shoal.launcher.files.standing import alive, directory_of, standing

ALIVE_S = 60.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="runs", help="the run's directory or its TOML file; else the newest in runs/"
    )
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--alive",
        action="store_true",
        help=f"print nothing; exit code 0 while its launcher runs and has written its state within {ALIVE_S:.0f} s, else 1: for probes",
    )
    parser.add_argument("--peers", action="store_true", help="of a run that has ended: the bytes of each peer, too")


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args.run, args.settings)
    if args.alive:
        return ExitCode.OK if alive(directory, ALIVE_S) else ExitCode.FAILED
    summary = directory / "summary.json"
    if summary.exists():
        print(account.text(account.read(summary), peers=args.peers))
        print_contributors(directory)
        return 0
    snapshot, running = standing(directory)
    console = Console(highlight=False)
    console.print(render(snapshot, console.width, max(console.height, rows(snapshot))))
    print_contributors(directory)
    if not running:
        command = "shoal run" if snapshot.stages else "shoal train"
        print(f"{snapshot.stopped}; `{command} ... --resume` goes on from the newest checkpoint")
    return 0


def print_contributors(directory: Path) -> None:
    if not (directory / "commits.jsonl").exists():
        return
    from shoal.launcher.files.contributions import board_in  # reads invites, which takes a while to import

    board = board_in(directory)
    if board is not None:
        print(line(board))
