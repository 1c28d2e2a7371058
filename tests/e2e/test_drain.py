"""A peer that is asked to go (SIGTERM, as a cloud's notice is passed on, or Ctrl-C) hands over at the next step boundary: nothing it did
is done again. Whoever presses Ctrl-C twice goes at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.e2e.test_run import LONG_S, NO_MODEL, Start, alive, children, end, start, summary, wait_for

from shoal.launcher.files import rundir
from shoal.launcher.watching.members import LAST_REPLICA_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

# A step takes seconds, most of them spent in the middle of something: whoever leaves at once would leave work behind.
LONG_STEPS = ("run.steps=100000", "train.batch=16", *NO_MODEL, "device.emulated_s=0.1")


def peers(tmp_path: Path) -> tuple[rundir.LocalPeer, ...]:
    try:
        locals_file = rundir.locals_of(tmp_path / "runs/tiny")
    except ValueError:
        return ()
    return locals_file.peers if locals_file.started else ()


def members(tmp_path: Path) -> set[str]:
    return {seat.label for seat in rundir.locals_of(tmp_path / "runs/tiny").members}


def committed(tmp_path: Path) -> int:
    path = tmp_path / "runs/tiny/commits.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("leads", [False, True])
def test_a_peer_told_to_go_leaves_with_nothing_redone(start: Start, tmp_path: Path, leads: bool) -> None:
    launcher = start("run", "tiny.toml", "run.peers=6", *LONG_STEPS)
    wait_for(lambda: launcher.poll() is not None or (committed(tmp_path) >= 2 and len(peers(tmp_path)) == 6))
    peer = next(peer for peer in peers(tmp_path) if peer.leads is leads)
    os.kill(peer.process.pid, signal.SIGTERM)
    wait_for(lambda: launcher.poll() is not None or not alive(peer.process.pid))
    wait_for(lambda: launcher.poll() is not None or peer.label not in members(tmp_path))
    seen = committed(tmp_path)
    wait_for(lambda: launcher.poll() is not None or committed(tmp_path) >= seen + 3)
    launcher.send_signal(signal.SIGINT)
    output = end(launcher, code=130)
    locals_file = summary(tmp_path)
    assert re.search(rf"left +{peer.label}: left: its launcher asks it to", output), output
    assert (locals_file["redone"], locals_file["lost"], locals_file["counted_twice"], locals_file["killed"]) == (
        0,
        0,
        0,
        0,
    ), output


def guests(
    tmp_path: Path, start: Start, emulated_s: float = 0.1, steps: int = 2
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A host with three peers and a guest with two, which train together and have committed so many steps."""
    emulated = f"device.emulated_s={emulated_s}"
    host = start("run", "tiny.toml", "run.peers=5", "--here", "3", *LONG_STEPS, emulated)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 3))
    invite = end(start("invite", "tiny.toml")).strip()
    guest = start(
        "join",
        invite,
        "--peers",
        "2",
        "run.dir=guest",
        *(word for word in NO_MODEL if "device" in word),
        emulated,
    )
    wait_for(lambda: host.poll() is not None or (bool(peers(tmp_path)) and committed(tmp_path) >= steps))
    return host, guest


def test_ctrl_c_lets_a_guests_peers_leave_in_order_and_twice_ends_them_at_once(start: Start, tmp_path: Path) -> None:
    host, guest = guests(tmp_path, start)
    guest.send_signal(signal.SIGINT)
    said = end(guest, code=130)
    assert "leaving at the end of the step, at most 20 s from now" in said
    assert len(re.findall(r"left +p\d: left: its launcher asks it to", said)) == 2, said
    seen = committed(tmp_path)
    wait_for(lambda: host.poll() is not None or committed(tmp_path) >= seen + 2)

    invite = end(start("invite", "tiny.toml")).strip()
    hasty = start("join", invite, "run.dir=hasty", *NO_MODEL)
    wait_for(lambda: host.poll() is not None or (members(tmp_path) == {"p1", "p2", "p3", ""}))
    mine = children(hasty.pid)
    for process in mine:
        os.kill(process, signal.SIGSTOP)  # it cannot leave in good order, however long anybody waits
    hasty.send_signal(signal.SIGINT)
    assert hasty.stdout is not None
    for line in hasty.stdout:
        if line.startswith("leaving at the end of the step"):
            break
    hasty.send_signal(signal.SIGINT)
    end(hasty, code=130)
    wait_for(lambda: not any(map(alive, mine)))

    seen = committed(tmp_path)
    wait_for(lambda: host.poll() is not None or committed(tmp_path) >= seen + 2)
    host.send_signal(signal.SIGINT)
    output = end(host, code=130)
    locals_file = summary(tmp_path)
    assert (locals_file["lost"], locals_file["counted_twice"]) == (0, 0), output


