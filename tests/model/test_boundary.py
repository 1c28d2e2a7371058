"""Boundary layers are part of the model: the cut model is the whole's bits, checkpoints hold them, nobody drops them unseen."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.model.test_stages import a_config, some_tokens

from shoal import config as configuration
from shoal.executor.base import boundary as boundary_of
from shoal.executor.resident import Resident
from shoal.model import stages, whole
from shoal.model.cut import inputs, next_token_loss, targets
from shoal.model.layers import boundary

KINDS = ("bottleneck-2x", "bottleneck-4x", "maxout-2x", "maxout-4x")


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "llama") for kind in KINDS), ("maxout-2x", "gemma2"), ("bottleneck-4x", "qwen3")]
)
def test_a_cut_model_with_layers_at_its_cuts_is_the_whole_bit_for_bit(kind: str, family: str) -> None:
    config = a_config(family, cut=3, boundary=kind)
    tokens = some_tokens()
    whole = stages.whole(config)
    logits = whole(input_ids=inputs(tokens), use_cache=False).logits
    loss = next_token_loss(logits, targets(tokens))
    parameters = dict(whole.named_parameters())
    grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    parts = [stages.build(config, stage) for stage in range(3)]
    named = [dict(part.named_parameters()) for part in parts]
    assert sorted(name for names in named for name in names) == sorted(parameters)
    assert all(torch.equal(value, parameters[name]) for names in named for name, value in names.items())
    executors = [Resident(part, config) for part in parts]
    hidden = [inputs(tokens)]
    for executor in executors[:-1]:
        hidden.append(executor.forward(hidden[-1]))
        assert hidden[-1].shape[-1] == 32 // int(kind[-2])
    grad, input_grad = executors[2].backward(hidden[2], None, tokens)
    grad, _ = executors[1].backward(hidden[1], grad, None)
    executors[0].backward(hidden[0], grad, None)
    assert input_grad == float(loss.detach())
    microbatches = config.train.batch // config.train.microbatch
    for executor, names in zip(executors, named, strict=True):
        wanted = torch.cat([grads[name].reshape(-1) for name in names])
        assert torch.equal(executor.sum, wanted / microbatches)
        layers = torch.cat([grads[name].reshape(-1) for name in names if "shoal_boundary" in name])
        assert layers.any()


def test_layers_stand_at_the_cuts_also_where_stages_are_uneven() -> None:
    config = a_config("llama", cut=2, boundary="maxout-2x")
    uneven = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, layers=(3, 1)))
    named = [name for stage in range(2) for name, _ in stages.build(uneven, stage).named_parameters()]
    assert sorted(named) == sorted(name for name, _ in stages.whole(uneven).named_parameters())
    assert {name.split(".")[1] for name in named if "shoal_boundary" in name} == {"3"}


@pytest.mark.parametrize(
    ("kind", "values"), [("bottleneck-2x", 1.050), ("bottleneck-4x", 0.526), ("maxout-2x", 0.525), ("maxout-4x", 0.263)]
)
def test_the_layers_have_as_many_parameters_as_the_published_ones(kind: str, values: float) -> None:
    """In millions at width 1,024, LayerNorms apart (SWARM's figures)."""
    with torch.device("meta"):
        layers = boundary.Layers(kind, 1024)
    linear = [value for name, value in layers.named_parameters() if "before" not in name and "after" not in name]
    assert sum(value.numel() for value in linear) / 1e6 == pytest.approx(values, abs=0.0006)


def test_maxout_keeps_the_largest_of_adjacent_features_and_what_passes_is_normalised() -> None:
    narrow = boundary.Narrow("maxout", 8, 4)
    values = narrow(torch.tensor([[[1.0, 5.0, 2.0, 0.0, -9.0, -3.0, -4.0, -8.0]]])).detach()
    assert values.shape == (1, 1, 2)
    assert float(values[0, 0, 0]) == pytest.approx(1.0, abs=1e-3)
    assert float(values[0, 0, 1]) == pytest.approx(-1.0, abs=1e-3)


def a_checkpoint(config: configuration.Config, folder: Path) -> Path:
    from shoal.runtime.checkpoints.checkpoint import about

    folder.mkdir()
    for name, data in about(config, "", "").files.items():
        (folder / name).write_bytes(data)
    tensors = {name: value.detach() for name, value in stages.whole(config).named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_checkpoint_loads_with_our_module_and_is_refused_by_others(tmp_path: Path) -> None:
    import transformers

    config = a_config("llama", cut=3, boundary="maxout-2x")
    folder = a_checkpoint(config, tmp_path / "layered")
    written = json.loads((folder / "config.json").read_text())
    assert "shoal.model.whole.load" in written["explanation"]
    assert (written["boundary"], written["before_blocks"]) == ("maxout-2x", [1, 3])
    with pytest.raises(ValueError, match="shoal_boundary_layers"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    x = inputs(some_tokens())
    with torch.no_grad():
        wanted = stages.whole(msgspec.structs.replace(config))(input_ids=x, use_cache=False).logits
        assert torch.equal(whole.load(folder)(input_ids=x, use_cache=False).logits, wanted)
    plain = a_checkpoint(a_config("llama"), tmp_path / "plain")
    with pytest.raises(ValueError, match="no boundary layers of Shoal"):
        whole.load(plain)


def test_a_run_starts_from_a_checkpoint_with_the_same_layers_only(tmp_path: Path) -> None:
    config = a_config("llama", cut=3, boundary="maxout-2x")
    layered, plain = a_checkpoint(config, tmp_path / "layered"), a_checkpoint(a_config(), tmp_path / "plain")

    def start(path: Path, kind: str, cut: int) -> configuration.Config:
        model = msgspec.structs.replace(config.model, path=str(path), boundary=kind)  # type: ignore[arg-type]
        run = msgspec.structs.replace(config.run, stages=cut)
        return msgspec.structs.replace(config, model=model, run=run)

    good = start(layered, "maxout-2x", 3)
    assert boundary_of(good).shape[-1] == 16
    for stage in range(3):
        wanted = dict(stages.build(config, stage).named_parameters())
        parameters = dict(stages.build(good, stage).named_parameters())
        assert list(parameters) == list(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in parameters.items())
    for bad in (start(layered, "none", 3), start(layered, "maxout-4x", 3), start(layered, "maxout-2x", 2)):
        with pytest.raises(ValueError, match=r"has boundary layers maxout-2x before blocks \[1, 3\], this run"):
            stages.build(bad, 0)
    with pytest.raises(ValueError, match="has boundary layers none, this run maxout-2x"):
        stages.build(start(plain, "maxout-2x", 3), 0)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["model.boundary=maxout-2x", "run.stages=1", "run.peers=1"], "stands at cuts, and run.stages = 1 has none"),
        (["model.boundary=maxout-4x", "model.hidden_size=66", "model.heads=1", "model.kv_heads=1"], "does not divide"),
        (["model.boundary=maxout-4x", "device.executor=swapping"], "swapping"),
        (["model.boundary=maxout"], "did you mean 'maxout-"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        configuration.load(None, words)
