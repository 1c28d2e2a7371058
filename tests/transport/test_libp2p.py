"""What is particular to libp2p: its daemon, which must not outlive us, the key that its identity is, and peers without a port.

The contract itself is tested in tests/contract (slow for this network, as each test starts daemons)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport import daemon as daemons
from shoal.transport.base import Blob, Incoming, Lost
from shoal.transport.congestion.windows import ACK_BYTES, FLOOR_BYTES
from shoal.transport.daemon import Daemon, parsed_address, public_key, written
from shoal.transport.identity.identity import Identity, key_id
from shoal.transport.identity.invite import Authority, read_invite
from shoal.transport.libp2p import DaemonStream, Libp2pTransport
from shoal.transport.streams.engine import Connection, Engine, WaitFor

INVITE = read_invite(Authority.new().invite((), time.time() + 3600), time.time())


class Hidden(Daemon):
    """Of a peer without an open port."""

    def _arguments(self, key: Path) -> list[str]:
        kept = [word for word in super()._arguments(key) if not word.startswith("-hostAddrs")]
        return [*kept, "-noListenAddrs", "-forceReachabilityPrivate"]


def make(kind: type[Daemon] = Daemon, relays: tuple[str, ...] = ()) -> Libp2pTransport:
    identity = Identity.new()
    membership = INVITE.membership(identity)
    return Libp2pTransport(identity.name, membership, kind(identity, relays=relays))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def take(transport: Libp2pTransport) -> Any:
    return await asyncio.wait_for(transport.receive(), 60)


def processes(marker: str) -> list[int]:
    """Those that have `marker` in their command line; a zombie has none."""
    numbers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # it is over
                continue
            if marker.encode() in words:
                numbers.append(int(entry.name))
    return numbers


def test_two_peers_talk_and_nothing_is_left_of_their_daemons() -> None:
    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        directories = [str(each._libp2p.daemon.directory) for each in (a, b)]
        assert all(processes(directory) for directory in directories)
        a.learn(b.name, b.address)
        data = os.urandom(3 << 20)
        a.send(b.name, BoundaryTensor(0, 1, 2, 1, False), (Blob("uint8", (len(data),), data),))
        got = await take(b)
        assert got.peer == a.name and bytes(got.blobs[0].data) == data
        assert not any((Path(directory) / "key").exists() for directory in directories)
        await a.close()
        await b.close()
        assert not any(processes(directory) or Path(directory).exists() for directory in directories)

    run(story)


def test_the_libp2p_identity_is_the_peers_own_key() -> None:
    async def story() -> None:
        a = make()
        await a.start()
        peer_id, _ = parsed_address(a.address[0])
        assert peer_id == a._libp2p.daemon.peer_id
        assert a.name.startswith(f"{key_id(public_key(peer_id))}.")
        await a.close()

    run(story)


PEER = """
import asyncio, sys
from shoal.transport.daemon import Daemon
from shoal.transport.identity.identity import Identity

async def main():
    daemon = Daemon(Identity.new())
    await daemon.start()
    print(daemon.directory, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_daemon_does_not_outlive_a_peer_that_is_killed(whole_group: bool) -> None:
    peer = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, process_group=0, text=True)
    assert peer.stdout is not None
    directory = peer.stdout.readline().strip()
    assert len(processes(directory)) == 2, "the daemon and its shell"
    (os.killpg if whole_group else os.kill)(peer.pid, signal.SIGKILL)
    peer.wait()
    while processes(directory) or Path(directory).exists():  # pytest's own timeout ends it
        time.sleep(0.02)
    peer.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_daemon_does_not_outlive_its_shell_and_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    code = PEER.replace("async def main", "import shoal.transport.daemon as d\nd.IDLE_S = 1.0\nasync def main")
    peer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0, text=True)
    assert peer.stdout is not None
    directory = peer.stdout.readline().strip()
    for pid in processes("/bin/sh"):
        if pid in processes(directory):
            os.kill(pid, signal.SIGKILL)
    peer.kill()
    peer.wait()
    while processes(directory):
        time.sleep(0.02)
    subprocess.run(["rm", "-rf", directory], check=True)
    peer.stdout.close()


def kill_daemon(daemon: Daemon) -> None:
    """The program itself, not the shell that watches over it."""
    for pid in processes(str(daemon.directory)):
        if b"p2pd\0" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"-id")[0][-6:]:
            os.kill(pid, signal.SIGKILL)


