"""`shoal run` with real processes: what it writes, that the account balances through a SIGKILL, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import DATA, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[2] / "src"
LONG_S = 600.0

CONFIG = tiny(peers=3, stages=3, steps=4, every=0) + 'host = "127.0.0.1"\n'

# Processes and the network are what some tests are about: their peers need no model, and start in a third of the time.
NO_MODEL = ("device.executor=emulated", "device.emulated_s=0.01", "device.emulated_values=64")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Begins `shoal COMMAND ...` in a directory of its own."""
    (tmp_path / "tiny.toml").write_text(CONFIG)
    (tmp_path / "a.txt").write_bytes(DATA)
    started: list[subprocess.Popen[str]] = []

    def start(command: str, *words: str, first: str = "", stdin: str | None = None) -> subprocess.Popen[str]:
        """`first`: a directory where Python looks before ours. `stdin`: what it reads there."""
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", command, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{first}{os.pathsep}{SOURCE}" if first else str(SOURCE)},
            stdin=None if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        if process.stdin is not None and stdin is not None:
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None  # communicate() would close it again
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == code, output
    return output


def summary(tmp_path: Path) -> dict[str, Any]:
    account: dict[str, Any] = json.loads((tmp_path / "runs/tiny/summary.json").read_bytes())
    return account


def children(launcher: int) -> dict[int, str]:
    """Process ids and command lines of a launcher's peers: its children, or forked by one of them."""
    commands = {}
    parents = {launcher}
    for path in Path("/proc").glob("[0-9]*/task/*/children"):
        if path.parts[2] == str(launcher):
            with contextlib.suppress(OSError):
                parents.update(map(int, path.read_text().split()))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue  # it has ended meanwhile
            if parent in parents and re.search(r"shoal\.launcher\.peer (p\d+|\d+) *$", command):
                commands[int(entry.name)] = command
    return commands


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.05)


def steps_done(tmp_path: Path) -> int:
    path = tmp_path / "runs/tiny/commits.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def assert_balanced(account: dict[str, Any], steps: int) -> None:
    assert account["balanced"], account["reason"]
    assert (account["steps"], account["issued"], account["committed"]) == (steps, 4 * steps, 4 * steps)
    assert (account["lost"], account["counted_twice"]) == (0, 0)
    assert len(account["losses"]) == steps


def test_a_run_leaves_its_account_its_checkpoint_and_a_trace_that_replays(start: Start, tmp_path: Path) -> None:
    output = end(start("run", "tiny.toml", "network.discovery=dht"))
    assert "Every sample counted once." in output
    account = summary(tmp_path)
    assert_balanced(account, 4)
    assert account["losses"][-1] < account["losses"][0]
    directory = tmp_path / "runs/tiny"
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Path(account["checkpoint"]) == directory / "checkpoints/step-4"
    assert (directory / "checkpoints/step-4/model.safetensors.index.json").exists()
    assert end(start("replay", "runs/tiny")).startswith("identical: ")
    assert "Every sample counted once." in end(start("status", "tiny.toml"))


