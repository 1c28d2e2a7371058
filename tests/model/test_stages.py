"""A cut model is the whole model: same weights, logits and gradients, bit for bit; what cannot be cut is refused."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.config import Config, Data, Device, Model, Run
from shoal.executor import fit
from shoal.model import stages
from shoal.model.cut import inputs, next_token_loss, targets

# Window and layer types differ between blocks, so that a block run at another block's index shows. test_families.py has more.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
}


def a_config(family: str = "llama", *, cut: int | tuple[int, ...] = 1, seed: int = 3, **fields: Any) -> Config:
    model = {"hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "vocab_size": 64}
    model = {"family": family, "extra": FAMILIES.get(family, {})} | model | fields
    layers = cut if isinstance(cut, tuple) else ()
    run = Run(stages=len(layers) if isinstance(cut, tuple) else cut, layers=layers, seed=seed)
    return Config(run=run, model=Model(**model), data=Data(sequence=12))


def some_tokens() -> Tensor:
    return torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(1))


@cache
def the_whole(family: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Logits, parameters and gradients of the uncut model."""
    model = stages.whole(a_config(family))
    logits = model(inputs(some_tokens()), use_cache=False).logits
    next_token_loss(logits, targets(some_tokens())).backward()
    named = dict(model.named_parameters())
    return (
        logits.detach(),
        {name: value.detach() for name, value in named.items()},
        {name: value.grad for name, value in named.items()},
    )


@pytest.mark.parametrize("boundary", ["none", "bottleneck-2x"])
@pytest.mark.parametrize("cut", [(1, 5), (3, 1, 2), 4])
def test_a_hollow_stage_has_the_parameters_of_the_built_one_at_any_cut(
    cut: int | tuple[int, ...], boundary: str
) -> None:
    config = a_config(cut=cut, layers=6, boundary=boundary)
    for stage in range(config.run.stages):
        hollow, built = stages.hollow(config, stage), stages.build(config, stage)
        shapes = {name: tuple(value.shape) for name, value in built.named_parameters()}
        assert {name: tuple(value.shape) for name, value in hollow.named_parameters()} == shapes
        assert all(value.is_meta for _, value in hollow.named_parameters()), "without values"


def test_room_is_asked_for_the_blocks_that_a_stage_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six blocks in stages of 1 and 5 the second takes more than any of an even cut."""
    monkeypatch.setattr(fit, "free_bytes", lambda: None)
    uneven, even = (a_config(cut=layers, layers=6) for layers in ((1, 5), (3, 3)))

    def values(config: Config, stage: int) -> int:
        return sum(value.numel() for _, value in stages.build(config, stage).named_parameters())

    needed = max(values(even, stage) for stage in range(2)) * fit.resident_bytes(even)
    moments = 8 * max(values(even, stage) for stage in range(2))
    tight = Device(memory_bytes=needed + moments)
    fit.check(msgspec.structs.replace(even, device=tight))
    with pytest.raises(ValueError, match=rf"stage 1 of 2: .* its {values(uneven, 1):,} parameters"):
        fit.check(msgspec.structs.replace(uneven, device=tight))


def test_stages_built_at_once_in_threads_of_one_process_have_the_weights_of_those_built_alone() -> None:
    def built(_: int) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in stages.whole(a_config()).named_parameters()}

    alone = built(0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            at_once = list(threads.map(built, range(12)))
    finally:
        sys.setswitchinterval(interval)
    assert [name for one in at_once for name in alone if not torch.equal(alone[name], one[name])] == []


@pytest.mark.parametrize("cut", [1, 2, 3, 4, (3, 1), (2, 1, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_model_has_the_weights_logits_and_gradients_of_the_whole_bit_for_bit(
    family: str, cut: int | tuple[int, ...]
) -> None:
    logits, parameters, gradients = the_whole(family)
    config = a_config(family, cut=cut)
    parts = [stages.build(config, stage) for stage in range(config.run.stages)]
    xs, ys = [], []
    x = inputs(some_tokens())
    for part in parts:
        xs.append(x)
        ys.append(part.forward(x))
        x = ys[-1].detach().requires_grad_()
    next_token_loss(ys[-1], targets(some_tokens())).backward()
    for y, x in zip(reversed(ys[:-1]), reversed(xs[1:]), strict=True):
        y.backward(x.grad)

    cut_parameters = {name: value for part in parts for name, value in part.named_parameters()}
    assert torch.equal(ys[-1], logits)
    assert list(cut_parameters) == list(parameters)
    for name, value in cut_parameters.items():
        assert torch.equal(value, parameters[name]), name
        assert value.grad is not None and torch.equal(value.grad, gradients[name]), name


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_families_tested_here_do_differ_between_their_blocks(family: str) -> None:
    assert len(set(stages.hf_config(a_config(family)).layer_types)) == 2


def test_the_loss_of_the_last_stage_is_that_of_the_whole() -> None:
    logits, _, _ = the_whole("llama")
    one = stages.build(a_config(), 0)
    assert one.first and one.last
    assert torch.equal(one.loss(inputs(some_tokens()), some_tokens()), next_token_loss(logits, targets(some_tokens())))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_trained(family: str) -> None:
    """A family's padding token, which may be a byte of ours, would get neither a first weight nor a gradient."""
    assert the_whole(family)[1]["model.embed_tokens.weight"].any(dim=1).all()
    assert stages.hf_config(a_config(family)).pad_token_id is None


def test_a_stage_has_memory_for_its_own_blocks_only() -> None:
    first, last = (stages.build(a_config(cut=2), stage) for stage in (0, 1))
    names = [
        {name.split(".layers.")[-1].split(".")[0] for name, _ in part.named_parameters()} for part in (first, last)
    ]
    assert names == [{"model", "0", "1"}, {"2", "3", "model", "lm_head"}]
    assert not any(value.is_meta for part in (first, last) for _, value in part.named_parameters())


