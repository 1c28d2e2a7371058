"""All processes of a run are killed at once, at random moments, and the same command is given again: nothing is skipped, nothing is
seen twice beyond the newest checkpoint, and what was trained is bit for bit what one process trains that nobody kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests import reference
from tests.e2e.test_run import (
    LONG_S,
    Start,
    alive,
    assert_balanced,
    children,
    end,
    start,
    steps_done,
    summary,
    wait_for,
)

from shoal import config as configuration
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.records.account import CommittedStep, surviving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
__all__ = ["start"]  # a fixture

STEPS = 24
# A schedule that is another at every step, and a checkpoint every third: what is continued wrongly shows in the losses.
COMMAND = (
    "tiny.toml",
    "--resume",
    f"run.steps={STEPS}",
    "train.schedule=cosine",
    "train.warmup=5",
    "checkpoint.every=3",
    "network.delay_s=0.05",
)


def committed(tmp_path: Path) -> tuple[CommittedStep, ...]:
    path = tmp_path / "runs/tiny/commits.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return surviving(msgspec.json.decode(line, type=CommittedStep) for line in lines)


def test_a_run_killed_whole_goes_on_from_its_checkpoint_when_the_same_command_is_given_again(
    start: Start, tmp_path: Path
) -> None:
    rng = Random(11)
    undone, firsts = 0, []
    for kill in range(3):
        seen = len(committed(tmp_path))
        launcher = start("run", *COMMAND)
        # The first before any checkpoint. Then at a moment drawn from the next steps and from within a step.
        wanted = 2 if kill == 0 else seen + rng.randrange(1, 6)
        wait_for(lambda wanted=wanted, launcher=launcher: launcher.poll() is not None or steps_done(tmp_path) >= wanted)
        time.sleep(rng.uniform(0, 0.5))
        peers = children(launcher.pid)
        for process in (launcher.pid, *peers):
            with contextlib.suppress(ProcessLookupError):  # the kernel ends peers with their launcher
                os.kill(process, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=LONG_S)
        wait_for(lambda peers=peers: not any(map(alive, peers)))
        firsts += map(int, re.findall(r"(\d+) steps that were committed after step \d+ are undone", output))
        assert not (tmp_path / "runs/tiny/summary.json").exists()
    trained = committed(tmp_path)
    output = end(start("run", *COMMAND))
    firsts += map(int, re.findall(r"(\d+) steps that were committed after step \d+ are undone", output))
    account = summary(tmp_path)
    undone = 4 * sum(firsts)
    assert_balanced(account, STEPS)
    assert account["undone"] == undone >= 4 * 2, "the steps before the first checkpoint at least"
    assert trained[-1].commit.step < STEPS - 1, "the last kill came in time"

    config = configuration.load(
        tmp_path / "tiny.toml", [*(word for word in COMMAND[2:]), f"data.path={tmp_path / 'a.txt'}"]
    )
    steps = [step.commit for step in committed(tmp_path)]
    assert [commit.step for commit in steps] == list(range(STEPS))
    process, alone = reference.follow(config, open_dataset(config), map(reference.as_recorded, steps))
    assert [one.loss for one in alone] == account["losses"]
    assert [one.norm for one in alone] == [commit.norm for commit in steps]
    wanted_state = reference.checkpoint(tmp_path / "runs/tiny", STEPS)
    assert reference.differing(process.state(), wanted_state) == []

    again = end(start("run", *COMMAND))  # nothing left to do: a supervisor that gives it again does no harm
    assert f"all {STEPS} steps are trained" in again and summary(tmp_path) == account
    (tmp_path / "runs/tiny/summary.json").unlink()  # as if the launcher had been killed before it wrote that
    assert "Every sample counted once." in end(start("run", *COMMAND))
    assert summary(tmp_path)["losses"] == account["losses"] and summary(tmp_path)["undone"] == undone


def damaged(path: Path) -> None:
    """One bit in the middle of the file."""
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def test_a_damaged_checkpoint_is_named_and_the_next_older_one_is_taken(start: Start, tmp_path: Path) -> None:
    words = ("tiny.toml", "train.schedule=cosine", "checkpoint.every=2")
    end(start("run", *words, "run.steps=8", "run.name=whole"))
    whole = json.loads((tmp_path / "runs/whole/summary.json").read_bytes())
    end(start("run", *words, "run.steps=8"))
    (tmp_path / "runs/tiny/summary.json").unlink()
    checkpoints = tmp_path / "runs/tiny/checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-4", "step-6", "step-8"]
    damaged(checkpoints / "step-8/optimizer/stage-00002-of-00003.safetensors")
    (checkpoints / "step-6/model-00001-of-00003.safetensors").unlink()
    output = end(start("run", *words, "run.steps=8", "--resume"))
    assert re.search(r"passed over \S*step-8: damaged: optimizer/stage-00002-of-00003.safetensors has SHA-256", output)
    assert re.search(r"passed over \S*step-6: damaged: model-00001-of-00003.safetensors is missing", output)
    assert "GOING BACK to step 4: its checkpoint is the newest that is whole" in output
    account = summary(tmp_path)
    assert_balanced(account, 8)
    assert account["losses"] == pytest.approx(whole["losses"], rel=1e-5)  # in whatever order microbatches were added
    assert sorted(path.name for path in checkpoints.glob("step-*")) == [
        "step-4",
        "step-6",
        "step-6.damaged",
        "step-8",
        "step-8.damaged",
    ]

    for step in (4, 6, 8):
        damaged(checkpoints / f"step-{step}/training.json")
    (tmp_path / "runs/tiny/summary.json").unlink()
    commits = (tmp_path / "runs/tiny/commits.jsonl").read_bytes()
    output = end(start("run", *words, "run.steps=8", "--resume"), code=2)
    assert "holds 3 checkpoints, and none can be gone on from" in output and "none can be gone on from" in output
    assert (tmp_path / "runs/tiny/commits.jsonl").read_bytes() == commits, "nothing was undone"


@pytest.mark.parametrize("discovery", ["dht", "gossip"])
def test_an_invite_of_the_session_before_still_leads_to_the_run(start: Start, tmp_path: Path, discovery: str) -> None:
    words = ("tiny.toml", "network.host=0.0.0.0", f"network.discovery={discovery}", "run.peers=3", "run.steps=400")
    words = (*words, "network.delay_s=0.05", "checkpoint.every=2", "run.name=tiny")
    host = start("run", *words)
    wait_for(lambda: host.poll() is not None or steps_done(tmp_path) >= 3)
    assert host.poll() is None, end(host)
    end(start("invite", "tiny.toml", "--out", "old"))
    host.send_signal(signal.SIGINT)
    end(host, code=130)

    host = start("run", *words, "--resume")
    seen = steps_done(tmp_path)
    wait_for(lambda: host.poll() is not None or steps_done(tmp_path) > seen)
    assert host.poll() is None, end(host)
    guest = start("join", "@old", "--files", ".", "run.dir=guest")
    log = tmp_path / "guest/tiny/commits.jsonl"
    wait_for(lambda: guest.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") >= 2))
    assert guest.poll() is None, end(guest)
    guest.send_signal(signal.SIGINT)
    end(guest, code=130)
    host.send_signal(signal.SIGINT)
    assert "invites of that time" not in end(host, code=130)