def test_a_killed_peer_costs_no_sample_and_changes_no_loss(start: Start, tmp_path: Path) -> None:
    settings = ("run.peers=6", "run.steps=30")
    end(start("run", "tiny.toml", *settings))
    undisturbed = summary(tmp_path)
    launcher = start("run", "tiny.toml", *settings)
    wait_for(lambda: launcher.poll() is not None or 1 <= steps_done(tmp_path) < 30)
    os.kill(max(children(launcher.pid)), signal.SIGKILL)  # any one: each stage has two
    output = end(launcher)
    account = summary(tmp_path)
    assert "its process ended with -9" in output
    assert_balanced(account, 30)
    assert account["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4)


def test_a_resumed_run_goes_on_at_the_next_sample_with_the_same_account(start: Start, tmp_path: Path) -> None:
    end(start("run", "tiny.toml", "run.steps=6"))
    whole = summary(tmp_path)
    end(start("run", "tiny.toml", "run.steps=4"))
    again = end(start("run", "tiny.toml", "--resume"))
    assert "all 4 steps are trained; to go on, try run.steps=8" in again and "Every sample counted once." in again
    end(start("run", "tiny.toml", "run.steps=6", "--resume"))
    resumed = summary(tmp_path)
    assert_balanced(resumed, 6)
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    other = end(start("run", "tiny.toml", "run.steps=9", "model.hidden_size=32", "--resume"), code=2)
    assert "model.hidden_size = 16, this run has 32" in other


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_no_process_behind(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    launcher = start("run", "tiny.toml", "run.steps=1000000", *NO_MODEL)
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 1)
    peers = children(launcher.pid)
    assert len(peers) == 3
    launcher.send_signal(number)
    end(launcher, code=130 if number is signal.SIGINT else -number)
    wait_for(lambda: not any(map(alive, peers)))
    if number is signal.SIGINT:
        assert summary(tmp_path)["reason"].startswith("interrupted")


def test_another_machine_joins_by_invite_and_a_stranger_does_not(start: Start, tmp_path: Path) -> None:
    common = (*NO_MODEL, f"checkpoint.url={tmp_path / 'checkpoints'}")
    host = start("run", "tiny.toml", "--here", "2", *common)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    invite = end(start("invite", "tiny.toml")).strip()
    refused = end(start("join", invite[:-4] + "AAAA", "run.dir=guest"), code=2)
    assert "invite" in refused
    assert "same for all peers" in end(start("join", invite, "train.batch=4"), code=2)
    guest = end(start("join", invite, "run.dir=guest", *common))
    assert "the run is finished" in guest
    end(host)
    assert_balanced(summary(tmp_path), 4)


# The interpreter reads this before anything else: the peer announces a port where nobody listens, as behind a router.
UNREACHABLE = """
import sys
if "shoal.launcher.peer" in sys.orig_argv:
    from shoal.transport.tls import Tls
    Tls.address = property(lambda self: ("127.0.0.1", 1))
"""


def test_a_machine_that_tls_does_not_reach_takes_part_over_libp2p_and_that_is_said(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "behind").mkdir()
    (tmp_path / "behind/sitecustomize.py").write_text(UNREACHABLE)
    mixed = ("network.transport=auto", "network.discovery=dht")
    common = (*NO_MODEL, f"checkpoint.url={tmp_path / 'checkpoints'}")
    host = start("run", "tiny.toml", "--here", "2", *mixed, *common)
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or (bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2))
    invite = end(start("invite", "tiny.toml", *mixed)).strip()
    guest = end(start("join", invite, "run.dir=guest", *common, first=str(tmp_path / "behind")))
    said = end(host)
    assert "the run is finished" in guest
    assert re.search(r"cannot be reached at 127\.0\.0\.1:1 .*: libp2p to it instead of TLS", said)
    assert "instead of TLS" not in guest, "the others have open ports"
    assert_balanced(summary(tmp_path), 4)


# In one process, the first that gets there, every pass fails from the third on, and so does whatever else it asks of its device.
LOST = """
import os, sys
if "shoal.launcher.peer" in sys.orig_argv:
    from shoal.executor import base
    from shoal.executor.resident import Resident
    real, passes = Resident.backward, [0]

    def backward(self, *given):
        passes[0] += 1
        if passes[0] == 3:
            try:
                os.close(os.open("lost", os.O_CREAT | os.O_EXCL))
                base.alive = lambda config: False
            except FileExistsError:
                pass
        if not base.alive(None):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return real(self, *given)

    base.alive = lambda config: True
    Resident.backward = backward
"""


def test_a_peer_whose_device_is_lost_leaves_with_a_word_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty/sitecustomize.py").write_text(LOST)
    words = ("run.peers=4", "run.stages=1", "run.steps=12")
    output = end(start("run", "tiny.toml", *words, first=str(tmp_path / "faulty")))
    assert (tmp_path / "lost").exists()
    assert re.search(r"p\d is gone: the device is lost: RuntimeError: CUDA error", output)
    assert_balanced(summary(tmp_path), 12)


def test_what_a_user_can_mend_ends_with_one_line_and_code_2(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, said in (
            (("data.path=nowhere.txt",), "nowhere.txt"),
            ((f"network.port={port}",), f"network.port = {port}"),
            (("model.family=bert",), "bert"),
            (("run.stages=4", "run.peers=4"), "run.stages = 4 is more than model.layers = 3"),
        ):
            output = end(start("run", "tiny.toml", "--here", "1", *words), code=2)
            last = output.strip().splitlines()[-1]
            assert last.startswith("shoal: ") and said in last, output
