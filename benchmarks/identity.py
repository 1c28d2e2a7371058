"""Whether training by many processes is training by one: a run of real peers against tests/reference.py, over 50 steps.

    python benchmarks/identity.py [a.b=c ...]

Runs configs/quickstart.toml (3 stages of 2 peers, fp32; fewer samples a step than there, so that one process can repeat it four
times) and trains the uncut model in this process on the same microbatches: once adding gradients in the order that the run's ledger
recorded, which must give equal bits in every loss, norm, parameter and moment, and in other orders: by index, as one machine
would, and drawn anew for every step. The learning rate is one at which training is stable: with 3e-3 (and so few samples a step)
rounding grows a thousandfold every four steps once layer 0's attention saturates, on one machine too, to 2e-2 after 50
steps, and no two orders of addition stay together; equal bits in the recorded order hold there as well.

The last line is one JSON object. Its value is the largest relative difference of the parameters among the other orders, its target
the 1e-5 that is allowed; `differing_tensors` is of the recorded order, and must be 0. The exit code says whether all of it holds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import repeat
from pathlib import Path

from report import at_most, parse, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.reference

from tests import reference  # noqa: E402

from shoal import config as configuration  # noqa: E402
from shoal import trace  # noqa: E402
from shoal.runtime.data.dataset import open_dataset  # noqa: E402

QUICKSTART = ROOT / "configs/quickstart.toml"
SMALL = (
    "run.name=identity",
    "run.steps=50",
    "train.batch=16",
    "train.microbatch=1",
    "train.learning_rate=1e-3",
    "checkpoint.every=0",
)
ALLOWED = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="a.b=c")
    asked = parse(parser)
    words = [*SMALL, *asked.settings]
    config = configuration.load(QUICKSTART, words)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal.cli.main", "run", str(QUICKSTART), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
        directory = Path(folder) / "runs/identity"
        commits = reference.commits(directory)
        wanted = reference.checkpoint(directory, config.run.steps)
        held = reference.held(trace.find(directory))
    dataset = open_dataset(config)
    recorded, trained = reference.follow(config, dataset, map(reference.as_recorded, commits))
    losses = [commit.loss for commit in commits]
    digests = {(stage, one.step + 1): digest for one in trained for stage, digest in enumerate(one.digests)}
    found = {
        "tensors": len(wanted),
        "differing_tensors": len(reference.differing(recorded.state(), wanted)),
        "replica_versions": len(held),
        "differing_versions": sum(one.digest != digests[one.stage, one.step] for one in held if one.step),
        "differing_losses": sum(one.loss != loss for one, loss in zip(trained, losses, strict=True)),
        "differing_norms": sum(one.norm != commit.norm for one, commit in zip(trained, commits, strict=True)),
    }
    print("in the recorded order:", found, flush=True)
    exact = not any(count for name, count in found.items() if name.startswith("differing"))
    stages, microbatches = config.run.stages, recorded.microbatches
    others: dict[str, float] = {}
    for name, orders in (
        ("by index", repeat(reference.one_after_the_other(microbatches, stages))),
        ("drawn, seed 1", reference.shuffled(microbatches, stages, seed=1)),
        ("drawn, seed 2", reference.shuffled(microbatches, stages, seed=2)),
    ):
        process, trained = reference.follow(config, dataset, orders)
        others[name] = float(f"{reference.relative(process.state(), wanted):.3g}")
        loss = reference.worst([one.loss for one in trained], losses)
        print(f"added {name}: parameters {others[name]:.3g}, losses {loss:.3g} relative", flush=True)
    value = max(others.values())
    setting = {
        "config": f"quickstart.toml {' '.join(words)}",
        "steps": len(commits),
        "stages": stages,
        "peers": config.run.peers,
        **found,
        "other_orders": others,
    }
    report("identity", value, "relative difference", at_most(ALLOWED), setting, asked.record)
    return 0 if exact and value <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
