"""A joiner whose line is narrower than the others': what it does to everybody's steps (docs/wan.md). Needs root.

    python benchmarks/wan_narrow.py [--line "5 Mbit/s"] [--down "20 Mbit/s"] [--seconds 120] [a.b=c ...]

Four hosts, two stages, 20 Mbit/s and 50 ms each way, executors that sleep; wan_mishaps.py has the setting. After some steps a fifth host
joins over its own line. Value: mean seconds of a step from the moment at which it asks, over the median of those before. The setting also
has every step's seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from report import at_most, parse, report
from wan.lab import AccessRule, Lab, PathRule, Topology, missing
from wan_mishaps import DELAY, HOSTS, LATE, LINE, START_S, STEADY, Hosts, usual_s, wait, words, wrong_samples

WANTED = 1.1


def served(commits: list[dict[str, Any]], peers: int) -> int:
    """Commits that so many replicas have microbatches in."""
    return sum(
        sum(bool(indices) for group in each["commit"][5] for _, indices, *_ in group) >= peers for each in commits
    )


def play(joiner: AccessRule, settings: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    topology = Topology((*HOSTS, LATE), (LINE, joiner), (PathRule(delay=DELAY),))
    with Lab(topology) as lab:
        hosts = Hosts(lab, folder)
        hosts.found(len(HOSTS), *settings)
        for host in HOSTS[1:]:
            hosts.join(host)
        wait(lambda: len(hosts.commits()) > STEADY + 1, START_S, "the first steps")
        before = hosts.commits()
        hosts.join(LATE)
        with contextlib.suppress(TimeoutError):
            wait(lambda: False, seconds, "the steps after it")
        commits = hosts.commits()
        times = [each["heard_s"] for each in commits]
        after = times[len(before) - 1 :]
        return {
            "before_s": round(usual_s(before), 2),
            "after_s": round((after[-1] - after[0]) / (len(after) - 1), 2),
            "steps_before_s": [
                round(later - earlier, 1) for earlier, later in itertools.pairwise(times[: len(before)])
            ],
            "steps_after_s": [round(later - earlier, 1) for earlier, later in itertools.pairwise(after)],
            "served": served(commits, len(HOSTS) + 1),
            "wrong": wrong_samples(commits),
            "joiner_said": words(hosts.output(LATE))[-4:],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--line", default="5 Mbit/s", help="the joiner's uplink")
    parser.add_argument("--down", help="its downlink; as its uplink by default")
    parser.add_argument("--seconds", type=float, default=120.0, help="of steps afterwards")
    parser.add_argument("--logs", type=Path, help="keep the processes' output and runs here")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    joiner = AccessRule(host=LATE, up=asked.line, down=asked.down or asked.line)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = play(joiner, asked.settings, asked.seconds, folder)
    setting = {"up": joiner.up, "down": joiner.down, **found, "load": round(os.getloadavg()[0], 1)}
    report(
        "narrow joiner",
        found["after_s"] / found["before_s"],
        "of a step's seconds without it",
        at_most(WANTED),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
