"""Dropout of adapters: masks are functions of (seed, step, microbatch, row, layer), and PEFT's layers with them compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_adapters import TOKENS, based, same
from tests.runtime.test_node import TINY
from torch import Tensor, nn

from shoal import config as configuration
from shoal.config import Config
from shoal.executor import create
from shoal.executor.base import Executor, draw
from shoal.model import stages
from shoal.model.cut import inputs
from shoal.model.layers import adapters
from shoal.model.layers.dropout import Dropout, Masks

RATE = 0.3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return based(TINY, tmp_path / "base", dropout=RATE)


def with_device(config: Config, **device: Any) -> Config:
    return msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, **device))


def kept(masks: Masks, name: str = "layer", rows: int = 2) -> Tensor:
    return Dropout(masks, name)(torch.ones(rows, 50, 40)) > 0


def test_a_mask_depends_on_seed_step_microbatch_row_and_layer_and_on_nothing_else() -> None:
    masks = Masks(7, RATE)
    masks.sample = 3, 5
    whole = kept(masks, rows=4)
    assert torch.equal(whole, kept(masks, rows=4))
    masks.at(1, 2)
    assert torch.equal(whole[2:], kept(masks)), "the second slice of two rows has the rows of the whole"
    masks.at(0, 2)
    others = [kept(masks, "another")]
    for seed, sample in ((8, (3, 5)), (7, (4, 5)), (7, (3, 6)), (7, (5, 3))):
        other = Masks(seed, RATE)
        other.sample = sample
        others.append(kept(other))
    others.append(whole[2:])
    assert not any(torch.equal(whole[:2], other) for other in others)
    assert float(whole.float().mean()) == pytest.approx(1 - RATE, abs=0.02)
    masks.sample = None
    assert kept(masks).all(), "outside of training nothing is dropped"


def test_values_that_are_kept_grow_so_that_the_mean_stays_and_gradients_pass_by_the_same_mask() -> None:
    masks = Masks(7, RATE)
    masks.sample = 0, 0
    x = torch.randn(2, 9, 8, requires_grad=True)
    y = Dropout(masks, "layer")(x)
    kept_values = y != 0
    assert torch.allclose(y, x / (1 - RATE) * kept_values)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, kept_values)


def grown(config: Config, stage: int) -> Executor:
    """Its adapters change the output: at first their second matrix is 0."""
    executor = create(config, stage)
    for name, value in executor.state().items():
        if name.startswith("model/") and "lora_B" in name:
            value.data.fill_(0.01)
    executor.refresh()
    return executor


def trained(config: Config, sample: tuple[int, int] | None = (2, 1)) -> tuple[list[Tensor], float]:
    """The sums of both stages after a microbatch went forward and back through them, and its loss."""
    first, last = grown(config, 0), grown(config, 1)

    def at(executor: Executor, *given: Any) -> Any:
        draw(executor, sample)
        return executor.backward(*given) if len(given) == 3 else executor.forward(*given)

    for executor in (first, last):
        executor.zero(0)
    y = at(first, inputs(TOKENS))
    grad, loss = at(last, y, None, TOKENS)
    at(first, inputs(TOKENS), grad, None)
    return [first.contribution(), last.contribution()], loss


def test_slices_kept_graphs_and_checkpointing_drop_the_same_values(config: Config) -> None:
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch=4, microbatch=2))
    expected, loss = trained(with_device(config, kept_activations=0))
    for device in ({"kept_activations": 4}, {"checkpointing": True, "kept_activations": 0}):
        sums, again = trained(with_device(config, **device))
        assert again == loss and all(map(same, sums, expected))
    sums, again = trained(with_device(config, sequences=1))
    assert again == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(sums, expected, strict=True))
    other, another = trained(with_device(config, kept_activations=0), (2, 2))
    assert another != loss and not any(map(same, other, expected))


def test_a_kept_graph_is_not_used_for_another_microbatch_of_the_same_tokens(config: Config) -> None:
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch=4, microbatch=2))
    grad = torch.randn(2, 8, TINY.model.hidden_size)
    sums = []
    for forwards in (((0, 0), (0, 1)), ((0, 1),)):
        executor = grown(with_device(config, kept_activations=4), 0)
        executor.zero(0)
        for sample in ((9, 9), *forwards):  # the first one is measured, and not kept
            draw(executor, sample)
            executor.forward(inputs(TOKENS))
        draw(executor, (0, 1))
        executor.backward(inputs(TOKENS), grad, None)
        sums.append(executor.contribution())
    assert same(*sums)


class Theirs(nn.Module):
    """What nn.Dropout computes, with a given mask."""

    def __init__(self, ours: Dropout) -> None:
        super().__init__()
        self._ours = ours

    def forward(self, x: Tensor) -> Tensor:
        return x * (self._ours._kept(x).float() / (1 - RATE))


def test_peft_with_the_same_masks_computes_the_same_loss_and_gradients(config: Config) -> None:
    results = []
    for replace in (False, True):
        model = stages.whole(config)
        for _, layer in adapters.layers(model):
            ours = layer.lora_dropout[adapters.ADAPTER]
            assert isinstance(ours, Dropout)
            with torch.no_grad():
                layer.lora_B[adapters.ADAPTER].weight.fill_(0.01)  # else the first matrix has no gradient
            ours.masks.sample = 4, 2
            if replace:
                layer.lora_dropout[adapters.ADAPTER] = Theirs(ours)
        loss = model(input_ids=inputs(TOKENS), labels=inputs(TOKENS)).loss
        loss.backward()
        results.append((loss, [value.grad for value in model.parameters() if value.requires_grad]))
    (loss, grads), (their_loss, their_grads) = results
    assert torch.equal(loss, their_loss)
    assert grads and all(torch.equal(one, other) for one, other in zip(grads, their_grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["tune.dora=true", "device.executor=swapping", "device.compile=true"])
def test_what_cannot_drop_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"tune\.dropout = 0\.3 with"):
        configuration.load(None, ["tune.method=lora", "model.path=there", "tune.dropout=0.3", setting])


def test_peft_reads_the_rate_of_a_run(config: Config) -> None:
    assert adapters.settings(config.tune).lora_dropout == RATE
