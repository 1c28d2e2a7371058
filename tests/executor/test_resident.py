"""The resident executor: stages train as one process would."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Config, Data, Model, Run, Train
from shoal.executor.base import NotFinite
from shoal.executor.resident import Resident
from shoal.model import sequential, stages
from shoal.model.cut import inputs, next_token_loss, targets

BATCH = [torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(cut: int = 1, dtype: str = "float32", **train: Any) -> Config:
    return Config(
        run=Run(stages=cut, steps=5, seed=2),
        model=Model(hidden_size=32, layers=4, heads=4, kv_heads=2, intermediate_size=48, vocab_size=64),
        data=Data(sequence=12),
        train=Train(**{"batch": 8, "microbatch": 2, "dtype": dtype, "warmup": 2, "learning_rate": 0.01} | train),
    )


def executors(config: Config) -> list[Resident]:
    return [Resident(stages.build(config, stage), config) for stage in range(config.run.stages)]


def one_step(chain: list[Resident], step: int) -> float:
    """Every microbatch through the chain and back, then one optimizer step; the batch's mean loss."""
    losses = []
    for tokens in BATCH:
        xs = [inputs(tokens)]
        for one in chain[:-1]:
            xs.append(one.forward(xs[-1]))
        grad: Tensor | None = None
        for one, x in zip(reversed(chain), reversed(xs), strict=True):
            grad, loss = one.backward(x, grad, tokens if one is chain[-1] else None)
            losses += [] if loss is None else [loss]
    norm = math.sqrt(sum(float(one.sum.double().square().sum()) for one in chain))
    for one in chain:
        one.apply(one.sum, norm, step)
        one.zero()
    return sum(losses) / len(losses)


