"""`shoal status [CONFIG | DIRECTORY]`: how a run stands, as its launcher last wrote it down, or how it ended."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from shoal import config as configuration
from shoal.dashboard import account
from shoal.dashboard.terminal import Snapshot, render, rows
from shoal.launcher import rundir
from shoal.transport.identity.passes import date


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="runs", help="the run's directory or its TOML file; else the newest in runs/"
    )
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument("--peers", action="store_true", help="of a run that has ended: the bytes of each peer, too")


def main(args: argparse.Namespace) -> int:
    directory = _directory(args)
    summary = directory / "summary.json"
    if summary.exists():
        print(account.text(account.read(summary), peers=args.peers))
        return 0
    path = directory / "status.json"
    try:
        snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not the state of a run: {error}") from None
    running = rundir.running(directory)
    if not running:
        since = f"DEAD since {date(int(path.stat().st_mtime))}: its launcher is not running any more"
        snapshot = msgspec.structs.replace(snapshot, stopped=since, advice="", survives="")
    console = Console(highlight=False)
    console.print(render(snapshot, console.width, max(console.height, rows(snapshot))))
    if not running:
        command = "shoal run" if snapshot.stages else "shoal train"
        print(f"{snapshot.stopped}; `{command} ... --resume` goes on from the newest checkpoint")
    return 0


def _directory(args: argparse.Namespace) -> Path:
    path = Path(args.run)
    if path.is_file():
        return configuration.load(path, args.settings).run.directory
    if (path / "status.json").exists():
        return path
    runs = sorted(path.glob("*/status.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise ValueError(f"{path}: no run is or was there; name a run's directory or its TOML file")
    return runs[-1].parent
