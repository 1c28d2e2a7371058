"""Bulk transfer over real networks: our transport beside plain sockets on the lines of the laboratory (docs/wan.md). Needs root.

    python benchmarks/wan_bulk.py [--lines even,20 ...] [--flows stream,turns,four,bursts] [--congestion cubic] [--repeats 2]

Host a sends tensors of 8 MB: `stream` four at once to one host, `turns` one at a time to one host, `four` two at once to each of four
hosts, `bursts` one at a time to each of four, `joiner` two at once to each of two hosts while two others download state: its ratio is of
the tensors' rate to the same without the download. Each flow is measured in turns over plain TCP sockets (one per receiver, with the
system's congestion control or the given one) and over our transport, in one lab. Value: the smallest ratio of
our rate to the plain socket's; the setting has each rate in MB/s, the line's round trip, and that of control messages under this load.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from report import at_least, parse, report
from shoal import units
from shoal.transport.identity.invite import Authority
from wan.endpoint import TENSOR_BYTES, Measured, Transfer, quantile
from wan.lab import AccessRule, Lab, PathRule, Topology, missing

ENDPOINT = Path(__file__).parent / "wan/endpoint.py"
HOSTS = ("a", "b", "c", "d", "e")
WANTED = 0.95  # of the plain socket
ABOUT_S = 5.0  # that a transfer should take at the line's rate
LEAST = 2  # tensors of a transfer
FLOWS = {"stream": 4, "turns": 1, "four": 2, "bursts": 1, "joiner": 2}  # tensors at once to each receiver


def line(rate: str, delay: str, down: str = "", loss: float = 0.0, buffer: str = "200 ms") -> Topology:
    access = AccessRule(up=rate, down=down or rate, up_buffer=buffer, down_buffer=buffer)
    return Topology(HOSTS, (access,), (PathRule(delay=delay, loss=loss),))


LINES = {
    "even": line("200 Mbit/s", "50 ms"),
    "20": line("20 Mbit/s", "50 ms"),
    "50": line("50 Mbit/s", "50 ms"),
    "50-5ms": line("50 Mbit/s", "5 ms"),
    "50-150ms": line("50 Mbit/s", "150 ms"),
    "100": line("100 Mbit/s", "50 ms"),
    "500": line("500 Mbit/s", "50 ms"),
    "1000": line("1000 Mbit/s", "50 ms"),
    "1ms": line("200 Mbit/s", "1 ms"),
    "10ms": line("200 Mbit/s", "10 ms"),
    "150ms": line("200 Mbit/s", "150 ms"),
    "loss0.1": line("200 Mbit/s", "50 ms", loss=0.001),
    "loss1": line("200 Mbit/s", "50 ms", loss=0.01),
    "home": line("20 Mbit/s", "20 ms", down="500 Mbit/s"),
    "bloat": line("100 Mbit/s", "20 ms", buffer="1 s"),
}


def transfers(topology: Topology, flow: str, repeats: int) -> list[Transfer]:
    last = {"four": 5, "bursts": 5, "joiner": 3}.get(flow, 2)
    receivers = [topology.address(host) for host in topology.hosts[1:last]]
    rate_Bps = units.parse(topology.access[0].up, "_Bps") / len(receivers)
    count = max(LEAST, round(ABOUT_S * rate_Bps / TENSOR_BYTES))
    if flow == "joiner":
        alone = Transfer(receivers, count, FLOWS[flow], over=("shoal",))
        beside = [topology.address(host) for host in topology.hosts[3:5]]
        return [alone, msgspec.structs.replace(alone, beside=beside)] * repeats
    return [Transfer(receivers, count, FLOWS[flow])] * repeats


def measure(topology: Topology, flow: str, repeats: int, congestion: str) -> dict[str, float]:
    plan = transfers(topology, flow, repeats)
    with Lab(topology) as lab:
        results = transferred(lab, plan, congestion)
    return joined(plan, results) if flow == "joiner" else summary(topology, plan[0], results)


def transferred(lab: Lab, plan: list[Transfer], congestion: str = "") -> list[Measured]:
    """The first host sends to the ones after it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "WAN_CONGESTION": congestion}
    first, *others = lab.topology.hosts
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "invite").write_text(Authority.new().invite((), time.time() + 3600))
        receivers = []
        for host in others[: len(plan[0].receivers) + max(len(each.beside) for each in plan)]:
            words = ["receive", folder, lab.topology.address(host), lab.topology.address(first)]
            receivers.append(lab.start(host, [sys.executable, str(ENDPOINT), *words], env=environment))
        words = ["send", folder, lab.topology.address(first), msgspec.json.encode(plan).decode()]
        sender = lab.start(first, [sys.executable, str(ENDPOINT), *words], env=environment, stdout=subprocess.PIPE)
        output = sender.communicate()[0]
        for receiver in receivers:
            lab.kill(receiver)
    if sender.returncode:
        raise RuntimeError(f"the sender ended with code {sender.returncode}; its reason stands above")
    return [msgspec.json.decode(each, type=Measured) for each in output.splitlines()]


