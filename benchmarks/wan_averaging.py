"""Averaging over real networks: replicas of one stage in the laboratory (docs/wan.md) beside a plain socket. Needs root.

    python benchmarks/wan_averaging.py [--line 50] [--peers 6] [--values 5000000] [--steps 4]

`shoal run` on one host and `shoal join` on the others, executors that sleep, a gradient of 20 MB. Value: what the busiest line must carry,
at the rate of a plain socket that was measured in the same lab just before, over the time from the first chunk that is cut to the last sum
that is gathered: the median of the steps after the first, at the slowest host. Two idle cores carry six hosts at 100 Mbit/s, and three at
200: more measures the processor.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from averaging import averagings
from report import at_least, parse, report
from wan.lab import Lab, missing
from wan_bulk import LINES, plain_Bps
from wan_hops import run, topology_of, traced

WANTED = 0.9  # of the bound


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--line", default="50", choices=[*LINES, "regions"])
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--values", type=int, default=5_000_000, help="of the gradient, 4 bytes each")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    asked = parse(parser)
    if lacking := missing():
        print(f"skipped: {lacking}")
        return
    peers = asked.peers
    device = ["device.executor=emulated", "device.emulated_values=1000", "device.emulated_s=20 ms"]
    device.append(f"device.emulated_gradient={asked.values}")
    words = [f"run.steps={asked.steps}", f"run.peers={peers}", "run.stages=1", "train.batch=12"]
    words += ["network.bandwidth_Bps=0", "network.delay_s=0"]
    topology = topology_of(asked.line, peers)
    with tempfile.TemporaryDirectory() as folder, Lab(topology) as lab:
        socket_Bps = plain_Bps(lab)
        run(lab, Path(folder), words, device)
        traces = [traced(Path(folder), host, topology) for host in topology.hosts]
        spans_s = {host: averagings(path) for host, path in zip(topology.hosts, traces, strict=True)}
    took_s = max(median(each) for each in spans_s.values())
    bound_s = 2 * (peers - 1) / peers * 4 * asked.values / socket_Bps
    setting = {
        "line": asked.line,
        "peers": peers,
        "gradient_bytes": 4 * asked.values,
        "plain_MBps": round(socket_Bps / 1e6, 1),
        "bound_s": round(bound_s, 2),
        "averaging_s": {host: [round(each, 2) for each in spans] for host, spans in spans_s.items()},
    }
    words_of_unit = "of the plain socket's bound"
    report("averaging over real lines", bound_s / took_s, words_of_unit, at_least(WANTED), setting, asked.record)


if __name__ == "__main__":
    main()
