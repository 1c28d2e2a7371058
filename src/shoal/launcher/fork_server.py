"""Peers forked from one process that has imported what they need: imports are paid once on a machine, in time and in memory.

`ForkServer` is the launcher's side: it asks for peers, each with standard streams and variables of its own. `keep` is the keeper, a small
process that the kernel makes the parent of every peer. `_serve` is the server, its child: one thread and no device, or it declines, so
that a fork copies nothing that is half done. The server's death harms no peer. A forked peer is a process as if started anew
(docs/design/2026-11-23-fork-server.md). Linux only: elsewhere a fork after imports is not safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from shoal.launcher.process import die_with, spawn

MESSAGE_BYTES = 1 << 17  # one variable of an environment on Linux is no longer
MODULE = "shoal.launcher.peer"
PR_SET_CHILD_SUBREAPER = 36


class Preload(msgspec.Struct, frozen=True, tag=True):
    """To the server, once: the configuration of the peers to come."""

    config: dict[str, Any]


class Fork(msgspec.Struct, frozen=True, tag=True):
    """To the server, with three descriptors: one peer. Its variables, as far as they differ from the server's."""

    title: str
    variables: dict[str, str | None]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the server. `reason`: why it forks nothing; '' it does."""

    reason: str = ""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """From the server: the peer that was asked for runs; peers are asked for one by one."""

    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """From the keeper, of every process whose parent it was: as subprocess counts, a signal's number is negative."""

    pid: int
    returncode: int


class ServerEnded(msgspec.Struct, frozen=True, tag=True):
    """From the keeper: nothing more is forked. The peers live."""

    returncode: int


_TO_SERVER = msgspec.msgpack.Decoder(Preload | Fork)
_FROM_SERVER = msgspec.msgpack.Decoder(Ready | Forked | Exited | ServerEnded)


def usable(here: int) -> bool:
    """`here`: local peers. One alone gains nothing."""
    return sys.platform == "linux" and here > 1


# ---------------------------------------------------------------------------------------------------------- launcher