def plain_Bps(lab: Lab) -> float:
    """What a plain socket carries from the lab's first host to its second."""
    plan = [msgspec.structs.replace(each, over=("plain",)) for each in transfers(lab.topology, "stream", 1)]
    (measured,) = transferred(lab, plan)
    return plan[0].count * TENSOR_BYTES / measured.seconds


def summary(topology: Topology, transfer: Transfer, results: list[Measured]) -> dict[str, float]:
    megabytes = transfer.count * len(transfer.receivers) * TENSOR_BYTES / 1e6
    row = {"trip_ms": 2000 * units.parse(topology.path[0].delay, "_s")}
    for over in ("plain", "shoal"):
        runs = [each for each in results if each.over == over]
        trips_s = [trip_s for each in runs for trip_s in each.round_trips_s]
        row[f"{over}_MBps"] = megabytes / median(each.seconds for each in runs)
        row[f"{over}_p50_ms"], row[f"{over}_p99_ms"] = (1000 * quantile(trips_s, part) for part in (0.5, 0.99))
    row["ratio"] = row["shoal_MBps"] / row["plain_MBps"]
    return {key: float(f"{value:.3g}") for key, value in row.items()}


def joined(plan: list[Transfer], results: list[Measured]) -> dict[str, float]:
    """Tensors with state for two joiners beside them, over tensors alone."""
    row: dict[str, float] = {}
    for name, kept in (("alone", results[::2]), ("beside", results[1::2])):
        row[f"{name}_MBps"] = (
            plan[0].count * len(plan[0].receivers) * TENSOR_BYTES / 1e6 / median(each.seconds for each in kept)
        )
        row[f"{name}_p99_ms"] = 1000 * quantile([trip_s for each in kept for trip_s in each.round_trips_s], 0.99)
    row["state_MBps"] = median(each.beside_bytes / 1e6 / each.seconds for each in results[1::2])
    row["ratio"] = row["beside_MBps"] / row["alone_MBps"]
    return {key: float(f"{value:.3g}") for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", default="even", help=f"of {','.join(LINES)}, or all; default: even")
    parser.add_argument("--flows", default=",".join(FLOWS))
    parser.add_argument("--congestion", default="", help="of all sockets, such as cubic where the kernel offers no BBR")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    rows: dict[str, Any] = {}
    for name in LINES if asked.lines == "all" else asked.lines.split(","):
        for flow in asked.flows.split(","):
            row = rows[f"{name} {flow}"] = measure(LINES[name], flow, asked.repeats, asked.congestion)
            print(
                f"{name:>8} {flow:6}", *(f"{key} {value:g}" for key, value in row.items()), file=sys.stderr, flush=True
            )
    worst = min(row["ratio"] for row in rows.values())
    setting = {"congestion": asked.congestion or "ours asks for BBR", "lines": rows}
    report("bulk over real lines", worst, "of the plain socket's rate", at_least(WANTED), setting, asked.record)


if __name__ == "__main__":
    main()
