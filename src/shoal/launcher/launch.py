"""Local peers as processes: started, read from, killed, and never left behind. For `shoal run`.

A peer reads who it is from its standard input (launcher/peer.py), writes reports to its standard output and words for people to a log
file. Each leads a process group of its own, so that a Ctrl-C reaches the launcher alone, and a kill takes a peer with all
it started. A peer ends when its launcher does: the kernel is asked to see to it, and the closed pipe tells it too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import msgspec

from shoal.config import Device
from shoal.escaping import escaped_lines
from shoal.launcher import devices
from shoal.launcher.ahead import Ahead
from shoal.launcher.fork_server import MODULE, Declined, ForkedProcess, ForkServer, usable
from shoal.launcher.process import identify, spawn
from shoal.runtime.records.report import AnyLine, Ended, Listening, decode, replace

MAX_REPORT_BYTES = 64 << 20  # one report line: a view of many thousand microbatches
LOG_BYTES = 4 << 20  # of a peer's log, and once more of what was in it before
LOGS = 64  # of peers that have ended; older ones are removed
GOODBYE_S = 5.0  # from SIGTERM to SIGKILL


class PeerSpec(msgspec.Struct, frozen=True):
    """First line on a peer's standard input: what it is to be. Known before anybody listens, so that it can get ready."""

    config: dict[str, Any]
    directory: str  # of the run
    label: str
    first: bool
    first_step: int = 0
    run: str | None = None  # id of the key that founded it
    number: int = 0  # among the local peers
    here: int = 1  # local peers
    key: str = ""  # file of the key that a run's first peer has in every session, so that invites go on leading to it
    log: str = ""  # where its words for people go from now on; '': where they went so far


class Start(msgspec.Struct, frozen=True):
    """Second line: the invite to the run, with the addresses of peers that listen by now, and the list of passes. Never on a command
    line, which every user of the machine can read."""

    invite: str
    passes: bytes = b""


class News(msgspec.Struct, frozen=True):
    """Any further line: a newer list of passes; or the run is about to be ended, and is to be saved."""

    passes: bytes = b""
    save: bool = False


class PeerProcess:
    """One peer process."""

    def __init__(self, label: str, process: asyncio.subprocess.Process | ForkedProcess, log: Path) -> None:
        self.label, self.process, self.log = label, process, log
        self.identity = identify(process.pid)
        self.listening = asyncio.Event()  # or ended without listening
        self.addresses: tuple[str, ...] = ()
        self.ended: Ended | None = None
        self.killed = False
        self.introduced = False  # it was sent its invite, and accepts News

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def write(self, line: PeerSpec | Start | News) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(line) + b"\n")

    def kill(self) -> None:
        """SIGKILL to the peer and all that it started."""
        self.killed = True
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has ended by itself
            return

    def trim_log(self) -> None:
        """Begin its log anew when it is long; the end of what was there is kept beside it. The process appends, so it goes on at the
        beginning. OSError: no room for the copy; the log is begun anew all the same."""
        if self.log.stat().st_size <= LOG_BYTES:
            return
        try:
            with open(self.log, "rb") as file:
                file.seek(-LOG_BYTES, os.SEEK_END)
                file.readline()
                replace(self.log.with_name(f"{self.log.name}.1"), file.read())
        finally:
            os.truncate(self.log, 0)

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            file = open(self.log, "rb")
        except OSError as error:  # the run's directory was removed
            return f"(its log cannot be read: {error.strerror})"
        with file:
            file.seek(max(0, self.log.stat().st_size - 20_000))
            return escaped_lines("\n".join(file.read().decode(errors="replace").splitlines()[-lines:]))


