"""Real processes whose run is disturbed on purpose: a stage that lost every replica, and a peer that stood still.

What must hold is that the account balances and that the training is the one that would have been without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import reference
from tests.e2e.test_run import NO_MODEL, Start, assert_balanced, end, start, summary, wait_for

from shoal.launcher.files import rundir
from shoal.runtime.records.account import CommittedStep, surviving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

STEPS = 60
SIX = ("run.peers=6", f"run.steps={STEPS}", "checkpoint.every=2")


def here(tmp_path: Path) -> rundir.PeersFile | None:
    """Once the run is there."""
    try:
        return rundir.locals_of(tmp_path / "runs/tiny")
    except ValueError:
        return None


def commits(tmp_path: Path) -> list[CommittedStep]:
    path = tmp_path / "runs/tiny/commits.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=CommittedStep) for line in lines]


def lose_a_stage(tmp_path: Path, launcher: subprocess.Popen[str]) -> None:
    """SIGKILL to both replicas of one stage at once, of two or more. Should another peer have been moving there, it takes over
    and nothing is lost: then once more."""
    while launcher.poll() is None:
        run = here(tmp_path)
        assert run is not None
        stage = next(stage for stage, held in Counter(seat.stage for seat in run.members).items() if held == 2)
        lost = {seat.label for seat in run.members if seat.stage == stage}
        for peer in run.peers:
            if peer.label in lost:
                os.kill(peer.process.pid, signal.SIGKILL)
        seen = len(commits(tmp_path))
        wait_for(lambda seen=seen: launcher.poll() is not None or len(commits(tmp_path)) >= seen + 4)
        if any(step.epoch for step in commits(tmp_path)):
            return


def test_a_stage_that_lost_every_replica_costs_steps_but_no_sample_and_no_bit_more(
    start: Start, tmp_path: Path
) -> None:
    end(start("run", "tiny.toml", *SIX))
    undisturbed: dict[str, Any] = summary(tmp_path)
    assert_balanced(undisturbed, STEPS)
    assert (undisturbed["undone"], undisturbed["recovered"]) == (0, 0)
    wanted = reference.checkpoint(tmp_path / "runs/tiny", STEPS)

    launcher = start("run", "tiny.toml", *SIX)
    wait_for(lambda: launcher.poll() is not None or 5 <= len(commits(tmp_path)) < STEPS)
    lose_a_stage(tmp_path, launcher)
    output = end(launcher)
    account = summary(tmp_path)

    assert_balanced(account, STEPS)
    assert account["recovered"] >= 1, output
    assert "lost its last replica: back from step" in output
    written = commits(tmp_path)
    assert {step.epoch for step in written} > {0}
    standing = surviving(written)
    assert [step.commit.step for step in standing] == list(range(STEPS))
    assert [step.commit.loss for step in standing] == account["losses"]
    again = len(written) - len(standing)
    assert account["undone"] >= 4 * again  # a commit that nobody lived to report is undone too
    assert account["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4)
    assert reference.relative(reference.checkpoint(tmp_path / "runs/tiny", STEPS), wanted) <= 1e-5


MIDDLE = ("run.peers=6", "run.stages=3", "model.layers=3", "checkpoint.every=0", "run.steps=100000")


def of_the_middle(tmp_path: Path) -> list[int]:
    """Processes of stage 1, once it has two."""

    def in_the_middle() -> list[int]:
        run = here(tmp_path)
        labels = {seat.label for seat in run.members if seat.stage == 1} if run is not None else set()
        pids = [peer.process.pid for peer in run.peers if peer.label in labels] if run is not None else []
        return pids if len(pids) == 2 and len(commits(tmp_path)) >= 3 else []

    wait_for(lambda: bool(in_the_middle()))
    return in_the_middle()


def leave(launcher: subprocess.Popen[str], tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Ctrl-C some commits later; what was said, and the summary."""
    seen = len(commits(tmp_path))
    wait_for(lambda: launcher.poll() is not None or len(commits(tmp_path)) >= seen + 4)
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    return output, summary(tmp_path)


