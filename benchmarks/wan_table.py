"""The table of real lines: what the transport does on each line of the laboratory, over what the line allows (docs/wan.md). Needs root.

    python benchmarks/wan_table.py [--lines even,20,...] [--measures bulk,hops,...] [--write]

Each cell is a short form of the benchmark that measures it (wan_bulk.py, wan_hops.py, wan_averaging.py, wan_join.py), with sizes that
follow the line, so that a cell takes 10 to 90 s. `plain`: MB/s of a plain socket; `bulk`: four streams to one host, over it; `p99`: of
control messages beside that, over the round trip; `hops`, `averaging`: over the plain socket's bound; `state`: to two joiners beside
tensors, over the line; `join`: seconds from the command to the first hop, less the download. `--write` puts what was measured into
the table of docs/wan.md and leaves its other cells, so that it can be made in pieces. Value: measured cells that meet their target.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import overhead
from averaging import averagings
from report import Target, parse, report
from shoal import config as configuration
from shoal import units
from wan.lab import AccessRule, Change, Lab, Topology, missing
from wan_bulk import LINES, measure, plain_Bps
from wan_hops import bound, run, topology_of, traced
from wan_join import join

DOCS = Path(__file__).resolve().parents[1] / "docs/wan.md"
BEGIN, END = "<!-- table: wan_table.py -->\n\n", "\n<!-- end of the table -->"
HOPS_S = 25.0  # that the bound of a step takes: filling and draining are a tenth of it
AVERAGING_S = 5.0
# By two cores, on all hosts' lines together while they average: of more the processor would be measured
CARRIED_BPS = 80e6
TARGETS = {"bulk": 0.95, "p99": 1.5, "hops": 0.92, "averaging": 0.9, "state": 0.05, "join": 8.0}
LOWER = ("p99", "join")
HOPS_OF_REGIONS = 0.85
NAMES = {
    "even": "200 Mbit/s, 50 ms",
    "20": "20 Mbit/s, 50 ms",
    "50": "50 Mbit/s, 50 ms",
    "100": "100 Mbit/s, 50 ms",
    "500": "500 Mbit/s, 50 ms",
    "1000": "1000 Mbit/s, 50 ms",
    "1ms": "200 Mbit/s, 1 ms",
    "10ms": "200 Mbit/s, 10 ms",
    "150ms": "200 Mbit/s, 150 ms",
    "loss0.1": "200 Mbit/s, 50 ms, 0.1 % loss",
    "loss1": "200 Mbit/s, 50 ms, 1 % loss",
    "home": "20 up, 500 down, 20 ms",
    "bloat": "100 Mbit/s, 20 ms, a buffer of 1 s",
    "changing": "50 Mbit/s, 50 ms; one line falls to 20 and rises",
    "regions": "eight regions, 50 Mbit/s",
}
Cells = dict[str, float]


def bulk(line: str) -> Cells:
    row = measure(topology(line), "stream", 1, "")
    return {"plain": row["plain_MBps"], "bulk": row["ratio"], "p99": row["shoal_p99_ms"] / max(row["trip_ms"], 1.0)}


def state(line: str) -> Cells:
    row = measure(topology(line), "joiner", 1, "")
    return {"state": row["state_MBps"] * 1e6 / width_Bps(line)}


def hops(line: str) -> Cells:
    peers, stages = (8, 4) if line == "regions" else (6, 3)
    topology_ = topology(line, peers)
    words = [
        "run.steps=2",
        f"run.peers={peers}",
        f"run.stages={stages}",
        "network.bandwidth_Bps=0",
        "network.delay_s=0",
    ]
    with tempfile.TemporaryDirectory() as folder, Lab(topology_) as lab:
        socket_Bps = plain_Bps(lab)
        values = int(min(2_000_000, socket_Bps * 0.37 / 4))  # a tensor takes 0.37 s, as 8 MB on 200 Mbit/s do
        device = ["device.executor=emulated", f"device.emulated_values={values}", "device.emulated_s=100 ms"]
        config = configuration.load(overhead.LAB, ["train.batch=96", *words, *device])
        batch = max(24, round(HOPS_S * bound(config, socket_Bps)))
        result = run(lab, Path(folder), [f"train.batch={batch}", *words], device)
    commits = result["commits"]
    rate = batch * (len(commits) - 1) / (commits[-1]["heard_s"] - commits[0]["heard_s"])
    return {"hops": rate / bound(config, socket_Bps)}


def averaging(line: str) -> Cells:
    peers = 8 if line == "regions" else min(6, max(3, int(CARRIED_BPS / width_Bps(line))))
    topology_ = topology(line, peers)
    words = ["run.steps=4", f"run.peers={peers}", "run.stages=1", "train.batch=16"]
    words += ["network.bandwidth_Bps=0", "network.delay_s=0"]
    with tempfile.TemporaryDirectory() as folder, Lab(topology_) as lab:
        socket_Bps = plain_Bps(lab)
        values = int(AVERAGING_S * socket_Bps / (2 * (peers - 1) / peers) / 4)
        device = ["device.executor=emulated", "device.emulated_values=1000", "device.emulated_s=20 ms"]
        run(lab, Path(folder), words, [*device, f"device.emulated_gradient={values}"])
        traces = {host: traced(Path(folder), host, topology_) for host in topology_.hosts}
        took_s = max(median(averagings(path)[1:]) for path in traces.values())
    return {"averaging": 2 * (peers - 1) / peers * 4 * values / socket_Bps / took_s}


def joining(line: str) -> Cells:
    topology_ = topology_of("regions", 4) if line == "regions" else topology(line, 4)
    with tempfile.TemporaryDirectory() as folder:
        marks = join(topology_, [], Path(folder))
    return {"join": marks["first hop"] - (marks["state there"] - marks["state asked"])}


MEASURES: dict[str, Callable[[str], Cells]] = {
    "bulk": bulk,
    "hops": hops,
    "averaging": averaging,
    "state": state,
    "join": joining,
}
COLUMNS = ("plain", "bulk", "p99", "hops", "averaging", "state", "join")


def width_Bps(line: str) -> float:
    """Of a host's uplink."""
    return units.parse(topology(line).access[0].up, "_Bps")


