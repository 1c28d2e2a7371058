"""What outsiders can do to a run: steps per second, memory and descriptors of a peer before, during and after floods of many kinds.

    python benchmarks/flood.py [--only NAME ...] [--seconds 15] [a.b=c ...]

A real run of three local peers (configs/quickstart.toml with a quarter of its batch) trains throughout; the victim is p1, which
founded and leads it. Then one flood after the other, of strangers without a pass and of a visitor with an invite who is in no view:

    records    strangers' signed records without a pass, 4.4 MB/s, to the plain directory (gossip), in large and in small calls
    table      the same to the distributed directory (dht), 3 MB/s; this run finds its peers by it
    names      a visitor announces 9,000 names of one key; `look_up_s` is how long another visitor then takes to find the peers
    pings      a visitor who does not read asks for 40 answers of 64 MiB
    heartbeats     a visitor sends Pulses of 2 MB, or the largest there may be, under twenty names of its key, 12 MB/s
    garbage    bytes that are no TLS to the port of the transport, 400 connections a second; `log_Bps` is what the victim writes
    silence    140 connections that never say a word, kept up; `join_s` is how long a visitor's handshake then takes
    loris      140 TLS handshakes of which a byte comes every half second, kept up; `join_s` as for silence
    hellos     whole handshakes with strangers' keys, 40 a second, then bytes, lists in lists, or a visitor's hello played again
    crowd      10,000 connections, opened as fast as it goes and held, and opened again when they are closed; `join_s` as for silence

Only 127.0.0.1 is called, for `--seconds` each. The attackers are a thread of this process that ranks low: they share the machine with
the run, and what they do has its price too. To measure another version of Shoal: `--source DIR` of its checkout.
The last line is one JSON object; value is the lowest rate during a flood as a part of the rate before it, and ought to be near 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from report import Target, parse, report

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
MIB = 1 << 20
SMALL = ("network.host=127.0.0.1", "run.peers=3", "run.steps=1000000", "train.batch=16", "checkpoint.every=0")
FLOODS = ("records", "table", "names", "pings", "heartbeats", "garbage", "silence", "loris", "hellos", "crowd")
CROWD = 10_000
ENOUGH_MIB = 6000.0  # of memory: the machine is not brought down to show that it could be


class Run:
    """A run of real processes, and what can be seen of its victim from outside."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
        self.folder, self.launcher = folder / "runs/flood", launcher
        self.started = False

    def step(self) -> int:
        try:
            return int(json.loads((self.folder / "status.json").read_bytes())["step"])
        except (OSError, ValueError):
            return 0

    def wait(self, step: int) -> None:
        until = time.monotonic() + START_S
        while self.step() < step:
            if self.launcher.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the run does not get on:\n{(self.folder.parents[1] / 'out').read_text()[-3000:]}")
            time.sleep(0.2)

    @property
    def victim(self) -> int:
        peers = json.loads((self.folder / "peers.json").read_bytes())["peers"]
        return int(next(peer["process"]["pid"] for peer in peers if peer["label"] == "p1"))

    def memory_mib(self) -> float:
        try:
            lines = Path(f"/proc/{self.victim}/status").read_text().splitlines()
        except OSError:
            return 0.0
        return round(next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0) / 1024, 1)

    def descriptors(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.victim}/fd"))
        except OSError:
            return 0

    def cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self.victim}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logged_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "logs").glob("p1.log"))

    def invite(self) -> str:
        out = self.folder.parents[1] / "invite"
        words = ["invite", str(ROOT / "configs/quickstart.toml"), "run.name=flood", *SMALL[:1], "--out", str(out)]
        command = [sys.executable, "-m", "shoal.cli.main", *words]
        asked = subprocess.run(command, cwd=out.parent, env=environment(), capture_output=True, text=True, check=False)
        if asked.returncode:
            raise SystemExit(asked.stdout + asked.stderr)
        return out.read_text().strip()

    def seen(self, seconds: float, stop: threading.Event | None = None) -> dict[str, float]:
        """Over so many seconds."""
        began, step, logged = time.monotonic(), self.step(), self.logged_bytes()
        spent_s, mine_s = self.cpu_s(), time.process_time()
        memory, descriptors = [self.memory_mib()], [self.descriptors()]
        while time.monotonic() < began + seconds:
            time.sleep(0.25)
            memory.append(self.memory_mib())
            descriptors.append(self.descriptors())
            if memory[-1] > ENOUGH_MIB and stop is not None:
                stop.set()
        took = time.monotonic() - began
        return {
            "steps_per_s": round((self.step() - step) / took, 3),
            "rss_mib": max(memory),
            "fds": max(descriptors),
            "cpu": round((self.cpu_s() - spent_s) / took, 2),
            "attackers_cpu": round((time.process_time() - mine_s) / took, 2),
            "log_Bps": round((self.logged_bytes() - logged) / took),
        }


