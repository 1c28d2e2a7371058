"""`shoal recover` on real processes: what it refuses, and that the survivors of a lost majority train to the end when it does not."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from tests.e2e.test_run import LONG_S, NO_MODEL, Start, end, start, summary, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
__all__ = ["start"]  # a fixture


def committed(tmp_path: Path) -> int:
    path = tmp_path / "runs/tiny/commits.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_survivors_go_on_by_the_operators_word_and_only_when_the_others_are_gone(start: Start, tmp_path: Path) -> None:
    steps = 40
    common = (*NO_MODEL, "device.emulated_s=0.05", f"checkpoint.url={tmp_path / 'checkpoints'}")
    run = ("run.stages=2", "run.peers=5", f"run.steps={steps}", "checkpoint.every=3")
    host = start("run", "tiny.toml", "--here", "2", *run, *common)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    invite = end(start("invite", "tiny.toml")).strip()
    guest = start("join", invite, "--peers", "3", "run.dir=guest", *common)
    wait_for(lambda: host.poll() is not None or committed(tmp_path) >= 5)

    needless = end(start("recover", "runs/tiny", "--wait", "10"), code=2)
    assert "voters answer, which is a quorum: they go on without anybody's word" in needless

    guest.send_signal(signal.SIGKILL)  # its three peers go with it
    guest.communicate(timeout=LONG_S)
    status = tmp_path / "runs/tiny/status.json"

    def printed() -> str:
        return "\n".join(event["text"] for event in json.loads(status.read_bytes())["happenings"])

    wait_for(lambda: host.poll() is not None or "nothing is committed until a majority" in printed())
    seen = committed(tmp_path)
    refused = end(start("recover", "runs/tiny", "--wait", "30"), code=2)
    names = re.findall(r"\b[a-z2-7]{32}(?:\.\w+)+", refused.partition("do not answer")[0])
    assert len(names) == 3, refused
    running = end(start("recover", "runs/tiny", "--wait", "10", "--gone", "p1", *names), code=2)
    assert "p1 is said to be gone, but its process" in running
    assert committed(tmp_path) == seen, "nothing was committed without a majority"

    said = end(start("recover", "runs/tiny", "--wait", "30", "--gone", *(name[:8] for name in names)))
    assert re.search(r"given up 3 of 5 peers: 2 go on from step \d+ back at the state of step \d+", said), said
    assert "the survivors train again" in said
    output = end(host)
    account = summary(tmp_path)
    assert account["balanced"], account["reason"]
    assert (account["steps"], account["committed"], account["lost"], account["counted_twice"]) == (
        steps,
        4 * steps,
        0,
        0,
    )
    assert account["recovered"] == 1 and "given up 3 of 5 peers" in output