class ForkedProcess:
    """A peer, as the launcher holds it: like asyncio's Process, as far as it is used."""

    def __init__(self, pid: int, stdin: asyncio.WriteTransport, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def end(self, returncode: int) -> None:
        self.returncode = returncode
        self.stdin.close()
        self._ended.set()


class Declined(Exception):
    """The server forks nothing: it said why, or has ended."""


class ForkServer:
    """The keeper and the server in one. Peers end with the keeper, by the kernel's hand, and outlive the server."""

    def __init__(self, log: Path, report_bytes: int, warn: Callable[[str], None] = lambda text: None) -> None:
        """`warn`: is called when the server or the keeper ends by itself."""
        self._log, self._report_bytes, self._warn = log, report_bytes, warn
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._variables: dict[str, str] = {}
        self._ready: asyncio.Future[str] | None = None
        self._asked: asyncio.Future[int] | None = None
        self._turn = asyncio.Lock()
        self._closing = False
        self._peers: dict[int, ForkedProcess] = {}
        self._early: dict[int, int] = {}  # return codes of processes that ended while `fork` waits: the peer may be one

    async def start(self, variables: Mapping[str, str], config: dict[str, Any]) -> None:
        """`variables`: of a peer. What differs between peers is not read while modules are imported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._variables = dict(variables)
        with theirs, open(self._log, "ab") as log:
            self._process = await spawn(
                sys.executable,
                "-m",
                MODULE,
                str(os.getpid()),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OPENBLAS_NUM_THREADS": "1", **variables},  # NumPy's would start its threads when it is imported
                process_group=0,
                pass_fds=(theirs.fileno(),),
            )
        self._socket, loop = ours, asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._hear)
        await self._send(Preload(config), ())

    async def fork(self, title: str, variables: Mapping[str, str], errors: IO[bytes]) -> ForkedProcess:
        """Declined: it cannot be had from here."""
        assert self._ready is not None
        async with self._turn:
            if reason := await asyncio.shield(self._ready):
                raise Declined(reason)
            self._early.clear()
            names = self._variables.keys() | variables.keys()
            changed = {name: variables.get(name) for name in names if variables.get(name) != self._variables.get(name)}
            loop = asyncio.get_running_loop()
            self._asked = loop.create_future()
            with contextlib.ExitStack() as ends:
                their_in, our_in = (ends.enter_context(each) for each in _pipe())
                our_out, their_out = (ends.enter_context(each) for each in _pipe())
                await self._send(Fork(title, changed), (their_in.fileno(), their_out.fileno(), errors.fileno()))
                pid = await self._asked
                self._asked = None
                stdin, _ = await loop.connect_write_pipe(
                    asyncio.BaseProtocol, os.fdopen(os.dup(our_in.fileno()), "wb", 0)
                )
                stdout = asyncio.StreamReader(self._report_bytes)
                reading = asyncio.StreamReaderProtocol(stdout)
                await loop.connect_read_pipe(lambda: reading, os.fdopen(os.dup(our_out.fileno()), "rb", 0))
            peer = self._peers[pid] = ForkedProcess(pid, stdin, stdout)
            if self._socket is None:
                peer.end(-signal.SIGKILL)
            elif pid in self._early:
                self._exited(Exited(pid, self._early.pop(pid)))
            return peer

    async def close(self) -> None:
        """Ends both and whatever was forked."""
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._lost()

    async def _send(self, message: Preload | Fork, descriptors: tuple[int, ...]) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors)
        except OSError as error:  # it has ended, or what is to be said is longer than a message may be
            raise Declined(f"{type(error).__name__}: {error}") from None

    def _hear(self) -> None:
        assert self._socket is not None and self._ready is not None
        try:
            data = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        match _FROM_SERVER.decode(data):
            case Ready(reason=reason):
                self._ready.set_result(reason)
            case Forked(pid=pid):
                assert self._asked is not None
                if not self._asked.done():  # else nobody waits any more; its pipes are closed, and it ends
                    self._asked.set_result(pid)
            case Exited() as exited:
                self._exited(exited)
            case ServerEnded(returncode=returncode):
                self._server_ended(f"the server has ended with {returncode}")

    def _exited(self, exited: Exited) -> None:
        peer = self._peers.pop(exited.pid, None)
        if peer is not None:
            peer.end(exited.returncode)
        elif self._asked is not None:  # else what a peer has started and left behind
            self._early[exited.pid] = exited.returncode

    def _server_ended(self, reason: str) -> None:
        """It forks nothing from now on; what it has forked goes on."""
        assert self._ready is not None
        declined = self._ready.done() and self._ready.exception() is None and self._ready.result()
        for waiting in (self._ready, self._asked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(Declined(reason))
                waiting.exception()  # somebody may wait, or nobody
        if not declined:  # else it has said why, and ends as it should
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.set_result(reason)
            if not self._closing:
                self._warn(f"{reason}; peers that join from now on start by themselves, which takes longer")

    def _lost(self) -> None:
        """The keeper has ended, and so have server and peers."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._server_ended("the keeper of forked peers has ended, and they with it")
        for peer in self._peers.values():
            peer.end(-signal.SIGKILL)
        self._peers.clear()


def _pipe() -> Iterator[IO[bytes]]:
    reading, writing = os.pipe()
    yield os.fdopen(reading, "rb", 0)
    yield os.fdopen(writing, "wb", 0)


# ------------------------------------------------------------------------------------------------- keeper and server


def keep(launcher: int, descriptor: int, be_peer: Callable[[int], int]) -> NoReturn:
    """Start the server, then report which peers end, until the launcher ends. `be_peer`: in a forked process, given its parent; returns
    its exit code."""
    die_with(launcher)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    line = socket.socket(fileno=descriptor)
    keeper, reason = os.getpid(), _threads("before")
    server = os.fork()
    if not server:
        _serve(line, keeper, reason, be_peer)
    while True:  # blocks: this process has nothing else to do, and always a child or a launcher that kills it
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # no server and no peer
            signal.pause()
            continue
        code = os.waitstatus_to_exitcode(status)
        line.send(msgspec.msgpack.encode(ServerEnded(code) if pid == server else Exited(pid, code)))


def _serve(line: socket.socket, keeper: int, reason: str, be_peer: Callable[[int], int]) -> NoReturn:
    """Imports, then forks until the keeper ends. `reason`: why it forks nothing; '' it does."""
    code = 1
    try:
        die_with(keeper)
        first = _TO_SERVER.decode(line.recv(MESSAGE_BYTES))
        assert isinstance(first, Preload)
        reason = reason or _preload(first.config)
        line.send(msgspec.msgpack.encode(Ready(reason)))
        while not reason:
            data, descriptors, *_ = socket.recv_fds(line, MESSAGE_BYTES, 3)
            if not data:
                break
            request = _TO_SERVER.decode(data)
            assert isinstance(request, Fork)
            _fork(line, keeper, request, descriptors, be_peer)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is stands in the log, and nothing may return into the keeper
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _preload(config: dict[str, Any]) -> str:
    """Why nothing can be forked after it; ''. What is wrong with the configuration, each peer finds and says by itself."""
    from shoal import build
    from shoal import config as configuration

    gc.disable()
    try:
        build.preload(configuration.from_tree(config))
    except Exception:  # noqa: BLE001 - a user's module, say: whatever it is, the peers meet it too, and each says so
        traceback.print_exc()
    gc.enable()
    gc.collect()
    gc.freeze()  # what is shared stays so: a collection would write into every object
    return _threads("after")


def _threads(when: str) -> str:
    """Why this process may not be forked; '' it may."""
    count = len(os.listdir("/proc/self/task"))
    return f"{count} threads run {when} the imports, and a fork would copy one" if count > 1 else ""


def _fork(
    line: socket.socket, keeper: int, request: Fork, descriptors: list[int], be_peer: Callable[[int], int]
) -> None:
    """One peer, by way of a process in between that ends at once: the keeper is its parent then. The peer begins when that is so."""
    sys.stdout.flush()
    sys.stderr.flush()
    number_in, number_out = os.pipe()
    go_in, go_out = os.pipe()
    between = os.fork()
    if not between:
        try:
            peer = os.fork()
        except OSError:  # no room for another process: said by the number that is missing
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if not peer:
            _begin((line.detach(), number_in, number_out, go_out), go_in, keeper, request, descriptors, be_peer)
        with contextlib.suppress(OSError):
            os.setpgid(peer, peer)  # here too: the launcher may signal the group as soon as it hears of it
        os.write(number_out, str(peer).encode())
        os._exit(0)
    for each in (number_out, go_in, *descriptors):
        os.close(each)
    pid = os.read(number_in, 32)
    os.close(number_in)
    os.waitpid(between, 0)  # after this the keeper is the peer's parent
    if not pid:
        raise OSError("no process could be forked")
    line.send(msgspec.msgpack.encode(Forked(int(pid))))
    os.write(go_out, b"!")
    os.close(go_out)


def _begin(
    others: Sequence[int],
    go: int,
    keeper: int,
    request: Fork,
    descriptors: Sequence[int],
    be_peer: Callable[[int], int],
) -> NoReturn:
    """As the new peer."""
    code = 1
    try:
        for each in others:  # also the other end of `go`, which ends when the server does
            os.close(each)
        os.setpgid(0, 0)
        if os.read(go, 1):  # else the server has died, and nobody knows of this peer
            os.close(go)
            for number, each in enumerate(descriptors):
                os.dup2(each, number)
            for each in descriptors:
                os.close(each)
            _become(request)
            code = be_peer(keeper)
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become(request: Fork) -> None:
    import torch

    for name, value in request.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ["SPT_NOENV"] = "1"  # what others read of this process's variables stays readable
    import setproctitle

    setproctitle.setproctitle(request.title)
    if (threads := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdigit():
        torch.set_num_threads(int(threads))  # libgomp read the server's
