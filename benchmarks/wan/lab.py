"""Hosts with networks of their own on this machine, joined by lines that a TOML file describes. Linux, root, gcc; docs/wan.md.

    python benchmarks/wan/lab.py TOPOLOGY.toml a='COMMAND' b='COMMAND'

runs a command on each named host and ends when the last command has ended; the topology's changes happen meanwhile. From Python:

    with Lab(load(Path("line.toml"))) as lab:
        process = lab.start("a", ["python", "-m", "http.server"])
        lab.change(Change(path=PathRule(sender="a", receiver="b", rate="0 bit/s")))

A host is a set of namespaces of one process of emulator.c, which carries the packets. Nothing outlives the lab: the emulator ends when
its standard input does, so also when this process is killed, and with it the hosts and all their processes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from shoal.units import parse

SOURCE = Path(__file__).with_name("emulator.c")
MAX_HOSTS, QUEUE = 64, struct.Struct("4dQ")  # the emulator's
UNLIMITED = "unlimited"  # of a rate
NEVER = "never"  # of a time
ANY = "*"


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line between a host and the network. A buffer is the time for which a packet may wait; what would wait longer is dropped."""

    host: str = ANY
    up: str = UNLIMITED
    down: str = UNLIMITED
    up_buffer: str = "200 ms"
    down_buffer: str = "200 ms"


class GateRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands between a host and its line (nat.h). A connection that is `idle` for longer is forgotten, silently or with a reset."""

    host: str = ANY
    kind: Literal["open", "firewall", "full cone", "address-restricted", "port-restricted", "symmetric"] = "open"
    idle: str = NEVER
    reset: bool = False


class PathRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies between two hosts' lines, in one direction. `loss` is a part of the packets; those larger than `mtu` vanish."""

    sender: str = ANY
    receiver: str = ANY
    delay: str = "0 ms"
    rate: str = UNLIMITED
    buffer: str = "200 ms"
    loss: float = 0.0
    mtu: int = 1500


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From this time on these rules apply, as if they had been the file's last."""

    at: str = "0 s"
    access: AccessRule | None = None
    path: PathRule | None = None
    gate: GateRule | None = None


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host i has the address 11.77.0.(i + 1), fd77::(i + 1) alone where it is one of `ipv6`. Of several rules for a line, the last
    applies."""

    hosts: tuple[str, ...]
    access: tuple[AccessRule, ...] = ()
    path: tuple[PathRule, ...] = ()
    gate: tuple[GateRule, ...] = ()
    change: tuple[Change, ...] = ()
    ipv6: tuple[str, ...] = ()

    def address(self, host: str) -> str:
        return f"fd77::{self._index(host) + 1:x}" if host in self.ipv6 else f"11.77.0.{self._index(host) + 1}"

    def own_address(self, host: str) -> tuple[str, ...]:
        """The commands that give a host its own address, where it is not the one that the emulator gives it."""
        number = self._index(host) + 1
        if host in self.ipv6:
            return (
                "ip addr flush dev wan0",
                f"ip -6 addr add fd77::{number:x}/64 dev wan0 nodad",
                "ip -6 route add default dev wan0",
            )
        if any(KINDS.index(rule.kind) >= FIRST_ROUTER for rule in self.gate if rule.host in (ANY, host)):
            return (
                "ip addr flush dev wan0",
                f"ip addr add 192.168.0.{number}/24 dev wan0",
                "ip route add default dev wan0",
            )
        return ()

    def words(self) -> list[str]:
        """The emulator's input for these lines. ValueError when a rule is wrong."""
        lines = [line for host in self.hosts for line in self.access_words(AccessRule(host))]
        for sender in self.hosts:
            lines += self.path_words(PathRule(sender))
        for access in self.access:
            lines += self.access_words(access)
        for path in self.path:
            lines += self.path_words(path)
        for gate in self.gate:
            lines += self.gate_words(gate)
        for host in self.ipv6:
            self._index(host)
        for change in self.change:
            parse(change.at, "_s")
            self.change_words(change)  # wrong ones are refused now
        return lines

    def change_words(self, change: Change) -> list[str]:
        access = self.access_words(change.access) if change.access is not None else []
        gate = self.gate_words(change.gate) if change.gate is not None else []
        return access + gate + (self.path_words(change.path) if change.path is not None else [])

    def access_words(self, rule: AccessRule) -> list[str]:
        up, down = (_rate_bps(each) for each in (rule.up, rule.down))
        buffers_s = [_seconds(each) for each in (rule.up_buffer, rule.down_buffer)]
        return [f"access {host} {up} {buffers_s[0]} {down} {buffers_s[1]}" for host in self._matching(rule.host)]

    def path_words(self, rule: PathRule) -> list[str]:
        if not 0 <= rule.loss <= 1:
            raise ValueError(f"loss = {rule.loss} is no part of the packets; try 0.01 for one of a hundred")
        line = f"{_seconds(rule.delay)} {_rate_bps(rule.rate)} {_seconds(rule.buffer)} {rule.loss} {rule.mtu}"
        receivers = self._matching(rule.receiver)
        return [f"path {sender} {receiver} {line}" for sender in self._matching(rule.sender) for receiver in receivers]

    def gate_words(self, rule: GateRule) -> list[str]:
        idle_s = float("inf") if rule.idle == NEVER else _seconds(rule.idle)
        return [f"gate {host} {KINDS.index(rule.kind)} {idle_s} {rule.reset:d}" for host in self._matching(rule.host)]

    def _matching(self, host: str) -> list[int]:
        return list(range(len(self.hosts))) if host == ANY else [self._index(host)]

    def _index(self, host: str) -> int:
        if host not in self.hosts:
            raise ValueError(f"no host is named {host!r}; there are {', '.join(self.hosts)}")
        return self.hosts.index(host)


