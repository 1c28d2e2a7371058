"""What local steps cost in quality, with kills: four real peers that average after H steps, against one that averages each step.

    python benchmarks/local_quality.py [--first 400] [--rounds 40] [--local 20] [--kill-every 25] [--seed 1] [a.b=c ...]

configs/quickstart.toml's model is trained alone for the first steps; DiLoCo begins from a trained model, too. From that checkpoint go on
`shoal train`, with H = 1, and `shoal run` with four peers in one stage, H local steps and an outer Nesterov step, one of them
killed every so often, on equally many sequences (a.b=c are its own settings). Value: the held-out loss of the second over that of the
first, after equal tokens; 1.02 is wanted. Peers must be killed for it to count, and every microbatch be committed once.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from overhead import ROOT, environment
from report import at_most, parse, report
from shoal import config as configuration
from shoal.model import stages
from shoal.runtime.data.dataset import open_dataset

CONFIG = ROOT / "configs" / "quickstart.toml"
PEERS, BATCH = 4, 8  # sequences of one step of all peers together
FIRST_BATCH = 4
HELD_OUT, HELD_OUT_BATCHES = 1_000_000, 24  # a sample far beyond those that are trained on; batches of BATCH
LOCAL = (  # found in docs/log/ (local-steps-trained-checkpoint)
    *("run.stages=1", f"run.peers={PEERS}", f"train.microbatch={BATCH // PEERS}", "network.discovery=gossip"),
    *(
        "train.local_warmup=5",
        "train.outer_learning_rate=0.7",
        "train.outer_momentum=0.85",
        "run.heartbeat_timeout_s=10",
        "run.min_request_timeout_s=60",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=400, help="steps before, of H = 1")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--local", type=int, default=20, help="H")
    parser.add_argument("--kill-every", type=float, default=25.0, metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="of the run with local steps")
    asked = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        alone = ["train.schedule=constant", f"train.batch={FIRST_BATCH}", f"train.microbatch={FIRST_BATCH}"]
        first = trained(there, "train", "first", asked.first, [*alone, f"run.seed={asked.seed - 1}"])
        words = [f"model.path={first}", f"train.batch={BATCH}", f"run.seed={asked.seed}", "train.warmup=0"]
        each = trained(there, "train", "each", asked.rounds * asked.local, [*words, f"train.microbatch={BATCH}"])
        words += [*LOCAL, f"train.local_steps={asked.local}", *asked.settings]
        seldom = trained(there, "run", "seldom", asked.rounds, words, "--kill-every", str(asked.kill_every))
        summary: dict[str, Any] = json.loads((there / "runs/seldom/summary.json").read_bytes())
        losses = {"first": loss(first), "H=1": loss(each), f"H={asked.local}": loss(seldom)}
    counted = {key: summary[key] for key in ("committed", "redone", "lost", "counted_twice", "killed", "joined")}
    if not summary["balanced"] or not summary["killed"]:
        raise SystemExit(f"nobody was killed, or the account does not balance: {counted}")
    setting = {**vars(asked), "losses": {name: round(value, 4) for name, value in losses.items()}, **counted}
    ratio = losses[f"H={asked.local}"] / losses["H=1"]
    report(
        "local steps, quality",
        ratio,
        "held-out loss with local steps over that without",
        at_most(1.02),
        setting,
        asked.record,
    )


def trained(there: Path, verb: str, name: str, steps: int, words: list[str], *more: str) -> Path:
    """The checkpoint that this run ends with."""
    words = [*words, f"run.name={name}", f"run.steps={steps}", "checkpoint.every=0", *more]
    command = [sys.executable, "-m", "shoal.cli.main", verb, str(CONFIG), *words]
    subprocess.run(command, cwd=there, env=environment() | {"OMP_NUM_THREADS": "1"}, check=True, stdout=sys.stderr)
    return there / "runs" / name / "checkpoints" / f"step-{steps}"


def loss(checkpoint: Path) -> float:
    config = configuration.load(CONFIG, ["run.stages=1", f"model.path={checkpoint}"])
    data, model, found = open_dataset(config), stages.whole(config), 0.0
    for first in range(HELD_OUT, HELD_OUT + HELD_OUT_BATCHES * BATCH, BATCH):
        tokens = torch.stack([torch.as_tensor(data.sample(index)) for index in range(first, first + BATCH)])
        with torch.no_grad():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        found += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    return found / HELD_OUT_BATCHES


if __name__ == "__main__":
    main()