def test_a_stage_whose_replicas_all_stood_still_goes_on_with_what_they_hold(start: Start, tmp_path: Path) -> None:
    launcher = start("run", "tiny.toml", *MIDDLE, *NO_MODEL, "run.lost_stage=wait")
    pids = of_the_middle(tmp_path)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def lost() -> bool:
        run = here(tmp_path)
        return run is not None and all(seat.stage != 1 for seat in run.members)

    wait_for(lambda: launcher.poll() is not None or lost())
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    output, account = leave(launcher, tmp_path)
    assert "comes back with the state of stage 1" in output
    assert account["undone"] == 0 and account["lost"] == 0 and account["counted_twice"] == 0


def test_a_stage_in_the_middle_is_made_from_its_neighbours(start: Start, tmp_path: Path) -> None:
    launcher = start("run", "tiny.toml", *MIDDLE, "run.lost_stage=neighbours", "run.lost_stage_wait_s=0")
    for pid in of_the_middle(tmp_path):
        os.kill(pid, signal.SIGKILL)
    output, account = leave(launcher, tmp_path)
    assert "stage 1 lost its last replica and is made from its neighbours" in output
    assert account["undone"] == 0 and account["lost"] == 0 and account["counted_twice"] == 0


def test_a_stopped_peer_is_removed_and_comes_back_when_it_is_continued(start: Start, tmp_path: Path) -> None:
    """How soon is a matter of the machine here; tests/sim says it on virtual time."""
    (tmp_path / "stop.toml").write_text('[[act]]\nat = "1 s"\nkind = "stop"\nwho = "p2"\nfor = "12 s"\n')
    launcher = start("run", "tiny.toml", "run.steps=100000", "run.peers=6", *NO_MODEL)
    wait_for(lambda: launcher.poll() is not None or here(tmp_path) is not None)
    said = end(start("chaos", "runs/tiny", "--schedule", "stop.toml"))
    assert re.search(r"stop p2 \(stage \d\) for 12.0 s: stop.toml says so", said), said
    assert "continue p2" in said
    status = tmp_path / "runs/tiny/status.json"

    def notes() -> list[str]:
        return [event["text"] for event in json.loads(status.read_bytes())["happenings"]]

    def member() -> bool:
        run = here(tmp_path)
        return run is not None and any(seat.label == "p2" for seat in run.members)

    wait_for(lambda: launcher.poll() is not None or member())
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    silent = re.search(r"removed .*p2 silent for (\d+\.\d) s", output)
    assert silent is not None, output
    print(f"noticed after {silent[1]} s")
    assert re.search(r"p2 serves stage \d", output) or "p2 joins stage" in output, output
    assert (summary(tmp_path)["lost"], summary(tmp_path)["counted_twice"]) == (0, 0)


def test_killed_peers_are_replaced_while_chaos_is_at_work_and_no_sample_is_lost(start: Start, tmp_path: Path) -> None:
    acts = [
        f'[[act]]\nat = "{at} s"\nkind = "{kind}"\nwho = "{who}"\n'
        for at, kind, who in ((0, "kill", "member"), (1, "add", ""), (2, "kill", "member"), (3, "remove", "member"))
    ]
    (tmp_path / "kill.toml").write_text("".join(acts))
    launcher = start("run", "tiny.toml", "run.steps=100000", "run.peers=6", *NO_MODEL)
    wait_for(lambda: launcher.poll() is not None or here(tmp_path) is not None)
    said = end(start("chaos", "runs/tiny", "--schedule", "kill.toml"))
    killed, removed = re.findall(r"  kill (p\d)", said), re.findall(r"  remove (p\d)", said)
    assert len(killed) == 2 and len(removed) == 1, said

    def members() -> set[str]:
        run = here(tmp_path)
        return set() if run is None else {seat.label for seat in run.members}

    # One for each kill and the one added; nobody for the one removed.
    everybody = {f"p{number}" for number in range(1, 10)}
    wait_for(lambda: launcher.poll() is not None or members() == everybody - {*killed, *removed})
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    account = summary(tmp_path)
    assert (account["lost"], account["counted_twice"]) == (0, 0), output
    assert account["killed"] == 3 and account["joined"] >= 1, (
        output
    )  # who comes in at a restart or takes over is not counted
    assert not (tmp_path / "runs/tiny/wanted.json").exists()