@contextmanager
def training(words: list[str]) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        config = ROOT / "configs/quickstart.toml"
        command = [sys.executable, "-m", "shoal.cli.main", "run", str(config), *SMALL, *words, "run.name=flood"]
        with open(Path(folder) / "out", "wb") as out:
            launcher = subprocess.Popen(command, cwd=folder, env=environment(), stdout=out, stderr=out)
        try:
            yield Run(Path(folder), launcher)
        finally:
            launcher.send_signal(signal.SIGINT)
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


# --------------------------------------------------------------------------------------------------------- the visitors


class Visitor:
    """Somebody with an invite who takes no part: a key, a pass, and the run's records."""

    def __init__(self, text: str) -> None:
        from shoal.transport.identity.identity import Identity
        from shoal.transport.identity.invite import read_invite

        self.invite = read_invite(text, time.time())
        self.identity = Identity.new()
        self.membership = self.invite.membership(self.identity)
        self.records: list[Any] = []

    def named(self, incarnation: str) -> Any:
        from shoal.transport.identity.identity import Identity

        identity = Identity(self.identity.key, incarnation)
        self.invite.membership(identity)  # where names say by which invite they came, this one does from here on
        return identity

    def gossip(self, port: int = 0, learn: Callable[[Any], None] = lambda record: None, identity: Any = None) -> Any:
        from shoal.transport.directory.directory import Gossip
        from shoal.transport.directory.records import PeerRecord

        identity = identity or self.identity
        own = PeerRecord(self.invite.run, identity.name, "127.0.0.1", port)
        return Gossip(identity, self.membership, own, self.invite.addresses, learn)

    async def find(self, port: int = 0, wanted: int = 3) -> float:
        """Until the run's peers are found by the plain directory; seconds."""
        began = time.monotonic()
        directory = self.gossip(port)
        await directory.start()
        try:
            await directory.announce()
            while time.monotonic() < began + 30:
                found = [one for one in await directory.peers() if not one.peer.startswith(self.identity.key_id)]
                self.records = [one for one in found if one.port]
                if len(self.records) >= wanted:
                    break
                await asyncio.sleep(0.2)
        finally:
            await directory.close()
        return time.monotonic() - began

    def victim(self) -> Any:
        """The record of whoever founded the run: newcomers call it first."""
        port = int(self.invite.addresses[0].rpartition(":")[2])
        return next((one for one in self.records if one.directory_port == port), self.records[0])

    def knock(self, record: Any) -> float:
        """Seconds that a connection, a handshake and both hellos take; 60 when there was no answer."""
        from shoal.transport.identity.identity import Identity, client_context
        from shoal.transport.streams.handshake import encode_hello

        identity = Identity.new()
        membership = self.invite.membership(identity)
        hello = encode_hello(identity.name, record.peer, "control", membership)
        began = time.monotonic()
        while time.monotonic() < began + 60:  # as a peer does: again, until it gets through
            try:
                with (
                    socket.create_connection((record.host, record.port), 5) as plain,
                    client_context(identity).wrap_socket(plain) as sock,
                ):
                    sock.sendall(struct.pack(">H", len(hello)) + hello)
                    if sock.recv(2):
                        return time.monotonic() - began
            except OSError:
                time.sleep(0.1)
        return 60.0


def forged(run: str, count: int) -> list[bytes]:
    """Records of strangers: each well made and signed by its own key, under a pass that nobody of the run has signed."""
    from shoal.transport.directory.records import PeerRecord, seal
    from shoal.transport.identity.identity import Identity
    from shoal.transport.identity.invite import Authority, Membership, read_invite

    stolen = read_invite(Authority.new().invite((), time.time() + 3600), 0.0)
    found = []
    for number in range(count):
        identity = Identity.new()
        proof = stolen.membership(identity).proof
        if number == 0:  # a pass of the run's own authority in all but its signature
            template = proof
        record = PeerRecord(run, identity.name, "127.0.0.1", 9, expires_s=time.time() + 80)
        found.append(seal(identity, Membership(run, _renamed(template, run, identity)), record))
    return found


