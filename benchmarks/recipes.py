"""The recipes of configs/recipes rehearsed: predicted and measured seconds of a step of each, by `shoal run --plan --cluster`.

    python benchmarks/recipes.py [--only lora-8B,full-1.3B] [--steps 4] [--scale 16] [--slower 1]

Real processes, messages, averaging and TLS behind the modelled lines of the recipe's machines; computation takes the seconds that the
plan predicts (device.executor=emulated), and weights are not read. Tensors and the rates of lines are a sixteenth of the recipe's, so
that they travel for as long, and the gradients of all peers, 42 GB for full-1.3B, fit into one machine: what its processor does with
bytes is rehearsed for a sixteenth of them. --scale 1 has their real sizes. --slower 3 is for a machine with other work: computation, lines
and delays take three times as long, and measured seconds are a third. docs/recipes.md has the plans. The value is the largest difference
of a measured from its predicted step time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from predict import environment, median_step_s
from report import at_most, parse, report
from shoal import config

ROOT = Path(__file__).resolve().parents[1]
RATE = re.compile(r'(_Bps = ")([\d.]+) ')  # of a line, in a file of machines
DELAY = re.compile(r'(delay_s = ")([\d.]+) ')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="lora-8B,dpo-8B,qlora-70B,full-1.3B,continued-3B", help="recipes, with commas between"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=int, default=16, help="tensors and rates of lines are divided by it")
    parser.add_argument("--slower", type=int, default=1, help="everything that is modelled takes so many times as long")
    args = parse(parser)
    seconds: dict[str, list[float]] = {}
    for name in args.only.split(","):
        predicted_s, measured_s = rehearsed(name, args.steps, args.scale, args.slower)
        seconds[name] = [round(predicted_s, 1), round(measured_s, 1)]
        print(f"{name:<14} predicted {predicted_s:6.1f} s, measured {measured_s:6.1f} s", flush=True)
    worst = max(abs(measured / predicted - 1) for predicted, measured in seconds.values())
    setting = {"predicted_and_measured_s": seconds, "steps": args.steps}
    setting |= {"scale": args.scale, "slower": args.slower}
    unit = "% largest difference of measured from predicted step time"
    report("recipes", 100 * worst, unit, at_most(15), setting, args.record)


def rehearsed(name: str, steps: int, scale: int, slower: int) -> tuple[float, float]:
    """Seconds of a step: predicted, measured."""
    recipe, machines = f"configs/recipes/{name}.toml", f"configs/recipes/{name}-machines.toml"
    with tempfile.TemporaryDirectory() as folder:
        plan, modelled = f"{folder}/plan.json", f"{folder}/machines.toml"
        stages = config.load(ROOT / recipe).run.stages
        shoal("plan", recipe, "--cluster", machines, "--stages", str(stages), "--out", plan)
        Path(plan).write_text(json.dumps(smaller(json.loads(Path(plan).read_text()), scale, slower)))
        text = (ROOT / machines).read_text()
        text = RATE.sub(lambda rate: f"{rate[1]}{float(rate[2]) / (scale * slower):.10g} ", text)
        Path(modelled).write_text(DELAY.sub(lambda delay: f"{delay[1]}{float(delay[2]) * slower:.10g} ", text))
        words = ["device.executor=emulated", "device.emulated_s=0", "device.kind=auto", f"run.steps={steps}"]
        words += [f"run.dir={folder}", "checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.copies=2"]
        shoal("run", recipe, "--plan", plan, "--cluster", modelled, *words)
        predicted_s = json.loads(Path(plan).read_text())["predicted"]["step_s"]
        return predicted_s, median_step_s(Path(folder) / name / "commits.jsonl") / slower


def smaller(plan: dict[str, Any], scale: int, slower: int) -> dict[str, Any]:
    """With the bytes of what travels divided by `scale`, and computation `slower` times as long."""
    stages = [stage | {"gradient_bytes": stage["gradient_bytes"] / scale} for stage in plan["stages"]]
    peers = [peer | {name: slower * peer[name] for name in ("forward_s", "backward_s")} for peer in plan["peers"]]
    return plan | {"stages": stages, "peers": peers, "boundary_bytes": plan["boundary_bytes"] / scale}


def shoal(*words: str) -> None:
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
