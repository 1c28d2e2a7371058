"""Two machines, each with a network of its own: nobody names an address, both screens show both peers, and a loss is explained."""

from __future__ import annotations

import re
import signal
import time

import pytest
from tests.e2e.machines import HOSTS, Machine, Program, ip, machines
from tests.e2e.test_run import NO_MODEL, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["machines"]  # a fixture

RUN = (*NO_MODEL, "device.emulated_s=0.2", "run.peers=2", "run.stages=2", "run.steps=500")


def invited(host: Machine, *settings: str, here: int = 1) -> str:
    """Begins a run and returns the invite that its screen shows."""
    program = host.shoal("run", "tiny.toml", "--here", str(here), *RUN, *settings)
    wait_for(lambda: program.process.poll() is not None or re.search(r"shoal1\w+\n", program.output))
    match = re.search(r"(shoal1\w+)\n", program.output)
    assert match is not None, program.output
    assert (
        f"waiting for {here} peer{'s' if here > 1 else ''} from other machines; this one is reached at {HOSTS[0]}"
        in program.output
    )
    return match[1]


def steps(run: Program) -> int:
    """The newest step that its screen shows as committed."""
    return max((int(step) for step in re.findall(r"step (\d+)/", run.output)), default=0)


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
    assert re.search(r"survives the loss of 1 peer other than p\d, which has the casting", status.output), status.output
    there = guest.shoal("status", "runs/tiny")
    assert there.end(60) == 0
    assert re.search(rf"0 .*\w{{6}}@{HOSTS[0]}", there.output), there.output

    joined.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: run.process.poll() is not None or "no peer is left" in run.output)
    print(f"{time.monotonic() - killed:.1f} s from the loss to the words")
    words = next(line for line in run.lines if "no peer is left" in line)
    print(words)
    assert re.search(r"stage 1 \(of 2\): .* shoal join @runs/tiny/guests.invite$", words.strip())

    at = steps(run)
    again = guest.shoal("join", invite, *NO_MODEL, "device.emulated_s=0.2")
    wait_for(lambda: run.process.poll() is not None or steps(run) > at + 1)
    assert run.process.poll() is None and again.process.poll() is None, run.output
    assert "training has stopped" not in run.output

    founder, killed = run, time.monotonic()
    founder.process.send_signal(signal.SIGKILL)
    wait_for(lambda: again.process.poll() is not None or "training has stopped" in again.output)
    print(f"{time.monotonic() - killed:.1f} s from the loss of the founder's machine to the words")
    words = next(line for line in again.lines if "training has stopped" in line)
    print(words)
    assert f"({HOSTS[0]}) silent; 1 of 2 members answer, and 2 are needed, or 1 with" in words
    assert "If only the line to it is cut, the run goes on there" in words


def test_the_founders_machine_goes_on_by_its_casting_vote_when_the_guests_is_gone(
    machines: tuple[Machine, Machine],
) -> None:
    host, guest = machines
    more = ("run.peers=4", "run.steps=60", "checkpoint.every=3", "device.emulated_s=0.1")
    invite = invited(host, *more, here=2)
    joined = guest.shoal("join", invite, "--peers", "2", *NO_MODEL, "device.emulated_s=0.1")
    run = host.programs[0]
    wait_for(lambda: joined.process.poll() is not None or re.search(r"step ([5-9]|\d\d)/60", joined.output))
    assert joined.process.poll() is None, joined.output
    status = host.shoal("status", "runs/tiny")
    assert status.end(60) == 0
    assert re.search(r"survives the loss of 2 peers other than p\d, which has the casting", status.output), (
        status.output
    )

    joined.process.send_signal(signal.SIGKILL)  # its peers go with it
    at, killed = steps(run), time.monotonic()
    wait_for(lambda: run.process.poll() is not None or steps(run) > at + 1)
    print(f"{time.monotonic() - killed:.1f} s from the loss of the guest's machine to the next commits")
    assert run.end(600) == 0, run.output
    assert "training has stopped" not in run.output and "Every sample counted once." in run.output, run.output


def test_a_guest_that_nobody_reaches_directly_takes_part_through_a_relay(machines: tuple[Machine, Machine]) -> None:
    """It listens where the host has no way to; its calls arrive from another address, as behind a router."""
    host, guest = machines
    invite = invited(host)
    ip("-n", guest.name, "addr", "add", "10.88.0.2/32", "dev", "lo")
    began = time.monotonic()
    joined = guest.shoal("join", invite, *NO_MODEL, "network.host=10.88.0.2")
    wait_for(lambda: joined.process.poll() is not None or "holds stage" in joined.output)
    print(f"{time.monotonic() - began:.1f} s from `shoal join` to the stage\n{joined.output}")
    assert "holds stage" in joined.output


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
