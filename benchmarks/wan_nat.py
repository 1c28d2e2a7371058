"""Who reaches whom through which routers (docs/wan.md), in how many seconds, and by which route. Needs root.

    python benchmarks/wan_nat.py [--seconds 60] [--kind "full cone" ...]

A founder with an open port, and two hosts behind a router of each kind, 50 ms apart (network.transport = auto, discovery = dht). Each
calls every other until it has answered. The seconds count from the moment at which both listen; the route is the one that the caller
has then: direct (TLS to its port), relayed (relay.py), or libp2p over a connection that the other has made or over libp2p's relay.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Target, parse, report
from wan.lab import KINDS, GateRule, Lab, PathRule, Topology, missing

CALLER = Path(__file__).with_name("wan") / "caller.py"


def topology_of(kinds: list[str]) -> Topology:
    pairs = [(f"{kind} {letter}", kind) for kind in kinds for letter in "ab"]
    gates = tuple(GateRule(host, kind) for host, kind in pairs)
    return Topology(("founder", *(host for host, _ in pairs)), path=(PathRule(delay="50 ms"),), gate=gates)


def measure(kinds: list[str], seconds: float) -> list[dict[str, Any]]:
    """One row per pair (from, to) that has met."""
    with tempfile.TemporaryDirectory() as temporary, Lab(topology_of(kinds)) as lab:
        folder = Path(temporary)
        for host in lab.topology.hosts:
            with (folder / f"{host}.log").open("w") as log, (folder / f"{host}.errors").open("w") as errors:
                words = [sys.executable, str(CALLER), str(folder), host]
                lab.start(host, [*words, "founder"] if host == "founder" else words, stdout=log, stderr=errors)
        time.sleep(seconds)
        names = {
            (folder / f"{host}.name").read_text(): host
            for host in lab.topology.hosts
            if (folder / f"{host}.name").exists()
        }
        rows, started = [], {}
        for host in lab.topology.hosts:
            for line in (folder / f"{host}.log").read_text().splitlines():
                if not line.startswith("{"):  # words of the transport, for people
                    print(f"{host}: {line}", file=sys.stderr)
                    continue
                record = json.loads(line)
                if "started_s" in record:
                    started[host] = record["started_s"]
                else:
                    rows.append({"from": host, "to": names[record["peer"]], "s": record["s"], "over": record["over"]})
        for row in rows:
            row["s"] = round(
                row["s"] - max(started[row["from"]], started[row["to"]] if row["to"] != "founder" else 0), 1
            )
        for host in lab.topology.hosts:
            if text := (folder / f"{host}.errors").read_text():
                print(f"--- {host}\n{text[-1500:]}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kind", action="append", choices=KINDS)
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    kinds = asked.kind or list(KINDS)
    rows = measure(kinds, asked.seconds)
    for row in rows:
        print(json.dumps(row))
    hosts = 1 + 2 * len(kinds)
    directions = hosts * (hosts - 1)
    setting = {"directions": directions, "slowest_s": max((row["s"] for row in rows), default=None)}
    report(
        "wan_nat",
        len(rows),
        f"directions of {directions} that meet",
        Target(directions, "higher"),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
