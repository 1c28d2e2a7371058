"""A peer of several processes (device.count, gloo) in a run: it stands beside resident replicas, ends as one, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests import reference
from tests.e2e.test_run import Start, alive, assert_balanced, children, end, start, steps_done, summary, wait_for

from shoal.launcher.files import rundir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

TWO = ("device.kind=cpu", "device.count=2")
# Steps take seconds, so that a joiner that starts a further process catches up on a busy machine.
RUN = ("run", "tiny.toml", "run.stages=2", "run.peers=2", "model.layers=2", "network.delay_s=0.4")


def followers(launcher: int) -> list[int]:
    """Process ids of its peers' further devices."""
    peers, processes = children(launcher), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue  # it has ended meanwhile
            if parent in peers and b"shards.follower" in command:
                processes.append(int(entry.name))
    return processes


def held_bits(tmp_path: Path) -> dict[tuple[int, int], tuple[str, set[str]]]:
    """Of each stage after each step that newest sessions held: the digest of its parameters, and the peers. Fails where replicas differ."""
    held: dict[tuple[int, int], tuple[str, set[str]]] = {}
    for path in tmp_path.glob("*/tiny/trace.jsonl"):
        for one in reference.held(path):
            if one.digest:
                digest, peers = held.setdefault((one.stage, one.step), (one.digest, set()))
                assert digest == one.digest, "replicas hold the same bits"
                peers.add(one.peer)
    return held


def most_replicas(tmp_path: Path) -> int:
    return max(len(peers) for _, peers in held_bits(tmp_path).values())


def test_a_run_with_a_sharded_replica_ends_with_its_account(start: Start, tmp_path: Path) -> None:
    host = start(*RUN, "run.peers=3", "--here", "2", "run.steps=4")
    invite = invite_of(start, host, tmp_path)
    guest = start("join", invite, "--files", ".", "run.dir=guest", *TWO)
    said = end(guest)
    assert "the run is finished" in said
    host_said = end(host)
    assert_balanced(summary(tmp_path), 4)
    assert "Every sample counted once." in host_said
    assert most_replicas(tmp_path) == 2


def invite_of(start: Start, host: Any, tmp_path: Path) -> str:
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    return end(start("invite", "tiny.toml")).split()[-1]


def test_a_sharded_replica_trains_dies_as_one_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    host = start(*RUN, "run.steps=100000", "checkpoint.at_end=false")
    invite = invite_of(start, host, tmp_path)

    def serving(name: str) -> int:
        """A guest with two devices, once it is a member and some steps are done."""
        guest = start("join", invite, "--files", ".", f"run.dir={name}", *TWO)
        path = tmp_path / name / "tiny"
        wait_for(
            lambda: (
                guest.poll() is not None
                or ((path / "peers.json").exists() and any(one.label == "p1" for one in rundir.locals_of(path).members))
            )
        )
        enough = steps_done(tmp_path) + 6
        wait_for(lambda: host.poll() is not None or guest.poll() is not None or steps_done(tmp_path) >= enough)
        guests.append(guest)
        return guest.pid

    guests: list = []  # type: ignore[type-arg]
    (follower,) = followers(serving("one"))
    os.kill(follower, signal.SIGKILL)
    output = end(guests[0], code=1)
    assert "the device is lost" in output and "the process of device 1 ended (-9)" in output, output[-3000:]
    (follower,) = followers(serving("two"))
    guests[1].send_signal(signal.SIGINT)
    end_output = end(guests[1], code=130)
    assert "left: its launcher asks it to" in end_output and not alive(follower), end_output[-3000:]
    host.send_signal(signal.SIGINT)
    host_output = end(host, code=130)
    account = summary(tmp_path)
    assert (account["lost"], account["counted_twice"]) == (0, 0), host_output[-3000:]
    assert account["joined"] == 2
    for words in ("downloads its state again", "another state of stage"):
        assert words not in host_output + output + end_output
    assert most_replicas(tmp_path) == 2


def test_a_checkpoint_of_the_one_is_resumed_by_the_other_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    def session(steps: int, *words: str) -> dict[tuple[int, int], str]:
        end(start("run", "tiny.toml", f"run.steps={steps}", "run.stages=2", "run.peers=2", "model.layers=2", *words))
        assert_balanced(summary(tmp_path), steps)
        return {key: digest for key, (digest, _) in held_bits(tmp_path).items()}

    sharded, alone = session(2, *TWO), session(4, "--resume")
    again = session(6, *TWO, "--resume")
    for stage in range(2):
        assert sharded[stage, 2] == alone[stage, 2] and alone[stage, 4] == again[stage, 4]
        assert alone[stage, 2] != alone[stage, 4]
