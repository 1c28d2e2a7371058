"""Replicas on unlike processors: torch and numba with another vector unit in each, some swapping, one or two threads, and kills.

What must hold: nobody but a joiner downloads, every sample counts once, and replicas hold the same bits at every version.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import reference
from tests.e2e.test_run import SOURCE, children
from torch.backends import cpu

from shoal import trace
from shoal.core.messages import Do, Import
from shoal.launcher.files import rundir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS, EVERY_S, STEPS = 6, 20, 60  # at least
UNITS = {"default": "generic", "avx2": "haswell", "avx512": "skylake-avx512"}  # torch's capability, numba's processor
GUESTS = {"avx2": ("device.executor=swapping", "device.threads=2"), "avx512": ("device.threads=1",)}
AGAIN = ("downloads its state again", "another state of stage")  # the leader's words of a replica that differs

CONFIG = """
[run]
name = "unlike"
peers = 4
stages = 1
steps = 100000
min_request_timeout_s = 20.0
[model]
hidden_size = 64
layers = 2
heads = 4
kv_heads = 2
intermediate_size = 128
[data]
source = "text"
path = "a.txt"
sequence = 64
[train]
batch = 16
microbatch = 2
warmup = 5
[network]
discovery = "gossip"
delay_s = 0.05
[checkpoint]
every = 0
"""


class Swarm(msgspec.Struct, frozen=True):
    """What a run and its guests left."""

    summary: dict[str, Any]
    output: str
    traces: list[Path]

    def digests(self) -> dict[int, dict[str, set[str]]]:
        """Of each version of the parameters: its digests, and who held them."""
        held: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for one in (one for path in self.traces for one in reference.held(path)):
            if one.digest:
                held[one.step][one.digest].add(one.peer)
        return held

    def downloads(self) -> int:
        """States that were downloaded and built: a joiner that cannot catch up with the commits of that time needs another."""
        records = (item for path in self.traces for item in trace.read(path) if isinstance(item, trace.TraceRecord))
        commands = (command for record in records for command in record.commands)
        return sum(isinstance(one, Do) and isinstance(one.task, Import) for one in commands)


def environment(unit: str) -> dict[str, str]:
    numba = {"NUMBA_CPU_NAME": UNITS[unit]} | ({"NUMBA_CPU_FEATURES": ""} if unit == "default" else {})
    return {**os.environ, "PYTHONPATH": str(SOURCE), "ATEN_CPU_CAPABILITY": unit, **numba}


class Machines:
    """Launchers in one directory, each with the vector unit of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.started = directory, dict[str, subprocess.Popen[bytes]]()
        (directory / "unlike.toml").write_text(CONFIG)
        (directory / "a.txt").write_bytes((SOURCE / "shoal/core/messages.py").read_bytes())

    def start(self, unit: str, name: str, *words: str) -> None:
        with open(self.directory / f"{name}.log", "w") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.main", *words],
                cwd=self.directory, env=environment(unit), stdout=log, stderr=log,
            )  # fmt: skip

    def invite(self) -> str:
        command = [sys.executable, "-m", "shoal.cli.main", "invite", "unlike.toml"]
        options: dict[str, Any] = {"cwd": self.directory, "env": environment("default")}
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout.split()[-1]

    def guest(self, unit: str, number: int) -> str:
        name = f"{unit}-{number}"
        self.start(unit, name, "join", self.invite(), "--files", ".", f"run.dir={name}", *GUESTS[unit])
        return name

    def committed(self) -> int:
        path = self.directory / "runs/unlike/commits.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def serves(self, name: str) -> bool:
        """A guest's peer is a member."""
        path = self.directory / name / "unlike"
        return (path / "peers.json").exists() and any(one.label == "p1" for one in rundir.locals_of(path).members)

    def wait(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + 600
        while not condition():
            assert self.started["host"].poll() is None and time.monotonic() < until, self.said()[-6000:]
            time.sleep(0.1)

    def said(self) -> str:
        return "".join((self.directory / f"{name}.log").read_text() for name in self.started)


def trained(directory: Path) -> Swarm:
    """A run of two peers without vector units, and guests with them, who are killed in turn and come back as others."""
    machines = Machines(directory)
    try:
        machines.start("default", "host", "run", "unlike.toml", "--here", "2")
        bootstrap = directory / "runs/unlike/bootstrap.json"
        machines.wait(lambda: bootstrap.exists() and len(json.loads(bootstrap.read_bytes())) == 2)
        units = [unit for unit in GUESTS if unit == "avx2" or cpu.get_cpu_capability() == "AVX512"]
        guests = deque((unit, machines.guest(unit, number)) for number, unit in enumerate((units * 2)[:2]))
        for number in range(2, 2 + KILLS):
            machines.wait(lambda: all(machines.serves(name) for _, name in guests))
            time.sleep(EVERY_S)
            unit, name = guests.popleft()
            for process in children(machines.started[name].pid):
                os.kill(process, signal.SIGKILL)
            guests.append((unit, machines.guest(unit, number)))
        machines.wait(lambda: all(machines.serves(name) for _, name in guests))
        enough = max(STEPS, machines.committed() + 12)
        machines.wait(lambda: machines.committed() >= enough)
        machines.started["host"].send_signal(signal.SIGINT)
        machines.started["host"].wait(300)
    finally:
        for one in machines.started.values():
            for process in children(one.pid):
                os.kill(process, signal.SIGKILL)
            one.kill()
            one.wait()
    summary = json.loads((directory / "runs/unlike/summary.json").read_bytes())
    return Swarm(
        summary,
        machines.said(),
        sorted(directory.glob("*/unlike/traces/*.jsonl")) + sorted(directory.glob("*/unlike/trace.jsonl")),
    )


@pytest.mark.skipif(cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="has one vector unit only")
def test_replicas_on_unlike_processors_agree_under_kills(tmp_path: Path) -> None:
    swarm = trained(tmp_path)
    summary, versions = swarm.summary, swarm.digests()
    fields = ("committed", "lost", "counted_twice", "redone", "joined")
    print({field: summary[field] for field in fields}, f"{swarm.downloads()} downloads, {len(versions)} versions")
    assert summary["committed"] >= STEPS * 8 and (summary["lost"], summary["counted_twice"]) == (0, 0), swarm.output[
        -6000:
    ]
    assert summary["joined"] == KILLS
    assert not [word for word in AGAIN if word in swarm.output], swarm.output[-6000:]
    assert {len(holders) for holders in versions.values()} == {1}
    # A version may be held by one that is killed then, and by who came in its place
    assert max(len(peers) for holders in versions.values() for peers in holders.values()) >= 4
