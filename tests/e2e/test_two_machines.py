"""Two machines, each with a network of its own: nobody names an address, both screens show both peers, and a loss is explained."""

from __future__ import annotations

import re
import signal
import time

import pytest
from tests.e2e.machines import HOSTS, Machine, ip, machines
from tests.e2e.test_run import NO_MODEL, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["machines"]  # a fixture

RUN = (*NO_MODEL, "device.emulated_s=0.2", "run.peers=2", "run.stages=2", "run.steps=500")


def invited(host: Machine, *settings: str) -> str:
    """Begins a run and returns the invite that its screen shows."""
    program = host.shoal("run", "tiny.toml", "--here", "1", *RUN, *settings)
    wait_for(lambda: program.process.poll() is not None or re.search(r"shoal join shoal-\S+\n", program.output))
    match = re.search(r"shoal join (shoal-\S+)\n", program.output)
    assert match is not None, program.output
    assert f"waiting for 1 peer from other machines; this one is reached at {HOSTS[0]}" in program.output
    return match[1]


@pytest.mark.parametrize("discovery", ["gossip", "dht"])
def test_a_guest_joins_without_naming_any_address_and_its_loss_is_explained(
    machines: tuple[Machine, Machine], discovery: str
) -> None:
    host, guest = machines
    invite = invited(host, f"network.discovery={discovery}")
    began = time.monotonic()
    joined = guest.shoal("join", invite, *NO_MODEL, "device.emulated_s=0.2")
    run = host.programs[0]
    wait_for(lambda: joined.process.poll() is not None or re.search(r"step [1-9]\d*/500", joined.output))
    assert joined.process.poll() is None, joined.output
    print(f"{discovery}: {time.monotonic() - began:.1f} s from `shoal join` to its screen showing a commit")
    status = host.shoal("status", "runs/tiny")
    assert status.end(60) == 0
    assert re.search(rf"1 .*\w{{6}}@{HOSTS[1]}", status.output), status.output
    assert "2 peers on 2 machines" in status.output and "nobody" not in status.output
    assert "survives no loss (1 with 1 peer more)" in status.output
    there = guest.shoal("status", "runs/tiny")
    assert there.end(60) == 0
    assert re.search(rf"0 .*\w{{6}}@{HOSTS[0]}", there.output), there.output

    joined.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: run.process.poll() is not None or "training has stopped" in run.output)
    print(f"{time.monotonic() - killed:.1f} s from the loss to the words")
    words = next(line for line in run.lines if "training has stopped" in line)
    print(words)
    assert f"({HOSTS[1]}) silent; 1 of 2 members answer, and 2 are needed" in words
    assert "Two members tolerate no loss" in words
    assert re.search(r"shoal recover runs/tiny --gone \w{6}$", words.strip())
    last = host.shoal("status", "runs/tiny")
    last.end(60)
    assert "STOPPED at" in last.output and "to go" not in last.output, last.output
    print(last.output)


def test_a_guest_whose_answers_do_not_arrive_reads_why_within_seconds(machines: tuple[Machine, Machine]) -> None:
    """It listens where the host has no way to; its calls arrive from another address, as behind a router."""
    host, guest = machines
    invite = invited(host)
    ip("-n", guest.name, "addr", "add", "10.88.0.2/32", "dev", "lo")
    began = time.monotonic()
    joined = guest.shoal("join", invite, *NO_MODEL, "network.host=10.88.0.2")
    wait_for(lambda: joined.process.poll() is not None or "answers do not arrive" in joined.output)
    print(f"{time.monotonic() - began:.1f} s from `shoal join` to the words\n{joined.output}")
    assert f"they see this machine as {HOSTS[1]}, a router's address, and it has 10.88.0.2" in joined.output


def test_a_guest_is_told_at_once_what_is_wrong_with_the_address(machines: tuple[Machine, Machine]) -> None:
    host, guest = machines
    invite = invited(host)
    run = host.programs[0].process
    run.kill()
    run.wait()
    refused = guest.shoal("join", invite, *NO_MODEL)
    assert refused.end(60) == 2
    assert f"{HOSTS[0]} refuses the connection: that machine is up, but nobody listens on TCP port" in refused.output
    ip(
        "-n",
        guest.name,
        "neigh",
        "replace",
        HOSTS[0],
        "lladdr",
        "02:00:00:00:00:99",
        "dev",
        "cable",
        "nud",
        "permanent",
    )
    silent = guest.shoal("join", invite, *NO_MODEL)
    assert silent.end(60) == 2
    assert f"{HOSTS[0]} does not answer within 4 s: a firewall on the way drops TCP port" in silent.output
    ip("-n", guest.name, "link", "set", "cable", "down")
    lost = guest.shoal("join", invite, *NO_MODEL)
    assert lost.end(60) == 2
    assert "no way leads from here to that address" in lost.output
