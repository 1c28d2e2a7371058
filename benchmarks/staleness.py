"""What delayed updates cost in quality as a run gets longer: held-out loss against exact updates after 80 to 1,000 steps, by seed.

    python benchmarks/staleness.py [--steps 1000] [--batch 16] [--seeds 2] [--only 'exact;delayed'] [--jobs 1] [--folder F]

The quickstart model, whole, in one process (tests/pipeline.py): with `train.staleness=1` the executor of a run computes every step with
the parameters that lack the gradient of the step before, and so has the bits of a swarm of one stage. All variants of a seed see the same
samples in the same order, and the loss is that of the same 256 held-out sequences. A variant is compared with `exact` after equally many
steps of equal schedules. The value of the last line is the gap in per cent at the end of the first variant asked for besides `exact`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from report import at_most, parse, report

if TYPE_CHECKING:
    from tests.pipeline import Pipeline

ROOT = Path(__file__).parents[1]
HELD_OUT_STEPS = 10**6  # samples far beyond those that are trained on
HELD_OUT = 256  # sequences
MOST_PERCENT = 0.5  # that a choice of the planner may cost: benchmarks/papers/tax.py
LATE = "train.staleness=1"
MUON = ("train.optimizer=muon",)
WITHOUT_FIRST = "train.betas=[0.0, 0.95]"  # what AdamW steps has no momentum


class Variant(NamedTuple):
    settings: tuple[str, ...] = ()
    exact_steps: int = 0  # that come before the settings take effect


VARIANTS = {
    "exact": Variant(),
    "delayed": Variant((LATE,)),
    "delayed after 100": Variant((LATE,), 100),
    "delayed after 200": Variant((LATE,), 200),
    "delayed, rate 0.8": Variant((LATE, "train.learning_rate=8e-4")),
    "exact, rate 0.3": Variant(("train.learning_rate=3e-4",)),
    "delayed, rate 0.3": Variant((LATE, "train.learning_rate=3e-4")),
    "8-bit moments": Variant(("train.moments=8bit",)),
    "delayed, beta1 0": Variant((LATE, WITHOUT_FIRST)),
    "Muon": Variant(MUON),
    "Muon delayed": Variant((*MUON, LATE)),
    "Muon delayed, beta1 0": Variant((*MUON, LATE, WITHOUT_FIRST)),
    "exact, rate 2": Variant(("train.learning_rate=2e-3",)),
    "exact, rate 4": Variant(("train.learning_rate=4e-3",)),
    "Muon, rate 2": Variant((*MUON, "train.learning_rate=2e-3")),
    "Muon delayed, beta1 0, rate 2": Variant((*MUON, LATE, WITHOUT_FIRST, "train.learning_rate=2e-3")),
    "Muon delayed, beta1 0, rate 4": Variant((*MUON, LATE, WITHOUT_FIRST, "train.learning_rate=4e-3")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--at", default="80,200,500,1000", help="steps after which the held-out loss is measured")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default=";".join(VARIANTS), help="variants, with semicolons between")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, one thread each")
    parser.add_argument(
        "--folder", help="where each variant's and seed's losses are kept; what is there is not measured again"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parse(parser)
    if asked.one:
        name, seed = asked.one.rsplit(":", 1)
        print(json.dumps(one(name, int(seed), asked)))
        return
    names = asked.only.split(";")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}; there are {'; '.join(VARIANTS)}")
    works = [(name, asked.first_seed + seed) for seed in range(asked.seeds) for name in names]
    began, found = time.monotonic(), dict[str, dict[int, dict[str, float]]]()
    with ThreadPoolExecutor(asked.jobs) as pool:
        for (name, seed), losses in zip(works, pool.map(lambda work: apart(*work, asked), works), strict=True):
            found.setdefault(name, {})[seed] = losses
            words = "  ".join(f"{step} {loss:.4f}" for step, loss in losses.items())
            print(f"{time.monotonic() - began:7.0f} s  {name:22} seed {seed}  {words}", flush=True)
    table = summary(found)
    for name, row in table.items():
        print(f"{name:22} {row}", flush=True)
    last = str(points(asked)[-1])
    value = next((row["percent"][last] for name, row in table.items() if name != "exact" and "percent" in row), 0.0)
    setting = {"steps": asked.steps, "batch": asked.batch, "seeds": asked.seeds, "variants": table}
    unit = f"% of held-out loss above exact updates after {last} steps"
    report("staleness, quality", value, unit, at_most(MOST_PERCENT), setting, asked.record)


def points(asked: argparse.Namespace) -> list[int]:
    return [step for step in map(int, asked.at.split(",")) if step <= asked.steps]


def apart(name: str, seed: int, asked: argparse.Namespace) -> dict[str, float]:
    """Held-out losses by step of one variant and seed, in a process of its own."""
    kept = asked.folder and Path(asked.folder) / f"{name}, {asked.steps} of {asked.batch}, seed {seed}.json"
    if kept and kept.exists():
        known: dict[str, float] = json.loads(kept.read_text())
        return known
    words = [f"--{key}={getattr(asked, key)}" for key in ("steps", "at", "batch")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, __file__, f"--one={name}:{seed}", *words],
        capture_output=True, text=True, env=environment, cwd=tempfile.gettempdir(), check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    losses: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(losses))
    return losses


def one(name: str, seed: int, asked: argparse.Namespace) -> dict[str, float]:
    from tests.pipeline import Pipeline
    from tests.reference import one_after_the_other

    from shoal import config as configuration
    from shoal.runtime.data.dataset import open_dataset

    variant, losses = VARIANTS[name], dict[str, float]()
    words = [f"run.seed={seed}", "run.stages=1", f"run.steps={asked.steps}", f"train.batch={asked.batch}"]
    words.append(f"train.microbatch={asked.batch}")

    def process_of(*settings: str) -> Pipeline:
        config = configuration.load(ROOT / "configs" / "quickstart.toml", [*words, *settings])
        return Pipeline(config, open_dataset(config, cache=Path(tempfile.gettempdir()) / "shoal-quality"))

    order, names = one_after_the_other(1, 1), (("a",),)
    held_out = range(HELD_OUT_STEPS, HELD_OUT_STEPS + HELD_OUT // asked.batch)
    process = process_of(*(() if variant.exact_steps else variant.settings))
    for step in range(1, asked.steps + 1):
        process.train(order, names)
        if step in points(asked):
            losses[str(step)] = process.loss(held_out)
        if step == variant.exact_steps:
            process = continued(process, process_of(*variant.settings))
    return losses


def continued(before: Pipeline, process: Pipeline) -> Pipeline:
    """`process` with the parameters, moments and step of `before`, as after a restart from its checkpoint."""
    for old, new in zip(before.executors, process.executors, strict=True):
        new.load_state(old.state())
        new.zero(before.step)
    process.step = before.step
    return process


def summary(found: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    """By variant: mean losses by step, and per cent above `exact`, mean and by seed."""
    exact, table = found.get("exact", {}), dict[str, Any]()
    for name, by_seed in found.items():
        steps = next(iter(by_seed.values()))
        row: dict[str, Any] = {
            "loss": {step: round(statistics.fmean(losses[step] for losses in by_seed.values()), 4) for step in steps}
        }
        if exact:
            gaps = {
                step: [100 * (losses[step] / exact[seed][step] - 1) for seed, losses in by_seed.items()]
                for step in steps
            }
            row["percent"] = {step: round(statistics.fmean(each), 2) for step, each in gaps.items()}
            row["by_seed"] = {step: [round(gap, 2) for gap in each] for step, each in gaps.items()}
        table[name] = row
    return table


if __name__ == "__main__":
    main()