def test_a_step_of_one_stage_is_a_plain_training_step() -> None:
    config = a_config()
    chain = executors(config)
    model = stages.whole(config)
    decayed = [value for value in model.parameters() if value.dim() >= 2]
    others = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, rate in enumerate([0.005, 0.01, 0.01]):
        for tokens in BATCH:
            loss = next_token_loss(model(inputs(tokens), use_cache=False).logits, targets(tokens))
            (loss / len(BATCH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        plain.zero_grad()
        one_step(chain, step)
    state = chain[0].state()
    for name, value in model.named_parameters():
        assert torch.allclose(state[f"model/{name}"], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_gradient_sums_of_a_cut_model_are_those_of_one_process_bit_for_bit(cut: int) -> None:
    one, many = executors(a_config()), executors(a_config(cut))
    for tokens in BATCH:
        one[0].backward(inputs(tokens), None, tokens)
        xs = [inputs(tokens)]
        for part in many[:-1]:
            xs.append(part.forward(xs[-1]))
        grad: Tensor | None = None
        for part, x in zip(reversed(many), reversed(xs), strict=True):
            grad, _ = part.backward(x, grad, tokens)
    assert torch.equal(torch.cat([part.sum for part in many]), one[0].sum)


@pytest.mark.parametrize("cut", [2, 4])
def test_parameters_of_a_cut_model_after_steps_are_those_of_one_process_bit_for_bit(cut: int) -> None:
    one, many = executors(a_config()), executors(a_config(cut))
    for step in range(3):
        for chain in (one, many):
            for tokens in BATCH:
                xs = [inputs(tokens)]
                for part in chain[:-1]:
                    xs.append(part.forward(xs[-1]))
                grad: Tensor | None = None
                for part, x in zip(reversed(chain), reversed(xs), strict=True):
                    grad, _ = part.backward(x, grad, tokens)
            for part in chain:
                part.apply(part.sum, 2.0, step)
                part.zero()
    together = {name: value for part in many for name, value in part.state().items()}
    for name, value in one[0].state().items():
        assert torch.equal(value, together[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls(dtype: str) -> None:
    chain = executors(a_config(2, dtype))
    losses = [one_step(chain, step) for step in range(5)]
    assert losses[-1] < losses[0] - 0.1


def test_bf16_computes_with_rounded_copies_of_fp32_parameters() -> None:
    config = a_config(2, "bfloat16")
    exact = dict(stages.build(config, 0).named_parameters())
    stage = stages.build(config, 0)
    one = Resident(stage, config)
    for name, value in one.state().items():
        kind, _, name = name.partition("/")
        assert kind != "model" or torch.equal(value, exact[name])
    one.apply(torch.linspace(-1, 1, one.length), 1.0, 0)
    state = one.state()
    for name, value in stage.named_parameters():
        assert value.dtype == torch.bfloat16 and torch.equal(value, state[f"model/{name}"].bfloat16())
    assert not any(value.dtype == torch.bfloat16 for value in stage.model.buffers())


def test_a_microbatch_that_is_not_finite_is_refused_and_leaves_the_sum() -> None:
    first, last = executors(a_config(2))
    x = first.forward(inputs(BATCH[0]))
    grad, _ = last.backward(x, None, BATCH[0])
    assert grad is not None
    first.backward(inputs(BATCH[0]), grad, None)
    before = [one.sum.clone() for one in (first, last)]
    for bad in (math.nan, math.inf):
        with pytest.raises(NotFinite):
            last.backward(torch.full_like(x, bad), None, BATCH[0])
        spoilt = grad.clone()
        spoilt[0, 0, 0] = bad
        with pytest.raises(NotFinite):
            first.backward(inputs(BATCH[0]), spoilt, None)
    with pytest.raises(NotFinite):
        Resident(stages.build(a_config(3), 1), a_config(3)).forward(torch.full_like(x, math.nan))
    assert all(torch.equal(one.sum, kept) for one, kept in zip((first, last), before, strict=True))


@pytest.mark.parametrize(
    ("stage", "x", "grad", "tokens", "message"),
    [
        (0, BATCH[0][:, :-1] + 64, torch.zeros(2, 12, 32), None, "outside the vocabulary of 64"),
        (0, torch.zeros(2, 12, 32), torch.zeros(2, 12, 32), None, "takes tokens"),
        (0, BATCH[0][:, :-1], torch.zeros(2, 12, 31), None, r"gradient \(2, 12, 31\)"),
        (0, BATCH[0][0], torch.zeros(2, 12, 32), None, r"are not \(B, L\)"),
        (1, BATCH[0][:, :-1], None, BATCH[0], "takes hidden states"),
        (1, torch.zeros(2, 12, 32), None, BATCH[0] - 128, "outside the vocabulary"),
        (1, torch.zeros(2, 11, 32), None, BATCH[0], r"does not fit tokens"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(stage: int, x: Tensor, grad: Any, tokens: Any, message: str) -> None:
    one = executors(a_config(2))[stage]
    with pytest.raises(ValueError, match=message):
        one.backward(x, grad, tokens)
    assert not one.sum.any()


def test_the_clip_uses_the_norm_of_the_whole_model() -> None:
    config = a_config(weight_decay=0.0, betas=(0.0, 0.0), epsilon=1e6)  # the step is then the gradient itself, scaled
    one, other = executors(config)[0], executors(config)[0]
    before = one.state()["model/lm_head.weight"].clone()
    one.apply(torch.ones(one.length) * 1000, 1.0, 1)
    other.apply(torch.ones(one.length) * 1000, 2.0, 1)
    moved, half = (each.state()["model/lm_head.weight"] - before for each in (one, other))
    assert torch.allclose(moved, 2 * half, rtol=0.01) and moved.any()


def test_a_plain_sequential_trains() -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 64))

    config = a_config(3)
    chain = [Resident(sequential.build(make, (stage, 3), seed=1), config) for stage in range(3)]
    losses = [one_step(chain, step) for step in range(5)]
    assert losses[-1] < losses[0]