def test_a_daemon_that_ends_is_told_and_sending_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        a, b = make(), make()
        await a.start()
        await b.start()
        a.learn(b.name, b.address)
        a.send(b.name, Cancelled(0, 1, 2, 0, 0))
        await take(b)
        a._libp2p.daemon._pause_s = 3600.0  # it is not started again while we look
        with caplog.at_level(logging.ERROR):
            kill_daemon(a._libp2p.daemon)
            assert isinstance(await take(a), Lost)
            while not a._libp2p.daemon.ended:
                await asyncio.sleep(0.01)
        assert "libp2p daemon of this peer has ended" in caplog.text
        a.send(b.name, Cancelled(0, 1, 3, 0, 0))
        assert "libp2p daemon does not answer" in (await take(a)).reason
        await a.close()
        await b.close()

    run(story)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("with_its_directory", [False, True])
def test_a_daemon_that_is_killed_runs_again_and_both_ways_are_open_again(with_its_directory: bool) -> None:
    """Several times, under the same address; the end and the new beginning are told. Nothing is left behind."""

    async def story() -> None:
        notes: list[str] = []
        identity = Identity.new()
        membership = INVITE.membership(identity)  # from here on its name says by which invite it came
        a = Libp2pTransport(identity.name, membership, Daemon(identity, tell=notes.append))
        b = make()
        await a.start()
        await b.start()
        a.learn(b.name, b.address)
        b.learn(a.name, a.address)
        daemon, address = a._libp2p.daemon, a.address
        directory = str(daemon.directory)
        for time_ in range(3):
            daemon._pause_s = daemons.FIRST_PAUSE_S
            if with_its_directory:
                daemon._process.stdin.close()  # type: ignore[union-attr]  # its shell ends and takes all with it
            else:
                kill_daemon(daemon)
            while len(notes) < 2 * time_ + 2 or daemon.ended:
                await asyncio.sleep(0.02)
            assert "has ended" in notes[2 * time_] and "runs again" in notes[2 * time_ + 1]
            assert a.address == address
            for one, other in ((a, b), (b, a)):
                number = 0
                while True:  # what was sent into the broken streams is lost, as the contract allows
                    one.send(other.name, Cancelled(0, time_, number, 0, 0))
                    number += 1
                    with contextlib.suppress(TimeoutError):
                        got = await asyncio.wait_for(other.receive(), 1.0)
                        if isinstance(got, Incoming) and got.message.step == time_:  # type: ignore[attr-defined]
                            break
            assert len(processes(directory)) == 2, "one shell and one daemon"
        await a.close()
        await b.close()
        assert not processes(directory) and not Path(directory).exists()

    run(story)


def test_without_the_program_it_is_said_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hivemind").mkdir()
    (tmp_path / "hivemind" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if not name.startswith("hivemind")})

    async def story() -> None:
        a = make()
        with pytest.raises(ValueError, match=r"no libp2p daemon for this system; network\.transport"):
            await a.start()
        await a.close()

    run(story)


