"""A run of real processes under churn, beside the same run without: a SIGKILL and a join every so often, then the comparison.

For benchmarks/churn.py (ten minutes) and tests/e2e/test_churn.py (a minute and a half). Everything is measured from outside: what was
committed from the groups of each commit, pauses from the times at which the launcher heard of commits, what is left behind from the
machine's own tables. The disturbed run has no last step; it is interrupted when the churn is over, and the undisturbed one trains exactly
as many steps as it committed, which is why the learning rate is constant.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shoal.runtime.records.account import CommittedStep, surviving

ROOT = Path(__file__).resolve().parents[1]
MARK = "SHOAL_CHURN"  # in the environment of every process of ours, so that what outlives its run is found
PATIENCE_S = 900.0
SETTLE_S = 15.0  # for the kernel to end what it was told to
PEERS, STAGES, BATCH, MICROBATCH = 8, 4, 32, 2

# The modelled delay makes a step take about a second, of which little is compute: starting a process costs more than a step here.
CONFIG = f"""
[run]
name = "NAME"
peers = {PEERS}
stages = {STAGES}
steps = 1000000
min_request_timeout_s = 20.0
[model]
hidden_size = 64
layers = 4
heads = 4
kv_heads = 2
intermediate_size = 128
[data]
source = "text"
path = "a.txt"
sequence = 64
[train]
batch = {BATCH}
microbatch = {MICROBATCH}
learning_rate = 3e-4 # constant and low: the comparison is about samples, not about how fast rounding grows
schedule = "constant"
warmup = 5
[network]
discovery = "gossip"
delay_s = 0.03
[checkpoint]
every = 50
"""


class Churned(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Counts are of microbatches; pauses in seconds."""

    minutes: float
    steps: int
    committed: int
    redone: int
    undone: int
    lost: int
    twice: int
    killed: int
    joined: int
    longest_pause_s: float
    step_s: float  # the median step without faults, with the same modelled delay, at the head of the run
    pause_bound_s: float
    worst_loss: float  # relative to the undisturbed run
    leftovers: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """All that is promised but the pause, which depends on the machine too."""
        whole = self.committed == self.steps * (BATCH // MICROBATCH)
        return whole and not self.lost and not self.twice and self.worst_loss <= 1e-4 and not self.leftovers


class Ground:
    """A directory for runs, and the means to find what they leave elsewhere on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.token = directory, uuid.uuid4().hex
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        (directory / "a.txt").write_bytes((ROOT / "src/shoal/core/messages.py").read_bytes() * 4)
        self._shared = _names("/dev/shm")
        self._ports: set[int] = set()

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), MARK: self.token, "TMPDIR": str(self.temporary)}
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", *words], cwd=self.directory, env=environment, stdout=sys.stderr
        )

    def config(self, name: str) -> str:
        (self.directory / f"{name}.toml").write_text(CONFIG.replace("NAME", name))
        return f"{name}.toml"

    def commits(self, name: str) -> tuple[CommittedStep, ...]:
        path = self.directory / "runs" / name / "commits.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return surviving(msgspec.json.decode(line, type=CommittedStep) for line in lines)

    def note_ports(self) -> None:
        """Remember what our processes listen on, to look for it when they are gone."""
        inodes = {inode for process in self.processes() for inode in _sockets(process)}
        self._ports |= {port for port, inode in _listening() if inode in inodes}

    def processes(self) -> list[int]:
        """Everything that was started from here and still runs, whoever its parent is."""
        wanted = f"{MARK}={self.token}".encode()
        entries = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                ours = wanted in (entry / "environ").read_bytes().split(b"\0")
                running = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:
                continue  # it has ended meanwhile, or is the kernel's
            if ours and running:
                entries.append(int(entry.name))
        return entries

    def leftovers(self) -> tuple[str, ...]:
        """Processes, listening sockets, temporary files and shared memory of ours."""
        until = time.monotonic() + SETTLE_S
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)
        processes = [f"process {process}" for process in self.processes()]
        ports = [f"a socket that listens on port {port}" for port in {p for p, _ in _listening()} & self._ports]
        files = [str(path) for path in sorted(self.temporary.rglob("*")) if not _torchs(path)]
        shared = [f"/dev/shm/{name}" for name in sorted(_names("/dev/shm") - self._shared) if _ours(name)]
        return (*processes, *sorted(ports), *files, *shared)


def churned(directory: Path, seconds: float, every_s: float, calm_s: float = 15.0) -> Churned:
    """Disturb a run for `seconds` with a SIGKILL every `every_s`, and compare. `calm_s`: before the first, to know a step's time."""
    ground = Ground(directory)
    kills = int(seconds // every_s)
    acts = [f'[[act]]\nat = "{calm_s + n * every_s} s"\nkind = "kill"\nwho = "member"\n' for n in range(kills)]
    (directory / "kills.toml").write_text("".join(acts))
    run = ground.start("run", ground.config("disturbed"))
    try:
        _wait(lambda: len(ground.commits("disturbed")) >= 3, run)
        began = len(ground.commits("disturbed"))
        chaos = ground.start("chaos", "runs/disturbed", "--schedule", "kills.toml", "--seed", "3")
        while chaos.poll() is None:
            assert run.poll() is None, "the run ended while it was disturbed"
            ground.note_ports()
            time.sleep(1.0)
        assert chaos.returncode == 0
        settled = len(ground.commits("disturbed")) + 3  # the last kill's pause is over only with further commits
        _wait(lambda: len(ground.commits("disturbed")) >= settled, run)
        run.send_signal(signal.SIGINT)
        run.wait(PATIENCE_S)
    finally:
        run.kill()
    steps = ground.commits("disturbed")
    summary = json.loads((directory / "runs/disturbed/summary.json").read_bytes())
    left = ground.leftovers()
    losses = undisturbed(ground, len(steps))
    pauses = [(later.heard_s - earlier.heard_s) for earlier, later in pairwise(steps[began:])]
    head = [b.heard_s - a.heard_s for a, b in pairwise(steps) if b.heard_s - steps[began].heard_s <= calm_s]
    step_s = sorted(head)[len(head) // 2]
    committed, lost, twice = counted(steps)
    return Churned(
        minutes=seconds / 60,
        steps=len(steps),
        committed=committed,
        redone=summary["redone"],
        undone=summary["undone"],
        lost=max(lost, summary["lost"]),
        twice=max(twice, summary["counted_twice"]),
        killed=summary["killed"],
        joined=summary["joined"],
        longest_pause_s=max(pauses),
        step_s=step_s,
        pause_bound_s=10.0 + step_s,
        worst_loss=max(abs(one.commit.loss / loss - 1) for one, loss in zip(steps, losses, strict=True)),
        leftovers=tuple(dict.fromkeys((*left, *ground.leftovers()))),
    )


def undisturbed(ground: Ground, steps: int) -> list[float]:
    """The losses of so many steps that nobody disturbs, without the modelled delay, which no loss depends on."""
    run = ground.start("run", ground.config("calm"), f"run.steps={steps}", "network.delay_s=0")
    assert run.wait(steps * 5 + PATIENCE_S) == 0
    account: dict[str, Any] = json.loads((ground.directory / "runs/calm/summary.json").read_bytes())
    assert account["balanced"], account["reason"]
    return list(account["losses"])


def counted(steps: tuple[CommittedStep, ...]) -> tuple[int, int, int]:
    """Microbatches that every stage of their step holds once; those that some stage lacks; those that some stage holds twice.
    Steps that are not there at all are lacking too."""
    each = range(BATCH // MICROBATCH)
    known = {step.commit.step: step.commit for step in steps}
    once = lost = twice = 0
    for number in range(max(known) + 1):
        groups = known[number].groups if number in known else ()
        held = [Counter(index for share in group for index in share.indices) for group in groups]
        missing = {index for index in each if len(held) < STAGES or any(not stage[index] for stage in held)}
        doubled = {index for stage in held for index, times in stage.items() if times > 1 or index not in each}
        once += len(set(each) - missing - doubled)
        lost, twice = lost + len(missing), twice + len(doubled)
    return once, lost, twice


# ------------------------------------------------------------------------------------------------------------- private


def _wait(condition: Any, run: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert run.poll() is None, f"the run ended with code {run.returncode}"
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.2)


def _sockets(process: int) -> set[str]:
    entries = set()
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                entries.add(target[8:-1])
    except OSError:
        pass  # it has ended meanwhile
    return entries


def _listening() -> list[tuple[int, str]]:
    """TCP ports that somebody on this machine listens on, with the socket's inode."""
    entries = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == "0A":
                entries.append((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return entries


def _names(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()} if Path(directory).is_dir() else set()


def _torchs(path: Path) -> bool:
    """The directory of torch's compile cache, one per user, which importing torch makes; nothing is compiled here, so it is empty."""
    return path.name.startswith("torchinductor_") and path.is_dir() and not any(path.iterdir())


def _ours(name: str) -> bool:
    """Shared memory names hold the process that made them; one that lives belongs to somebody else's work beside this."""
    numbers = [int(part) for part in "".join(c if c.isdigit() else " " for c in name).split()]
    return not any(Path(f"/proc/{number}").exists() for number in numbers)
