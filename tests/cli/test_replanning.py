"""`shoal plan --replan RUN`: what is read of a run that is under way, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main as program
from shoal.dashboard.terminal import Snapshot
from shoal.exit_codes import ExitCode
from shoal.launcher.files import rundir
from shoal.launcher.planning import replanning
from shoal.launcher.process import identify
from shoal.planner.strategy import plan as plans
from shoal.planner.strategy.plan import Plan, StagePlan

CLUSTER = """
[link]
delay_s = "10 ms"
bandwidth_Bps = "200 Mbit/s"
[[device]]
name = "a"
flops = "1 TFLOP/s"
[[device]]
name = "b"
flops = "1 TFLOP/s"
[[device]]
name = "c"
flops = "1 TFLOP/s"
"""


def a_run(folder: Path, members: dict[str, int], step: int = 130) -> Path:
    """The directory of a run of 1,000 steps that saves every 50, planned for a at stage 0 and b and c at stage 1."""
    directory = folder / "runs" / "r"
    directory.mkdir(parents=True)
    plans.save(Plan(6, (StagePlan(0, 3, ("a",)), StagePlan(3, 6, ("b", "c")))), directory / "plan.json")
    seats = tuple(rundir.MemberSeat(label="", stage=stage, name=name) for name, stage in members.items())
    launcher = identify(os.getpid())
    assert launcher is not None
    (directory / "peers.json").write_bytes(msgspec.json.encode(rundir.PeersFile(launcher=launcher, members=seats)))
    status = Snapshot(name="r", elapsed_s=1.0, step=step, steps=1000, stages=2, state="training")
    (directory / "status.json").write_bytes(msgspec.json.encode(status))
    (directory / "config.toml").write_text("[checkpoint]\nevery = 50\n")
    (folder / "run.toml").write_text("[model]\nlayers = 6\n")
    (folder / "cluster.toml").write_text(CLUSTER)
    return directory


def test_a_run_is_read_as_its_launcher_wrote_it_down(tmp_path: Path) -> None:
    serving = replanning.running(a_run(tmp_path, {"a": 0, "b": 1}))
    assert (dict(serving.serving), serving.steps_left, serving.undone_steps) == ({"a": 0, "b": 1}, 870, 30)


def test_a_directory_without_a_run_a_plan_or_members_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the directory of a run that has begun"):
        replanning.running(tmp_path)
    with pytest.raises(ValueError, match="nobody serves anything yet"):
        replanning.running(a_run(tmp_path, {}))


def test_a_fleet_as_planned_goes_on_and_one_that_lost_a_stage_changes_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = a_run(tmp_path, {"a": 0, "b": 1, "c": 1})
    words = ["plan", "run.toml", "--cluster", "cluster.toml", "--replan", "runs/r", "--out", "new.json"]
    assert program.main(words) == 0
    assert "under the threshold of 20%" in capsys.readouterr().out
    assert not Path("new.json").exists()
    locals_ = msgspec.json.decode((directory / "peers.json").read_bytes(), type=rundir.PeersFile)
    lost = msgspec.structs.replace(locals_, members=locals_.members[1:])
    (directory / "peers.json").write_bytes(msgspec.json.encode(lost))
    assert program.main(words) == ExitCode.CHANGE_OVER
    assert "`shoal run CONFIG --plan new.json --resume`" in capsys.readouterr().out
    assert plans.load("new.json").layers == 6
