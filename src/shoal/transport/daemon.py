"""This peer's libp2p daemon: the program p2pd that comes with hivemind, started, asked, and never left behind.

For libp2p.py (streams of bytes to peers that have no open port) and dht.py (the distributed directory), which may share
one. Its libp2p identity is the peer's own ed25519 key, so that a libp2p peer id holds the very key that the peer's name is
the hash of.

The daemon must die with this process, however that ends. Its parent is a shell that waits for the end of a pipe which only
this process holds open; then it kills the daemon and removes its sockets. Should that shell be killed too, the daemon
misses the connection we keep to it and ends itself.

A daemon that ends by itself is started again, after pauses that grow, under the same key and port and in the same directory. Whoever
uses it hears of that (`revived`) and tells the new one what the old one knew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shoal.transport.addresses import hosts, is_loopback
from shoal.transport.hivemind_parts import hivemind, load
from shoal.transport.identity.identity import PUBLIC_BYTES, Identity
from shoal.transport.identity.text import ED25519
from shoal.transport.tls import resolved

log = logging.getLogger(__name__)

START_S = 30.0  # to begin listening; 0.2 when the machine is not busy
END_S = 5.0
IDLE_S = 10.0  # without a connection from us, and it ends itself
MAX_REPLY_BYTES = 1 << 20
MAX_LINE_BYTES = 4096
# Over one relayed connection, then it is made anew. Holds once the relay knows that it is reached from everywhere; before that
# p2pd relays 128 KiB at a time whatever its settings are (measured).
RELAYED_BYTES = (1 << 32) - 1
_P2P = bytes.fromhex("a503")  # the multiaddr code before a peer id, 421 as a varint
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0  # before it is started again; doubled each time
STEADY_S = 60.0  # one that has run for so long has nothing to do with the end of the one before
# A word on its input instead of the end: another daemon runs in that directory by now.
_WATCH = '"$@" & exec >/dev/null 2>&1; read -r word; kill -KILL $!; wait; [ -n "$word" ] || rm -rf "$0"'
_NEEDED = "network.transport = 'libp2p' and network.discovery = 'dht' need it; 'tls' and 'gossip' do not"


class Endpoint:
    """Where a daemon listens: as configured, then as it turned out."""

    def __init__(self, host: str, port: int, relays: tuple[str, ...]) -> None:
        self.host, self.port, self.relays = host, port, relays
        self.family: int = socket.AF_INET

    def arguments(self) -> list[str]:
        local = ipaddress.ip_address(self.host).is_loopback
        kind = "ip6" if ":" in self.host else "ip4"
        arguments = [
            f"-hostAddrs=/{kind}/{self.host}/tcp/{self.port}",
            f"-natPortMap={int(not local)}",
            f"-autonat={int(not local)}",
        ]
        if self.relays:
            arguments += ["-autoRelay", f"-trustedRelays={','.join(self.relays)}"]
        return arguments


class DaemonOutput:
    """What a daemon prints, line by line."""

    def __init__(self) -> None:
        self.last_line = ""
        self.listening: asyncio.Future[bool] | None = None  # True when it listens, False when it ends before
        self._partial_line = b""

    def begin(self) -> asyncio.Future[bool]:
        """A daemon was started."""
        self._partial_line = b""
        self.listening = asyncio.get_running_loop().create_future()
        return self.listening

    def feed(self, data: bytes) -> None:
        """b"": its end."""
        assert self.listening is not None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[:MAX_LINE_BYTES]
        for line in [*lines, *([self._partial_line] if self._partial_line and not data else [])]:
            self.last_line = line.decode(errors="replace").strip()
            log.debug("p2pd: %s", self.last_line)
            if line.startswith(b"Peer ID:") and not self.listening.done():
                self.listening.set_result(True)


class Daemon:
    """Used by several: each starts and closes it, and it runs in between."""

    def __init__(
        self,
        identity: Identity,
        host: str = "127.0.0.1",
        port: int = 0,
        relays: tuple[str, ...] = (),
        tell: Callable[[str], None] = log.error,
    ) -> None:
        """`relays`: addresses of peers through which others may reach this one when it has no open port. `tell` hears when the daemon
        ends and when it runs again."""
        self.peer_id = ED25519 + identity.public
        self._identity = identity
        self._endpoint = Endpoint(host, port, relays)
        self.ended = False  # by itself, and it does not run again yet
        self.revived: list[Callable[[], Awaitable[None]]] = []  # called each time that it runs again
        self._tell = tell
        self._pause_s: float = FIRST_PAUSE_S
        self._began_s = 0.0
        self._reviving: asyncio.Task[None] | None = None
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._kept: socket.socket | None = None
        self._addresses: tuple[str, ...] = ()
        self._output = DaemonOutput()

    @property
    def control(self) -> str:
        """Path of the socket that takes requests."""
        return str(self.directory / "control")

    @property
    def directory(self) -> Path:
        """For sockets; nobody else may look into it, and it vanishes with the daemon."""
        assert self._directory is not None, "not started"
        return self._directory

    @property
    def addresses(self) -> tuple[str, ...]:
        """As libp2p multiaddrs that end in the peer id; newest known."""
        return self._addresses

    async def start(self) -> None:
        """ValueError when it cannot listen, or there is no such program for this system."""
        self._users += 1
        if self._users == 1:
            try:
                await self._start()
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        if not self._users:
            return
        self._users -= 1
        if self._users:
            return
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        if self._kept is not None:
            self._kept.close()
        if self._process is not None:
            await self._end(self._process)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def restart(self) -> None:
        """This machine has another address: libp2p would wait half a minute for answers to the old one."""
        if self._process is not None and self._users and self._process.poll() is None:
            self._output.last_line = "this machine's address has changed"
            os.killpg(self._process.pid, 9)

    async def ask(self, request: Any, wait_s: float) -> Any:
        """OSError (TimeoutError too) when the daemon refuses, with its words, or does not answer."""
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_unix_connection(self.control)
            try:
                writer.write(framed(request.SerializeToString()))
                length = shift = 0
                while True:
                    byte = (await reader.readexactly(1))[0]
                    length |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                    check_length(length)
                check_length(length)
                return parsed(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                raise ConnectionError("the libp2p daemon has ended") from None
            finally:
                writer.close()

    async def refresh(self) -> None:
        """Ask for the addresses again: those through relays come later than the others."""
        pb = protobuf()
        reply = await self.ask(pb.Request(type=pb.Request.IDENTIFY), END_S)
        assert reply.identify.id == self.peer_id
        known = [
            f"{multiaddr(raw)}/p2p/{written(self.peer_id)}" for raw in reply.identify.addrs if _fit(str(multiaddr(raw)))
        ]
        outside = [address for address in known if not any(map(is_loopback, hosts((address,))))]
        self._addresses = tuple(outside or known)

    async def connect(self, address: str, wait_s: float) -> None:
        """OSError says why not; ValueError when that is no address of a peer."""
        pb = protobuf()
        peer_id, route = parsed_address(address)
        ask = pb.ConnectRequest(peer=peer_id, addrs=[route] if route else [], timeout=max(1, int(wait_s)))
        await self.ask(pb.Request(type=pb.Request.CONNECT, connect=ask), wait_s)

    # ------------------------------------------------------------------------------------------------------- private

    async def _start(self) -> None:
        program = _program()
        load()
        endpoint = self._endpoint
        endpoint.family, (endpoint.host, _) = await resolved(endpoint.host, endpoint.port)
        _check_free(self._endpoint.family, self._endpoint.host, self._endpoint.port)
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-"))  # mode 700
        self._run(program)
        await self._begin()
        endpoint.port = endpoint.port or _port_of(self._addresses)  # others know it by now

    async def _begin(self) -> None:
        await self._wait()
        self._keep()
        await self.refresh()
        self._began_s = time.monotonic()

    async def _revive(self) -> None:
        while self.ended:
            if time.monotonic() - self._began_s > STEADY_S:
                self._pause_s = FIRST_PAUSE_S
            self._tell(
                f"the libp2p daemon of this peer has ended, nobody is reached through it ({self._output.last_line or 'without a word'});"
                f" it is started again in {self._pause_s:g} s"
            )
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
            try:
                await self._start_again()
            except (OSError, ValueError) as error:
                self._output.last_line = str(error)
                continue
            self.ended = False
            self._tell("the libp2p daemon of this peer runs again")
            for call in self.revived:
                try:
                    await call()
                except (OSError, EOFError, ValueError) as error:  # it has ended once more; or it is asked again later
                    log.warning("the libp2p daemon is not told all that the one before it knew: %s", error)

    async def _start_again(self) -> None:
        before = self._process
        assert before is not None
        if self._kept is not None:
            self._kept.close()
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("control", "key"):
            (self.directory / name).unlink(missing_ok=True)
        try:
            _check_free(self._endpoint.family, self._endpoint.host, self._endpoint.port)
        except ValueError:  # somebody has taken it meanwhile
            self._endpoint.port = 0
        self._run(_program())
        with contextlib.suppress(OSError, ValueError):  # its shell may have ended too
            assert before.stdin is not None
            os.write(before.stdin.fileno(), b"replaced\n")
        await self._end(before)
        await self._begin()

    def _run(self, program: Path) -> None:
        key = self.directory / "key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_key_file(self._identity))
        environment = dict(os.environ)
        environment.setdefault("GOLOG_LOG_LEVEL", "error")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, str(self.directory), str(program), *self._arguments(key)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a kill of this process's group leaves the shell the time to clean up
        )

    def _arguments(self, key: Path) -> list[str]:
        return [
            f"-id={key}",
            f"-listen=/unix{self.control}",
            "-dhtServer",
            "-connManager",
            f"-idleTimeout={IDLE_S:.0f}s",
            f"-relayDataLimit={RELAYED_BYTES}",
            "-relayTimeLimit=8760h",
            *self._endpoint.arguments(),
        ]

    async def _wait(self) -> None:
        """Until it listens; its own words when it does not."""
        assert self._process is not None and self._process.stdout is not None
        loop, listening = asyncio.get_running_loop(), self._output.begin()
        pipe = self._process.stdout.fileno()
        os.set_blocking(pipe, False)
        loop.add_reader(pipe, self._hear)
        try:
            async with asyncio.timeout(START_S):
                listens = await listening
        except TimeoutError:
            raise ValueError(
                f"the libp2p daemon does not begin to listen within {START_S:g} s: {self._output.last_line}"
            ) from None
        (self.directory / "key").unlink()
        if not listens:
            raise ValueError(
                f"the libp2p daemon cannot start: {self._output.last_line or 'it ended without a word'}; {_NEEDED}"
            )

    def _hear(self) -> None:
        """Read what it prints. In the loop, as nothing else empties the pipe."""
        assert self._process is not None and self._process.stdout is not None and self._output.listening is not None
        try:
            data = os.read(self._process.stdout.fileno(), MAX_LINE_BYTES)
        except BlockingIOError:
            return
        self._output.feed(data)
        if data:
            return
        asyncio.get_running_loop().remove_reader(self._process.stdout.fileno())
        if not self._output.listening.done():
            self._output.listening.set_result(False)
        elif self._users:
            self.ended = True
            if self._reviving is None or self._reviving.done():
                self._reviving = asyncio.get_running_loop().create_task(self._revive())

    def _keep(self) -> None:
        """The connection without which it ends itself."""
        pb = protobuf()
        self._kept = socket.socket(socket.AF_UNIX)
        self._kept.settimeout(END_S)
        self._kept.connect(self.control)
        self._kept.sendall(framed(pb.Request(type=pb.Request.PERSISTENT_CONN_UPGRADE).SerializeToString()))

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """The shell sees the end of its input, kills the daemon and goes."""
        assert process.stdin is not None and process.stdout is not None
        asyncio.get_running_loop().remove_reader(process.stdout.fileno())
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while process.poll() is None:
                    await asyncio.sleep(0.005)
        if process.poll() is None:
            log.error("the libp2p daemon is not over within %g s; its shell is killed", END_S)
            os.killpg(process.pid, 9)
            process.wait()
        process.stdout.close()


# ------------------------------------------------------------------------------------------------------ the wire format


def protobuf() -> Any:
    """The daemon's messages."""
    return hivemind("proto.p2pd_pb2")


