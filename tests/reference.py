"""One process that trains the whole, uncut model in plain PyTorch: what a run of many peers is compared with.

It shares with a run what defines it (first weights, samples, schedule) and takes from it one thing that only the run knows: in
which order gradients were added, which the ledger records in every commit. No stage, executor, round or hop is in here: the
whole Hugging Face model, AdamW and a loop, each operation
rounded by itself as in a run. `follow` adds as the ledger says and must end with the run's bits; with
`shuffled` orders it must end within rounding. For tests/e2e and benchmarks/identity.py; fp32 on the CPU.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal import trace
from shoal.config import Config, Data, Tune, local_batch, microbatches, paired
from shoal.core.messages import Apply, Committed, Do, Done, Import, Init, Peer
from shoal.executor.base import digest_of
from shoal.model import stages
from shoal.model.layers.dropout import masks_of
from shoal.numerics.schedule import learning_rate
from shoal.runtime.data.dataset import Dataset
from shoal.runtime.records.account import CommittedStep

Shares = tuple[
    tuple[int, ...], ...
]  # of one stage: what each replica added, in its order; the sums are added in this order, those of more than 16 in rows
Order = tuple[Shares, ...]  # of one step: one per stage
Tensors = dict[str, Tensor]

NORM_VALUES = 1 << 20  # squares are summed in fp64 in pieces of so many values


class Trained(msgspec.Struct, frozen=True):
    """After one step. `digests`: of each stage's parameters in the model's order."""

    step: int
    loss: float
    norm: float
    digests: tuple[str, ...]


class SeparateAdamW(torch.optim.AdamW):
    """Its formula as torch's documentation has it, in fp32 operations that each round once."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for value in group["params"]:
                state = self.state[value]
                count = state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("exp_avg", torch.zeros_like(value))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(value))
                mean.copy_(mean * beta1 + value.grad * (1 - beta1))
                square.copy_(square * beta2 + value.grad * value.grad * (1 - beta2))
                root = torch.from_numpy(np.sqrt(square.numpy()))  # torch's may be MKL's, which is not rounded correctly
                divisor = root * (1 / math.sqrt(1 - beta2**count)) + group["eps"]
                value.copy_(value * (1 - lr * group["weight_decay"]) - mean * (lr / (1 - beta1**count)) / divisor)


class SeparateMuon(SeparateAdamW):
    """For groups of matrices that say so: products of whole numbers, in 64 bits, of which no sum is rounded."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups, self.param_groups = self.param_groups, [group for group in self.param_groups if "muon" not in group]
        super().step()
        self.param_groups = groups
        for group in groups:
            for value in group["params"] if "muon" in group else []:
                mean = self.state[value].setdefault("exp_avg", torch.zeros_like(value))
                mean.copy_(mean * 0.95 + value.grad * (1 - 0.95))
                way = _orthogonal(value.grad * (1 - 0.95) + mean * 0.95)
                size = group["lr"] * 0.2 * math.sqrt(max(value.shape))
                value.copy_(value * (1 - group["lr"] * group["weight_decay"]) - way * size)


def _orthogonal(matrix: Tensor) -> Tensor:
    if matrix.shape[0] > matrix.shape[1]:
        return _orthogonal(matrix.T.contiguous()).T
    x = matrix * (1 / (math.sqrt(_squares(matrix.flatten())) + 1e-7))
    for _ in range(5):
        gram = _product(x, x.T)
        x = x * 3.4445 + _product(gram * -4.7750 + _product(gram, gram) * 2.0315, x)
    return x


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Of values rounded to 20 bits below the power of two above the largest."""
    assert left.shape[1] <= 2**13
    ups = [20 - math.frexp(float(factor.abs().max()))[1] for factor in (left, right)]
    a, b = (
        np.rint(np.ldexp(factor.double().numpy(), up)).astype(np.int64)
        for factor, up in zip((left, right), ups, strict=True)
    )
    return torch.from_numpy(np.ldexp((a @ b).astype(np.float64), -sum(ups)).astype(np.float32))


