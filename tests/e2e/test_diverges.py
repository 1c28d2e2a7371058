"""A run that diverges skips steps, says so, and ends with what is left to do instead of hanging."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.test_run import Start, end, start, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

DIVERGES = ("train.learning_rate=100", "train.warmup=0", "train.weight_decay=1", "train.schedule=constant")


def test_a_run_that_diverges_skips_five_steps_and_ends_with_its_checkpoint_named(start: Start, tmp_path: Path) -> None:
    words = ("run.stages=2", "run.peers=3", "run.steps=40", "checkpoint.every=1", "device.executor=resident")
    said = end(start("run", "tiny.toml", *words, *DIVERGES), code=1)
    assert "is skipped, no parameter changes: microbatch" in said
    assert "6 steps in a row. The run ends; its newest checkpoint is of step" in said
    account = summary(tmp_path)
    assert account["skipped"] == 5 * account["committed"] // account["steps"]
    assert (account["lost"], account["counted_twice"], account["issued"]) == (0, 0, account["committed"])


def test_a_run_that_is_to_stop_ends_at_its_first_step_that_is_not_finite(start: Start, tmp_path: Path) -> None:
    words = ("run.stages=1", "run.peers=1", "run.steps=40", "device.executor=resident", "train.on_nonfinite=stop")
    said = end(start("run", "tiny.toml", *words, *DIVERGES), code=1)
    assert "training diverges. The run ends" in said
    assert summary(tmp_path)["skipped"] == 0
