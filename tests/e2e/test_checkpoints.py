"""Checkpoints of real runs: whose they are, what a run does that cannot save or cannot read one, and what Ctrl-C leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start

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
