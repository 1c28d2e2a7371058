"""Bad luck on real lines: what a run does when a host is killed, a line is cut or changes, and so on (docs/wan.md). Needs root.

    python benchmarks/wan_mishaps.py [--only "cut, averaging" ...] [--logs DIR]

Four hosts, two stages, 20 Mbit/s and 50 ms each way, executors that sleep; a fifth host joins where the state is what is disturbed. Each
scenario is a run of real processes; the mishap comes in the middle of hops, averaging or a download, as the trace of a peer shows it.
Reported for each: the usual seconds of a step, the longest time without a commit, the seconds from the end of the mishap until every
peer that still lives holds its stage, what the screens said, and whether every sample of every commit was counted once: read from
the commits that the hosts received, not from counters. Value: the scenarios that end with every living peer and every sample once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import overhead
from report import Target, parse, report
from shoal.launcher.chaos.injection_points import INJECTION_POINTS, TraceTail
from wan.lab import AccessRule, Change, GateRule, Lab, PathRule, Topology, missing
from wan_hops import wait_for_invite

HOSTS = ("h0", "h1", "h2", "h3")
LATE = "h4"  # joins while the others train
BATCH, STAGES = 24, 2
DEVICE = (
    "device.executor=emulated",
    "device.emulated_values=25000",
    "device.emulated_s=50 ms",
    "device.emulated_gradient=1250000",
)
SETTINGS = (f"run.stages={STAGES}", "run.steps=100000", f"train.batch={BATCH}", "network.fault_injection=true")
SETTINGS += ("network.bandwidth_Bps=0", "network.delay_s=0", "run.inflight=8")
LINE = AccessRule(up="20 Mbit/s", down="20 Mbit/s")
DELAY = "50 ms"
STEADY = 3  # commits before the mishap
AFTER = 3  # commits after all are back
START_S, LONGEST_S = 120.0, 180.0
CUT_S = 15.0  # longer than run.heartbeat_timeout_s
SITE = """
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR2)
_true = time.time
def _shifted():
    try:
        with open(os.environ["SHIFT"]) as file:
            return _true() + float(file.read())
    except (OSError, ValueError):
        return _true()