def _renamed(proof: bytes, run: str, identity: Any) -> bytes:
    """The authority's public key and the member's, which anybody has seen, put into a pass."""
    import msgspec

    try:
        grant, _, signature = msgspec.msgpack.decode(proof)
        grant[0] = AUTHORITY[run]
    except (ValueError, TypeError, IndexError):  # passes of this version have another form
        return proof
    return msgspec.msgpack.encode([grant, identity.public, signature])


AUTHORITY: dict[str, bytes] = {}


# ----------------------------------------------------------------------------------------------------------- the floods


class Flood:
    def __init__(self, run: Run, text: str, seconds: float) -> None:
        self.run, self.text, self.seconds = run, text, seconds
        self.stop, self.begun = threading.Event(), threading.Event()
        self.extra: dict[str, float] = {}
        self.visitor = Visitor(text)
        AUTHORITY[self.visitor.invite.run] = self.visitor.invite.grant.authority

    def prepare(self, name: str) -> Callable[[], None]:
        if self.visitor.invite.addresses[0].startswith("/"):
            assert name == "table"
            return self.table()
        asyncio.run(self.visitor.find())
        made: Callable[[], None] = getattr(self, name)()
        return made

    def until(self) -> bool:
        self.begun.set()
        return not self.stop.is_set()

    def records(self) -> Callable[[], None]:
        import msgspec

        host, _, port = self.visitor.invite.addresses[0].rpartition(":")
        made = forged(self.visitor.invite.run, 9000)
        batches = [made[at : at + 4500] for at in (0, 4500)]
        large = [_framed(msgspec.msgpack.encode(batch)) for batch in batches]
        small = [_framed(msgspec.msgpack.encode(made[at : at + 4])) for at in range(0, 9000, 4)]

        def attack() -> None:
            """Half of the time by large calls, which is all that older versions need; half by those that any version reads."""
            turn = 0
            while self.until():
                began = time.monotonic()
                for words in large if turn % 2 else small[turn * 100 % 2250 :][:200]:  # new ones every time
                    with suppress(OSError), socket.create_connection((host, int(port)), 1) as sock:
                        sock.sendall(words)
                turn += 1
                time.sleep(max(0.0, began + 1.0 - time.monotonic()))

        return attack

    def table(self) -> Callable[[], None]:
        from shoal.transport.daemon import Daemon, multiaddr, parsed_address
        from shoal.transport.hivemind_parts import hivemind, load
        from shoal.transport.identity.identity import Identity

        load()
        run = self.visitor.invite.run
        import msgspec

        made = forged(run, 3000)
        names = [msgspec.msgpack.decode(msgspec.msgpack.decode(one)[0])[1] for one in made]
        ends = [msgspec.msgpack.decode(msgspec.msgpack.decode(one)[0])[5] for one in made]

        async def story() -> None:
            daemon = Daemon(Identity.new())
            await daemon.start()
            address = self.visitor.invite.addresses[0]
            await daemon.connect(address, 10)
            p2p = await hivemind("p2p").P2P.replicate(multiaddr(f"/unix{daemon.control}"))
            node = await hivemind("dht.node").DHTNode.create(p2p=p2p, initial_peers=[])
            victim = hivemind("p2p").PeerID(parsed_address(address)[0])
            key = hivemind("dht.routing").DHTID.generate(f"shoal/{run}")
            packed = [node.protocol.serializer.dumps(one) for one in made]
            at = refused = 0
            waiting: set[Any] = set()

            def heard(call: Any) -> None:
                nonlocal refused
                refused += not call.cancelled() and call.result() is not None
                self.extra["calls_answered"] = refused

            while self.until():
                ends_at = at + 500
                pieces = slice(at, ends_at)
                call = node.protocol.call_store(victim, [key] * 500, packed[pieces], ends[pieces], names[pieces])
                task = asyncio.ensure_future(call)
                task.add_done_callback(heard)
                waiting.add(task)
                waiting = {one for one in waiting if not one.done()}
                at = ends_at % 3000
                await asyncio.sleep(0.08)
            await asyncio.gather(*waiting, return_exceptions=True)
            await p2p.shutdown()
            await daemon.close()

        return lambda: asyncio.run(story())

    def names(self) -> Callable[[], None]:
        import msgspec

        from shoal.transport.directory.records import PeerRecord, seal

        host, _, port = self.visitor.invite.addresses[0].rpartition(":")
        made = []
        for number in range(9000):
            identity = self.visitor.named(f"{number:x}")
            record = PeerRecord(self.visitor.invite.run, identity.name, "127.0.0.1", 9, 9, expires_s=time.time() + 500)
            made.append(seal(identity, self.visitor.membership, record))
        small = [_framed(msgspec.msgpack.encode(made[at : at + 4])) for at in range(0, 9000, 4)]
        large = [_framed(msgspec.msgpack.encode(made[at : at + 4500])) for at in (0, 4500)]

        def attack() -> None:
            """The same 9,000 names again and again."""
            turn = 0
            while self.until():
                began = time.monotonic()
                for words in large if turn == 0 else small[turn * 200 % 2200 :][:200]:
                    with suppress(OSError), socket.create_connection((host, int(port)), 1) as sock:
                        sock.sendall(words)
                if turn in (3, 6):
                    visitor = Visitor(self.text)
                    self.extra["look_up_s"] = round(asyncio.run(visitor.find()), 2)
                    self.extra["found"] = len(visitor.records)
                turn += 1
                time.sleep(max(0.0, began + 1.0 - time.monotonic()))

        return attack

    def pings(self) -> Callable[[], None]:
        from shoal.core.messages import Ping

        return self._by_transport(
            1, lambda send, turn: [send(Ping(turn * 40 + number, 64 * MIB)) for number in range(40)], every_s=5.0
        )

    def heartbeats(self) -> Callable[[], None]:
        import msgspec

        from shoal.core.messages import Booking, Heartbeat
        from shoal.transport import wire

        most = getattr(wire, "LARGE", {}).get("Heartbeat", 2 << 20)  # older versions allow 4 MiB
        one = len(msgspec.msgpack.encode(Booking(100_000, 0.5)))
        books = tuple(Booking(100_000 + index, 0.5) for index in range(most // one - 100))
        heartbeat = Heartbeat(1, 1, 1, True, books)
        return self._by_transport(20, lambda send, turn: send(heartbeat), every_s=most / 12e6)

    def _by_transport(self, names: int, act: Callable[..., Any], every_s: float) -> Callable[[], None]:
        """Send to the victim as a visitor, under so many names of one key, each with a place of its own; and read nothing."""
        from shoal.transport.streams import receive_queue
        from shoal.transport.tls import TlsTransport

        victim = self.visitor.victim()

        async def story() -> None:
            receive_queue.BULK_LIMIT_BYTES = MIB
            transports = []
            for number in range(names):
                identity = self.visitor.named(f"{number + 1:x}")
                transport = TlsTransport(identity, self.visitor.membership)
                await transport.start()
                directory = self.visitor.gossip(transport.address[1], identity=identity)
                await directory.start()
                if names == 1:
                    await directory.announce()  # the victim learns where to send its answers
                transport.learn(victim.peer, (victim.host, victim.port))
                transports.append((transport, directory))
            turn = 0
            while self.until():
                transport, _ = transports[turn % names]
                act(lambda message, transport=transport: transport.send(victim.peer, message), turn)
                turn += 1
                await asyncio.sleep(every_s)
            for transport, directory in transports:
                await directory.close()
                await transport.close()

        return lambda: asyncio.run(story())

    def garbage(self) -> Callable[[], None]:
        victim = self.visitor.victim()
        words = os.urandom(600)

        def attack() -> None:
            while self.until():
                began = time.monotonic()
                for _ in range(100):
                    with suppress(OSError), socket.create_connection((victim.host, victim.port), 1) as sock:
                        sock.sendall(words)
                time.sleep(max(0.0, began + 0.25 - time.monotonic()))

        return attack

    def silence(self) -> Callable[[], None]:
        return self._held(140)

    def loris(self) -> Callable[[], None]:
        return self._held(140, _client_hello())

    def crowd(self) -> Callable[[], None]:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return self._held(min(CROWD, most - 500))

    def _held(self, count: int, words: bytes = b"") -> Callable[[], None]:
        """So many connections, opened again when they are closed. `words`: said on each, a byte every half second."""
        victim = self.visitor.victim()
        self.extra["join_before_s"] = round(statistics.median(self.visitor.knock(victim) for _ in range(5)), 3)

        def attack() -> None:
            held: list[tuple[socket.socket, float]] = []
            begun = time.monotonic()
            opened = most = 0
            while self.until():
                held = [(sock, since) for sock, since in held if not _hung_up(sock)]
                while len(held) < count and self.until():
                    try:
                        held.append((socket.create_connection((victim.host, victim.port), 1), time.monotonic()))
                    except OSError:
                        break
                    opened += 1
                    if opened % 200 == 0:  # others have turns too
                        break
                most = max(most, len(held))
                for sock, since in held if words else ():
                    at = int((time.monotonic() - since) / 0.5)
                    with suppress(OSError):
                        sock.send(words[at : at + 1])
                if time.monotonic() > begun + 2 and "join_s" not in self.extra:
                    took = [self.visitor.knock(victim) for _ in range(3)]
                    self.extra["join_s"] = round(statistics.median(took), 3)
                time.sleep(0.2)
            self.extra["opened"], self.extra["held_at_most"] = opened, most
            for sock, _ in held:
                sock.close()

        return attack

    def hellos(self) -> Callable[[], None]:
        from shoal.transport.identity.identity import Identity, client_context
        from shoal.transport.streams import handshake

        victim = self.visitor.victim()
        valid = handshake.encode_hello(self.visitor.identity.name, victim.peer, "control", self.visitor.membership)
        false = [os.urandom(300), b"\x91" * 4000, valid, valid[:-1], b""]
        contexts = [client_context(Identity.new()) for _ in range(8)]

        def attack() -> None:
            tried = refused = admitted = 0
            while self.until():
                began = time.monotonic()
                for _ in range(10):
                    tried += 1
                    hello = false[tried % len(false)]
                    with suppress(OSError), socket.create_connection((victim.host, victim.port), 1) as plain:
                        plain.settimeout(1)
                        with contexts[tried % 8].wrap_socket(plain) as sock:
                            sock.sendall(struct.pack(">H", len(hello)) + hello)
                            if len(size := sock.recv(2)) == 2:
                                said = handshake._decoder.decode(sock.recv(struct.unpack(">H", size)[0]))
                                admitted += isinstance(said, handshake.Hello)
                                refused += isinstance(said, handshake.Rejection)
                self.extra.update(hellos=tried, refused=refused, admitted=admitted)
                time.sleep(max(0.0, began + 0.25 - time.monotonic()))

        return attack


def _client_hello() -> bytes:
    """The first bytes of a handshake."""
    from shoal.transport.identity.identity import Identity, client_context

    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        client_context(Identity.new()).wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def _hung_up(sock: socket.socket) -> bool:
    try:
        sock.setblocking(False)
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _framed(words: bytes) -> bytes:
    return len(words).to_bytes(4, "big") + words


def measure(run: Run, name: str, seconds: float) -> dict[str, Any]:
    flood = Flood(run, run.invite(), seconds)
    attack = flood.prepare(name)
    before = run.seen(seconds)

    def rank_low() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            attack()
        except BaseException as error:
            failures.append(error)
            raise

    failures: list[BaseException] = []
    thread = threading.Thread(target=rank_low, daemon=True)
    thread.start()
    if not flood.begun.wait(120):
        raise SystemExit(f"the attackers of '{name}' did not get ready")
    time.sleep(2.0)
    during = run.seen(seconds, flood.stop)
    flood.stop.set()
    thread.join(120)
    if failures:
        raise SystemExit(f"the attackers of '{name}' failed: {failures[0]!r}")
    after = run.seen(seconds)
    found = {"before": before, "during": during, "after": after, **flood.extra}
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--only", action="append", choices=FLOODS)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout of Shoal")
    asked = parse(parser)
    source = str(asked.source.resolve() / "src")
    os.environ["PYTHONPATH"] = source
    sys.path.insert(0, source)
    names = asked.only or list(FLOODS)
    found: dict[str, Any] = {}
    for discovery in ("gossip", "dht"):
        wanted = [name for name in names if (name == "table") == (discovery == "dht")]
        for name in wanted:  # a run for each: what one leaves behind does not count for the next
            with training([*asked.settings, f"network.discovery={discovery}"]) as run:
                run.wait(5)
                found[name] = measure(run, name, asked.seconds)
    kept = [one["during"]["steps_per_s"] / (one["before"]["steps_per_s"] or 1.0) for one in found.values()]
    setting = {"floods": found, "source": asked.source.name, "seconds": asked.seconds, "settings": asked.settings}
    report(
        "flood",
        min(kept, default=0.0),
        "of the rate before, least of the floods",
        Target(None, "higher"),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
