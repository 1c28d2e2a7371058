"""Texts that a simulated peer serves, in symbols: what a stage makes of a position names all positions before it, at every stage.

So the next token of a text is one and the same for every route and every way of cutting the text into requests, and another one where any
replica had other keys and values than those of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core import messages as m
from shoal.sim.tasks.storage import Blob, short

TOKENS = 997  # of the vocabulary


class Texts:
    """By session: what came in for each position."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, ...]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def forget(self, task: m.Forget) -> m.Result:
        for session in task.sessions:
            self._kept.pop(session, None)
        return m.Result()

    def run(self, task: m.Infer, inputs: Sequence[Blob]) -> tuple[m.Result, Blob]:
        before = () if task.start else self._kept.pop(task.session, None)
        if before is None:
            raise ValueError("the keys and values of this text are not here")
        new = tuple(map(str, task.tokens)) if not inputs else tuple(inputs[0][1:])
        kept = self._kept[task.session] = before + new
        outputs = tuple(_made(task.stage, kept[: len(before) + n + 1]) for n in range(len(new)))
        if task.out:
            return m.Result(nbytes=len(kept)), ("hidden", *outputs)
        likely = tuple((int(outputs[-1], 16) + n) % TOKENS for n in range(task.scores))
        return m.Result(nbytes=len(kept), tokens=likely, scores=tuple(-float(n) for n in range(task.scores))), ()


def next_token(tokens: Sequence[int], stages: int) -> int:
    """The likeliest one after `tokens`, computed without any swarm."""
    values = tuple(map(str, tokens))
    for stage in range(stages):
        values = tuple(_made(stage, values[: n + 1]) for n in range(len(values)))
    return int(values[-1], 16) % TOKENS


def _made(stage: int, kept: tuple[str, ...]) -> str:
    return short("text", stage, kept)
