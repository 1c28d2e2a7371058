"""The laboratory of real networks (benchmarks/wan): lines are as described, packets arrive whole, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/wan"


# On b: answers each connection with the digest of all that it sent. On a: sends and prints the digest and the seconds.
ANSWER = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 9), family=10 if ":" in sys.argv[1] else 2) as listener:
    print("listening", flush=True)
    while True:
        with listener.accept()[0] as sock:
            digest = hashlib.sha256()
            while data := sock.recv(1 << 16):
                digest.update(data)
            sock.sendall(digest.digest())
"""
SEND = """
import hashlib, os, socket, sys, time
data = os.urandom(int(sys.argv[1]))
start = time.monotonic()
with socket.create_connection((sys.argv[3], 9), timeout=float(sys.argv[2])) as sock:
    connected = time.monotonic()
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    answer = sock.recv(32, socket.MSG_WAITALL)
print(answer == hashlib.sha256(data).digest(), connected - start, time.monotonic() - connected)
"""


def transfer(
    lab: ModuleType, topology: Any, nbytes: int, *changes: Any, timeout_s: int = 60, address: str = "11.77.0.2"
) -> str:
    """What SEND prints on a, with b answering, after these changes."""
    with lab.Lab(topology) as open_lab:
        receiver = open_lab.start("b", [sys.executable, "-c", ANSWER, address], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "listening\n"
        for change in changes:
            open_lab.change(change)
        sender = open_lab.start(
            "a",
            [sys.executable, "-c", SEND, str(nbytes), str(timeout_s), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output: str = sender.communicate(timeout=100)[0]
        receiver.stdout.close()
    return output


def test_a_line_has_its_delay_and_its_rate(real: ModuleType) -> None:
    topology = real.Topology(("a", "b"), (real.AccessRule(up="20 Mbit/s"),), (real.PathRule(delay="30 ms"),))
    whole, connect_s, send_s = transfer(real, topology, 2_000_000).split()
    assert whole == "True"
    assert float(connect_s) >= 0.060, "one round trip"
    assert float(send_s) >= 0.8, "2 MB over 2.5 MB/s"


def test_the_receivers_downlink_is_a_limit_too(real: ModuleType) -> None:
    topology = real.Topology(("a", "b"), (real.AccessRule(down="20 Mbit/s"),))
    whole, _, send_s = transfer(real, topology, 2_000_000).split()
    assert whole == "True" and float(send_s) >= 0.8


def test_a_path_with_loss_delivers_the_rest_of_each_large_packet_intact(real: ModuleType) -> None:
    """Large packets are cut where a segment is lost: with a wrong sequence number or checksum the digest would differ or never arrive."""
    topology = real.Topology(("a", "b"), path=(real.PathRule(delay="2 ms", rate="200 Mbit/s", loss=0.02),))
    assert transfer(real, topology, 8_000_000).split()[0] == "True"


def test_a_path_that_is_cut_while_the_lab_runs_carries_nothing(real: ModuleType) -> None:
    cut = real.Change(path=real.PathRule("b", "a", rate="0 bit/s"))
    output = transfer(real, real.Topology(("a", "b")), 1, cut, timeout_s=1)
    assert "TimeoutError" in output


def test_nothing_outlives_a_lab_that_is_killed(real: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "line.toml").write_text('hosts = ["a", "b"]\n')
    sleep = f"echo begun; exec sleep {100_000 + os.getpid()}"  # nobody else sleeps for so long
    words = [sys.executable, str(FOLDER / "lab.py"), "line.toml", f"a={sleep}"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    wait_for(sleeping)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for(lambda: not sleeping())


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def sleeping() -> bool:
    wanted = f"sleep\0{100_000 + os.getpid()}\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text() == wanted:
                return True
        except OSError:  # it has ended
            continue
    return False


# IPv6 alone: the emulator knows a host by the last number of its address.
def test_a_host_may_have_an_ipv6_address_alone(real: ModuleType) -> None:
    topology = real.Topology(("a", "b"), path=(real.PathRule(delay="30 ms"),), ipv6=("a", "b"))
    assert transfer(real, topology, 2_000_000, address="fd77::2").split()[0] == "True"


def test_packets_larger_than_the_paths_mtu_vanish(real: ModuleType) -> None:
    """The connection is made, and carries nothing large: a black hole."""
    topology = real.Topology(("a", "b"), path=(real.PathRule("a", "b", mtu=1300),))
    assert transfer(real, topology, 500, timeout_s=1).split()[0] == "True"
    assert "TimeoutError" in transfer(real, topology, 100_000, timeout_s=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('hosts = ["a"]\n[[access]]\nhost = "b"', "no host is named 'b'; there are a"),
        ('hosts = ["a"]\n[[access]]\nup = "fast"', "'fast' is not a quantity"),
        ('hosts = ["a"]\n[[path]]\nloss = 2.0', "loss = 2.0 is no part of the packets"),
        ('hosts = ["a"]\n[[path]]\ndelay = "-1 s"', "'-1 s' is a negative time"),
        ('hosts = ["a"]\n[[path]]\nlatency = "1 s"', "unknown field `latency`"),
        ('hosts = ["a"]\n[[change]]\nat = "1 s"\n[change.path]\nsender = "c"', "no host is named 'c'"),
        ('hosts = "a"', "Expected `array`"),
        ("hosts = [", "line.toml"),
        ('hosts = ["a"]\n[[gate]]\nkind = "cone"', "Invalid enum value 'cone'"),
        ('hosts = ["a"]\nipv6 = ["b"]', "no host is named 'b'"),
    ],
)
def test_a_wrong_topology_is_refused_with_its_reason(lab: ModuleType, tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "line.toml").write_text(text)
    with pytest.raises(ValueError) as refusal:
        lab.load(tmp_path / "line.toml")
    assert reason in str(refusal.value)


def test_the_last_rule_for_a_line_applies(lab: ModuleType) -> None:
    rules = (lab.PathRule(delay="5 ms"), lab.PathRule("a", "b", delay="7 ms"))
    words = lab.Topology(("a", "b"), path=rules).words()
    last = {line.rsplit(" ", 5)[0]: line.split()[3] for line in words if line.startswith("path")}
    assert last == {"path 0 0": "0.005", "path 0 1": "0.007", "path 1 0": "0.005", "path 1 1": "0.005"}