KINDS = get_args(get_type_hints(GateRule)["kind"])  # in the order of nat.h
FIRST_ROUTER = KINDS.index("full cone")


def load(path: Path) -> Topology:
    """ValueError when the file describes no topology."""
    try:
        topology = msgspec.toml.decode(path.read_bytes(), type=Topology)
        topology.words()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return topology


def _rate_bps(text: str) -> float:
    return float("inf") if text == UNLIMITED else 8 * parse(text, "_Bps")


def _seconds(text: str) -> float:
    seconds = parse(text, "_s")
    if seconds < 0:
        raise ValueError(f"{text!r} is a negative time")
    return seconds


def missing() -> str:
    """What the laboratory needs and this machine lacks; '' when it can run here."""
    lacking = [program for program in ("gcc", "nsenter", "ip") if shutil.which(program) is None]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        lacking.append("root on Linux")
    elif not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        lacking.append("/dev/net/tun")
    return f"the laboratory needs {' and '.join(lacking)}" if lacking else ""


class Line(NamedTuple):
    """One direction of a host's, since it began: seconds in which it carried something, and packets dropped."""

    busy_s: float
    dropped: int


class Counted(NamedTuple):
    """Bytes that a host has sent, and its line."""

    sent_bytes: int
    up: Line
    down: Line


class Lab:
    """The hosts of a topology, alive inside the `with` statement."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._lines = topology.words()
        self._emulator: subprocess.Popen[str]
        self._pids: dict[str, int] = {}  # of each host's first process
        self._processes: list[subprocess.Popen[Any]] = []
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def __enter__(self) -> Lab:
        """OSError or CalledProcessError when the system refuses; see `missing`."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "emulator")
            subprocess.run(["gcc", "-O2", "-o", program, SOURCE, "-lm"], check=True)
            counters = os.memfd_create("counters")
            os.ftruncate(counters, 2 * MAX_HOSTS * QUEUE.size)
            self._counters = mmap.mmap(counters, 0)
            self._emulator = subprocess.Popen(
                [program, str(len(self.topology.hosts)), str(counters)],
                pass_fds=(counters,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends the emulator
            )
            os.close(counters)
        assert self._emulator.stdout is not None
        self._tell(self._lines)
        for host in self.topology.hosts:
            line = self._emulator.stdout.readline()
            if not line:
                self.close()
                raise OSError("the emulator has ended; its reason stands above")
            self._pids[host] = int(line.split()[1])
            for command in self.topology.own_address(host):
                self.configure(host, command)
        threading.Thread(target=self._follow_changes, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ended.set()
        assert self._emulator.stdin is not None and self._emulator.stdout is not None
        with self._writing:
            self._emulator.stdin.close()
        self._emulator.wait()
        self._emulator.stdout.close()
        for process in self._processes:
            process.wait()  # the kernel has ended it with its host

    def start(
        self, host: str, command: Sequence[str], cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on that host; `options` are Popen's. To signal it, use `kill`: the process that is returned only waits for it."""
        enter = [*self._enter(host), "env", f"--chdir={cwd or Path.cwd()}"]
        process = subprocess.Popen([*enter, *command], start_new_session=True, **options)
        self._processes.append(process)
        return process

    def configure(self, host: str, command: str) -> None:
        """Run a command of the system there, such as "ip addr add 11.77.1.1/16 dev wan0", to its end. CalledProcessError: it failed."""
        subprocess.run([*self._enter(host), *command.split()], check=True)

    def counted(self, host: str) -> Counted:
        words = Path(f"/proc/{self._pids[host]}/net/dev").read_text().partition("wan0:")[2].split()
        place = self.topology.hosts.index(host)
        return Counted(int(words[8]), self._line(place), self._line(MAX_HOSTS + place))

    def _line(self, place: int) -> Line:
        _, _, free_at, served_s, dropped = QUEUE.unpack_from(self._counters, place * QUEUE.size)
        return Line(served_s - max(0.0, free_at - time.monotonic()), dropped)

    def first_process(self, host: str) -> int:
        """The process whose namespaces the host is."""
        return self._pids[host]

    def kill(self, process: subprocess.Popen[Any], number: int = signal.SIGKILL) -> None:
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            for pid in task.read_text().split():
                os.kill(int(pid), number)

    def change(self, change: Change) -> None:
        """Apply its rules now, whatever its time."""
        self._tell(self.topology.change_words(change))

    def _enter(self, host: str) -> list[str]:
        return ["nsenter", "--target", str(self._pids[host]), "--net", "--pid", "--mount"]

    def _tell(self, lines: Sequence[str]) -> None:
        stream: IO[str] | None = self._emulator.stdin
        assert stream is not None
        with self._writing:
            if not stream.closed:
                stream.write("".join(f"{line}\n" for line in lines))
                stream.flush()

    def _follow_changes(self) -> None:
        start = time.monotonic()
        for change in sorted(self.topology.change, key=lambda each: parse(each.at, "_s")):
            if self._ended.wait(max(0.0, start + parse(change.at, "_s") - time.monotonic())):
                return
            self.change(change)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topology", type=Path)
    parser.add_argument("commands", nargs="+", metavar="HOST=COMMAND")
    asked = parser.parse_args()
    if lacking := missing():
        sys.exit(lacking)
    try:
        topology = load(asked.topology)
        commands = [each.partition("=") for each in asked.commands]
        for host, _, _ in commands:
            topology.address(host)
        with Lab(topology) as lab:
            processes = [lab.start(host, ["sh", "-c", command]) for host, _, command in commands]
            codes = [process.wait() for process in processes]
    except ValueError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
