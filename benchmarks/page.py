"""The page of a run with many peers: what its server costs while a browser looks at it.

    python benchmarks/page.py [--peers 400] [--stages 20] [--seconds 60] [--readers 1] [--record]

Peers only report (tests/recorded_run.py); their lines pass through the launcher's own monitor, which writes the run's directory once a
second. `shoal watch` is a process of its own; a reader takes its server-sent events. The last line is one JSON object: the server's
processor time per second, in % of a core. --serve leaves all this running, to look at.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import msgspec

from report import at_most, parse, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.recorded_run

from tests.recorded_run import RecordedRun  # noqa: E402

TARGET_PERCENT = 10.0
WARM_S = 5.0


class Reader(threading.Thread):
    """A browser, as far as the server can tell. Counts events and bytes."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address, self.events, self.nbytes = address, 0, 0
        self.latest = b""

    def run(self) -> None:
        with urllib.request.urlopen(f"{self.address}events") as answer:
            for line in answer:
                self.nbytes += len(line)
                if line.startswith(b"data:"):
                    self.events, self.latest = self.events + 1, line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=400)
    parser.add_argument("--stages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="until Ctrl-C; nothing is measured")
    args = parse(parser)
    with tempfile.TemporaryDirectory() as place, RecordedRun(Path(place) / "swarm", args.peers, args.stages) as run:
        for _ in range(300):
            run.tick()
        command = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            "watch",
            str(run.output.path),
            "--port",
            "0",
            "--parent",
            str(os.getpid()),
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            words = server.stdout.readline()
            print(words, flush=True)
            address = next(word.rstrip(";") for word in words.split() if word.startswith("http"))
            readers = [Reader(address) for _ in range(0 if args.serve else args.readers)]
            for reader in readers:
                reader.start()
            live(run, float("inf") if args.serve else WARM_S)
            cpu_s, began_s, events = cpu(server.pid), time.monotonic(), sum(reader.events for reader in readers)
            live(run, args.seconds)
            passed_s = time.monotonic() - began_s
            percent = 100 * (cpu(server.pid) - cpu_s) / passed_s
            updates = (sum(reader.events for reader in readers) - events) / passed_s / args.readers
            peers = msgspec.json.decode(readers[0].latest[5:])["state"]["peers"]
            setting = {
                "peers": len(peers),
                "stages": args.stages,
                "readers": args.readers,
                "updates_per_s": round(updates, 2),
                "kB_per_update": round(readers[0].nbytes / readers[0].events / 1e3, 1),
                "memory_MiB": round(memory_mib(server.pid)),
            }
            report(
                "page: processor time of its server",
                percent,
                "% of a core",
                at_most(TARGET_PERCENT),
                setting,
                args.record,
            )
        finally:
            server.terminate()
            server.wait()


def live(run: RecordedRun, seconds: float) -> None:
    """The run goes on: everybody reports once a second; now and then a peer dies and another joins."""
    end_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        began_s, count = time.monotonic(), count + 1
        if count % 10 == 0:
            label = list(run.members)[len(run.members) // 2]
            stage = run.members[label].stage
            run.kill(label)
            run.join(f"n{count}", stage)
        run.tick()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began_s)))


def cpu(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    main()
