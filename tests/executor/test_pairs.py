"""DPO: the executors' loss and gradient of preference pairs, against TRL's formula written out beside transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.preferences import some_pairs
from torch import Tensor

from shoal.config import Config, Data, Device, Model, Run, Train, Tune
from shoal.executor import create
from shoal.executor.base import Executor, Recomputing, boundary, boundary_gradient, evaluate, rewards
from shoal.executor.delayed import Delayed
from shoal.model import stages
from shoal.model.cut import counted, inputs, plain
from shoal.model.layers import adapters, vocabulary
from shoal.runtime.data.dataset import open_dataset

PAIRS, SEQUENCE, BETA = 4, 16, 0.3


def a_config(folder: Path, cut: int = 1, *, tune: dict[str, Any] | None = None, **fields: Any) -> Config:
    model = Model(hidden_size=32, layers=3, heads=4, kv_heads=2, intermediate_size=48, vocab_size=256)
    config = Config(run=Run(stages=1, steps=5, seed=2), model=model)
    if not (folder / "base").exists():
        stages.whole(config).save_pretrained(folder / "base")
        some_pairs(folder / "pairs.jsonl", 40)
    data = Data(source="jsonl", format="preference", path=str(folder / "pairs.jsonl"), sequence=SEQUENCE)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, stages=cut),
        model=Model(path=str(folder / "base")),
        data=data,
        train=Train(batch=2 * PAIRS, microbatch=PAIRS, warmup=0, **fields.pop("train", {})),
        tune=Tune(**{"method": "lora", "rank": 2, "alpha": 8.0, "beta": BETA} | (tune or {})),
        device=Device(kind="cpu", **fields),
    )


def moved(executor: Executor, seed: int = 5) -> None:
    """Adapters away from their first values, with which they change nothing: by name, so that any cut has the same."""
    for name, value in executor.state().items():
        if name.startswith("model/"):
            drawn = torch.Generator().manual_seed(seed + len(name) + sum(name.encode()))
            value.copy_(torch.randn(value.shape, generator=drawn) * 0.05)
    executor.refresh()


def tokens_of(config: Config, index: int = 0) -> Tensor:
    return open_dataset(config).microbatch(0, index)


def trl(config: Config, executor: Executor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """As TRL's DPOTrainer.concatenated_forward and dpo_loss (loss_type = "sigmoid") write it: chosen rows, then rejected ones; the
    reference is another model, read from the base's directory. The mean loss, the gradients of the adapters by name, and the margin of
    each pair's rewards."""
    import transformers
    from peft import inject_adapter_in_model

    policy, reference = (transformers.AutoModelForCausalLM.from_pretrained(config.model.path).eval() for _ in range(2))
    inject_adapter_in_model(adapters.settings(config.tune), policy, "default")
    trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in executor.state().items():
            if name.startswith("model/"):
                trained[name.removeprefix("model/")].copy_(value)
    ordered = torch.cat([tokens[0::2], tokens[1::2]])
    labels, mask = plain(ordered)[:, 1:], ordered[:, 1:] >= 0

    def log_probabilities(model: Any) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=plain(ordered)[:, :-1]).logits
        per_token = torch.gather(logits.log_softmax(-1), 2, labels[..., None])[..., 0]
        chosen, rejected = (per_token * mask).sum(-1).chunk(2)
        return chosen, rejected

    chosen, rejected = log_probabilities(policy)
    with torch.no_grad():
        reference_chosen, reference_rejected = log_probabilities(reference)
    log_ratios = (chosen - rejected) - (reference_chosen - reference_rejected)
    loss = -torch.nn.functional.logsigmoid(config.tune.beta * log_ratios).mean()
    gradients = torch.autograd.grad(loss, list(trained.values()))
    margins = config.tune.beta * (chosen - reference_chosen) - config.tune.beta * (rejected - reference_rejected)
    return loss.detach(), dict(zip(trained, gradients, strict=True)), margins.detach()


def passed(executors: list[Executor], tokens: Tensor) -> tuple[list[Tensor], float]:
    """A microbatch forward and back through all stages: each stage's sum, and the loss."""
    xs = [inputs(tokens)]
    for executor in executors[:-1]:
        xs.append(executor.forward(xs[-1]))
    grad, loss = executors[-1].backward(xs[-1], None, tokens)
    for executor, x in zip(reversed(executors[:-1]), reversed(xs[:-1]), strict=True):
        assert grad is not None and len(grad) == 2 * PAIRS < len(xs[-1]) == 4 * PAIRS
        grad, _ = executor.backward(x, grad, None)
    assert grad is None and loss is not None
    return [executor.sum.clone() for executor in executors], loss


