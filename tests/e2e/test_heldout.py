"""Held-out samples in real runs: the same loss as one process, whatever is killed; the best checkpoint stays; a run stops early.

Every measured version is saved, and one process alone measures the saved one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import reference
from tests.e2e.test_chats import kill_one
from tests.e2e.test_run import Start, end, start, steps_done, summary, wait_for
from tests.tiny import DATA

import shoal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture
MEASURED = "eval.path=held.txt eval.samples=9 eval.keep_best=true checkpoint.keep=100 train.dtype=float32".split()


@pytest.fixture
def held(tmp_path: Path) -> Path:
    (tmp_path / "held.txt").write_bytes(bytes(reversed(DATA))[:1500])
    return tmp_path / "held.txt"


def measured(tmp_path: Path) -> dict[int, float]:
    """By version, as the peers agreed on it; the one at the end is in the summary."""
    commits = {one.step: one.heldout for one in reference.commits(tmp_path / "runs/tiny") if one.heldout is not None}
    newest = summary(tmp_path)["heldout"]
    return commits | {newest["step"]: newest["loss"]}


def alone(tmp_path: Path, held: Path, step: int) -> float:
    (result,) = shoal.evaluate(tmp_path / f"runs/tiny/checkpoints/step-{step}", [held], samples=9)
    return result.loss


def test_under_kills_the_held_out_loss_is_that_of_one_process(start: Start, tmp_path: Path, held: Path) -> None:
    words = ["run.steps=24", "run.peers=4", "train.learning_rate=0.01", "eval.every=6"]
    launcher = start("run", "tiny.toml", *MEASURED, *words)
    for step in (3, 9):
        wait_for(lambda step=step: launcher.poll() is not None or steps_done(tmp_path) >= step)
        kill_one(launcher)
    assert "held out" in end(launcher)
    losses = measured(tmp_path)
    assert sorted(losses) == [0, 6, 12, 18, 24]
    assert losses[24] < losses[0]
    for step, loss in losses.items():
        if step:  # nothing is saved before the first step
            assert loss == pytest.approx(alone(tmp_path, held, step), rel=1e-6)


def test_one_machine_alone_measures_the_same(start: Start, tmp_path: Path, held: Path) -> None:
    words = ["run.stages=1", "run.peers=1", "run.steps=7", "eval.every=3"]
    end(start("train", "tiny.toml", *MEASURED, *words))
    losses = measured(tmp_path)
    assert sorted(losses) == [0, 3, 6, 7]
    for step in (3, 6, 7):
        assert losses[step] == pytest.approx(alone(tmp_path, held, step), rel=1e-6)


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_run_that_gets_worse_stops_early_and_keeps_its_best(
    start: Start, tmp_path: Path, held: Path, command: str
) -> None:
    """What is held out is unlike what is trained on, and the rate is far too high."""
    words = ["run.steps=200", "train.learning_rate=3", "train.clip=0", "eval.every=2", "eval.patience=3"]
    words += ["checkpoint.keep=1", "checkpoint.every=0"]
    alone_words = ["run.stages=1", "run.peers=1"] if command == "train" else []
    end(start(command, "tiny.toml", *MEASURED, *words, *alone_words))
    account = summary(tmp_path)
    held_out = account["heldout"]
    assert account["steps"] < 200 and account["balanced"] and held_out["misses"] == 3
    losses = measured(tmp_path)
    assert held_out["best_loss"] == min(losses.values()) == losses[held_out["best_step"]]
    saved = {int(path.name.removeprefix("step-")) for path in (tmp_path / "runs/tiny/checkpoints").glob("step-*")}
    assert saved >= {account["steps"]} | ({held_out["best_step"]} - {0})
    assert len(saved) <= 2, "the newest and the best"


def test_callbacks_hear_of_each_measurement_once(tmp_path: Path, held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(DATA)
    from tests.tiny import tiny

    (tmp_path / "tiny.toml").write_text(tiny(steps=5))
    heard: list[shoal.HeldOut] = []
    trained = shoal.run("tiny.toml", *MEASURED, "eval.every=2", on_eval=heard.append, quiet=True)
    assert [one.step for one in heard] == [0, 2, 4, 5]
    assert trained.steps[2].heldout_loss == heard[1].loss and trained.steps[1].heldout_loss is None
    assert trained.summary is not None and trained.summary.heldout == heard[-1]
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/status.json").read_text().splitlines()]
    assert lines[-1]["heldout"]["step"] == 5
