"""Bounded parts (run.robust = "clip") beside the plain mean: what they cost without a liar, and what one liar of N does to a model.

    python benchmarks/robust.py [--steps 300] [--seeds 0:3] [--replicas 3,4,8] [--factors] [--how none]

A byte-level model of some 16,000 parameters learns from a page of this repository, by AdamW with a clip of 1. Replicas have two
microbatches of 16 samples each; one of N lies from the second step on. Rounds, arithmetic and checks are those of real peers
(tests/tensors.py), but for the baselines, which no owner of a chunk could prove to have computed: the trimmed mean (of every value the
largest and the smallest are left out), the median, and centred clipping (Karimireddy and others 2021, 3 iterations around the average of
the step before, to the median distance from it). Told of each lie: the held-out loss at the end. `clip`: the liar shortens its part as its
machine would, so that nobody can prove anything; `open`: it does not, and is found. With --factors instead: the loss and the share of
honest parts that are shortened, for other factors than 1.5.

The last line is one JSON object: by how much of its loss the
honest run ends higher with bounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.tensors

from tests.tensors import LIES, Model, Trained, train

from report import at_most, parse, report
from shoal.core.allreduce import bounds

EACH = 2  # microbatches of a replica
FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)


def trimmed(parts: Tensor, before: Tensor) -> Tensor:
    """Of (replicas, values)."""
    return parts.sort(0).values[1:-1].mean(0) * len(parts)


def median(parts: Tensor, before: Tensor) -> Tensor:
    return parts.quantile(0.5, 0) * len(parts)


def centred(parts: Tensor, before: Tensor) -> Tensor:
    centre = before / len(parts)
    for _ in range(3):
        apart = parts - centre
        norms = apart.norm(dim=1, keepdim=True)
        centre = centre + (apart * (norms.median() / norms).clamp(max=1.0)).mean(0)
    return centre * len(parts)


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"trimmed": trimmed, "median": median, "centred": centred}


def baseline(how: str, lie: str, replicas: int, steps: int, seed: int) -> float:
    model, chance = Model(seed), torch.Generator().manual_seed(seed + 1)
    before = torch.zeros(len(model.flat))
    for step in range(steps):
        parts = [model.part(EACH, EACH * replicas) for _ in range(replicas)]
        if lie and step:
            parts[-1] = LIES[lie](parts[-1], chance)
        before = BASELINES[how](torch.stack(parts), before)
        model.step(before)
    return model.evaluate()


def played(robust: str, lie: str, tame: bool, replicas: int, given: argparse.Namespace) -> list[Trained]:
    counts = (EACH,) * replicas
    return [
        train(robust, lie, tame, counts, given.steps, given.how, seed)
        for seed in range(*map(int, given.seeds.split(":")))
    ]


def mean(runs: list[Trained]) -> float:
    return statistics.fmean(one.loss for one in runs)


def factors(replicas: int, given: argparse.Namespace) -> None:
    print(f"{'factor':>8} {'shortened':>10} {'no lie':>8}  " + "  ".join(f"{lie:>14}" for lie in LIES))
    for factor in FACTORS:
        bounds.FACTOR = factor
        honest = played("clip", "", True, replicas, given)
        share = sum(one.shortened for one in honest) / sum(one.sent_parts for one in honest)
        losses = [mean(played("clip", lie, True, replicas, given)) for lie in LIES]
        row = "  ".join(f"{loss:14.3f}" for loss in losses)
        print(f"{factor:8} {share:10.1%} {mean(honest):8.4f}  {row}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0:3", metavar="A:B")
    parser.add_argument("--replicas", default="3,4,8", metavar="N,M")
    parser.add_argument("--how", default="none", help="network.averaging")
    parser.add_argument("--factors", action="store_true")
    given = parse(parser)
    torch.set_num_threads(1)
    worst, found = 0.0, dict[str, dict[str, float]]()
    for replicas in map(int, given.replicas.split(",")):
        if given.factors:
            print(f"{replicas} replicas")
            factors(replicas, given)
            continue
        plain, bounded = (played(robust, "", True, replicas, given) for robust in ("none", "clip"))
        alone = mean(played("none", "", True, replicas - 1, given))
        bias = mean(bounded) / mean(plain) - 1.0
        worst = max(worst, bias)
        share = sum(one.shortened for one in bounded) / sum(one.sent_parts for one in bounded)
        seeds = range(*map(int, given.seeds.split(":")))
        names = ("mean", "clip", "open", *BASELINES)
        print(
            f"{replicas} replicas: {share:.1%} of honest parts shortened; the honest others alone {alone:.4f}",
            flush=True,
        )
        print(f"{'lie':16} " + " ".join(f"{name:>9}" for name in names))
        for lie in ("", *LIES):
            row = {
                "mean": mean(played("none", lie, True, replicas, given)) if lie else mean(plain),
                "clip": mean(played("clip", lie, True, replicas, given)) if lie else mean(bounded),
                "open": mean(played("clip", lie, False, replicas, given)) if lie else mean(bounded),
            }
            row |= {
                how: statistics.fmean(baseline(how, lie, replicas, given.steps, seed) for seed in seeds)
                for how in BASELINES
            }
            found[f"{replicas}, {lie or 'none'}"] = {name: round(loss, 4) for name, loss in row.items()}
            print(f"{lie or 'none':16} " + " ".join(f"{row[name]:9.4f}" for name in names), flush=True)
    if given.factors:
        return 0
    report("bounded parts", 100.0 * worst, "% of the loss, without a liar", at_most(1.0), found, given.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
