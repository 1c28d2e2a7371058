"""What local steps save on the wire: bytes per token of a run that averages after H steps, against one that averages after each.

    python benchmarks/local_steps.py [--peers 4] [--rounds 2] [--local 20]

Two runs of real processes train on equally many tokens, one with H = 1 and one with H local steps (DiLoCo), every peer with the
whole model. Bytes are those that the peers counted as sent, by kind. A round sends 2 (n - 1) times the parameters among n peers, so

    bound = averaged bytes per token of H = 1, divided by H

and what is sent besides (heartbeats, requests, views) is told apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from overhead import environment
from report import at_most, parse, report

LOCAL_BATCH, MICROBATCH, SEQUENCE = 2, 1, 32

CONFIG = f"""
[run]
name = "local"
stages = 1
min_request_timeout_s = 60.0
heartbeat_timeout_s = 30.0 # on a busy machine nobody may be evicted: a round would be repeated
[model]
hidden_size = 64
layers = 2
heads = 2
kv_heads = 2
intermediate_size = 128
[data]
sequence = {SEQUENCE}
[train]
microbatch = {MICROBATCH}
warmup = 0
[network]
discovery = "gossip"
[checkpoint]
every = 0
at_end = false
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of H local steps each")
    parser.add_argument("--local", type=int, default=20, help="H")
    asked = parse(parser)
    tokens = asked.rounds * asked.local * asked.peers * LOCAL_BATCH * SEQUENCE
    every = sent(asked.peers, asked.rounds * asked.local, 1)
    seldom = sent(asked.peers, asked.rounds, asked.local)
    told = {
        f"H={steps}": {kind: round(count / tokens, 2) for kind, count in found.items() if count}
        for steps, found in ((1, every), (asked.local, seldom))
    }
    for name, kinds in told.items():
        print(f"{name:<6}", "  ".join(f"{kind} {count:,.1f}" for kind, count in kinds.items()), "bytes per token")
    setting = {"peers": asked.peers, "rounds": asked.rounds, "tokens": tokens, "bytes_per_token": told}
    setting["all_kinds_ratio"] = round(sum(every.values()) / sum(seldom.values()), 2)
    bound = every["averaging"] / tokens / asked.local
    report(
        "local steps, bytes",
        seldom["averaging"] / tokens,
        "averaged bytes per token",
        at_most(bound),
        setting,
        asked.record,
    )


def sent(peers: int, steps: int, local: int) -> dict[str, int]:
    """Bytes by kind that all peers of a run sent."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "local.toml").write_text(CONFIG)
        words = [f"run.peers={peers}", f"run.steps={steps}", f"train.batch={peers * LOCAL_BATCH}"]
        command = [sys.executable, "-m", "shoal.cli.main", "run", "local.toml", *words, f"train.local_steps={local}"]
        subprocess.run(command, cwd=there, env=environment(), check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads((there / "runs/local/summary.json").read_bytes())
        if not found["balanced"]:
            raise SystemExit(f"the account does not balance: {found['reason']}")
        return {kind: int(count) for kind, count in found["sent"].items()}


if __name__ == "__main__":
    main()