def framed(request: bytes) -> bytes:
    """Behind its length, seven bits to a byte, the lowest first."""
    length, rest = b"", len(request)
    while rest > 127:
        length += bytes([rest & 127 | 128])
        rest >>= 7
    return length + bytes([rest]) + request


def check_length(length: int) -> None:
    if length > MAX_REPLY_BYTES:
        raise ConnectionError(f"the libp2p daemon announces {length} bytes")


def parsed(reply: bytes | bytearray) -> Any:
    pb = protobuf()
    response = pb.Response.FromString(bytes(reply))
    if response.type == pb.Response.ERROR:
        raise ConnectionError(response.error.msg[:500])
    return response


def public_key(peer_id: bytes) -> bytes:
    """The ed25519 key that a libp2p peer id holds. ValueError: it is of another kind."""
    if len(peer_id) != len(ED25519) + PUBLIC_BYTES or not peer_id.startswith(ED25519):
        raise ValueError("its libp2p identity is not an ed25519 key")
    return peer_id[len(ED25519) :]


def written(peer_id: bytes) -> str:
    return str(hivemind("p2p").PeerID(peer_id).to_base58())


def multiaddr(address: str | bytes) -> Any:
    """ValueError when it is none."""
    return hivemind("utils.multiaddr").Multiaddr(address)


