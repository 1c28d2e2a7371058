"""Tokens whose loss does not count: every executor adds the gradient of the others' losses over all tokens of the microbatch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor import create
from shoal.executor.delayed import Delayed
from shoal.model import stages
from shoal.model.cut import counted, inputs
from shoal.model.layers import balance, vocabulary

TOKENS = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(3))
SOME = torch.where(torch.arange(13) % 3 == 0, TOKENS, ~TOKENS)
LEFT = torch.cat([~TOKENS[:1], TOKENS[1:]])  # a sequence with none, and one with all
NONE = ~TOKENS


def a_config(words: str = "", **train: Any) -> Config:
    config = Config(
        run=Run(stages=1, steps=5, seed=2),
        model=Model(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, vocab_size=64),
        data=Data(sequence=12),
        train=Train(**{"batch": 8, "microbatch": 2, "warmup": 0} | train),
    )
    executor, _, sequences = words.partition("/")
    return msgspec.structs.replace(
        config, device=Device(executor=executor or "resident", sequences=int(sequences or 0), memory_bytes=1 << 20)
    )


def of_plain_torch(config: Config, tokens: Tensor) -> tuple[float, Tensor]:
    model = stages.whole(config)
    wanted = torch.where(tokens < 0, -100, tokens)[:, 1:].flatten()
    logits = model(torch.where(tokens < 0, ~tokens, tokens)[:, :-1], use_cache=False).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum") / len(wanted)
    grads = torch.autograd.grad(loss / 4, list(model.parameters()))
    return float(loss.detach()), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("words", ["resident", "swapping", "resident/1", "swapping/1"])
@pytest.mark.parametrize("tokens", [SOME, LEFT, TOKENS])
def test_a_microbatch_adds_the_losses_of_its_counted_tokens_over_all(words: str, tokens: Tensor) -> None:
    config = a_config(words)
    wanted_loss, wanted = of_plain_torch(config, tokens)
    executor = create(config, 0)
    _, loss = executor.backward(inputs(tokens), None, tokens)
    if words.endswith("/1"):  # slices are added one after the other
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        torch.testing.assert_close(executor.sum, wanted, rtol=1e-5, atol=1e-7)
    else:
        assert loss == wanted_loss
        assert torch.equal(executor.sum, wanted)


@pytest.mark.parametrize("words", ["resident", "swapping", "resident/1"])
def test_a_microbatch_without_a_counted_token_adds_nothing(words: str) -> None:
    executor = create(a_config(words), 0)
    assert executor.backward(inputs(NONE), None, NONE) == (None, 0.0)
    assert not executor.sum.any()
    assert (counted(NONE), counted(LEFT), counted(TOKENS)) == (0, 12, 24)


@pytest.mark.parametrize("tokens", [SOME, LEFT, NONE])
def test_a_large_vocabulary_counts_the_same_tokens(tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config()
    wanted_loss, wanted = of_plain_torch(config, tokens)
    monkeypatch.setattr(vocabulary, "LOGITS", 24 * 10)  # the head in slices of ten
    executor = create(config, 0)
    _, loss = executor.backward(inputs(tokens), None, tokens)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    torch.testing.assert_close(executor.sum, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("words", "staleness"), [("resident", 0), ("swapping", 0), ("resident", 1), ("swapping", 1)])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_the_scale_multiplies_the_gradient_within_the_clip(words: str, staleness: int, moments: str) -> None:
    """A power of two rounds nothing: the same step as from a gradient that is twice as large."""
    states = []
    for gradient, scale in ((1.0, 2.0), (2.0, 1.0)):
        executor = create(a_config(words, staleness=staleness, moments=moments), 0)
        executor.apply(torch.linspace(-gradient, gradient, executor.length), 5.0, 0, scale)
        if isinstance(executor, Delayed):
            executor.at(1)
        states.append(executor.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_experts_that_are_balanced_over_all_tokens_are_refused_where_some_count() -> None:
    config = msgspec.structs.replace(a_config(), data=Data(sequence=12, format="chat"))
    model = stages.whole(a_config())
    model.config.router_aux_loss_coef = 0.01
    with pytest.raises(ValueError, match=r"data\.format = 'chat' would scale that loss too; set model\.extra\.router"):
        balance.attach(model, [], config)