time.time = _shifted
"""


class Hosts:
    """The hosts of one scenario, with a directory and an output each."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.invite = ""
        self._tail = TraceTail(folder)

    def start(self, host: str, *command: str) -> None:
        place = self.folder / host
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(SITE)
        environment = overhead.environment()
        environment |= {"PYTHONPATH": f"{place}:{environment['PYTHONPATH']}", "SHIFT": str(place / "shift")}
        words = [sys.executable, "-m", "shoal.cli.main", *command, *DEVICE]
        with (place / "out.log").open("a") as log:
            self.processes[host] = self.lab.start(
                host, words, cwd=place, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def found(self, peers: int, *settings: str) -> None:
        words = (str(overhead.LAB), "--here", "1", f"run.peers={peers}", *SETTINGS, *settings)
        self.start(HOSTS[0], "run", *words)
        self.invite = wait_for_invite(self.folder / HOSTS[0] / "out.log", self.processes[HOSTS[0]])

    def join(self, host: str) -> None:
        self.start(host, "join", self.invite)

    def run(self, host: str) -> Path:
        return self.folder / host / "runs/lab"

    def commits(self) -> list[dict[str, Any]]:
        """By the host that has received most."""
        return max((read_lines(self.run(host) / "commits.jsonl") for host in self.processes), key=len)

    def ready(self) -> int:
        """Members that hold a stage, as the host with the newest step shows it."""
        pages = []
        for host in self.processes:
            with contextlib.suppress(OSError, ValueError):
                pages.append(json.loads((self.run(host) / "status.json").read_bytes()))
        newest = max(pages, key=lambda page: page["step"], default={"peers": ()})
        return sum(peer["ready"] for peer in newest["peers"])

    def has_ended(self, host: str) -> bool:
        return self.processes[host].poll() is not None

    def output(self, host: str) -> str:
        return (self.folder / host / "out.log").read_text(errors="replace")

    def wait_for_point(self, host: str, point: str) -> None:
        """Until that host's peer begins the task of this point."""
        tail = TraceTail(self.run(host))
        tail.skip()
        wait(lambda: INJECTION_POINTS[point].tag in tail.new_lines(["p1"])["p1"], START_S, f"{point} at {host}")

    def kill(self, host: str) -> None:
        """All of its processes at once, and its line, as when a machine loses power: nobody learns of it from the system."""
        self.line(host, CLOSED)
        for pid in self.processes_of(host):
            os.kill(pid, signal.SIGKILL)

    def processes_of(self, host: str) -> list[int]:
        init = self.lab.first_process(host)
        namespace = os.readlink(f"/proc/{init}/ns/pid")
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) != init and os.readlink(path / "ns/pid") == namespace:
                    pids.append(int(path.name))
        return pids

    def line(self, host: str, access: AccessRule) -> None:
        self.lab.change(Change(access=msgspec.structs.replace(access, host=host)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def wait(condition: Callable[[], object], longest_s: float, what: str) -> None:
    end = time.monotonic() + longest_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {longest_s:.0f} s")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------------------- mishaps

CLOSED = AccessRule(up="0 bit/s", down="0 bit/s")
NARROW = AccessRule(up="5 Mbit/s", down="5 Mbit/s")


class Mishap(msgspec.Struct, frozen=True):
    """`begin` and `end` act on the victim; without `end` it stays. `survivors`: peers that hold a stage in the end."""

    begin: Callable[[Hosts, str], None]
    end: Callable[[Hosts, str], None] | None = None
    for_s: float = CUT_S
    victim_lives: bool = True


def cut(hosts: Hosts, host: str) -> None:
    hosts.line(host, CLOSED)


def heal(hosts: Hosts, host: str) -> None:
    hosts.line(host, LINE)


def change(hosts: Hosts, host: str) -> None:
    hosts.line(host, NARROW)
    for rule in (PathRule(host, "*", delay="150 ms"), PathRule("*", host, delay="150 ms")):
        hosts.lab.change(Change(path=rule))


def one_way(hosts: Hosts, host: str) -> None:
    """Nothing from the victim reaches the last host; the other direction works."""
    hosts.lab.change(Change(path=PathRule(host, HOSTS[3], delay=DELAY, rate="0 bit/s")))


def both_ways(hosts: Hosts, host: str) -> None:
    hosts.lab.change(Change(path=PathRule(host, HOSTS[3], delay=DELAY)))


def hole(hosts: Hosts, host: str) -> None:
    hosts.lab.change(Change(path=PathRule(host, "*", delay=DELAY, mtu=1300)))


def block(hosts: Hosts, host: str) -> None:
    hosts.lab.change(Change(gate=GateRule(host, "firewall")))


def jump(hosts: Hosts, host: str) -> None:
    (hosts.folder / host / "shift").write_text("3600")


def jump_back(hosts: Hosts, host: str) -> None:
    (hosts.folder / host / "shift").write_text("-3600")


def new_address(hosts: Hosts, host: str) -> None:
    number = int(host[1:]) + 1
    hosts.lab.configure(host, f"ip addr del 11.77.0.{number}/16 dev wan0")
    hosts.lab.configure(host, f"ip addr add 11.77.1.{number}/16 dev wan0")


def nothing(hosts: Hosts, host: str) -> None:
    """The scenario's lines are bad luck enough."""


MISHAPS = {
    "for 5 s": Mishap(nothing, nothing, 5.0),
    "for 75 s": Mishap(nothing, nothing, 75.0),
    "killed": Mishap(Hosts.kill, victim_lives=False),
    "cut for 15 s": Mishap(cut, heal),
    "cut for 2 s": Mishap(cut, heal, 2.0),
    "changed": Mishap(change),
    "one way cut": Mishap(one_way),
    "one way cut for 15 s": Mishap(one_way, both_ways),
    "MTU hole": Mishap(hole),
    "port blocked": Mishap(block),
    "clock +1 h": Mishap(jump),
    "clock -1 h": Mishap(jump_back),
    "new address": Mishap(new_address),
}


class Scenario(msgspec.Struct, frozen=True):
    mishap: str
    during: str  # "hops", or an injection point
    victim: str = "h2"
    late: bool = False  # a fifth host joins, and the mishap comes during its download
    gate: tuple[GateRule, ...] = ()
    ipv6: tuple[str, ...] = ()
    silent_names: bool = False  # a name server is configured and never answers
    words: str = ""

    @property
    def name(self) -> str:
        return f"{self.words or self.victim} {self.mishap}, {self.during}"


SCENARIOS = [
    *(Scenario(mishap, "hops") for mishap in MISHAPS),
    *(Scenario(mishap, "hops", "h0") for mishap in ("killed", "cut for 15 s", "clock +1 h")),
    *(Scenario(mishap, "averaging") for mishap in ("killed", "cut for 15 s", "cut for 2 s", "changed")),
    *(Scenario(mishap, "download", LATE, late=True) for mishap in ("killed", "cut for 15 s", "cut for 2 s", "changed")),
    *(Scenario(mishap, "upload", "source", late=True) for mishap in ("killed", "cut for 15 s", "changed")),
    Scenario("for 5 s", "hops", ipv6=HOSTS, words="IPv6 alone"),
    Scenario("for 5 s", "hops", silent_names=True, words="silent name servers"),
    Scenario("for 5 s", "hops", gate=(GateRule("h2", "firewall"),), words="h2's port blocked from the beginning"),
    Scenario(
        "for 75 s", "hops", gate=(GateRule("h2", idle="60 s", reset=True),), words="idle connections reset after 60 s"
    ),
]


def play(scenario: Scenario, folder: Path) -> dict[str, Any]:
    mishap = MISHAPS[scenario.mishap]
    hosts_of = (*HOSTS, LATE) if scenario.late else HOSTS
    topology = Topology(hosts_of, (LINE,), (PathRule(delay=DELAY),), scenario.gate, ipv6=scenario.ipv6)
    with Lab(topology) as lab:
        if scenario.silent_names:
            for host in hosts_of:
                lab.configure(host, "ip route add default dev wan0")
        hosts = Hosts(lab, folder)
        started = time.monotonic()
        hosts.found(len(HOSTS))
        for host in HOSTS[1:]:
            hosts.join(host)
        wait(lambda: len(hosts.commits()) > STEADY, START_S, "the first steps")
        before, first_s = len(hosts.commits()), hosts.commits()[0]["heard_s"] - started
        victim = scenario.victim
        if scenario.late:
            hosts.join(LATE)
            victim = await_download(hosts) if victim == "source" else LATE
        if scenario.during in INJECTION_POINTS and not (scenario.late and scenario.victim == "source"):
            hosts.wait_for_point(victim, scenario.during)
        said = {host: len(hosts.output(host)) for host in hosts.processes}
        began = time.monotonic()
        mishap.begin(hosts, victim)
        if mishap.end is not None:
            time.sleep(mishap.for_s)
            mishap.end(hosts, victim)
        ended = time.monotonic()
        living = len(hosts_of) - (not mishap.victim_lives)
        trouble = settle(hosts, living, began)
        whole = time.monotonic()
        reached = len(hosts.commits())
        with contextlib.suppress(TimeoutError):
            wait(lambda: len(hosts.commits()) >= reached + AFTER, LONGEST_S, "further steps")
        commits = hosts.commits()
        return {
            "scenario": scenario.name,
            "victim": victim,
            "first_commit_s": round(first_s, 1),
            "usual_s": round(usual_s(commits[:before]), 1),
            "longest_s": round(longest_s(commits, began), 1),
            "whole_again_s": round(whole - ended, 1),
            "trouble": trouble,
            "wrong": wrong_samples(commits),
            "commits": len(commits),
            "said": {host: words(hosts.output(host)[at:]) for host, at in said.items()},
        }


def await_download(hosts: Hosts) -> str:
    """The first host that gives a part of its state."""
    tails = {host: TraceTail(hosts.run(host)) for host in HOSTS}
    for tail in tails.values():
        tail.skip()
    giving: list[str] = []

    def gives() -> bool:
        giving.extend(h for h, tail in tails.items() if INJECTION_POINTS["upload"].tag in tail.new_lines(["p1"])["p1"])
        return bool(giving)

    wait(gives, START_S, "an upload")
    return next((host for host in giving if host != HOSTS[0]), giving[0])


def settle(hosts: Hosts, living: int, began: float) -> str:
    """Until all that live hold a stage and a step is committed that began after the mishap. '' or what is missing."""

    def settled() -> bool:
        return hosts.ready() == living and len([each for each in hosts.commits() if each["heard_s"] > began]) > 1

    try:
        wait(settled, LONGEST_S, "")
    except TimeoutError:
        return f"{hosts.ready()} of {living} hold a stage, {hosts.commits()[-1]['heard_s'] - began:.0f} s after it the last commit"
    return ""


def usual_s(commits: list[dict[str, Any]]) -> float:
    times = [each["heard_s"] for each in commits]
    return median(later - earlier for earlier, later in itertools.pairwise(times))


def longest_s(commits: list[dict[str, Any]], began: float) -> float:
    """The longest time between two commits of which the later one came after the mishap."""
    times = [each["heard_s"] for each in commits] + [time.monotonic()]
    return max(later - earlier for earlier, later in itertools.pairwise(times) if later > began)


def wrong_samples(commits: list[dict[str, Any]]) -> list[str]:
    """Steps in which a stage does not have every microbatch once, by the books that were agreed."""
    wrong = []
    for number, each in enumerate(commits):
        step, groups = each["commit"][0], each["commit"][5]
        if step != number:
            wrong.append(f"line {number}: step {step}")
        for stage, replicas in enumerate(groups):
            booked = sorted(index for _, indices, *_ in replicas for index in indices)
            if booked != list(range(BATCH)):
                wrong.append(f"step {step}, stage {stage}: {booked}")
    return wrong


def words(text: str) -> list[str]:
    """What a screen said beside the steps."""
    return [line.strip() for line in text.splitlines() if re.match(r"  +\d+:\d\d", line) or "stall" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="scenarios whose name has this in it")
    parser.add_argument("--logs", type=Path, help="keep the processes' output and runs here")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    chosen = [each for each in SCENARIOS if any(part in each.name for part in asked.only or [""])]
    rows = []
    for scenario in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (asked.logs or Path(temporary)) / scenario.name.replace(" ", "-").replace(",", "")
            folder.mkdir(parents=True)
            rows.append(play(scenario, folder))
        print(json.dumps(rows[-1], indent=1), flush=True)
    good = sum(not row["trouble"] and not row["wrong"] for row in rows)
    setting = {"scenarios": [{key: value for key, value in row.items() if key != "said"} for row in rows]}
    report(
        "mishaps", good, f"scenarios of {len(rows)} that end well", Target(len(rows), "higher"), setting, asked.record
    )


if __name__ == "__main__":
    main()
