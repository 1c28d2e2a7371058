"""Checkpoints of real runs: whose they are, what a run does that cannot save or cannot read one, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, summary, wait_for

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
    found = json.loads((tmp_path / "runs/b/summary.json").read_bytes())
    assert (found["balanced"], found["lost"], found["taken_over"], found["committed"]) == (True, 0, 6, 32)


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
    words = ("checkpoint.url=/proc/shoal", "checkpoint.every=2", "run.steps=40", "device.emulated_s=0.2")
    said = end(start("run", "tiny.toml", *PAIR, *words), code=1)
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


def test_machines_without_a_directory_in_common_are_told_on_both_that_nothing_is_saved(
    start: Start, tmp_path: Path
) -> None:
    common = (*PAIR, "device.emulated_s=0.1")
    host = start("run", "tiny.toml", "--here", "1", "run.steps=8", "checkpoint.every=4", *common)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and json.loads(bootstrap.read_bytes())))
    invite = end(start("invite", "tiny.toml")).strip()
    guest = start("join", invite, "run.dir=guest", *NO_MODEL, "device.emulated_s=0.1")
    said = end(host, code=1)
    assert "which must be one place for all peers" in said
    assert "Every sample counted once." in said and "NOTHING SAVED YET: a checkpoint was due at step 8: " in said
    assert "NOTHING SAVED YET" in end(guest, code=1)
