"""Text by text through a cut model with key-value caches: the greedy tokens of transformers' own `generate`, in every family."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_families import FAMILIES, of_family
from torch import Tensor

from shoal.config import Config, Data
from shoal.model import stages

PROMPT = torch.tensor([[7, 3, 60, 21, 9, 9, 33]])  # longer than the windows
NEW = 12


def longer(family: str, cut: int) -> Config:
    """With positions for the prompt and what is added."""
    return msgspec.structs.replace(of_family(family, cut), data=Data(sequence=32))


def greedy(parts: list[Any], tokens: Tensor, caches: list[Any], count: int) -> Tensor:
    """`tokens` that the caches lack, and what is added; `caches` is changed."""
    x, added = tokens, []
    with torch.no_grad():
        for _ in range(count):
            for at, part in enumerate(parts):
                x, caches[at] = part.infer(x, caches[at])
            x = x.argmax(-1, keepdim=True)
            added.append(x)
    return torch.cat(added, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_with_caches_add_the_tokens_of_generate(family: str) -> None:
    config = longer(family, 3)
    whole = stages.whole(longer(family, 1))
    expected = whole.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )[:, PROMPT.shape[1] :]
    parts = [stages.build(config, stage) for stage in range(3)]
    caches: list[Any] = [None] * 3
    first = greedy(parts, PROMPT, caches, 5)
    assert torch.equal(first, expected[:, :5])
    caches[1:] = [None] * 2  # two peers die: their caches are replayed from the tokens, and so is the first's
    text = torch.cat([PROMPT, first], 1)
    again: list[Any] = [None] * 3
    assert torch.equal(torch.cat([first, greedy(parts, text, again, NEW - 5)], 1), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_prompt_in_pieces_gives_the_same_tokens(family: str) -> None:
    parts = [stages.build(longer(family, 3), stage) for stage in range(3)]
    whole, pieces = [None] * 3, [None] * 3
    expected = greedy(parts, PROMPT, whole, NEW)
    greedy(parts, PROMPT[:, :4], pieces, 1)
    assert torch.equal(greedy(parts, PROMPT[:, 4:], pieces, NEW), expected)


def test_the_cache_holds_the_own_blocks_alone() -> None:
    config = longer("llama", 3)
    _, cache = stages.build(config, 1).infer(torch.zeros(1, 3, 32), None)
    assert len({id(layer) for layer in cache.layers}) == 2  # of four blocks, the middle stage has two
