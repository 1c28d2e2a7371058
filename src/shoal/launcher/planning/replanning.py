"""`shoal plan --replan RUN`: the state of a run, as its launcher last wrote it, and whether to change to another plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from shoal.dashboard.terminal import Snapshot
from shoal.launcher.files import rundir
from shoal.launcher.planning import plan_settings
from shoal.planner.strategy import choices, plan, replan
from shoal.planner.strategy.problem import Problem
from shoal.planner.strategy.replan import Running, Verdict


def verdict(directory: Path, problem: Problem) -> Verdict:
    """`problem`: the run's, on the machines that are available now."""
    file = plan_settings.plan_file(directory)
    if not file.is_file():
        raise ValueError(f"{file} is not there: only a run that was started with --plan can be planned anew")
    old = plan.load(file)
    return replan.replan(old, choices.chosen(problem, old), running(directory), lambda: np.random.default_rng(0))


def running(directory: Path) -> Running:
    """Which peer serves which stage, and how many steps are left."""
    try:
        there = msgspec.json.decode((directory / "peers.json").read_bytes(), type=rundir.PeersFile)
        status = msgspec.json.decode((directory / "status.json").read_bytes(), type=Snapshot)
        every = msgspec.toml.decode((directory / "config.toml").read_bytes())["checkpoint"]["every"]
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise ValueError(f"{directory} is not the directory of a run that has begun: {error}") from None
    if not there.members:
        raise ValueError(f"{directory}: training has not begun, so nobody serves anything yet")
    return Running(
        serving={member.name: member.stage for member in there.members},
        steps_left=max(status.steps - status.step, 0),
        undone_steps=status.step % every if every else status.step,
    )
