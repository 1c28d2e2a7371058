"""Real tensors for a group that averages (tests/rounds.py), and groups that train a small model together, with a liar among them."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tests.rounds import Group
from torch import Tensor

from shoal import codec
from shoal.config import Config, Device, Network, Run, Train
from shoal.core import messages as m
from shoal.core.allreduce.bounds import following, longest, too_long
from shoal.core.allreduce.checked import wrong_sums
from shoal.runtime.tasks.task_runner import TaskRunner

STEP = 3
ANSWER_S = 60.0
TEXT = Path(__file__).parent.parent / "docs" / "operations.md"
CONTEXT, WIDTH, HIDDEN, BYTES = 8, 16, 64, 128  # of the small model
MICROBATCH, MOST_NORM, RATE = 16, 1.0, 3e-3
Lie = Callable[[Tensor, torch.Generator], Tensor]
LIES: dict[str, Lie] = {
    "noise": lambda part, chance: (
        torch.randn(len(part), generator=chance) * (10.0 * part.norm() / math.sqrt(len(part)))
    ),
    "sign flip": lambda part, chance: -part,
    "sign flip x 10": lambda part, chance: -10.0 * part,
    "x 100": lambda part, chance: 100.0 * part,
}


class Tensors:
    """tests/rounds.py's runner, around real ones. What comes is checked, as a driver would, and lies in memory of its own."""

    def __init__(self, config: Config, stage: int = 0) -> None:
        self.runner = TaskRunner(config)
        self.do(m.Init("init", stage, 0))
        seat = self.runner._seat
        assert seat is not None
        seat.step = STEP
        self.executor: Any = seat.executor

    def get(self, name: str) -> Any:
        return self.runner.blob(name)

    def put(self, name: str, value: Any) -> None:
        blob = msgspec.structs.replace(value, data=bytearray(value.data))
        assert self.runner.check(m.ReduceChunk(0, STEP, 7, 0), (blob,)) == ""
        self.runner.put(name, blob)

    def drop(self, name: str) -> None:
        self.runner.drop(name)

    def do(self, task: Any) -> m.Done | m.Failed:
        answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
        self.runner.submit(task, answers.put)
        answer = answers.get(timeout=ANSWER_S)
        assert isinstance(answer, m.Done), answer
        return answer

    def reduced(self, round_: int) -> torch.Tensor:
        return self.runner._sums.reduced[STEP, round_].reduced


class Averaged(msgspec.Struct):
    """Of one step: the averaged gradient, how many honest parts were shortened, and who was found to have brought too much."""

    reduced: Tensor
    shortened: int
    guilty: tuple[m.Peer, ...]


class Replicas:
    """The replicas of one stage, whose rounds, arithmetic and checks are those of real peers. `counts`: microbatches of each; `how`: the
    code of averaging."""

    def __init__(self, counts: Sequence[int], length: int, how: str, robust: str, piece_values: int = 0) -> None:
        self.config = Config(
            run=Run(name="bounded", stages=1),
            train=Train(batch=sum(counts), microbatch=1),
            network=Network(averaging=how),
            device=Device(executor="emulated", emulated_s=0.0, emulated_gradient=length, threads=1),
        )
        self.settings = m.Settings(
            1, sum(counts), steps=9, piece_values=piece_values, robust=robust, averaging_error=codec.LOST[how]
        )
        self.counts, self.length = dict(zip((f"p{at}" for at in range(len(counts))), counts, strict=True)), length
        self.references: tuple[float, ...] = ()
        self.tensors: dict[m.Peer, Tensors] = {}
        self._begin()

    def _begin(self) -> None:
        """With those that are left."""
        self.close()
        self.tensors = {name: Tensors(self.config) for name in self.counts}
        names = tuple(self.counts)
        self.group = Group(names, self.length, self.settings.piece_values, runner=lambda name, _: self.tensors[name])
        indices = iter(range(self.settings.microbatches))
        for name, count in self.counts.items():
            self.group.shares[name] = m.Share(name, tuple(next(indices) for _ in range(count)))
            self.group.rounds[name]._settings = self.settings
        self._number = 7

    def average(self, parts: dict[m.Peer, Tensor], liar: m.Peer = "", tame: bool = True) -> Averaged:
        """Until a round is committed: who brings too much is left out of the next one, and its microbatches with it. A `liar` that is not
        `tame` does not shorten its part."""
        for name, one in self.tensors.items():
            one.executor.sum.copy_(parts[name])
            if name == liar and not tame:
                one.runner._sums._shortening = lambda *_: 1.0  # type: ignore[method-assign]
            self.group.rounds[name]._replica.view = msgspec.structs.replace(self.group.view, part_norms=self.references)
        group, shares = self.group, tuple(self.group.shares.values())
        group.reduced.clear()
        self._number += 1
        group.begin(number=self._number)
        group.run()
        assert len(group.reduced) == len(shares) and len({one.digest for one in group.reduced.values()}) == 1
        assert wrong_sums(group.names, group.reduced, self.settings.averaging_error) is None
        guilty = too_long(self.references, 0, shares, group.reduced, self.settings)
        if guilty:
            out = dict(guilty)
            self.counts = {name: count for name, count in self.counts.items() if name not in out}
            self.settings = msgspec.structs.replace(self.settings, microbatches=sum(self.counts.values()))
            self._begin()
            again = self.average(parts)
            return msgspec.structs.replace(again, guilty=(*out, *again.guilty))
        bounds = {one.peer: longest(self.references, 0, shares, one, self.settings) for one in shares}
        short = sum(
            most is not None and float(parts[name].norm()) > most for name, most in bounds.items() if name != liar
        )
        self.references = following(self.references, (shares,), group.reduced, self.settings)
        for name, one in self.tensors.items():
            one.runner._sums.averaging.applied(one.runner._sums.reduced[STEP, self._number].left)
            group.carry(name, group.rounds[name].end("committed"))
        return Averaged(next(iter(self.tensors.values())).reduced(self._number), short, ())

    def close(self) -> None:
        for one in self.tensors.values():
            one.runner.close()