@pytest.mark.parametrize("tune", [{}, {"rslora": True}, {"dora": True}, {"targets": ("q_proj", "down_proj")}])
def test_the_loss_and_its_gradient_are_those_of_trl(tmp_path: Path, tune: dict[str, Any]) -> None:
    config = a_config(tmp_path, tune=tune)
    executor, tokens = create(config, 0), tokens_of(config)
    moved(executor)
    wanted_loss, gradients, margins = trl(config, executor, tokens)
    _, loss = executor.backward(inputs(tokens), None, tokens)
    assert loss == pytest.approx(float(wanted_loss), abs=1e-5) and abs(loss - 0.6931) > 1e-3
    figures = rewards(executor)
    assert figures is not None and figures.margin == pytest.approx(margins.mean().item(), abs=1e-5)
    assert figures.accuracy == pytest.approx((margins > 0).double().mean().item())
    names = [name.removeprefix("model/") for name in executor.state() if name.startswith("model/")]
    wanted = torch.cat([gradients[name].flatten() for name in names]) / 2  # of two microbatches
    torch.testing.assert_close(executor.sum, wanted, rtol=1e-4, atol=1e-7)
    assert wanted.abs().max() > 1e-3


def test_at_first_every_pair_costs_the_logarithm_of_two_and_the_margin_grows(tmp_path: Path) -> None:
    config = a_config(tmp_path, train={"learning_rate": 0.01, "schedule": "constant", "weight_decay": 0.0})
    executor, tokens = create(config, 0), tokens_of(config)
    losses = []
    for step in range(12):
        executor.zero(step)
        losses.append(executor.backward(inputs(tokens), None, tokens)[1])
        executor.apply(executor.contribution(), 1.0, step)
    assert losses[0] == pytest.approx(0.69314718, abs=1e-7)
    assert losses[-1] is not None and losses[-1] < 0.5


@pytest.mark.parametrize("kept", [0, 4])
@pytest.mark.parametrize("cut", [2, 3])
def test_stages_have_the_bits_of_the_whole_with_and_without_kept_activations(
    tmp_path: Path, cut: int, kept: int
) -> None:
    whole = create(a_config(tmp_path), 0)
    config = a_config(tmp_path, cut, kept_activations=kept)
    executors = [create(config, stage) for stage in range(cut)]
    for executor in (whole, *executors):
        moved(executor)
    for index in range(2):  # the first forward is measured, and not kept
        tokens = tokens_of(config, index)
        _, loss = whole.backward(inputs(tokens), None, tokens)
        sums, of_stages = passed(executors, tokens)
        assert of_stages == loss
    assert torch.equal(torch.cat(sums), whole.sum)


def test_an_audit_computes_the_backward_of_pairs_again_and_adds_it_elsewhere(tmp_path: Path) -> None:
    config = a_config(tmp_path, 2)
    first, last = (create(config, stage) for stage in range(2))
    tokens = tokens_of(config)
    for executor in (first, last):
        moved(executor)
    x = first.forward(inputs(tokens))
    grad, loss = last.backward(x.clone(), None, tokens)
    before = last.sum.clone()
    assert isinstance(last, Recomputing)
    into = torch.zeros_like(last.sum)
    output, again, loss_again = last.recompute(x.clone(), None, tokens, into)
    assert output is None and grad is not None and again is not None
    assert torch.equal(grad, again) and loss == loss_again and torch.equal(into, before)
    assert torch.equal(last.sum, before)


def test_boundary_tensors_have_the_shapes_that_messages_are_checked_by(tmp_path: Path) -> None:
    config = a_config(tmp_path, 2)
    first, last = (create(config, stage) for stage in range(2))
    tokens = tokens_of(config)
    y = first.forward(inputs(tokens))
    grad, _ = last.backward(y, None, tokens)
    assert grad is not None
    assert (tuple(y.shape), tuple(grad.shape)) == (boundary(config).shape, boundary_gradient(config).shape)
    assert y.shape[0] == 2 * grad.shape[0] == 4 * PAIRS