def topology(line: str, hosts: int = 5) -> Topology:
    if line == "regions":
        return topology_of("regions", max(hosts, 5))
    if line == "changing":
        return msgspec.structs.replace(
            topology_of("50", hosts),
            change=tuple(
                Change(at=f"{at} s", access=AccessRule(host="h1", up=rate, down=rate))
                for at, rate in ((60, "20 Mbit/s"), (75, "50 Mbit/s"))
            ),
        )
    return msgspec.structs.replace(LINES[line], hosts=tuple(f"h{i}" for i in range(hosts)))


def read(text: str) -> dict[str, dict[str, str]]:
    """The table that stands in the page: cells in words, by line and column."""
    rows: dict[str, dict[str, str]] = {}
    for row in text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in row.strip().strip("|").split("|"))
        rows[name] = {column: cell for column, cell in zip(COLUMNS, cells, strict=True) if cell}
    return rows


def write(measured: dict[str, Cells]) -> None:
    text = DOCS.read_text()
    rows = read(text)
    for line, cells in measured.items():
        rows.setdefault(NAMES[line], {}).update({column: shown(column, value) for column, value in cells.items()})
    lines = ["| line | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in NAMES.values():
        if name in rows:
            lines.append(f"| {name} | " + " | ".join(rows[name].get(column, "") for column in COLUMNS) + " |")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    DOCS.write_text(text[:begin] + "\n".join(lines) + "\n" + text[end:])


def shown(column: str, value: float) -> str:
    return f"{value:.1f}" if column in ("plain", "join") else f"{value:.2f}"


def meets(line: str, column: str, value: float) -> bool:
    target = HOPS_OF_REGIONS if (line, column) == ("regions", "hops") else TARGETS[column]
    return value <= target if column in LOWER else value >= target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", default="even", help=f"of {','.join(NAMES)}, or all; default: even")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--write", action="store_true", help="into the table of docs/wan.md")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    measured: dict[str, Cells] = {}
    for line in NAMES if asked.lines == "all" else asked.lines.split(","):
        for name in asked.measures.split(","):
            row = MEASURES[name](line)
            measured.setdefault(line, {}).update(row)
            print(line, *(f"{key} {value:.3g}" for key, value in row.items()), file=sys.stderr, flush=True)
            if asked.write:
                write({line: row})
    cells = [(line, *cell) for line, row in measured.items() for cell in row.items() if cell[0] in TARGETS]
    rounded: dict[str, Any] = {
        line: {key: float(f"{value:.3g}") for key, value in row.items()} for line, row in measured.items()
    }
    setting = {"lines": rounded, "load": round(os.getloadavg()[0], 1)}
    met = sum(meets(*cell) for cell in cells)
    report(
        "table of real lines",
        met,
        f"cells of {len(cells)} that meet their target",
        Target(len(cells), "higher"),
        setting,
        asked.record,
    )


if __name__ == "__main__":
    main()