@pytest.mark.parametrize("words", ["nonsense", "Peer ID"])
def test_a_daemon_that_cannot_start_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    program = tmp_path / "p2pd"
    program.write_text(f"#!/bin/sh\necho 'a reason of its own: {words}' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(daemons, "_program", lambda: program)

    async def story() -> None:
        a = make()
        with pytest.raises(ValueError, match=f"cannot start: a reason of its own: {words}"):
            await a.start()
        assert not a._libp2p.daemon.directory.exists()

    run(story)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1"):
            await Daemon(Identity.new(), "192.0.2.1").start()

    run(story)


def test_addresses_of_another_key_and_nonsense_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    me, other = Identity.new(), Identity.new()
    a = make()
    own = written(Daemon(me).peer_id)
    foreign = written(Daemon(other).peer_id)
    for address in (f"/ip4/127.0.0.1/tcp/1/p2p/{foreign}", "127.0.0.1:80", "/ip4/127.0.0.1/tcp/1", f"/ip4/x/p2p/{own}"):
        a.learn(me.name, (address,))
        assert a._libp2p.route(me.name) is None, address
    a.learn(me.name, ("127.0.0.1:80", f"/ip4/127.0.0.1/tcp/1/p2p/{own}"))
    assert a._libp2p.route(me.name) is not None
    asyncio.run(a.close())


def test_a_peer_without_a_port_is_reached_by_those_that_it_has_called() -> None:
    async def story() -> None:
        a, hidden = make(), make(Hidden)
        await a.start()
        await hidden.start()
        assert not hidden.address
        hidden.learn(a.name, a.address)
        a.learn(hidden.name, (f"/p2p/{written(hidden._libp2p.daemon.peer_id)}",))
        arrived = asyncio.create_task(hidden.receive())
        while not arrived.done():  # until it has called
            a.send(hidden.name, Cancelled(0, 1, 2, 0, 0))
            await asyncio.wait([arrived], timeout=0.1)
        item = arrived.result()
        assert isinstance(item, Incoming) and (item.peer, item.message) == (a.name, Cancelled(0, 1, 2, 0, 0))
        await a.close()
        await hidden.close()

    run(story)


@pytest.mark.slow
def test_two_peers_without_a_port_reach_one_another_through_relays() -> None:
    async def story() -> None:
        relays = [make() for _ in range(4)]  # so many that libp2p does not wait minutes for more
        for relay in relays:
            await relay.start()
        ways = tuple(relay.address[0] for relay in relays)
        a, b = make(Hidden, ways), make(Hidden, ways)
        await a.start()
        await b.start()
        name = written(b._libp2p.daemon.peer_id)
        circuits = tuple(f"{way}/p2p-circuit/p2p/{name}" for way in ways)
        reserved = False
        while not reserved:
            for circuit in circuits:
                try:
                    await a._libp2p.daemon.connect(circuit, 60)
                    reserved = True
                except OSError:
                    await asyncio.sleep(0.05)
        a.learn(b.name, circuits)
        data = os.urandom(16 << 10)
        a.send(b.name, BoundaryTensor(0, 1, 2, 1, False), (Blob("uint8", (len(data),), data),))
        got = await take(b)
        assert isinstance(got, Incoming), got
        assert got.peer == a.name and bytes(got.blobs[0].data) == data
        for each in (a, b, *relays):
            await each.close()

    run(story)


# ------------------------------------------------------------------------------------------- bulk beside control, paced


class Pair:
    """A paced stream over a pair of sockets, each end in an engine of its own."""

    def __init__(self) -> None:
        self.engines, self.links, self.failed = (
            (Engine("writes"), Engine("reads")),
            [],
            [asyncio.Event(), asyncio.Event()],
        )
        loop = asyncio.get_running_loop()
        for sock, failed in zip(socket.socketpair(), self.failed, strict=True):
            sock.setblocking(False)
            self.links.append(Connection(sock, lambda _, failed=failed: loop.call_soon_threadsafe(failed.set)))
        self.writer, self.reader = (DaemonStream(link).paced(None) for link in self.links)

    def start(self, end: int, steps: Any) -> None:
        self.links[end].steps = steps
        self.engines[end].start()
        self.engines[end].post(lambda: self.engines[end].adopt(self.links[end]))

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()
        for link in self.links:
            link.sock.close()


def test_paced_bytes_arrive_as_they_were_sent_whatever_their_sizes() -> None:
    async def story() -> None:
        pair, done, loop = Pair(), asyncio.Event(), asyncio.get_running_loop()
        sizes = [1, ACK_BYTES - 1, ACK_BYTES, 5, 3 * FLOOR_BYTES + 7, 0, 12]
        parts, got = [os.urandom(size) for size in sizes], [bytearray(size) for size in reversed(sizes)]

        def write() -> Any:
            for part in parts:
                yield from pair.writer.write(memoryview(part))
            yield WaitFor.WOKEN

        def read() -> Any:
            for part in got:
                yield from pair.reader.read(memoryview(part))
            loop.call_soon_threadsafe(done.set)
            yield WaitFor.WOKEN

        pair.start(0, write())
        pair.start(1, read())
        await asyncio.wait_for(done.wait(), 60)
        assert b"".join(got) == b"".join(parts)
        pair.stop()

    run(story)


def test_no_more_than_the_window_is_on_its_way_to_a_reader_that_does_not_read() -> None:
    async def story() -> None:
        pair = Pair()
        pair.links[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FLOOR_BYTES)
        pair.start(0, pair.writer.write(memoryview(bytes(16 * FLOOR_BYTES))))
        there = pair.links[1].sock
        there.setblocking(True)
        data = await asyncio.to_thread(there.recv, FLOOR_BYTES, socket.MSG_WAITALL)
        assert len(data) == FLOOR_BYTES
        there.settimeout(0.2)  # a bound on how long we look; more would come at once
        with pytest.raises(TimeoutError):
            there.recv(1)
        there.settimeout(60)
        there.send(b"\6")
        assert len(await asyncio.to_thread(there.recv, ACK_BYTES, socket.MSG_WAITALL)) == ACK_BYTES
        pair.stop()

    run(story)


def test_a_reader_that_acknowledges_what_was_not_sent_is_hung_up_on() -> None:
    async def story() -> None:
        pair = Pair()
        pair.links[1].sock.send(b"\6")
        pair.start(0, pair.writer.write(memoryview(bytes(ACK_BYTES))))
        await asyncio.wait_for(pair.failed[0].wait(), 60)
        pair.stop()

    run(story)