class SeparateSGD(torch.optim.SGD):
    """With Nesterov momentum, likewise."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            keep, lr = group["momentum"], group["lr"]
            for value in group["params"]:
                momentum = self.state[value].setdefault("momentum_buffer", torch.zeros_like(value))
                momentum.copy_(momentum * keep + value.grad)
                value.copy_(value - (momentum * keep + value.grad) * lr)


class OneProcess:
    """The whole model and its optimizer."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        assert config.train.dtype == "float32" and config.device.kind in ("auto", "cpu")
        torch.set_num_threads(max(1, config.device.threads))
        self.config, self.dataset = config, dataset
        self.microbatches = microbatches(config.train)
        self.parts = self.microbatches  # whose mean losses one optimizer step takes
        self.model = stages.whole(config)
        self.parameters: Tensors = {name: v for name, v in self.model.named_parameters() if v.requires_grad}
        parts = [stages.build(config, stage) for stage in range(config.run.stages)]
        self.names = [[name for name, _ in part.named_parameters()] for part in parts]
        self.frozen = [_digest_of_bytes(part.frozen()) for part in parts]
        assert sorted(name for names in self.names for name in names) == sorted(self.parameters), (
            "the stages do not make the whole model"
        )
        inner = {id(value) for name, value in self.parameters.items() if ".layers." in name and value.dim() == 2}
        inner = inner if config.train.optimizer == "muon" else set()
        matrices = [value for value in self.parameters.values() if value.dim() >= 2 and id(value) not in inner]
        vectors = [value for value in self.parameters.values() if value.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        if inner:
            own = [value for value in self.parameters.values() if id(value) in inner]
            groups.append({"params": own, "weight_decay": config.train.weight_decay, "muon": True})
        self.optimizer = SeparateMuon(
            groups,
            betas=config.train.betas,
            eps=config.train.epsilon,
        )
        self.base = _base(config) if paired(config) else None
        self.step = 0
        self.stale: Tensors | None = None  # parameters of the version before: with delayed updates they compute

    def train(self, order: Order) -> Trained:
        """One optimizer step, adding in that order."""
        newest = {name: value.detach().clone() for name, value in self.parameters.items()}
        if self.config.train.staleness:
            self._set(newest if self.stale is None else self.stale)
        values = [self._gradients(index) for index in range(self.microbatches)]
        self._set(newest)
        self.stale = newest
        sums = [
            self._sum([grads for _, grads in values], names, shares)
            for names, shares in zip(self.names, order, strict=True)
        ]
        norm = math.sqrt(math.fsum(_squares(flat) for flat in sums) if len(sums) == 1 else sum(map(_squares, sums)))
        tokens = [self.dataset.microbatch(self.step, index)[:, 1:] for index in range(self.microbatches)]
        counts = [part >= 0 if self.base is None else (part >= 0).any(1)[::2] for part in tokens]
        counted = sum(int(part.sum()) for part in counts)
        scale = sum(part.numel() for part in counts) / counted if counted else 1.0
        norm *= scale
        clip = self.config.train.clip
        factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) * scale
        for names, flat in zip(self.names, sums, strict=True):
            self._hand_out(names, flat * factor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.train, self.config.run.steps, self.step)
        self.optimizer.step()
        self.step += 1
        loss = mean_loss([loss for loss, _ in values], whole=counted == sum(part.numel() for part in counts)) * scale
        return Trained(self.step - 1, loss, norm, tuple(self.digest(stage) for stage in range(len(self.names))))

    def digest(self, stage: int) -> str:
        trained = digest_of(self.parameters[name] for name in self.names[stage])
        frozen = self.frozen[stage]
        return hashlib.sha256(f"{frozen}{trained}".encode()).hexdigest() if frozen else trained

    def state(self) -> Tensors:
        """Parameters and moments, named as in a checkpoint's stages."""
        moments = self.optimizer.state
        return {
            **{f"model/{name}": value.detach() for name, value in self.parameters.items()},
            **{
                f"{moment}/{name}": moments[value][moment]
                for moment in ("exp_avg", "exp_avg_sq")
                for name, value in self.parameters.items()
                if moment in moments[value]
            },
        }

    def _set(self, parameters: Tensors) -> None:
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(parameters[name])

    def _gradients(self, index: int) -> tuple[float, Tensors]:
        """Of one microbatch's share of the batch's mean loss, to which tokens that do not count (~id) give nothing."""
        tokens = self.dataset.microbatch(self.step, index)  # (B, L+1)
        if (masks := masks_of(self.model)) is not None:
            masks.sample = self.step, index
        ids, wanted = torch.where(tokens < 0, ~tokens, tokens)[:, :-1], tokens[:, 1:].flatten()
        logits = self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        if self.base is not None:
            loss = self._preferred(logits, ids, wanted)
        elif (wanted >= 0).all():
            loss = torch.nn.functional.cross_entropy(logits, wanted)
        else:
            some = torch.where(wanted < 0, -100, wanted)
            loss = torch.nn.functional.cross_entropy(logits, some, ignore_index=-100, reduction="sum") / len(wanted)
        values = list(self.parameters.values())
        grads = torch.autograd.grad(loss / self.parts, values, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), dict(zip(self.parameters, grads, strict=True))

    def _preferred(self, logits: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        """DPO against the base alone: -log sigmoid(beta x (log ratio of the chosen answer - of the rejected one))."""
        assert self.base is not None
        with torch.no_grad():
            of_base = _log_probabilities(
                self.base(input_ids=ids, use_cache=False).logits.flatten(0, 1), wanted, len(ids)
            )
        rewards = self.config.tune.beta * (_log_probabilities(logits, wanted, len(ids)) - of_base)
        return -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()

    def _sum(self, values: Sequence[Tensors], names: Sequence[str], shares: Shares) -> Tensor:
        """Each share by itself, from nothing, then the shares: fp32 addition depends on it."""
        parts = []
        for share in shares:
            part = torch.zeros(sum(values[0][name].numel() for name in names))
            for index in share:
                part += torch.cat([values[index][name].reshape(-1) for name in names])
            parts.append(part)
        return added(parts)

    def _hand_out(self, names: Sequence[str], flat: Tensor) -> None:
        parts = flat.split([self.parameters[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self.parameters[name].grad = part.view_as(self.parameters[name])


def _base(config: Config) -> torch.nn.Module:
    """The model of model.path, in which no adapters ever were."""
    return stages.whole(msgspec.structs.replace(config, tune=Tune(), data=Data(sequence=config.data.sequence)))


def _log_probabilities(logits: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """Of each row's answer."""
    some = torch.where(wanted < 0, -100, wanted)
    return -torch.nn.functional.cross_entropy(logits, some, ignore_index=-100, reduction="none").view(rows, -1).sum(1)


def _digest_of_bytes(values: Sequence[Tensor]) -> str:
    return digest_of(value.view(torch.uint8) for value in values) if values else ""


class ApartAndBack(OneProcess):
    """The same with train.local_steps: every share of a round trained by itself, one after the other, then the outer step."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        assert config.run.stages == 1
        self.parts = local_batch(config) // config.train.microbatch
        values = [value for names in self.names for value in (self.parameters[name] for name in names)]
        self.outer = [value.detach().clone().requires_grad_() for value in values]
        self.sgd = SeparateSGD(
            self.outer, lr=config.train.outer_learning_rate, momentum=config.train.outer_momentum, nesterov=True
        )

    def train(self, order: Order) -> Trained:
        (names,), (shares,) = self.names, order
        start = torch.cat([value.detach().reshape(-1) for value in self.outer])
        losses: dict[int, float] = {}
        ways = []
        for share in shares:
            self._alone(names, share, losses)
            here = torch.cat([self.parameters[name].detach().reshape(-1) for name in names])
            ways.append((start - here) * (len(share) / self.microbatches))
            self._back(names)
        way = added(ways)
        for value, part in zip(self.outer, way.split([value.numel() for value in self.outer]), strict=True):
            value.grad = part.view_as(value)
        self.sgd.step()
        self._back(names)
        self.step += 1
        loss = mean_loss([losses[index] for index in sorted(losses)])
        return Trained(self.step - 1, loss, math.sqrt(_squares(way)), (self.digest(0),))

    def _alone(self, names: Sequence[str], share: Sequence[int], losses: dict[int, float]) -> None:
        train, run, apart = self.config.train, self.config.run, self.config.train.local_steps
        optimizer = type(self.optimizer)(self.optimizer.param_groups)
        for group in optimizer.param_groups:
            group.update(betas=train.betas, eps=train.epsilon)
        for number, first in enumerate(range(0, len(share), self.parts)):
            values = []
            for index in share[first : first + self.parts]:
                loss, grads = self._gradients(index)
                losses[index] = loss
                values.append(grads)
            flat = self._sum(values, names, (tuple(range(len(values))),))
            if len(values) < self.parts:
                flat *= self.parts / len(values)
            norm = math.sqrt(_squares(flat))
            self._hand_out(names, flat * (min(1.0, train.clip / (norm + 1e-6)) if train.clip else 1.0))
            step = self.step * apart + min(number, apart - 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, run.steps * apart, step, number)
            optimizer.step()

    def _back(self, names: Sequence[str]) -> None:
        with torch.no_grad():
            for name, value in zip(names, self.outer, strict=True):
                self.parameters[name].copy_(value)

    def state(self) -> Tensors:
        (names,) = self.names
        momenta = [self.sgd.state[value]["momentum_buffer"] for value in self.outer]
        return {f"model/{name}": self.parameters[name].detach() for name in names} | {
            f"momentum/{name}": momentum for name, momentum in zip(names, momenta, strict=True)
        }


def rows(replicas: int) -> list[int]:
    """How many replicas of a group stand in each row: all in one up to 16. Of more each has a connection to its own row, and to one of
    each row that is as long, one or two of each that is one longer or shorter; there are as many rows as keep the most of those least."""
    if replicas <= 16:
        return [replicas]
    best: tuple[int, list[int]] | None = None
    for count in range(2, math.isqrt(replicas) + 1):
        sizes = [replicas // count + (row < replicas % count) for row in range(count)]
        most = max(size - 1 + sum(1 if other == size else 2 for other in sizes) - 1 for size in sizes)
        if best is None or most < best[0]:
            best = most, sizes
    assert best is not None
    return best[1]


def added(parts: Sequence[Tensor]) -> Tensor:
    """What the replicas of a group bring, in the listed order: each row by itself, then the rows."""
    sums, at = [], 0
    for size in rows(len(parts)):
        whole = parts[at]
        for part in parts[at + 1 : at + size]:
            whole = whole + part
        sums.append(whole)
        at += size
    total = sums[0]
    for row in sums[1:]:
        total = total + row
    return total


def _squares(flat: Tensor) -> float:
    """Halves of each piece are added to each other."""
    sums = []
    for piece in flat.split(NORM_VALUES):
        values = piece.double().numpy() ** 2
        while len(values) > 1:
            half, rest = len(values) // 2, len(values) % 2
            values = np.append(values[:half] + values[half + rest :], values[half : half + rest])
        sums.append(float(values.sum()))
    return math.fsum(sums)


# ------------------------------------------------------------------------------------------------------------ orders


def as_recorded(commit: Committed) -> Order:
    """The order in which a run added."""
    return tuple(tuple(share.indices for share in group) for group in commit.groups)


def one_after_the_other(microbatches: int, stages: int) -> Order:
    """As one machine would: a single sum, by index."""
    return ((tuple(range(microbatches)),),) * stages


def shuffled(microbatches: int, stages: int, seed: int) -> Iterator[Order]:
    """For ever another order in every step, between one replica and four."""
    rng = Random(seed)
    while True:
        order = []
        for _ in range(stages):
            indices = rng.sample(range(microbatches), microbatches)
            cuts = sorted(rng.choices(range(microbatches + 1), k=rng.randrange(4)))
            order.append(tuple(tuple(indices[a:b]) for a, b in zip([0, *cuts], [*cuts, microbatches], strict=True)))
        yield tuple(order)


def follow(config: Config, dataset: Dataset, orders: Iterable[Order]) -> tuple[OneProcess, list[Trained]]:
    """Train `config.run.steps` steps, adding in the orders given."""
    process = (OneProcess if config.train.local_steps == 1 else ApartAndBack)(config, dataset)
    return process, [process.train(order) for order, _ in zip(orders, range(config.run.steps), strict=False)]


# ----------------------------------------------------------------------------------------------- what a run has left


def mean_loss(losses: list[float], whole: bool = True) -> float:
    """Of a step's microbatches. Where every token counts, each is taken as at most 16 times their median."""
    most = 16.0 * statistics.median(losses) if whole else math.inf
    return sum(min(loss, most) for loss in losses) / len(losses)


def commits(directory: Path) -> list[Committed]:
    """Of a finished run without rollbacks, by step."""
    lines = (directory / "commits.jsonl").read_bytes().splitlines()
    commit_of = {
        step.commit.step: step.commit for step in (msgspec.json.decode(line, type=CommittedStep) for line in lines)
    }
    return [commit_of[step] for step in sorted(commit_of)]


def checkpoint(directory: Path, step: int) -> Tensors:
    """All tensors of a run's checkpoint, under the names of `OneProcess.state`."""
    folder = directory / "checkpoints" / f"step-{step}"
    state: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        state |= {f"model/{name}": value for name, value in load_file(file).items()}
    for file in sorted((folder / "optimizer").glob("*.safetensors")):
        state |= load_file(file)
    return state


class Held(msgspec.Struct, frozen=True):
    """A replica had these parameters: those after `step` steps."""

    stage: int
    step: int
    peer: Peer
    digest: str


def held(path: Path) -> list[Held]:
    """Every version of its stage that any peer came to hold, as the driver told its machine, from a run's trace."""
    asked: dict[tuple[Peer, str], Init | Import | Apply] = {}
    stage_of: dict[Peer, int] = {}
    values: list[Held] = []
    for item in trace.read(path):
        if not isinstance(item, trace.TraceRecord):
            continue
        if isinstance(item.event, Done) and (task := asked.pop((item.peer, item.event.id), None)) is not None:
            if not isinstance(task, Apply):
                stage_of[item.peer] = task.stage
            step = task.step + isinstance(task, Apply)
            values.append(Held(stage_of[item.peer], step, item.peer, item.event.result.digest))
        for command in item.commands:
            if isinstance(command, Do) and isinstance(command.task, Init | Import | Apply):
                asked[item.peer, command.task.id] = command.task
    return values


# -------------------------------------------------------------------------------------------------------- comparing


def differing(values: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same bits, or are in one of them only."""
    both = values.keys() & wanted.keys()
    odd = sorted(values.keys() ^ wanted.keys())
    return odd + [name for name in sorted(both) if not _same_bits(values[name], wanted[name])]


def relative(values: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Euclidean distance of all parameters over their norm."""
    names = sorted(name for name in wanted if name.startswith("model/"))
    distance = math.fsum(float((values[name].double() - wanted[name].double()).square().sum()) for name in names)
    return math.sqrt(distance / math.fsum(float(wanted[name].double().square().sum()) for name in names))


def worst(values: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))


def _same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
