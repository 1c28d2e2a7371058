"""`Stage`, the contract of every stage; `cut`, which blocks a stage holds; and the loss and seeds that all models share.

For the executors, which run stages, and for stages.py and sequential.py, which build them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.model.draws import Draws
from shoal.model.layers.dropout import Masks

UNCOUNTED = -1  # the target of a token whose loss does not count


class Stage(Protocol):
    """Consecutive blocks of a model on one device, built in fp32; the executor chooses the compute dtype."""

    first: bool  # takes tokens (B, L) int64 instead of hidden states (B, L, D)
    last: bool  # has a loss instead of a boundary tensor
    vocabulary: int | None  # tokens must be below it; None = the model takes no token ids
    paired: bool  # samples are preference pairs, whose rows pass it with adapters and without (layers/pairs.py)
    # Margins of the pairs whose loss was computed since it was emptied; NaN for one that does not count
    compared: list[Tensor]
    masks: Masks | None  # of dropout

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Own parameters that are trained, named as in the whole model, each once, in the whole model's order."""
        ...

    def named_frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Own parameters that are not trained, likewise, in the dtype to compute with."""
        ...

    def frozen(self) -> list[Tensor]:
        """The values of `named_frozen`."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Boundary tensor (B, L, D); at the last stage the logits (B, L, V)."""
        ...

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The next positions of one text, as one document: `x` is tokens (1, L) or hidden states (1, L, D). Gives hidden states (1, L, D),
        at the last stage the logits (1, V) of the last position; and `cache`, or a new one for None, with these positions. ValueError:
        the text is too long, or the model keeps no keys and values."""
        ...

    def loss(self, x: Tensor, tokens: Tensor, reference: Tensor | None = None) -> Tensor:
        """Mean loss of a microbatch, at the last stage, 0 for tokens that do not count. `x`: the stage's input, `tokens` (B, L+1)
        int64. `reference`: the input of the frozen base, where samples are preference pairs."""
        ...

    def reference(self, x: Tensor) -> Tensor:
        """`forward` of the frozen base alone, without a graph."""
        ...


def cut(run: Run, blocks: int) -> tuple[range, ...]:
    """The blocks of each stage of a run whose model has `blocks` blocks: the one place that decides the cut."""
    return spans(blocks, run.stages, run.layers)


def spans(blocks: int, stages: int, layers: tuple[int, ...] = ()) -> tuple[range, ...]:
    """The blocks of each stage: `layers` of them, or as even as possible, where the first and the last stage, which also hold
    embedding and head, get an extra block last. ValueError: no such cut."""
    if layers and (len(layers) != stages or sum(layers) != blocks or min(layers) < 1):
        raise ValueError(
            f"run.layers = {list(layers)} for a model of {blocks} blocks in run.stages = {stages};"
            f" it must be {stages} numbers of 1 or more that add up to {blocks}, or []"
        )
    if blocks < 1:
        raise ValueError("the model has no repeated blocks, and only those can be cut or take turns on a device")
    if not 1 <= stages <= blocks:
        raise ValueError(
            f"run.stages = {stages}, but the model has {blocks} blocks and each stage needs at least one;"
            f" try run.stages={min(max(1, stages), blocks)}"
        )
    base, extra = divmod(blocks, stages)
    from_the_middle = sorted(range(stages), key=lambda stage: (-min(stage, stages - 1 - stage), stage))
    longer = set(from_the_middle[:extra])
    starts = [0]
    for size in layers or [base + (stage in longer) for stage in range(stages)]:
        starts.append(starts[-1] + size)
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def with_borders(x: Tensor, starts_BL: Tensor) -> Tensor:
    """Hidden states (B, L, D) with a column more, 1 where a document starts: what stages exchange with data.document_end."""
    return torch.cat([x, starts_BL.to(x.device, x.dtype)[..., None]], -1)


def document_starts(inputs_BL: Tensor, end: int) -> Tensor:
    """(B, L) bool: the first token of each sample, and those behind the token that ends a document."""
    starts = torch.ones_like(inputs_BL, dtype=torch.bool)
    starts[:, 1:] = inputs_BL[:, :-1] == end
    return starts


def positions(starts_BL: Tensor) -> Tensor:
    """(B, L): of each token in its document."""
    numbers = torch.arange(starts_BL.shape[1], device=starts_BL.device)
    return numbers - torch.where(starts_BL, numbers, 0).cummax(1).values


def rows_of(samples: Tensor, rows: int) -> Tensor:
    """(B x rows, L+1) from (B, rows x L + 1): neighbours share a token, the last target of one, which the other begins with."""
    length = (samples.shape[1] - 1) // rows
    return samples.unfold(1, length + 1, length).flatten(0, 1).contiguous()


def plain(tokens: Tensor) -> Tensor:
    """Token ids of a microbatch's tokens, where ~id stands for a token whose loss does not count."""
    return tokens ^ (tokens >> 63)


def inputs(tokens: Tensor) -> Tensor:
    """The first stage's input (B, L) from a microbatch's tokens (B, L+1)."""
    return plain(tokens[:, :-1])


def targets(tokens: Tensor) -> Tensor:
    """The last stage's targets (B, L) from a microbatch's tokens (B, L+1): UNCOUNTED where the loss does not count."""
    return tokens[:, 1:].clamp(min=UNCOUNTED)


def counted(tokens: Tensor, pairs: bool = False) -> int:
    """How many of a microbatch's targets count; of preference pairs, how many of these."""
    return int((counted_pairs(tokens) if pairs else tokens[:, 1:] >= 0).sum())


def counted_pairs(tokens: Tensor) -> Tensor:
    """(P,) bool, of (2 P, L+1) tokens: pairs of which any token counts."""
    return (tokens[:, 1:] >= 0).any(1).view(-1, 2).any(1)


def row_losses(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """(B,): of each row the sum of its counted tokens' cross entropies, in fp32."""
    logits, wanted = logits_BLV.float().flatten(0, 1), targets_BL.flatten()
    losses = nn.functional.cross_entropy(logits, wanted, ignore_index=UNCOUNTED, reduction="none")
    return losses.view(targets_BL.shape).sum(1)


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross entropy in fp32, whatever the dtype of the logits; 0 for a token that does not count. A microbatch's gradient
    thus depends on no other microbatch: the commit says how many tokens of the step count (Settings.scale)."""
    logits, wanted = logits_BLV.float().flatten(0, 1), targets_BL.flatten()
    total = nn.functional.cross_entropy(logits, wanted, ignore_index=UNCOUNTED, reduction="sum")
    return total / wanted.numel()


# Initialisers draw from torch's default generator, which all threads of a process share; peers of one process build at once.
_DRAWING = threading.Lock()


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random draws inside depend on (seed, name) alone, so that a module's first weights do not depend on the build order.

    Only the CPU's generator: weights are drawn there and moved, which makes them the same for every kind of device."""
    drawn = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    with _DRAWING, torch.random.fork_rng(devices=[]), Draws(drawn):
        torch.default_generator.manual_seed(drawn)
        yield
