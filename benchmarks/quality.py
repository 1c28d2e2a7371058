"""What codecs and boundary layers cost in quality: the quickstart model, equal tokens, several seeds, one process.

    python benchmarks/quality.py [--steps 80] [--batch 64] [--seeds 3] [--only int8,none] [--jobs 1] [--plot quality.png]

tests/pipeline.py trains: the run's own executors and codecs without network and machines, which ends with the bits of a
run that encodes the same (tests/e2e/test_codecs.py). Each variant trains on the same samples in the same order; the loss is that of 16
held-out microbatches after the last step, mean over the seeds. `bytes` are those of one microbatch's boundary tensors across
one cut, there and back; `averaging` adds two replicas whose parts and sums travel in int8 with the error fed back; `delayed`
applies every gradient one step late. The order that SWARM's table has: none <= int8 << bottleneck ~ maxout, 2x < 4x. The last
line's value is the loss with int8 over that without codecs, its target 1.003.
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
from typing import Any

from report import at_most, parse, report

ROOT = Path(__file__).parents[1]
HELD_OUT_STEPS = 10**6  # samples far beyond those that are trained on
INT8 = ("network.activations=int8", "network.gradients=int8")

VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "bf16": ("network.activations=bf16", "network.gradients=bf16"),
    "int8": INT8,
    "int4": ("network.activations=int4", "network.gradients=int8"),
    "averaging int8": ("network.averaging=int8",),
    "delayed": ("train.staleness=1",),
    "bottleneck 2x": ("model.boundary=bottleneck-2x",),
    "bottleneck 4x": ("model.boundary=bottleneck-4x",),
    "maxout 2x": ("model.boundary=maxout-2x",),
    "maxout 4x": ("model.boundary=maxout-4x",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, one thread each")
    parser.add_argument("--plot", help="a PNG of loss against bytes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parse(parser)
    if asked.one:
        print(json.dumps(one(asked.one.split(":")[0], int(asked.one.split(":")[1]), asked)))
        return
    names = asked.only.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    works = [(name, seed) for seed in range(asked.seeds) for name in names]
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for (name, seed), made in zip(works, pool.map(lambda work: apart(*work, asked), works), strict=True):
            found[name].append(made)
            print(f"{time.monotonic() - began:7.0f} s  {name:15} seed {seed}  loss {made['loss']:.4f}", flush=True)
    table = summary(found)
    for name, row in table.items():
        print(f"{name:15}", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if asked.plot:
        draw(table, Path(asked.plot))
    ratio = table["int8"]["loss"] / table["none"]["loss"] if {"int8", "none"} <= table.keys() else 0.0
    setting = {"steps": asked.steps, "batch": asked.batch, "seeds": asked.seeds, **table}
    report("quality", ratio, "held-out loss with int8 over loss without codecs", at_most(1.003), setting, asked.record)


def apart(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One variant and seed in a process of its own."""
    words = [f"--one={name}:{seed}", f"--steps={asked.steps}", f"--batch={asked.batch}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, env=environment, cwd=tempfile.gettempdir()
    )
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def one(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    from tests.pipeline import Pipeline
    from tests.reference import one_after_the_other

    from shoal import config as configuration
    from shoal.executor.base import boundary
    from shoal.numerics import compress
    from shoal.runtime.data.dataset import open_dataset

    words = [f"run.seed={seed}", f"run.steps={asked.steps}", f"train.batch={asked.batch}", *VARIANTS[name]]
    config = configuration.load(ROOT / "configs" / "quickstart.toml", words)
    process = Pipeline(config, open_dataset(config, cache=Path(tempfile.gettempdir()) / "shoal-quality"))
    microbatches, stages = process.microbatches, config.run.stages
    order, names = one_after_the_other(microbatches, stages), (("a",),) * stages
    if config.network.averaging != "none":
        halves = (tuple(range(0, microbatches, 2)), tuple(range(1, microbatches, 2)))
        order, names = (halves,) * stages, (("a", "b"),) * stages
    losses = [process.train(order, names).loss for _ in range(asked.steps)]
    import torch

    shape, _ = boundary(config)
    sizes = [
        compress.encode(torch.ones(shape), how).data.numel()
        for how in (config.network.activations, config.network.gradients)
    ]
    held_out = range(HELD_OUT_STEPS, HELD_OUT_STEPS + max(1, 16 // microbatches))
    return {"loss": process.loss(held_out), "train_loss": losses[-1], "bytes": sum(sizes)}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    none = [made["loss"] for made in found.get("none", [])]
    table: dict[str, dict[str, Any]] = {}
    for name, made in found.items():
        losses = [each["loss"] for each in made]
        apart = [100 * (loss / base - 1) for loss, base in zip(losses, none, strict=False)]
        table[name] = {
            "loss": round(statistics.fmean(losses), 4),
            "spread": round(max(losses) - min(losses), 4),
            "percent_above_none": round(statistics.fmean(apart), 2) if apart else None,
            "by_seed_percent": [round(each, 2) for each in apart],
            "bytes": made[0]["bytes"],
        }
    return table


def draw(table: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    lowest = min(row["loss"] for row in table.values())
    highest = max(row["loss"] for row in table.values())
    taken: list[tuple[float, float]] = []
    for name, row in sorted(table.items(), key=lambda entry: entry[1]["loss"]):
        at, loss = row["bytes"] / 1024, row["loss"]
        axes.errorbar(at, loss, yerr=row["spread"] / 2, fmt="o", capsize=3)
        near = sum(at == other and loss - below < 0.03 * (highest - lowest) for other, below in taken)
        axes.annotate(name, (at, loss), textcoords="offset points", xytext=(6, -3 + 10 * near), fontsize=8)
        taken.append((at, loss))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.margins(x=0.25)
    axes.set_xlabel("KiB per microbatch and cut, there and back")
    axes.set_ylabel("held-out loss (bars: range over seeds)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
