"""The recipes of configs/recipes rehearsed: predicted and measured seconds of a step of each, by `shoal run --plan --cluster`.

    python benchmarks/recipes.py [--only lora-8B,full-1.3B] [--steps 4]

Real processes, messages, averaging and TLS behind the modelled lines of the recipe's machines; computation takes the seconds that the
plan predicts (device.executor=emulated). Tensors have their real sizes, weights are not read. docs/recipes.md has the plans. The value
is the largest difference of a measured from its predicted step time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from predict import environment, median_step_s
from report import at_most, parse, report
from shoal import config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "recipes"
NAMES = [path.stem for path in sorted(RECIPES.glob("*.toml")) if not path.stem.endswith("-machines")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(NAMES), help="recipes, with commas between")
    parser.add_argument("--steps", type=int, default=4)
    args = parse(parser)
    seconds: dict[str, list[float]] = {}
    for name in args.only.split(","):
        predicted_s, measured_s = rehearsed(name, args.steps)
        seconds[name] = [round(predicted_s, 1), round(measured_s, 1)]
        print(f"{name:<14} predicted {predicted_s:6.1f} s, measured {measured_s:6.1f} s", flush=True)
    worst = max(abs(measured / predicted - 1) for predicted, measured in seconds.values())
    setting = {"predicted_and_measured_s": seconds, "steps": args.steps}
    unit = "% largest difference of measured from predicted step time"
    report("recipes", 100 * worst, unit, at_most(15), setting, args.record)


def rehearsed(name: str, steps: int) -> tuple[float, float]:
    """Seconds of a step: predicted, measured."""
    recipe, machines = f"configs/recipes/{name}.toml", f"configs/recipes/{name}-machines.toml"
    with tempfile.TemporaryDirectory() as folder:
        plan = f"{folder}/plan.json"
        stages = config.load(ROOT / recipe).run.stages
        shoal("plan", recipe, "--cluster", machines, "--stages", str(stages), "--out", plan)
        words = ["device.executor=emulated", "device.emulated_s=0", "device.kind=auto", f"run.steps={steps}"]
        words += [f"run.dir={folder}", "checkpoint.every=0", "checkpoint.at_end=false"]
        shoal("run", recipe, "--plan", plan, "--cluster", machines, *words)
        predicted_s = json.loads(Path(plan).read_text())["predicted"]["step_s"]
        return predicted_s, median_step_s(Path(folder) / name / "commits.jsonl")


def shoal(*words: str) -> None:
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
