"""What a peer costs that has nothing to do: memory and CPU of a process that serves its stage and waits for others.

    python benchmarks/idle.py [--seconds 10] [a.b=c ...]

One local peer of configs/quickstart.toml is started as `shoal run --here 1` starts it; it listens, holds its stage's parameters,
moments and gradient sum, and waits for five more that never come. Memory is the process's resident set, its own
part and what it shares (libraries, token files). The bound is a Python process that has imported torch and the model's family and
built the same stage with its optimizer: what remains above it is Shoal's own. Linux only.
The last line is one JSON object; its value is MiB; `torch_and_stage` in `setting` is the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Target, parse, report

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
MIB = 1 << 20

# What the bound holds: no Shoal but the model that it trains, cut as it cuts.
BARE = """
import sys, torch
from transformers import AutoModelForCausalLM
from shoal import config
from shoal.executor import create
torch.set_num_threads(1)
executor = create(config.load(sys.argv[1], sys.argv[2:]), 0)
print("ready", flush=True)
sys.stdin.read()
"""


def memory(process: int) -> dict[str, float]:
    """Resident MiB of a process: all, its own, and the highest it has been."""
    rollup = (
        dict(
            line.split(":", 1) for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines() if ":" in line
        )
        if Path(f"/proc/{process}/smaps_rollup").exists()
        else {}
    )
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line
    )

    def mib(text: str) -> float:
        return round(int(text.split()[0]) / 1024, 1)

    found = {"resident": mib(status["VmRSS"])}
    if "VmHWM" in status:
        found["peak"] = mib(status["VmHWM"])
    if "Private_Dirty" in rollup:
        found["own"] = mib(rollup["Private_Dirty"])
    return found


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peer_of(launcher: int) -> int | None:
    """The peer process that a launcher has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue  # it has ended meanwhile
            if parent == launcher and b"shoal.launcher.peer" in command:
                return int(entry.name)
    return None


def idle_peer(words: list[str], seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal.cli.main", "run", *words, "run.name=idle"]
        with open(Path(folder) / "out", "wb") as out:
            launcher = subprocess.Popen(
                [*command, "--here", "1"], cwd=folder, env=environment(), stdout=out, stderr=out
            )
        try:
            status = Path(folder) / "runs/idle/status.json"
            until = time.monotonic() + START_S
            while not (status.exists() and any(peer["ready"] for peer in json.loads(status.read_bytes())["peers"])):
                if launcher.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the peer is not ready:\n{(Path(folder) / 'out').read_text()}")
                time.sleep(0.2)
            peer = peer_of(launcher.pid)
            assert peer is not None
            spent_s, began = cpu_s(peer), time.monotonic()
            time.sleep(seconds)  # it idles, and its heartbeats cost what they cost
            found = memory(peer)
            found["cpu_percent"] = round(100 * (cpu_s(peer) - spent_s) / (time.monotonic() - began), 2)
            return found
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)


def bare(words: list[str]) -> dict[str, float]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BARE, *words], env=environment(), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"ready\n"
        return memory(process.pid)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parse(parser)
    words = [str(ROOT / "configs/quickstart.toml"), *asked.settings]
    least = bare(words)
    print("torch and the stage alone:", least, flush=True)
    found = idle_peer(words, asked.seconds)
    print("idle peer:", found, flush=True)
    setting = {"peer": found, "torch_and_stage": least, "settings": asked.settings}
    report("idle", found["resident"], "MiB resident", Target(None, "lower"), setting, asked.record)


if __name__ == "__main__":
    main()