def test_the_reference_rows_are_the_base_models_whatever_the_adapters_are(tmp_path: Path) -> None:
    config = a_config(tmp_path, 2)
    first, base = create(config, 0), stages.build(msgspec.structs.replace(config, tune=Tune(), data=Data()), 0)
    tokens = tokens_of(config)
    with torch.no_grad():
        wanted = base.forward(inputs(tokens))
    for drawn in (False, True):
        if drawn:
            moved(first)
        trained, reference = first.forward(inputs(tokens)).chunk(2)
        assert torch.equal(reference, wanted)
        assert torch.equal(trained, wanted) != drawn


def test_slices_of_a_microbatch_add_up_to_the_whole(tmp_path: Path) -> None:
    tokens = tokens_of(a_config(tmp_path))
    results = []
    for sequences in (0, 1, 2):
        config = a_config(tmp_path, 2, sequences=sequences)
        executors = [create(config, stage) for stage in range(2)]
        for executor in executors:
            moved(executor)
        results.append(passed(executors, tokens))
    for sums, loss in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-6)
        torch.testing.assert_close(torch.cat(sums), torch.cat(results[0][0]), rtol=1e-4, atol=1e-7)


def test_a_large_vocabulary_gives_the_same_loss_and_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(tmp_path)
    results = []
    for sliced in (False, True):
        if sliced:
            monkeypatch.setattr(vocabulary, "LOGITS", 2 * PAIRS * SEQUENCE * 100)
        executor, tokens = create(config, 0), tokens_of(config)
        moved(executor)
        results.append((executor.backward(inputs(tokens), None, tokens)[1], executor.sum))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-7)


def test_evaluation_takes_the_mean_over_the_pairs_that_count(tmp_path: Path) -> None:
    for cut, sequences in ((1, 0), (2, 0), (2, 1)):
        config = a_config(tmp_path, cut, sequences=sequences)
        executors = [create(config, stage) for stage in range(cut)]
        for executor in executors:
            moved(executor)
        tokens = tokens_of(config)
        filled = torch.where(torch.arange(2 * PAIRS)[:, None] < 6, tokens, torch.where(tokens < 0, tokens, ~tokens))
        assert counted(filled, pairs=True) == 3

        def loss(given: Tensor, executors: list[Executor] = executors) -> float:
            x = inputs(given)
            for executor in executors[:-1]:
                y = evaluate(executor, x, None)
                assert isinstance(y, Tensor)
                x = y
            value = evaluate(executors[-1], x, given)
            assert isinstance(value, float)
            return value

        each = [loss(torch.cat([tokens[2 * at : 2 * at + 2], filled[6:].repeat(3, 1)])) for at in range(3)]
        of_third = rewards(executors[-1])
        assert of_third is not None and of_third.accuracy in (0.0, 1.0)
        assert loss(filled) == pytest.approx(sum(each) / 3, rel=1e-5)
        of_three = rewards(executors[-1])
        assert of_three is not None and of_three.accuracy * 3 == pytest.approx(round(of_three.accuracy * 3))
        assert not any(executor.sum.any() for executor in executors)
        assert loss(torch.where(tokens < 0, tokens, ~tokens)) == 0.0
        assert rewards(executors[-1]) is None


@pytest.mark.parametrize("fields", [{"checkpointing": True}, {"train": {"staleness": 1}}])
def test_other_ways_to_compute_give_the_same_bits(tmp_path: Path, fields: dict[str, Any]) -> None:
    results = []
    for given in ({}, fields):
        config = a_config(tmp_path, 2, **dict(given))
        executors = [create(config, stage) for stage in range(2)]
        for executor in executors:
            moved(executor)
            if isinstance(executor, Delayed):
                executor.at(1)
        results.append(passed(executors, tokens_of(config)))
    assert results[0][1] == results[1][1]
    assert all(map(torch.equal, results[0][0], results[1][0]))


def test_frozen_weights_in_four_bits_are_the_reference(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = a_config(tmp_path, tune={"quantize": "nf4"})
    executor, tokens = create(config, 0), tokens_of(config)
    _, loss = executor.backward(inputs(tokens), None, tokens)
    assert loss == pytest.approx(0.69314718, abs=1e-7)  # of the same weights, not of those before they were encoded
    moved(executor)
    assert executor.backward(inputs(tokens), None, tokens)[1] != loss


def test_rows_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    config = a_config(tmp_path, 2)
    last, tokens = create(config, 1), tokens_of(config)
    with pytest.raises(ValueError, match="does not fit tokens"):
        last.backward(torch.zeros(2 * PAIRS, SEQUENCE, 32), None, tokens)
    assert not last.sum.any()