class PeerProcesses:
    """All peer processes of a launcher. `hear` is called with every report, `end` with every process that has ended,
    `warn` with what the user should know."""

    def __init__(
        self,
        directory: Path,
        hear: Callable[[PeerProcess, AnyLine], None],
        end: Callable[[PeerProcess], None],
        warn: Callable[[str], None],
        ahead: Ahead | None = None,
    ) -> None:
        self.directory, self._hear, self._end, self._warn, self._ahead = directory, hear, end, warn, ahead
        self.children: list[PeerProcess] = []
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._server: ForkServer | None = None

    @property
    def living(self) -> list[PeerProcess]:
        return [child for child in self.children if child.alive]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where joiners find the run: through the peers that listen."""
        return tuple(address for child in self.living for address in child.addresses)[:32]

    async def start(self, spec: PeerSpec) -> PeerProcess:
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{spec.label}.log"
        environment = _environment(spec)
        begun = await self._ahead.take(environment, MAX_REPORT_BYTES) if self._ahead is not None else None
        with open(log, "ab") as errors:
            process = (
                begun
                or await self._forked(spec, environment, errors)
                or await spawn(
                    sys.executable,
                    "-m",
                    MODULE,
                    str(os.getpid()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    limit=MAX_REPORT_BYTES,
                    env=environment,
                    process_group=0,
                )
            )
        child = PeerProcess(spec.label, process, log)
        self.children.append(child)
        child.write(msgspec.structs.replace(spec, log=str(log.absolute())) if begun else spec)
        self._readers[child.label] = asyncio.get_running_loop().create_task(self._read(child))
        return child

    async def _forked(self, spec: PeerSpec, variables: dict[str, str], errors: IO[bytes]) -> ForkedProcess | None:
        """None: it is to be started by itself; why is in logs/fork_server.log."""
        if not usable(spec.here):
            return None
        try:
            if self._server is None:
                self._server = ForkServer(self.directory / "logs" / "fork_server.log", MAX_REPORT_BYTES, self._warn)
                await self._server.start(variables, spec.config)
            return await self._server.fork(f"{MODULE} {spec.label}", variables, errors)
        except Declined as declined:
            with open(self.directory / "logs" / "fork_server.log", "a") as log:
                log.write(f"{spec.label} is started by itself: {declined}\n")
            return None

    def trim_logs(self) -> None:
        """For a run of months: no log grows without end, and the logs of peers that ended long ago are removed."""
        ended = [child for child in self.children if not child.alive][:-LOGS]
        for child in ended:
            child.log.unlink(missing_ok=True)
            child.log.with_name(f"{child.log.name}.1").unlink(missing_ok=True)
        for child in self.living:
            child.trim_log()

    async def wait(self, children: Iterable[PeerProcess], wait_s: float | None) -> None:
        """Until all of these have ended, or `wait_s` have passed."""
        readers = [self._readers[child.label] for child in children]
        if readers:
            await asyncio.wait(readers, timeout=wait_s)

    async def stop(self, goodbye_s: float | None = None) -> None:
        """Ask the living to end, then kill them. Nothing is left when this returns."""
        self.signal(signal.SIGTERM)
        await self.wait(self.living, GOODBYE_S if goodbye_s is None else goodbye_s)
        self.kill()
        await self.wait(self.children, None)
        if self._server is not None:
            await self._server.close()

    def signal(self, number: signal.Signals) -> None:
        for child in self.living:
            child.signal(number)

    def kill(self) -> None:
        """At once, whatever they are doing."""
        self.signal(signal.SIGKILL)

    async def _read(self, child: PeerProcess) -> None:
        assert child.process.stdout is not None
        while True:
            try:
                text = await child.process.stdout.readline()
            except ValueError:  # longer than any report: not from our code; asyncio has thrown it away
                continue
            if not text:
                break
            line = decode(text)
            if isinstance(line, Listening):
                child.addresses = line.addresses
                child.listening.set()
            if isinstance(line, Ended):
                child.ended = line
            if line is not None:
                self._hear(child, line)
        await child.process.wait()
        child.signal(signal.SIGKILL)  # what it may have left in its group
        child.listening.set()
        self._end(child)


def _environment(spec: PeerSpec) -> dict[str, str]:
    device = msgspec.convert(spec.config["device"], Device)
    factories = tuple(spec.config[section]["factory"] for section in ("model", "data"))
    return devices.peer_environment(device, factories, spec.number, spec.here)
