"""How a run stands, as its launcher last wrote it down: for `shoal status` and `shoal watch`. Without what computes or plans."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.dashboard.leaderboard import Eviction
from shoal.dashboard.terminal import Snapshot
from shoal.escaping import UNDECODABLE
from shoal.launcher.files import rundir
from shoal.transport.identity.passes import date

EVICTIONS = "evictions.json"


def directory_of(run: str, settings: list[str]) -> Path:
    """The directory of the run that a command names: by its own path, by its TOML file, or as the newest below a path."""
    path = Path(run)
    if path.is_file():
        return configuration.load(path, settings).run.directory
    if (path / "status.json").exists():
        return path
    runs = sorted(path.glob("*/status.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise ValueError(f"{path}: no run is or was there; name a run's directory or its TOML file")
    return runs[-1].parent


def alive(directory: Path, within_s: float) -> bool:
    """Its launcher runs, and has written the state within that time."""
    written_s = (directory / "status.json").stat().st_mtime
    return rundir.running(directory) and time.time() - written_s < within_s


def evictions(directory: Path) -> tuple[Eviction, ...]:
    """Who was evicted for what it did, in all sessions, as far as the launcher heard of it and still lists it."""
    path = directory / EVICTIONS
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Eviction, ...])
    except FileNotFoundError:
        return ()
    except UNDECODABLE as error:
        raise ValueError(f"{path} is not a list of evictions: {error}; remove it to go on without") from None


def standing(directory: Path) -> tuple[Snapshot, bool]:
    """How the run stands, as last written, and whether its launcher lives; of a run that was killed, since when it is dead."""
    path = directory / "status.json"
    try:
        snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not the state of a run: {error}") from None
    running = rundir.running(directory)
    if not running:
        since = f"DEAD since {date(int(path.stat().st_mtime))}: its launcher is not running any more"
        snapshot = msgspec.structs.replace(snapshot, stopped=since, advice="", survives="")
    return snapshot, running
