"""A run's directory is deleted, or moved away, while it is trained: said, made anew, and nothing that was committed is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, steps_done, summary, wait_for

from shoal.runtime.records.account import CommittedStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture


@pytest.mark.parametrize("how", ["deleted", "moved", "with all runs"])
def test_a_deleted_directory_is_said_and_made_anew(start: Start, tmp_path: Path, how: str) -> None:
    launcher = start("run", "tiny.toml", "run.steps=1000000", "checkpoint.every=5", *NO_MODEL)
    run_directory = tmp_path / "runs/tiny"
    wait_for(
        lambda: (
            launcher.poll() is not None or (steps_done(tmp_path) >= 5 and (run_directory / "bootstrap.json").exists())
        )
    )
    key = (run_directory / "authority.key").read_bytes()
    if how == "deleted":
        shutil.rmtree(run_directory, ignore_errors=True)
        shutil.rmtree(run_directory, ignore_errors=True)  # a checkpoint was being written
    elif how == "moved":
        os.rename(run_directory, tmp_path / "elsewhere")
    else:
        os.rename(tmp_path / "runs", tmp_path / "elsewhere")
    wait_for(lambda: launcher.poll() is not None or (run_directory / "commits.jsonl").exists())
    seen = steps_done(tmp_path)
    wait_for(
        lambda: (
            launcher.poll() is not None
            or (steps_done(tmp_path) >= seen + 10 and (run_directory / "status.json").exists())
        )
    )
    wait_for(lambda: launcher.poll() is not None or any(run_directory.glob("checkpoints/step-*")))
    assert launcher.poll() is None
    assert (run_directory / "authority.key").read_bytes() == key and (
        run_directory / "authority.key"
    ).stat().st_mode & 0o77 == 0
    assert end(start("invite", "tiny.toml", *NO_MODEL)).startswith("shoal1")
    assert "being trained now" in end(start("run", "tiny.toml", *NO_MODEL), code=2)
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    assert output.count("was deleted or moved away; it is made anew") == 1
    account = summary(tmp_path)
    assert (account["lost"], account["counted_twice"]) == (0, 0) and account["steps"] > seen
    lines = (run_directory / "commits.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=CommittedStep).commit.step for line in lines] == list(
        range(account["steps"])
    )


def test_a_place_that_another_launcher_has_taken_ends_the_run(start: Start, tmp_path: Path) -> None:
    launcher = start("run", "tiny.toml", "run.steps=1000000", *NO_MODEL)
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 2)
    launcher.send_signal(signal.SIGSTOP)  # so that the other is first
    os.rename(tmp_path / "runs", tmp_path / "elsewhere")
    other = start("run", "tiny.toml", "run.steps=1000000", *NO_MODEL)
    wait_for(lambda: other.poll() is not None or steps_done(tmp_path) >= 1)
    launcher.send_signal(signal.SIGCONT)
    output = end(launcher, code=1)
    assert "was deleted, and another launcher has begun a run there" in output
    assert not (tmp_path / "runs/tiny/summary.json").exists(), "it writes nothing there"
    assert sorted(path.name for path in (tmp_path / "runs/tiny/traces").iterdir()) == [
        "p1.jsonl",
        "p2.jsonl",
        "p3.jsonl",
    ]
    seen = steps_done(tmp_path)
    wait_for(lambda: other.poll() is not None or steps_done(tmp_path) > seen)
    other.send_signal(signal.SIGINT)
    end(other, code=130)