def parsed_address(address: str) -> tuple[bytes, bytes]:
    """A peer id, and the route to it, which may be empty: then libp2p looks for one. ValueError when it is no such address."""
    route, p2p, name = address.rpartition("/p2p/")
    try:
        if not p2p:
            raise ValueError("it does not end in /p2p/ and a peer id")
        multiaddr(address)
        peer_id = hivemind("p2p").PeerID.from_base58(name).to_bytes()
        return peer_id, _packed(route)
    except ValueError as error:
        raise ValueError(
            f"'{address[:300]}' is no libp2p address ({error}); expected /ip4/HOST/tcp/PORT/p2p/ID, as `shoal invite` writes it"
        ) from None


def _packed(route: str) -> bytes:
    """A multiaddr as bytes. hivemind's own packs the peer ids of relays in a form that the daemon does not take."""
    start, *relays = route.split("/p2p/")
    packed = bytes(multiaddr(start).to_bytes()) if start else b""
    for each in relays:
        name, slash, rest = each.partition("/")
        relay_id = hivemind("p2p").PeerID.from_base58(name).to_bytes()
        packed += _P2P + bytes([len(relay_id)]) + relay_id + (multiaddr(slash + rest).to_bytes() if slash else b"")
    return packed


def _port_of(addresses: tuple[str, ...]) -> int:
    """That it listens on; 0 when it does not."""
    matches = (re.search(r"/tcp/(\d+)/p2p/", address) for address in addresses if "/p2p-circuit" not in address)
    return next((int(match[1]) for match in matches if match), 0)


def _fit(address: str) -> bool:
    """Not those that libp2p invents for talking to itself."""
    return "/ip" in address or "/dns" in address or "/p2p-circuit" in address


def _key_file(identity: Identity) -> bytes:
    seed = identity.key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    keys = hivemind("proto.crypto_pb2")
    return bytes(keys.PrivateKey(key_type=keys.KeyType.Ed25519, data=seed + identity.public).SerializeToString())


def _check_free(family: int, host: str, port: int) -> None:
    """libp2p would share a port with another of its kind, and each would get some of the other's connections."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port}: taken on {host}; set network.port to another, or 0 for any") from None
            raise ValueError(f"cannot listen on {host}:{port}: {error}; check network.host and network.port") from None


def _program() -> Path:
    package = importlib.util.find_spec("hivemind")
    if package is None or package.origin is None:
        raise ValueError(f"hivemind is not installed, whose libp2p daemon is needed ({_NEEDED}): pip install hivemind")
    program = Path(package.origin).parent / "hivemind_cli" / "p2pd"
    if not os.access(program, os.X_OK):
        raise ValueError(f"{program}: hivemind has no libp2p daemon for this system; {_NEEDED}")
    return program