def test_the_random_start_follows_seed_and_family() -> None:
    _, parameters, _ = the_whole("llama")
    other = dict(stages.whole(a_config(seed=4)).named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other[name], parameters[name])
    assert not torch.equal(parameters[name], parameters["model.layers.1.mlp.up_proj.weight"])
    assert float(parameters[name].std()) == pytest.approx(0.02, rel=0.1)  # the family's initializer_range
    assert torch.equal(parameters["model.norm.weight"], torch.ones(32))
    assert not the_whole("gemma2")[1]["model.norm.weight"].any()  # Gemma's norms are centred on 1 + weight


def test_a_sequence_above_the_models_positions_is_refused(tmp_path: Path) -> None:
    stages.hf_config(a_config()).save_pretrained(tmp_path)  # made for 12
    run, model = Run(stages=1), Model(path=str(tmp_path))
    stages.check(Config(run=run, model=model, data=Data(sequence=12)))
    longer = Config(run=run, model=model, data=Data(sequence=13))
    with pytest.raises(
        ValueError, match=r"data\.sequence = 13 is above the 12 positions of .*; try data\.sequence=12, or"
    ):
        stages.check(longer)
    extended = msgspec.structs.replace(model, extra={"max_position_embeddings": 13})
    stages.check(msgspec.structs.replace(longer, model=extended))
    with pytest.raises(ValueError, match=r"above the 8 positions of model\.family = 'llama'"):
        stages.check(a_config(extra={"max_position_embeddings": 8}))


@pytest.mark.parametrize("sharded", [False, True])
def test_stages_read_their_own_weights_from_safetensors(tmp_path: Path, sharded: bool) -> None:
    save_as_hugging_face(tmp_path, a_config(seed=9), sharded=sharded)
    wanted = dict(stages.whole(a_config(seed=9)).named_parameters())
    for config, source in ((a_config(cut=2), str(tmp_path)), (a_config(cut=2, path=str(tmp_path)), None)):
        for stage in (0, 1):
            for name, value in stages.build(config, stage, source=source).named_parameters():
                assert torch.equal(value, wanted[name]), name


def test_a_tied_checkpoint_can_be_trained_apart_when_asked_to(tmp_path: Path) -> None:
    save_as_hugging_face(tmp_path, a_config(tied_embeddings=True), sharded=False)
    with pytest.raises(ValueError, match=r"model\.extra\.tie_word_embeddings"):
        stages.check(a_config(cut=2, path=str(tmp_path)))
    apart = a_config(cut=2, path=str(tmp_path), extra={"tie_word_embeddings": False})
    first, last = (dict(stages.build(apart, stage).named_parameters()) for stage in (0, 1))
    assert torch.equal(first["model.embed_tokens.weight"], last["lm_head.weight"])


def test_tied_embeddings_are_one_parameter_in_one_stage_and_refused_in_more() -> None:
    names = [name for name, _ in stages.build(a_config(tied_embeddings=True), 0).named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    with pytest.raises(ValueError, match=r"model\.tied_embeddings is true.*model\.tied_embeddings=false"):
        stages.check(a_config(tied_embeddings=True, cut=2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (a_config(cut=5), r"run\.stages = 5.*4 blocks.*try run\.stages=4"),
        (a_config("biogpt"), "no pipeline plan.*Shoal only one of gpt2, bloom"),
        (a_config("gpt2"), r"model\.kv_heads = 2 has no effect: gpt2 has no such field"),
        (a_config("gpt2", kv_heads=4), r"set model\.extra\.resid_pdrop=0\.0 model\.extra\.embd_pdrop=0\.0"),
        (a_config("gemma3"), r"try model\.family=gemma3_text"),
        (a_config("lama"), "did you mean 'llama'"),
        (a_config(heads=5), r"model\.hidden_size = 32 is not a multiple of model\.heads = 5"),
        (a_config(kv_heads=3), r"model\.heads = 4 is not a multiple of model\.kv_heads = 3"),
        (a_config(extra={"rms_norm_epsilon": 1.0}), "did you mean rms_norm_eps"),
        (a_config(extra={"rms_norm_eps": "small"}), "llama refuses this configuration"),
        (a_config(extra={"attention_dropout": 0.1}), r"set model\.extra\.attention_dropout=0\.0"),
        (a_config(path="/nowhere"), r"model\.path = '/nowhere' has no config\.json"),
        (a_config("granite", cut=2, extra={"embedding_multiplier": 12.0}), "more than pass on hidden states"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages.check(config)


def test_what_one_stage_holds_whole_may_scale_its_embeddings() -> None:
    stages.check(a_config("granite", cut=1, extra={"embedding_multiplier": 12.0}))


def test_an_emulated_run_has_no_model_to_check() -> None:
    stages.check(msgspec.structs.replace(a_config(cut=40), device=Device(executor="emulated")))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "holds no tensor 'model.norm.weight'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), r"has shape \(31,\)"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path: Path, spoil: Any, message: str) -> None:
    tensors = {name: value.detach() for name, value in stages.whole(a_config()).named_parameters()}
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        stages.build(a_config(cut=2), 1, source=str(tmp_path))


def test_an_index_cannot_name_a_file_outside_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="no file of that directory"):
        stages.build(a_config(), 0, source=str(tmp_path))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other formats of weights are not read"):
        stages.build(a_config(), 0, source=str(tmp_path))


def save_as_hugging_face(folder: Path, config: Config, *, sharded: bool) -> None:
    stages.hf_config(config).save_pretrained(folder)
    tensors = {name: value.detach() for name, value in stages.whole(config).named_parameters()}
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
