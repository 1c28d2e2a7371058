"""Which update rules bear gradients that are one step late: many rules at once on one small decoder, at several learning rates.

    python benchmarks/late_rules.py [--steps 300] [--seeds 1] [--first-seed 0] [--batch 16]

To find out what is worth the hours of benchmarks/staleness.py, which trains with a run's executors. All rules start from the same weights,
see the same bytes of Python's library in the same order, and are computed as one batch of models: 2 layers, 32 wide, 43,000 parameters.
Schedule, clip and decay are the quickstart's; a late gradient is that of the parameters before the last update. A rule counts at its best
rate: AdamW in time too, else a rule would win because its rival is badly tuned. The last line's value is how many per cent the best
late rule is above AdamW in time.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from report import at_most, parse, report
from shoal import config as configuration
from shoal.numerics.muon import COEFFICIENTS, ITERATIONS, MOMENTUM, SIZE
from shoal.runtime.data.dataset import open_dataset

ROOT = Path(__file__).parents[1]
WIDTH, LAYERS, HEADS, LENGTH, INNER, BYTES = 32, 2, 2, 32, 96, 256
WARMUP, FINAL, DECAY, BETA2, EPSILON = 10, 0.1, 0.1, 0.95, 1e-8
HELD_OUT, HELD_OUT_STEPS = 16, 10**6  # batches, far beyond those that are trained on
MOST_PERCENT = 0.5
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
Weights = dict[str, Tensor]  # (rules, ...) each


class Rule(NamedTuple):
    name: str
    muon: bool = False  # steps the blocks' matrices; AdamW the rest
    late: bool = False
    beta1: float = 0.9  # of AdamW
    momentum: float = MOMENTUM  # of Muon


RULES = (
    Rule("AdamW"),
    Rule("AdamW late", late=True),
    Rule("AdamW late, beta1 = 0", late=True, beta1=0.0),
    Rule("Muon", muon=True),
    Rule("Muon late", muon=True, late=True),
    Rule("Muon late, beta1 = 0", muon=True, late=True, beta1=0.0),
    Rule("Muon late, beta1 = 0, momentum 0.9", muon=True, late=True, beta1=0.0, momentum=0.9),
)


class Decoders:
    """One decoder for each rule and rate, computed together."""

    def __init__(self, seed: int, steps: int) -> None:
        self.each = [(rule, rate) for rule in RULES for rate in RATES]
        self.steps, count = steps, len(self.each)
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.08).expand(count, *shape).clone()

        shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {
            "g": (INNER, WIDTH),
            "u": (INNER, WIDTH),
            "d": (WIDTH, INNER),
        }
        self.weights: Weights = {
            "embedding": drawn(BYTES, WIDTH),
            "head": drawn(BYTES, WIDTH),
            "norm": torch.ones(count, WIDTH),
        }
        for layer in range(LAYERS):
            self.weights |= {f"{layer}{name}": drawn(*shape) for name, shape in shapes.items()}
            self.weights |= {f"{layer}{name}": torch.ones(count, WIDTH) for name in ("norm1", "norm2")}
        self.before = dict(self.weights)
        self.first, self.second = ({name: torch.zeros_like(w) for name, w in self.weights.items()} for _ in range(2))
        self.muon, self.late = (torch.tensor([flag(rule) for rule, _ in self.each]) for flag in (_muon, _late))
        self.rate = torch.tensor([rate for _, rate in self.each])
        self.beta1 = torch.tensor([rule.beta1 for rule, _ in self.each])
        self.momentum = torch.tensor([rule.momentum if rule.muon else rule.beta1 for rule, _ in self.each])

    def train(self, tokens: Tensor, step: int) -> None:
        used = {
            name: torch.where(_by_rule(self.late, w), self.before[name], w).requires_grad_()
            for name, w in self.weights.items()
        }
        losses(used, tokens).sum().backward()
        squares = sum((w.grad.flatten(1).square().sum(1) for w in used.values() if w.grad is not None), torch.zeros(1))
        clip = (1 / (squares.sqrt() + 1e-6)).clamp(max=1)
        self.before = self.weights
        self.weights = {name: self._stepped(name, w, used[name].grad, clip, step) for name, w in self.weights.items()}

    def _stepped(self, name: str, weight: Tensor, grad: Tensor | None, clip: Tensor, step: int) -> Tensor:
        assert grad is not None
        inner = name[0].isdigit() and weight.dim() == 3
        grad = grad * _by_rule(clip, weight)
        keep, rate = (
            _by_rule(each, weight) for each in (self.momentum if inner else self.beta1, self.rate * self._scale(step))
        )
        self.first[name] = first = keep * self.first[name] + (1 - keep) * grad
        self.second[name] = second = BETA2 * self.second[name] + (1 - BETA2) * grad * grad
        way = first / (1 - keep ** (step + 1)) / ((second / (1 - BETA2 ** (step + 1))).sqrt() + EPSILON)
        if inner:
            size = SIZE * math.sqrt(max(weight.shape[1:]))
            way = torch.where(_by_rule(self.muon, weight), size * orthogonal(keep * first + (1 - keep) * grad), way)
        return weight * (1 - rate * (DECAY if weight.dim() == 3 else 0.0)) - rate * way

    def _scale(self, step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        angle = math.pi * (step - WARMUP) / max(1, self.steps - 1 - WARMUP)
        return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(angle))


def _muon(rule: Rule) -> bool:
    return rule.muon


def _late(rule: Rule) -> bool:
    return rule.late


def _by_rule(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def losses(weights: Weights, tokens: Tensor) -> Tensor:
    """(rules,): each decoder's mean loss. `tokens` (B, L+1)."""
    count, rows = len(weights["norm"]), len(tokens)
    x, wanted = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    hidden = weights["embedding"][:, x]  # (rules, B * L, D)
    for layer in range(LAYERS):
        of = {name.removeprefix(str(layer)): w for name, w in weights.items() if name.startswith(str(layer))}
        z = normed(hidden, of["norm1"])
        q, k, v = (through(z, of[name]).view(count * rows, LENGTH, HEADS, -1).transpose(1, 2) for name in "qkv")
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        hidden = hidden + through(attended.transpose(1, 2).reshape(count, -1, WIDTH), of["o"])
        z = normed(hidden, of["norm2"])
        hidden = hidden + through(F.silu(through(z, of["g"])) * through(z, of["u"]), of["d"])
    logits = through(normed(hidden, weights["norm"]), weights["head"])
    return F.cross_entropy(logits.flatten(0, 1), wanted.repeat(count), reduction="none").view(count, -1).mean(1)


