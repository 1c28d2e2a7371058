"""Seconds from `shoal join` to a peer's first useful hop, over a line of the laboratory (docs/wan.md). Needs root.

    python benchmarks/wan_join.py [--delay "50 ms"] [--rate "200 Mbit/s"] [--rounds 3] [a.b=c ...]

Three peers, each on a host of its own, train the quickstart's model with two microbatches a step, so that the lines keep them waiting and
leave the processor to the fourth, which joins from another host in mid-run, by an invite from a file: Python, torch, the run's known
answers, its stage, that stage's state from a replica. Its trace says when it had begun, was taken in, had the state and had computed its
first microbatch that counts. Value: from the command to that, less the download, in the median of the rounds. The bound is what it takes to
import what a peer needs, measured alone before each round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overhead
from report import at_most, parse, report
from shoal import trace
from shoal.core.messages import Do, Done, Import, Received, RunBackward, RunForward, Send, StateRequest
from start import QUICKSTART, imports_s
from wan.lab import ANY, AccessRule, Lab, PathRule, Topology, missing
from wan_hops import wait_for_invite

WANTED_S = 8.0
LONGEST_S = 120.0
STEADY_S = 5.0  # of training before the guest comes
SETTINGS = ("run.steps=100000", "train.batch=8", "train.microbatch=4")


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not seen in {LONGEST_S:.0f} s")
        time.sleep(0.1)


def join(topology: Topology, words: list[str], folder: Path) -> dict[str, float]:
    shoal = [sys.executable, "-m", "shoal.cli.main"]
    options: dict[str, Any] = {"env": overhead.environment(), "stderr": subprocess.STDOUT}
    founder, *others, guest = topology.hosts
    for each in topology.hosts:
        (folder / each).mkdir()
    run, log = folder / founder / "runs/quickstart", folder / guest / "out.log"
    with Lab(topology) as lab, contextlib.ExitStack() as files:

        def start(name: str, *command: str) -> subprocess.Popen[Any]:
            out = files.enter_context((folder / name / "out.log").open("w"))
            return lab.start(name, [*shoal, *command], cwd=folder / name, stdout=out, **options)

        first = start(founder, "run", str(QUICKSTART), "--here", "1", "run.peers=3", *SETTINGS, *words)
        invite = wait_for_invite(folder / founder / "out.log", first)
        for each in others:
            start(each, "join", invite)
        until(lambda: (run / "commits.jsonl").exists() and (run / "commits.jsonl").stat().st_size, "a commit")
        time.sleep(STEADY_S)
        (folder / guest / "invite").write_text(invite)
        began = time.monotonic()
        joined = start(guest, "join", "@invite")
        until(
            lambda: joined.poll() is not None or re.search(r"step [1-9]\d*/", log.read_text()), "a commit by the guest"
        )
        if joined.poll() is not None:
            raise RuntimeError(f"the guest has ended:\n{log.read_text()}")
        until(lambda: marks(folder / guest), "the guest's first microbatch")
    return {mark: at_s - began for mark, at_s in marks(folder / guest).items()}


def marks(guest: Path) -> dict[str, float]:
    """When the guest's trace first shows what, as far as its first hop; nothing before that."""
    seen: dict[str, float] = {}
    forwards: set[int] = set()
    for item in trace.read(guest / "runs/quickstart/traces/p1.jsonl"):
        if not isinstance(item, trace.TraceRecord):
            continue
        seen.setdefault("begun", item.time_s)
        if isinstance(item.event, Received):
            seen.setdefault("answered", item.time_s)
        if isinstance(item.event, Done) and item.event.id in forwards:
            return seen | {"first hop": item.time_s}
        for command in item.commands:
            if isinstance(command, Send) and isinstance(command.message, StateRequest):
                seen.setdefault("state asked", item.time_s)
            if isinstance(command, Do) and isinstance(command.task, Import):
                seen["state there"] = item.time_s
            if (
                isinstance(command, Do)
                and isinstance(command.task, RunForward | RunBackward)
                and not command.task.heldout
            ):
                forwards.add(command.task.id)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--delay", default="50 ms", help="one way")
    parser.add_argument("--rate", default="200 Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, help="keep the processes' output and runs here")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    topology = Topology(
        ("founder", "second", "third", "guest"),
        (AccessRule(ANY, up=asked.rate, down=asked.rate),),
        (PathRule(delay=asked.delay),),
    )
    rounds, imports = [], []
    for number in range(asked.rounds):
        imports.append(imports_s())
        with tempfile.TemporaryDirectory() as temporary:
            folder = (asked.logs or Path(temporary)) / str(number)
            folder.mkdir(parents=True)
            rounds.append(join(topology, asked.settings, folder))
        said = ", ".join(f"{mark} {at_s:.1f} s" for mark, at_s in rounds[-1].items())
        print(
            f"round {number + 1}: {said}; imports alone {imports[-1]:.1f} s; load {os.getloadavg()[0]:.1f}", flush=True
        )
    download_s = [each["state there"] - each["state asked"] for each in rounds]
    spent_s = [each["first hop"] - less for each, less in zip(rounds, download_s, strict=True)]
    setting = {
        "delay": asked.delay,
        "rate": asked.rate,
        "rounds": asked.rounds,
        "seconds": [{mark: round(at_s, 2) for mark, at_s in each.items()} for each in rounds],
        "download_s": round(statistics.median(download_s), 2),
        "imports_s": round(statistics.median(imports), 2),
        "load": round(os.getloadavg()[0], 1),
    }
    report("join", statistics.median(spent_s), "s beside the download", at_most(WANTED_S), setting, asked.record)


if __name__ == "__main__":
    main()
