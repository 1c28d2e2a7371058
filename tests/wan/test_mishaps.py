"""What happens to real lines while peers talk: an address that changes, idle connections that are forgotten, routers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.transport.identity.invite import Authority
from shoal.transport.streams.uplink import BLACK_HOLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# A transport with the directory of one file per peer. Sends to the other each 0.2 s (also tensors, where it is told so; once, where it is
# to be quiet), and its wall clock may jump; prints each message that it gets and each loss.
PEER = """
import asyncio, json, os, sys, time
from pathlib import Path
from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport.base import Blob, Incoming, Lost
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import read_invite
from shoal.transport.relay import Relays
from shoal.transport.tls import TlsTransport

wall_clock, JUMP_S = time.time, float(os.environ.get("JUMP_S", 0))
folder, me, other, host, quiet = Path(sys.argv[1]), *sys.argv[2:]

async def main():
    identity = Identity.new()
    membership = read_invite((folder / "invite").read_text(), time.time()).membership(identity)
    relays = Relays(identity, membership)
    transport = TlsTransport(identity, membership, host, relays=relays)
    await transport.start()
    def write(routes=()):
        (folder / f".{me}").write_text(json.dumps([transport.name, *transport.address, *routes]))
        (folder / f".{me}").rename(folder / me)
    relays.hear(write)
    write()
    async def send():
        sent, known = 0, b""
        while True:
            if (folder / other).exists():
                data = (folder / other).read_bytes()
                name, *address = json.loads(data)
                if data != known:  # as a directory does
                    known = data
                    transport.learn(name, tuple(address))
                if not (quiet == "quiet" and sent and not (folder / "speak").exists()):
                    if quiet == "large":
                        transport.send(name, BoundaryTensor(0, 1, sent, 0, True), (Blob("uint8", (65536,), bytes(65536)),))
                    if quiet != "large" or sent % 2:  # control beside it
                        transport.send(name, Cancelled(0, 1, sent, 0, 0))
                    sent += 1
            if (folder / "jump").exists() and time.time is wall_clock and JUMP_S:
                time.time = lambda: wall_clock() + JUMP_S
                print("jumped", flush=True)
            await asyncio.sleep(0.2)
    task = asyncio.create_task(send())
    while True:
        item = await transport.receive()
        if isinstance(item, Incoming):
            kind = "tensor" if isinstance(item.message, BoundaryTensor) else "heard"
            print(kind, item.message.index, relays.service.passed_bytes, flush=True)
        elif isinstance(item, Lost):
            print("lost", item.reason, flush=True)

asyncio.run(main())
"""


class Peer:
    def __init__(
        self, lab: Any, folder: Path, me: str, other: str, host: str, quiet: str = "", **environment: str
    ) -> None:
        words = [sys.executable, "-c", PEER, str(folder), me, other, host, quiet]
        self.process = lab.start(me, words, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        self.lines: list[str] = []

    def next(self, word: str) -> str:
        """The next line that begins with it."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(word):
                return str(line)
        raise AssertionError(f"it has ended: {self.lines}")

    def close(self) -> None:
        self.process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "invite").write_text(Authority.new().invite((), time.time() + 3600))
    return tmp_path


def test_a_host_whose_address_changes_goes_on(real: ModuleType, folder: Path) -> None:
    """Both directions, though nobody tells the other side of the new address: TCP alone would take ten seconds, the directory longer."""
    with real.Lab(real.Topology(("a", "b"))) as lab:
        a, b = Peer(lab, folder, "a", "b", "0.0.0.0"), Peer(lab, folder, "b", "a", "0.0.0.0")
        a.next("heard"), b.next("heard")
        lab.configure("a", "ip addr del 11.77.0.1/16 dev wan0")
        lab.configure("a", "ip addr add 11.77.1.1/16 dev wan0")
        assert "address has changed" in a.next("lost")
        for peer in (b, a, b, a):
            peer.next("heard")
        a.close(), b.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_quiet_connection_outlives_a_middlebox_that_forgets_idle_ones(
    real: ModuleType, folder: Path, reset: bool
) -> None:
    """TCP's own questions keep it known there: one after each 5 s of silence."""
    topology = real.Topology(("a", "b"), gate=(real.GateRule("a", idle="8 s", reset=reset),))
    with real.Lab(topology) as lab:
        a, b = (Peer(lab, folder, me, other, "0.0.0.0", "quiet") for me, other in ("ab", "ba"))
        a.next("heard"), b.next("heard")
        time.sleep(20)  # the silence itself
        (folder / "speak").touch()
        a.next("heard"), b.next("heard")
        assert not [line for line in a.lines + b.lines if line.startswith("lost")]
        a.close(), b.close()


@pytest.mark.parametrize("kinds", [("symmetric", "symmetric"), ("firewall", "port-restricted")])
def test_two_peers_behind_routers_meet_through_a_third(real: ModuleType, folder: Path, kinds: tuple[str, str]) -> None:
    gates = tuple(real.GateRule(host, kind) for host, kind in zip("ab", kinds, strict=True))
    with real.Lab(real.Topology(("a", "b", "r"), gate=gates)) as lab:
        r = Peer(lab, folder, "r", "a", "0.0.0.0")
        a = Peer(lab, folder, "a", "r", "0.0.0.0")
        a.next("heard")  # through the relay that it has found in r, which cannot reach it directly
        while int(r.next("heard").split()[2]) == 0:
            pass
        b = Peer(lab, folder, "b", "a", "0.0.0.0")
        assert a.process.poll() is None
        a.next("heard")
        for peer in (a, b, r):
            peer.close()


