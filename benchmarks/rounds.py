"""How near to the line's bound a stage's replicas average: 100 MB among 4 and 16 peers over 200 Mbit/s and 50 ms.

    python benchmarks/rounds.py [--megabytes 100] [--peers 4,16] [--steps 3] [--kill member|leader] [--staleness 1] [--mbit 200]

Real processes, real TLS over modelled lines, executors that compute nothing. Measured: from the first part that is asked for to the
last sum that is gathered. Among n replicas each sends the others its part of their chunks, and its own chunk's sum to them, in groups of
more than 16 by way of rows: 2 (n - 1) / n of the gradient leaves every uplink and comes through every downlink, whatever else is done, so

    bound = 2 (n - 1) / n * gradient / bandwidth

and the last of each trip's delay is added by no bound. The target is 0.85 of it. What every step's commit says of the sum is compared with
tests/reference.py, which adds in the order that the commit lists.

With --kill one replica, or the one that leads, is ended by SIGKILL in the step after those, when half of the bytes are through (half of
the bound's time after the first part was asked for), and no other comes. Told then: how many rounds that step took, and the seconds
from its first part asked for to its last sum gathered by the others, beside those of an undisturbed step and of the next one among
those who are left. One round more is wanted: the one that was given up, and one that is done. With --staleness 1 updates are delayed
by a step: what is averaged is then the sum of the step before.

The last line is one JSON object, about the smaller group.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.reference

from tests import reference

from averaging import averagings, spans
from overhead import LAB, environment
from report import at_least, at_most, parse, report
from shoal import trace
from shoal.core.messages import Do, Gather, Round, Send
from shoal.launcher import process
from shoal.launcher.chaos.injection_points import TraceTail
from shoal.launcher.files import rundir

RUN = Path("runs/rounds")
DELAY_MS = 50
WANTED = 0.85  # of the bound
CUT_OF = re.compile(rb'"type":"Cut","id":"[^"]*","step":(\d+)')  # in a trace: averaging begins
SILENCE_S = 15.0  # a busy machine makes nobody silent; that one is dead is seen by its connections, which break


class Case(msgspec.Struct, frozen=True):
    """What is averaged by whom over which lines."""

    peers: int
    megabytes: float
    mbit: float
    steps: int
    staleness: int

    @property
    def bandwidth_Bps(self) -> float:
        return self.mbit * 1e6 / 8

    @property
    def bound_s(self) -> float:
        return 2 * (self.peers - 1) / self.peers * self.megabytes * 1e6 / self.bandwidth_Bps


def command(case: Case, steps: int) -> list[str]:
    settings = {
        "run.name": "rounds",
        "run.peers": case.peers,
        "run.stages": 1,
        "run.steps": steps,
        "train.batch": case.peers,
        "train.microbatch": 1,
        "train.staleness": case.staleness,
        "device.executor": "emulated",
        "device.emulated_s": 0.01,
        "device.emulated_values": 256,
        "device.emulated_gradient": int(case.megabytes * 1e6 / 4),
        "network.bandwidth_Bps": case.bandwidth_Bps,
        "network.delay_s": DELAY_MS / 1000,
        "run.heartbeat_timeout_s": SILENCE_S,
        "checkpoint.every": 0,
        "checkpoint.at_end": "false",
    }
    return [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "run",
        str(LAB),
        *(f"{key}={value}" for key, value in settings.items()),
    ]


def played(folder: Path, case: Case) -> list[float]:
    subprocess.run(command(case, case.steps), cwd=folder, env=environment(), check=True, stdout=sys.stderr)
    compare(folder / RUN, case.peers, int(case.megabytes * 1e6 / 4), case.steps)
    return averagings(trace.find(folder / RUN))


def compare(directory: Path, microbatches: int, values: int, steps: int) -> None:
    """Every microbatch adds the same share of the batch to all values (executor/emulated.py)."""
    commits = reference.commits(directory)
    if len(commits) != steps:
        raise SystemExit(f"{len(commits)} commits of {steps} steps")
    for commit in commits:
        ((shares,),) = [reference.as_recorded(commit)]
        parts = [torch.zeros(values) for _ in shares]
        for part, share in zip(parts, shares, strict=True):
            for _ in share:
                part += 1.0 / microbatches
        wanted = hashlib.sha256(reference.added(parts).numpy().tobytes()).hexdigest()
        if commit.digests != (wanted,):
            raise SystemExit(f"step {commit.step}: {commit.digests[0]} was committed, the listed order gives {wanted}")


def struck(folder: Path, case: Case, whom: str) -> dict[str, float]:
    """One is killed in the middle of averaging step `steps`; the next is undisturbed again."""
    steps = case.steps
    words = [*command(case, steps + 2), "network.fault_injection=true"]  # its traces are written at once
    with subprocess.Popen(words, cwd=folder, env=environment(), stdout=sys.stderr) as running:
        kill(folder / RUN, running, case.peers, steps, case.bound_s / 2, whom)
        if running.wait():
            raise SystemExit(f"{case.peers} peers: the run ended with {running.returncode}")
    path = trace.find(folder / RUN)
    took = {step: over - begun for step, (begun, over) in spans(path).items()}
    before = sorted(took[step] for step in range(1, steps))
    rounds, gathered = of_step(path, steps)
    return {  # in seconds but for `rounds` and `gathered_in`
        "undisturbed_s": round(before[len(before) // 2], 3),
        "killed_s": round(took[steps], 3),
        "rounds": rounds,
        "gathered_in": gathered,
        "after_s": round(took[steps + 1], 3),
    }


def kill(directory: Path, running: subprocess.Popen[bytes], peers: int, steps: int, half_s: float, whom: str) -> None:
    """Half of the usual time after the first Cut of that step, in whichever round: busy machines average a step twice."""
    while not (directory / "peers.json").exists():
        wait(running)
    me = process.identify(os.getpid())
    assert me is not None, "this process lives"
    wanted = rundir.WantedPeers(peers - 1, me)  # or the launcher starts another
    (directory / "wanted.json").write_bytes(msgspec.json.encode(wanted))
    traces, newest = TraceTail(directory), -1
    while newest < steps:
        wait(running)
        local = rundir.locals_of(directory).peers
        for news in traces.new_lines(one.label for one in local).values():
            newest = max([newest, *(int(step) for step in CUT_OF.findall(news))])
    time.sleep(half_s)
    victim = next(one for one in local if one.leads is (whom == "leader"))
    print(f"{victim.label} is killed", file=sys.stderr, flush=True)
    if not process.send(victim.process, signal.SIGKILL):
        raise SystemExit(f"{victim.label} was gone before it was killed")


def wait(running: subprocess.Popen[bytes]) -> None:
    if running.poll() is not None:
        raise SystemExit(f"the run ended with {running.returncode} before anybody was killed")
    time.sleep(0.01)


def of_step(path: Path, step: int) -> tuple[int, int]:
    """Rounds that were opened for that step, and in how many somebody gathered."""
    opened, gathered = set[int](), set[int]()
    for record in trace.read(path):
        for command in record.commands if isinstance(record, trace.TraceRecord) else ():
            if isinstance(command, Send) and isinstance(command.message, Round) and command.message.step == step:
                opened.add(command.message.round)
            if isinstance(command, Do) and isinstance(command.task, Gather) and command.task.step == step:
                gathered.add(command.task.round)
    return len(opened), len(gathered)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--peers", default="4,16")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--kill", choices=("member", "leader"), help="one in the middle")
    parser.add_argument("--mbit", type=float, default=200.0, help="of every line")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    asked = parse(parser)
    told: dict[str, dict[str, float]] = {}
    for peers in map(int, asked.peers.split(",")):
        case = Case(peers, asked.megabytes, asked.mbit, asked.steps, asked.staleness)
        if asked.kill:
            with tempfile.TemporaryDirectory() as folder:
                row = told[str(peers)] = struck(Path(folder), case, asked.kill)
            print(f"{peers:3} peers, a {asked.kill} killed: {row}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            spans = played(Path(folder), case)
        least, median = case.bound_s, sorted(spans)[len(spans) // 2]
        told[str(peers)] = {
            "measured_s": round(median, 3),
            "bound_s": round(least, 3),
            "ratio": round(least / median, 4),
        }
        print(f"{peers:3} peers: {median:6.2f} s, bound {least:6.2f} s ({least / median:.1%})", flush=True)
    first = told[asked.peers.split(",")[0]]
    setting = {
        "megabytes": asked.megabytes,
        "Mbit_per_s": asked.mbit,
        "delay_ms": DELAY_MS,
        "staleness": asked.staleness,
        "groups": told,
    }
    if asked.kill:
        more = (first["killed_s"] - first["undisturbed_s"]) / first["after_s"]
        setting["killed"] = asked.kill
        report("rounds, one killed", more, "rounds more, in time", at_most(1.0), setting, asked.record)
        return
    name = f"rounds, {asked.peers.split(',')[0]} peers"
    rate, most = asked.megabytes / first["measured_s"], asked.megabytes / first["bound_s"]
    report(name, rate, "MB of gradient averaged per second", at_least(WANTED * most), setting, asked.record)


if __name__ == "__main__":
    main()