def through(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale[:, None, :]


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(half) / half)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)


def orthogonal(matrices: Tensor) -> Tensor:
    """As numerics.muon.orthogonal, of many in fp32: the bits do not matter here."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(1, 2)
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


def held_out_losses(seed: int, asked: argparse.Namespace) -> dict[str, dict[float, float]]:
    """By rule and rate, after the last step."""
    words = [
        f"run.seed={seed}",
        f"data.sequence={LENGTH}",
        f"train.batch={asked.batch}",
        f"train.microbatch={asked.batch}",
    ]
    config = configuration.load(ROOT / "configs" / "quickstart.toml", words)
    dataset = open_dataset(config, cache=Path(tempfile.gettempdir()) / "shoal-quality")
    decoders = Decoders(seed, asked.steps)
    for step in range(asked.steps):
        decoders.train(dataset.microbatch(step, 0), step)
    with torch.no_grad():
        sums = sum(losses(decoders.weights, dataset.microbatch(HELD_OUT_STEPS + i, 0)) for i in range(HELD_OUT))
    found: dict[str, dict[float, float]] = {}
    for (rule, rate), loss in zip(decoders.each, (sums / HELD_OUT).tolist(), strict=True):
        found.setdefault(rule.name, {})[rate] = round(loss, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    asked = parse(parser)
    torch.set_num_threads(1)
    gaps, tables = [], {}
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        tables[seed] = table = held_out_losses(seed, asked)
        best = {name: min(row.values()) for name, row in table.items()}
        for name, row in table.items():
            print(f"seed {seed}  {name:36} {row}  {100 * (best[name] / best['AdamW'] - 1):+.1f} % of AdamW", flush=True)
        gaps.append(min(100 * (best[rule.name] / best["AdamW"] - 1) for rule in RULES if rule.late))
    setting = {"steps": asked.steps, "batch": asked.batch, "seeds": asked.seeds, "losses": tables}
    unit = f"% of held-out loss of the best late rule above AdamW in time, after {asked.steps} steps"
    report("late rules, quality", max(gaps), unit, at_most(MOST_PERCENT), setting, asked.record)


if __name__ == "__main__":
    main()
