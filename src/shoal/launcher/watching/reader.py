"""Reads a run's directory for `shoal watch`, again and again: what its launcher wrote, and nothing else.

commits.jsonl is read from where the last reading ended; status.json when it has changed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.config import Config
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.dashboard.leaderboard import Leaderboard
from shoal.dashboard.page.state import Forecast, Reading
from shoal.dashboard.series import Series
from shoal.launcher.files import rundir
from shoal.launcher.files.contributions import board_of
from shoal.launcher.files.standing import standing
from shoal.launcher.planning import plan_settings
from shoal.planner.strategy import plan as plans
from shoal.runtime.records.account import CommittedStep, Credits, surviving

FORECAST_STEPS = 1000  # newest ones, whose median is compared with the plan


class RunReader:
    """A run's directory. The run may be set aside, resumed or begun anew meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.series = Series(Config())
        self._config: tuple[object, Config] = (None, Config())  # with its file's stamp
        self._steps: list[CommittedStep] = []  # without groups and digests
        self._credits = Credits()
        self._commits: tuple[int, int] = (0, 0)  # inode and bytes read
        self._forecast: tuple[object, Forecast | None] = (None, None)

    def read(self) -> Reading:
        """How the run stands now."""
        self._mark()
        config = self._read_config()
        self._read_commits()
        snapshot, running = standing(self.directory)
        summary = self._summary()
        if summary is not None:
            snapshot = msgspec.structs.replace(snapshot, stopped="")
        return Reading(
            config=config,
            snapshot=snapshot,
            running=running,
            written_s=(self.directory / "status.json").stat().st_mtime,
            summary=account.text(summary) if summary is not None else "",
            balanced=summary.balanced if summary is not None else None,
            forecast=self._read_forecast(),
            board=self._board(config),
        )

    def _board(self, config: Config) -> Leaderboard | None:
        if not self._steps:
            return None
        credits = self._credits.listed, self._credits.credited
        return board_of(self.directory, config, credits, self._steps[-1].commit.step + 1)

    def _mark(self) -> None:
        """Somebody looks: the launcher writes the status more often (run_directory.py)."""
        with contextlib.suppress(OSError):  # not ours to write: updates are rarer
            (self.directory / rundir.WATCHED).touch()

    def _read_config(self) -> Config:
        path = self.directory / "config.toml"
        stamp = _stamp(path)
        if stamp != self._config[0]:
            self._config = stamp, configuration.load(path, [])
            self.series, self._commits, generation = Series(self._config[1]), (0, 0), self.series.generation
            self.series.generation = generation + 1
        return self._config[1]

    def _read_commits(self) -> None:
        path = self.directory / "commits.jsonl"
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._commits[0] or status.st_size < self._commits[1]:
                    self._commits, self._steps, self._credits = (status.st_ino, 0), [], Credits()
                    self.series.replace(())
                file.seek(self._commits[1])
                data = file.read()
        except FileNotFoundError:  # no step is committed yet
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._commits = status.st_ino, self._commits[1] + len(whole)
        self._add([step for line in whole.splitlines() if (step := _step(line)) is not None])

    def _add(self, steps: list[CommittedStep]) -> None:
        numbers = [step.commit.step for step in (*self._steps[-1:], *steps)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):  # the run has gone back
            if self._steps:  # without what the steps that are undone were credited with
                self._commits = (0, 0)
                self._read_commits()
                return
            steps = list(surviving(steps))
        for step in steps:
            self._credits.add(step)
            self._steps.append(_without_groups(step))
            self.series.add(self._steps[-1])

    def _summary(self) -> Summary | None:
        with contextlib.suppress(FileNotFoundError):
            return account.read(self.directory / "summary.json")
        return None

    def _read_forecast(self) -> Forecast | None:
        """What the run's plan predicts, beside what is measured."""
        path = plan_settings.plan_file(self.directory)
        if not path.exists():
            return None
        stamp = _stamp(path), len(self._steps)
        if stamp != self._forecast[0]:
            plan = plans.load(path)
            text = plan_settings.against(plan, tuple(self._steps[-FORECAST_STEPS:]))
            predicted = plan.predicted
            self._forecast = (
                stamp,
                Forecast(predicted.step_s, predicted.tokens_per_s, predicted.bottleneck, text) if predicted else None,
            )
        return self._forecast[1]


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _step(line: bytes) -> CommittedStep | None:
    """None: half a line."""
    try:
        return msgspec.json.decode(line, type=CommittedStep)
    except msgspec.DecodeError:
        return None


def _without_groups(step: CommittedStep) -> CommittedStep:
    """Without what only the account needs, and credits."""
    commit = msgspec.structs.replace(step.commit, groups=(), digests=())
    return msgspec.structs.replace(step, commit=commit, tally=None)