def test_ctrl_c_lets_a_guest_leave_in_the_middle_of_a_step_that_lasts_minutes(start: Start, tmp_path: Path) -> None:
    host, guest = guests(tmp_path, start, emulated_s=5.0, steps=0)
    guest.send_signal(signal.SIGINT)
    said = end(guest, code=130)
    assert len(re.findall(r"left +p\d: left: its launcher asks it to", said)) == 2, said
    assert committed(tmp_path) == 0
    assert "nothing is saved yet; the run keeps what it has committed" in said
    assert "To take part again: shoal join @guest/tiny/guests.invite" in said, said
    host.send_signal(signal.SIGINT)
    output = end(host, code=130)
    assert len(re.findall(r"left +\w+ on \S+ has left stage \d, which \d peers? serves? now", output)) == 2, output
    assert "It ended early: interrupted. Step 0 had begun: its 8 microbatches are not in them." in output, output
    assert "leaves in the middle of step 0: its launcher asks it to" in output, output


def test_ctrl_c_on_the_host_hands_the_run_over_when_others_can_go_on(start: Start, tmp_path: Path) -> None:
    host = start("run", "tiny.toml", "run.peers=6", "--here", "2", *LONG_STEPS)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    invite = end(start("invite", "tiny.toml")).strip()
    guest = start("join", invite, "--peers", "4", "run.dir=guest", *NO_MODEL)
    wait_for(lambda: host.poll() is not None or committed(tmp_path) >= 2)
    host.send_signal(signal.SIGINT)
    output = end(host, code=130)
    assert len(re.findall(r"left +p\d: left: its launcher asks it to", output)) == 2, output
    assert summary(tmp_path)["redone"] == 0
    assert "BALANCE" not in output and re.search(r"Step \d+ had begun: its 8 microbatches are not in them", output), (
        output
    )
    assert "while they train: shoal join @runs/tiny/guests.invite; once they have ended: shoal run tiny" in output
    heard = tmp_path / "guest/tiny/commits.jsonl"
    seen = len(heard.read_bytes().splitlines())
    wait_for(lambda: guest.poll() is not None or len(heard.read_bytes().splitlines()) >= seen + 2)
    guest.send_signal(signal.SIGKILL)
    guest.communicate(timeout=LONG_S)


def test_a_stage_that_nobody_can_take_over_is_saved_and_left_and_little_is_trained_in_vain(
    start: Start, tmp_path: Path
) -> None:
    """Two machines with a stage each. The guest once stayed for 120 s, while the run trained on and lost it all."""
    words = ("tiny.toml", "run.peers=2", "run.stages=2", "--here", "1", *LONG_STEPS)
    host = start("run", *words)
    file = tmp_path / "runs/tiny/guests.invite"
    wait_for(lambda: host.poll() is not None or (file.exists() and file.read_text().endswith("\n")))
    guest = start("join", f"@{file}", "run.dir=guest", *NO_MODEL)
    wait_for(lambda: guest.poll() is not None or host.poll() is not None or committed(tmp_path) >= 2)
    guest.send_signal(signal.SIGINT)
    output = end(guest, code=130)
    assert "nobody else can take stage" in output and "training stops without this machine" in output, output
    at, saved = (
        re.search(pattern, output) for pattern in (r"It leaves when step (\d+) is saved", r"step (\d+) is saved;")
    )
    assert at is not None and saved is not None and int(saved[1]) >= int(at[1]), output
    host.send_signal(signal.SIGINT)
    output = end(host, code=130)
    assert f"--here 1 {' '.join(LONG_STEPS)} --resume" in output, output
    account = summary(tmp_path)
    assert int(at[1]) <= account["saved"] and account["steps"] <= account["saved"] + 5, output


def test_machines_that_are_told_to_go_together_save_the_run_and_go(start: Start, tmp_path: Path) -> None:
    """A whole pool gets its notice. Each machine once waited for 120 s for the others, which were leaving, to take its stages over."""
    words = ("tiny.toml", "run.peers=6", "--here", "3", *LONG_STEPS)
    host = start("run", *words)
    file = tmp_path / "runs/tiny/guests.invite"
    wait_for(lambda: host.poll() is not None or (file.exists() and file.read_text().endswith("\n")))
    guest = start("join", f"@{file}", "--peers", "3", "run.dir=guest", *NO_MODEL)
    wait_for(lambda: guest.poll() is not None or host.poll() is not None or committed(tmp_path) >= 2)
    told_s, at = time.monotonic(), committed(tmp_path)
    for each in (host, guest):
        each.send_signal(signal.SIGTERM)
    output = end(host, code=130)
    end(guest, code=130)
    print(f"both machines have left after {time.monotonic() - told_s:.1f} s")
    assert time.monotonic() - told_s < LAST_REPLICA_S / 2, output
    account = summary(tmp_path)
    assert at <= account["saved"] and account["lost"] == account["counted_twice"] == 0, output
    assert f"--here 3 {' '.join(LONG_STEPS)} --resume" in output or "To go on from there" in output, output