@pytest.mark.parametrize("begin", [False, True])
def test_a_way_that_drops_large_packets_carries_smaller_ones(real: ModuleType, folder: Path, begin: bool) -> None:
    """An MTU black hole, from the beginning or in the middle: the next connection has smaller segments. In the middle it is noticed by what
    passes: control does, and bulk does not."""
    hole = real.PathRule("a", "b", mtu=1300)
    with real.Lab(real.Topology(("a", "b"), path=(hole,) if begin else ())) as lab:
        a, b = Peer(lab, folder, "a", "b", "0.0.0.0", "large"), Peer(lab, folder, "b", "a", "0.0.0.0")
        if not begin:
            b.next("tensor")
            lab.change(real.Change(path=hole))
            assert BLACK_HOLE in a.next("lost")
        for _ in range(20):  # more than was on its way
            b.next("tensor")
        a.close(), b.close()


def test_a_port_that_is_blocked_one_way_is_waited_for_at_a_relay(real: ModuleType, folder: Path) -> None:
    """a calls everybody and is called by nobody; r carries what b has for it."""
    with real.Lab(real.Topology(("a", "b", "r"), gate=(real.GateRule("a", "firewall"),))) as lab:
        r, a = Peer(lab, folder, "r", "a", "0.0.0.0"), Peer(lab, folder, "a", "r", "0.0.0.0")
        a.next("heard")
        b = Peer(lab, folder, "b", "a", "0.0.0.0")
        before = int(r.next("heard").split()[2])
        while int(r.next("heard").split()[2]) <= before:
            pass
        a.next("heard")
        for peer in (a, b, r):
            peer.close()


def test_a_port_that_is_blocked_in_mid_run_is_waited_for_at_a_relay(real: ModuleType, folder: Path) -> None:
    """a was reached directly before. Whoever calls after that finds the relay in a's record."""
    with real.Lab(real.Topology(("a", "b", "r"))) as lab:
        r, a = Peer(lab, folder, "r", "b", "0.0.0.0"), Peer(lab, folder, "a", "r", "0.0.0.0")
        b = Peer(lab, folder, "b", "a", "0.0.0.0")
        a.next("heard"), r.next("heard")
        lab.change(real.Change(gate=real.GateRule("a", "firewall")))
        lab.kill(b.process)
        b.close()
        while len(json.loads((folder / "a").read_text())) <= 3:  # a waits there, and its record says so
            time.sleep(0.1)
            assert a.process.poll() is None
        b = Peer(lab, folder, "b", "a", "0.0.0.0")
        while int(r.next("heard").split()[2]) == 0:
            pass
        for peer in (a, b, r):
            peer.close()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_jumps_breaks_no_connection(real: ModuleType, folder: Path, hours: int) -> None:
    """Both directions, and a connection that is made after the jump: an invite is good for days."""
    (folder / "invite").write_text(Authority.new().invite((), time.time() + 86400))
    jump = {"JUMP_S": str(3600 * hours)}
    with real.Lab(real.Topology(("a", "b"))) as lab:
        a, b = Peer(lab, folder, "a", "b", "0.0.0.0", **jump), Peer(lab, folder, "b", "a", "0.0.0.0")
        a.next("heard"), b.next("heard")
        (folder / "jump").touch()
        a.next("jumped")
        for peer in (a, b, a, b):
            peer.next("heard")
        lab.configure("a", "ip addr del 11.77.0.1/16 dev wan0")  # both connections end
        lab.configure("a", "ip addr add 11.77.1.1/16 dev wan0")
        a.next("lost")
        for peer in (b, a, b, a):
            peer.next("heard")
        a.close(), b.close()


# A gossip directory; prints its address, and the names it finds once it knows of two peers.
FINDER = """
import asyncio, sys, time
from shoal.transport.directory.directory import Gossip
from shoal.transport.directory.records import PeerRecord
from shoal.transport.identity.identity import Identity
from shoal.transport.identity.invite import read_invite

invite, host, *bootstrap = sys.argv[1:]

async def main():
    identity = Identity.new()
    membership = read_invite(invite, time.time()).membership(identity)
    own = PeerRecord(membership.run, identity.name, host, 5)
    directory = Gossip(identity, membership, own, tuple(bootstrap), lambda record: None)
    await directory.start()
    print(*directory.addresses, flush=True)
    while len(await directory.peers()) < 2:
        await directory.announce()
        await asyncio.sleep(0.1)
    print("found", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_bootstrap_name_that_no_server_resolves_holds_nobody_up(real: ModuleType, folder: Path) -> None:
    """The name servers are silent: the system asks them for longer than a directory waits."""
    invite = (folder / "invite").read_text()
    with real.Lab(real.Topology(("a", "b"))) as lab:
        words = [sys.executable, "-c", FINDER, invite]
        b = lab.start("b", [*words, "11.77.0.2"], stdout=subprocess.PIPE, text=True)
        known = b.stdout.readline().strip()
        lab.configure("a", "ip route add default dev wan0")
        a = lab.start("a", [*words, "11.77.0.1", "shoal.invalid:9", known], stdout=subprocess.PIPE, text=True)
        for process in (a, b):
            while process.stdout.readline() != "found\n":
                assert process.poll() is None
            process.stdout.close()


def test_peers_with_ipv6_alone_meet(real: ModuleType, folder: Path) -> None:
    with real.Lab(real.Topology(("a", "b"), ipv6=("a", "b"))) as lab:
        a, b = Peer(lab, folder, "a", "b", "::"), Peer(lab, folder, "b", "a", "::")
        a.next("heard"), b.next("heard")
        a.close(), b.close()
