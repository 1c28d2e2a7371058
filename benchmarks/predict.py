"""Plans against reality: predicted and measured seconds per step of runs planned for six machines on modelled links.

Each shape is planned by the planner with its number of stages, and the plan is run by `shoal run --plan --cluster` on six real
processes: real messages, agreement, averaging and rebalancing over TLS, modelled lines (transport/emulated/shaped.py), and
emulated compute that takes the seconds the plan predicts for each machine and stage. So what is compared is the planner's
model of a step (planner/prediction/step.py) with the runtime; what a FLOP takes is not in question. Shapes run one after another.

    python benchmarks/predict.py [--shapes "far; lines"] [--steps 8]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from report import at_most, parse, report
from shoal.planner.inputs import cluster
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy import plan, strategy
from shoal.planner.strategy.problem import Problem, Wiring
from shoal.runtime.records.account import CommittedStep

CONFIG = """
[run]
name = "predict"
steps = {steps}
stages = 1
peers = 1
[model]
hidden_size = 64
intermediate_size = 192
layers = 6
heads = 4
kv_heads = 4
[data]
sequence = 64
[train]
batch = 192
microbatch = 8
[device]
executor = "emulated"
emulated_s = 0.0
[checkpoint]
every = 0
at_end = false
"""
SHAPE = Shape(hidden=64, layers=6, heads=4, kv_heads=4, head_dim=16, intermediate=192, vocabulary=256)
WORK = Work(microbatches=24, sequences=8, tokens=64, value_bytes=4)
EVEN = """
[link]
delay_s = "40 ms"
bandwidth_Bps = "10 Gbit/s"
[[device]]
name = "p"
count = 6
flops = "0.8 GFLOP/s"
up_Bps = "10 Mbit/s"
down_Bps = "10 Mbit/s"
"""


def machine(name: str, gflops: float, up_mbit: float, down_mbit: float, region: str = "") -> str:
    return (
        f'[[device]]\nname = "{name}"\nflops = "{gflops} GFLOP/s"\nup_Bps = "{up_mbit} Mbit/s"\n'
        f'down_Bps = "{down_mbit} Mbit/s"\nregion = "{region}"\n'
    )


def link(one: str, other: str, delay_ms: float, mbit: float) -> str:
    return f'[[links]]\nfrom = "{one}"\nto = "{other}"\ndelay_s = "{delay_ms} ms"\nbandwidth_Bps = "{mbit} Mbit/s"\n'


def two_regions(gflops: tuple[float, ...], between_mbit: float) -> str:
    """Three machines on each side of a long way of which every pair has its share."""
    text = '[link]\ndelay_s = "2 ms"\nbandwidth_Bps = "10 Gbit/s"\n'
    for number, speed in enumerate(gflops):
        text += machine(f"m{number}", speed, 20, 20, "east" if number < 3 else "west")
    return text + link("east", "west", 80, between_mbit)


LINES = '[link]\ndelay_s = "40 ms"\nbandwidth_Bps = "10 Gbit/s"\n'
PAIRS = LINES + "".join(machine(f"m{n}", 0.8, 20, 20) for n in range(6))
SHAPES: dict[str, tuple[int, str]] = {  # name: stages, machines
    "even, 1 stage": (1, EVEN),
    "lines of 3 to 15 Mbit/s, 1 stage": (
        1,
        LINES
        + "".join(
            machine(f"m{n}", 0.8, up, down)
            for n, (up, down) in enumerate([(3, 15), (5, 15), (5, 5), (10, 10), (15, 15), (15, 3)])
        ),
    ),
    "pairs of 1 Mbit/s behind lines of 20, 1 stage": (
        1,
        PAIRS + "".join(link(f"m{a}", f"m{b}", 40, 1) for a in range(6) for b in range(a)),
    ),
    "devices 1 to 4, 2 stages": (
        2,
        LINES + "".join(machine(f"m{n}", s, 10, 10) for n, s in enumerate((1.6, 1.6, 0.8, 0.8, 0.4, 0.4))),
    ),
    "two regions, 2 stages": (2, two_regions((0.8,) * 6, 1.5)),
    "even, 3 stages": (3, EVEN),
    "devices and lines uneven, 3 stages": (
        3,
        LINES
        + "".join(
            machine(f"m{n}", s, u, d)
            for n, (s, u, d) in enumerate(
                [(1.6, 5, 10), (1.2, 10, 10), (0.8, 8, 15), (0.8, 15, 8), (0.6, 10, 5), (0.6, 15, 15)]
            )
        ),
    ),
    "far, 4 stages": (4, EVEN.replace("40 ms", "150 ms")),
    "two regions, devices uneven, 4 stages": (4, two_regions((1.6, 0.8, 0.6, 1.2, 0.8, 0.6), 2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="", help="only those whose names contain one of these words, by semicolons")
    parser.add_argument("--steps", type=int, default=8)
    args = parse(parser)
    words = [word.strip() for word in args.shapes.split(";")]
    worst, told = 0.0, {}
    for name, (stages, machines) in SHAPES.items():
        if not any(word in name for word in words):
            continue
        predicted_s, measured_s, wiring = one(machines, stages, args.steps)
        off = measured_s / predicted_s - 1
        told[name] = [round(predicted_s, 3), round(measured_s, 3), round(off, 3)]
        worst = max(worst, abs(off))
        print(
            f"{name:<50} {wiring:<10} predicted {predicted_s:6.2f} s, measured {measured_s:6.2f} s, {off:+.1%}",
            flush=True,
        )
    print(f"worst of {len(told)} shapes: {worst:.1%}")
    report(
        "predict",
        100 * worst,
        "% largest difference of measured from predicted step time",
        at_most(10),
        {"shapes": told},
        args.record,
    )


def one(machines: str, stages: int, steps: int, wiring: Wiring = "best") -> tuple[float, float, str]:
    """Plan for those machines, run the plan: predicted and measured seconds per step, and the wiring that was chosen."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "cluster.toml").write_text(machines)
        (there / "run.toml").write_text(CONFIG.format(steps=steps))
        made = planned(there, stages, wiring)
        play(there, made)
        measured_s = median_step_s(there / "runs" / "predict" / "commits.jsonl")
    assert made.predicted is not None
    return made.predicted.step_s, measured_s, "planned" if made.routes else "stochastic"


def play(there: Path, made: plan.Plan) -> None:
    """`shoal run` by that plan, with run.toml and cluster.toml of that folder."""
    plan.save(made, there / "plan.json")
    words = ["run.toml", "--plan", "plan.json", "--cluster", "cluster.toml"]
    command = [sys.executable, "-m", "shoal.cli.main", "run", *words]
    done = subprocess.run(command, cwd=there, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def planned(there: Path, stages: int, wiring: Wiring) -> plan.Plan:
    machines = cluster.read(there / "cluster.toml")
    problem = Problem(shape=SHAPE, work=WORK, cluster=machines, uneven=True, wiring=wiring)
    return strategy.decide(problem, np.random.default_rng(0), stages=stages)


def median_step_s(commits: Path) -> float:
    """Between commits, as the launcher heard them; the first step, in which everybody warms up, is not among them."""
    heard = [msgspec.json.decode(line, type=CommittedStep).heard_s for line in commits.read_bytes().splitlines()]
    apart = sorted(later - earlier for earlier, later in pairwise(heard))
    return apart[len(apart) // 2]


def environment() -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


if __name__ == "__main__":
    main()
