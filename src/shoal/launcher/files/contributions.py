"""Who contributed what to a run, from its directory: for `shoal leaderboard`, `shoal status` and the page."""

from __future__ import annotations

from pathlib import Path

from shoal import config as configuration
from shoal.config import Config
from shoal.dashboard.leaderboard import Leaderboard, leaderboard
from shoal.launcher.files import rundir
from shoal.launcher.files.standing import evictions
from shoal.launcher.invites import titles
from shoal.runtime.records.account import Credit, credits_of, surviving


def board_of(
    directory: Path, config: Config, credits: tuple[list[Credit], int], steps: int, *, by_person: bool = True
) -> Leaderboard:
    """`credits`: with the number of steps of which they are; `steps`: all that are committed."""
    tokens = config.train.microbatch * config.data.sequence * config.train.local_steps
    return leaderboard(
        config.run.name,
        credits[0],
        (steps, credits[1]),
        titles(directory),
        (tokens, config.run.stages),
        evictions(directory),
        by_person=by_person,
    )


def board_in(directory: Path) -> Leaderboard | None:
    """Of the history that stands; None: no step is committed, or one machine trains alone."""
    steps = surviving(rundir.commits(directory))
    if not steps:
        return None
    config = configuration.load(directory / "config.toml")
    board = board_of(directory, config, credits_of(steps), steps[-1].commit.step + 1)
    return board if board.contributors else None
