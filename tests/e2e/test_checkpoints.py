"""Checkpoints of real runs: whose they are, what a run does that cannot save or cannot read one, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, steps_done, summary, wait_for

from shoal.launcher.files.rundir import locals_of
from shoal.launcher.launcher import SAVE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

PAIR = ("run.stages=2", "run.peers=2", *NO_MODEL)


def content(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def test_two_runs_never_touch_each_others_checkpoints(start: Start, tmp_path: Path) -> None:
    common = ("tiny.toml", "checkpoint.url=CK", "checkpoint.every=2", *PAIR)
    end(start("run", *common, "run.name=a", "run.steps=6"))
    kept = content(tmp_path / "CK")
    said = end(start("run", *common, "run.name=b", "run.seed=1", "run.steps=2"), code=2)
    assert "checkpoint.url = CK holds another run's checkpoints (steps 2, 4 and 6 of run 'a' (key " in said
    assert "Give another checkpoint.url; or --adopt" in said
    said = end(start("run", *common, "run.name=b", "run.steps=2", "--resume"), code=2)
    assert "steps 2, 4 and 6 of run 'a'" in said and "and they become this run's" in said
    assert content(tmp_path / "CK") == kept
    said = end(start("run", *common, "run.name=b", "run.steps=8", "--resume", "--adopt"))
    assert "the checkpoints of steps 2, 4 and 6 of run 'a'" in said and "are now this run's" in said
    said = end(start("run", *common, "run.name=a", "run.steps=8", "--resume"), code=2)
    assert "of run 'b'" in said
    account = json.loads((tmp_path / "runs/b/summary.json").read_bytes())
    assert (account["balanced"], account["lost"], account["adopted_steps"], account["committed"]) == (True, 0, 6, 32)


def test_a_run_resumed_on_another_number_of_stages_balances_and_its_figures_are_apart(
    start: Start, tmp_path: Path
) -> None:
    common = ("tiny.toml", "run.peers=2", *NO_MODEL)
    end(start("run", *common, "run.stages=1", "run.steps=4"))
    said = end(start("run", *common, "run.stages=2", "run.steps=6", "--resume"))
    assert "Every sample counted once." in said and "tiny: 6 steps, 2 of them in this session of" in said
    assert re.search(r"sent +since step 4: ", said)
    end(start("run", *common, "run.stages=1", "run.steps=8", "train.microbatch=4", "--resume"))
    assert (summary(tmp_path)["lost"], summary(tmp_path)["steps"]) == (0, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can write below /proc, not even root")
def test_a_run_that_cannot_save_says_so_all_along_and_ends_with_an_error(start: Start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = (f"checkpoint.url={disk}/shoal", "checkpoint.every=2", "run.steps=40", "device.emulated_s=0.2")
    launcher = start("run", "tiny.toml", *PAIR, *words)
    wait_for(lambda: launcher.poll() is not None or (tmp_path / "runs/tiny/config.toml").exists())
    disk.rmdir()  # it could be written when everything was checked
    disk.symlink_to("/proc")
    said = end(launcher, code=1)
    assert "NOT saved at step 2: " in said and "No such file or directory" in said
    lines = [line for line in said.splitlines() if line.startswith("tiny: step ")]
    late = [line for line in lines if 5 <= int(line.split()[2].split("/")[0]) < 40]
    assert late and all("NOTHING SAVED YET" in line for line in late), said
    assert "Every sample counted once." in said
    assert re.search(
        r"\nNOTHING SAVED YET: a checkpoint was due at step 40: .*No such file or directory.*\. What was trained since",
        said,
    )
    assert summary(tmp_path)["balanced"] and summary(tmp_path)["saved"] == 0
    status = end(start("status", "runs/tiny"))
    assert "NOTHING SAVED YET" in status


def damage(folder: Path) -> None:
    """One bit of each stage's weights."""
    for path in folder.glob("model-*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


def saved(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "runs/tiny/checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))


@pytest.mark.parametrize("whole", [1, 0])
def test_a_stage_lost_while_checkpoints_are_damaged_goes_further_back_or_ends_the_run(
    start: Start, tmp_path: Path, whole: int
) -> None:
    words = ("run.stages=2", "run.peers=5", "run.steps=16", "checkpoint.every=4", "checkpoint.keep=9")
    launcher = start("run", "tiny.toml", *words, *NO_MODEL, "device.emulated_s=0.15")
    wait_for(lambda: launcher.poll() is not None or len(saved(tmp_path)) == 2)
    for folder in saved(tmp_path)[whole:]:
        damage(folder)
    run = locals_of(tmp_path / "runs/tiny")
    stages = Counter(seat.stage for seat in run.members)
    few = min(stages, key=lambda stage: stages[stage])
    lost = {seat.label for seat in run.members if seat.stage == few}
    for peer in run.peers:
        if peer.label in lost:
            os.kill(peer.process.pid, signal.SIGKILL)
    said = end(launcher, code=0 if whole else 1)
    assert "cannot be loaded from the checkpoint of step 8" in said and "damaged: model-0000" in said
    if whole:
        assert "back to the state of step 4, 4 steps more are trained again" in said
        assert (summary(tmp_path)["steps"], summary(tmp_path)["balanced"]) == (16, True)
        assert [path.name for path in saved(tmp_path)] == ["step-4", "step-8", "step-12", "step-16"]
        said = end(start("run", "tiny.toml", *words, *NO_MODEL, "run.steps=18", "--resume"))
        assert "passed over" not in said
    else:
        assert "It ended early: stage" in said and "no older one is whole: the run ends" in said
        said = end(start("run", "tiny.toml", *words, *NO_MODEL, "--resume"), code=2)
        assert "holds 2 checkpoints, and none can be gone on from: " in said
        assert "step-8: damaged: model" in said and "step-4: damaged: model" in said


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(start: Start, tmp_path: Path) -> None:
    words = ("tiny.toml", *PAIR, "run.steps=100000", "device.emulated_s=0.05")
    launcher = start("run", *words)
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 3)
    launcher.send_signal(signal.SIGINT)
    said = end(launcher, code=130)
    account = summary(tmp_path)
    assert account["saved"] >= 3 and account["unsaved"] == "" and saved(tmp_path)[-1].name == f"step-{account['saved']}"
    assert re.search(r"interrupted: step \d+ is saved before the run ends; Ctrl-C \(again\) ends it at once", said)
    assert f"Step {account['saved']:,} is saved" in said
    assert re.search(r"To go on from there: shoal run tiny.toml .*--resume\n", said)
    said = end(start("run", *words, f"run.steps={account['saved'] + 2}", "--resume"))
    assert summary(tmp_path)["first_step"] == account["saved"] and summary(tmp_path)["balanced"]


def test_ctrl_c_ends_a_run_that_loses_a_stage_while_it_is_saved(start: Start, tmp_path: Path) -> None:
    """It is back before the step that was to be saved. It went on for ten minutes, and all of that was lost."""
    three = ("run.stages=3", "run.peers=3", *NO_MODEL)
    launcher = start("run", "tiny.toml", *three, "run.steps=100000", "device.emulated_s=0.2")
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 3)
    os.kill(locals_of(tmp_path / "runs/tiny").peers[-1].process.pid, signal.SIGKILL)
    launcher.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    said = end(launcher, code=130)
    assert time.monotonic() - began_s < SAVE_S / 5
    account = summary(tmp_path)
    assert account["steps"] <= account["saved"] + 2 and "is saved before the run ends" in said, said


def test_ctrl_c_in_the_middle_of_a_long_step_saves_what_it_began_with(start: Start, tmp_path: Path) -> None:
    """A step takes half a minute: nothing is committed before the checkpoint is there."""
    launcher = start("run", "tiny.toml", *PAIR, "run.steps=100000", "device.emulated_s=2")
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 1)
    launcher.send_signal(signal.SIGINT)
    said = end(launcher, code=130)
    assert "step 1 is saved before the run ends" in said and "Step 1 is saved" in said
    assert re.search(r"To go on from there: shoal run tiny.toml .*--resume\n", said)
    assert (summary(tmp_path)["steps"], summary(tmp_path)["saved"]) == (1, 1)


def test_a_run_whose_time_is_over_is_saved_and_goes_on(start: Start, tmp_path: Path) -> None:
    words = ("tiny.toml", *PAIR, "run.steps=100000", "device.emulated_s=0.05")
    said = end(start("run", *words, "--time", "25 s"), code=75)
    account = summary(tmp_path)
    assert account["saved"] > 0 and f"Step {account['saved']:,} is saved" in said and "its time is over" in said
    assert end(start("run", *words, "--time", "0 s"), code=2).startswith("shoal: --time 0 s: must be above 0")