class Model:
    """Predicts the next byte of a text of this repository from the ones before: some 20,000 parameters in one flat tensor."""

    def __init__(self, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        shapes = ((BYTES, WIDTH), (CONTEXT * WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, BYTES), (BYTES,))
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = torch.cat([torch.randn(size, generator=self.chance) * 0.1 for size in sizes]).requires_grad_()
        self._sizes, self._shapes = sizes, shapes
        self.optimizer = torch.optim.AdamW([self.flat], lr=RATE, betas=(0.9, 0.95))
        text = bytes(byte for byte in TEXT.read_bytes() if byte < BYTES)
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)
        self.held_out, self.trained = windows[::8], windows[torch.arange(len(windows)) % 8 != 0]

    def loss(self, windows: Tensor) -> Tensor:
        parts = zip(torch.split(self.flat, self._sizes), self._shapes, strict=True)
        embedding, first, bias, last, shift = (part.view(shape) for part, shape in parts)
        hidden = torch.tanh(embedding[windows[:, :-1]].flatten(1) @ first + bias)
        return torch.nn.functional.cross_entropy(hidden @ last + shift, windows[:, -1])

    def part(self, count: int, of: int) -> Tensor:
        """The sum that a replica brings that has computed `count` of a step's `of` microbatches."""
        if not count:
            return torch.zeros(len(self.flat))
        drawn = torch.randint(len(self.trained), (count * MICROBATCH,), generator=self.chance)
        loss = self.loss(self.trained[drawn]) * (count / of)
        (gradient,) = torch.autograd.grad(loss, self.flat)
        return gradient.detach()

    def step(self, reduced: Tensor) -> None:
        norm = float(reduced.norm())
        self.flat.grad = reduced * min(1.0, MOST_NORM / norm) if norm else reduced
        self.optimizer.step()

    def evaluate(self) -> float:
        with torch.no_grad():
            return float(self.loss(self.held_out))


class Trained(msgspec.Struct):
    """Held-out loss at the end; how many honest parts were shortened, of how many; when which liar was found."""

    loss: float
    shortened: int
    sent_parts: int
    evicted: dict[m.Peer, int]


def train(
    robust: str,
    lie: str = "",
    tame: bool = True,
    counts: Sequence[int] = (2, 2, 2, 2),
    steps: int = 200,
    how: str = "none",
    seed: int = 0,
) -> Trained:
    """One of them, the last, lies in that way from the second step on, unless `lie` is ''."""
    model, evicted, shortened, sent_parts = Model(seed), dict[m.Peer, int](), 0, 0
    replicas = Replicas(counts, len(model.flat), how, robust)
    chance, liar = torch.Generator().manual_seed(seed + 1), f"p{len(counts) - 1}"
    try:
        for step in range(steps):
            of = sum(replicas.counts.values())
            parts = {name: model.part(count, of) for name, count in replicas.counts.items()}
            lies = bool(lie) and step > 0 and liar in parts
            if lies:
                parts[liar] = LIES[lie](parts[liar], chance)
            averaged = replicas.average(parts, liar if lies else "", tame)
            evicted |= dict.fromkeys(averaged.guilty, step)
            shortened += averaged.shortened
            sent_parts += len(parts) - lies
            model.step(averaged.reduced)
        return Trained(model.evaluate(), shortened, sent_parts, evicted)
    finally:
        replicas.close()
