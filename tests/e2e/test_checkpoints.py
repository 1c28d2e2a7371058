"""Checkpoints of real runs: whose they are, what a run does that cannot save or cannot read one, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, summary

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
