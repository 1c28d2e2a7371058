"""Embeddings, head and norms that are trained beside adapters: which these are, what PEFT reads of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_adapter_import import an_adapter, faults, importing
from tests.model.test_adapters import TOKENS, based, same
from tests.runtime.test_node import TINY

import shoal
from shoal import config as configuration
from shoal.cli import export
from shoal.config import Config, Model
from shoal.executor import create, fit
from shoal.launcher.files import saved
from shoal.model import analysis, stages
from shoal.runtime.checkpoints import checkpoint

_SLOW = pytest.mark.slow
ALSO = ("embeddings", "head", "norms")
OF_KIND = {"embeddings": ["embed_tokens"], "head": ["lm_head"], "norms": ["norm", "layernorm"]}


def kinds_of(name: str) -> list[str]:
    module = name.rpartition(".")[0]
    return [kind for kind, ends in OF_KIND.items() if module.endswith(tuple(ends))]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return based(TINY, tmp_path / "base", also=ALSO)


def tied(tmp_path: Path, *also: str, **extra: object) -> Config:
    one = msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, stages=1))
    one = msgspec.structs.replace(one, model=msgspec.structs.replace(TINY.model, tied_embeddings=True))
    config = based(one, tmp_path / "tied", also=also)
    return msgspec.structs.replace(config, run=TINY.run, model=msgspec.structs.replace(config.model, extra=dict(extra)))


def trained(config: Config, folder: Path, steps: int = 3) -> Path:
    """A checkpoint of two stages after some steps, of which every weight that is trained is another one than in the base."""
    stage = [create(config, number) for number in range(2)]
    before = [{name: value.clone() for name, value in each.state().items()} for each in stage]
    for step in range(steps):
        gradient, _ = stage[1].backward(stage[0].forward(TOKENS[:, :8]), None, TOKENS)
        stage[0].backward(TOKENS[:, :8], gradient, None)
        for each in stage:
            each.apply(each.contribution(), 1.0, step)
            each.zero(step + 1)
    for each, values in zip(stage, before, strict=True):
        assert [name for name, value in each.state().items() if torch.equal(value, values[name])] == []
    store = checkpoint.Store(str(folder))
    records = [store.write_shard(steps, number, 2, each.state()) for number, each in enumerate(stage)]
    return Path(store.publish(steps, records, checkpoint.about(config, "", "")))


@pytest.mark.parametrize(
    ("also", "dtype"),
    [
        *((also, "float32") for also in (("norms",), ("embeddings",), ("head", "norms"))),
        (ALSO, "bfloat16"),
        *(pytest.param(also, "bfloat16", marks=_SLOW) for also in (("norms",), ("embeddings",), ("head", "norms"))),
        pytest.param(ALSO, "float32", marks=_SLOW),
    ],
)
def test_stages_train_them_in_fp32_and_hold_all_other_weights_as_before(
    config: Config, dtype: str, also: tuple[str, ...]
) -> None:
    train = msgspec.structs.replace(config.train, dtype=dtype)
    config = msgspec.structs.replace(config, train=train, tune=msgspec.structs.replace(config.tune, also=also))
    base = dict(stages.whole(TINY).named_parameters())
    counted, seen = analysis.count(config), []
    for stage, span in enumerate((range(1), range(1, 2))):
        built, hollow = stages.build(config, stage), stages.hollow(config, stage)
        own, frozen = dict(built.named_parameters()), dict(built.named_frozen())
        assert list(own) == [name for name, _ in hollow.named_parameters()]
        for name, value in own.items():
            assert value.dtype == torch.float32
            assert "lora_" in name or (same(value, base[name]) and set(kinds_of(name)) <= set(also))
        assert all(str(value.dtype) == f"torch.{dtype}" for value in frozen.values())
        assert [name for name in frozen if set(kinds_of(name)) & set(also)] == []
        assert fit.stage_bytes(hollow, config) == fit.stage_bytes(built, config)
        profile = counted.stage(span)
        assert profile.parameters == sum(value.numel() for value in own.values()) == create(config, stage).length
        assert profile.frozen_bytes == fit.frozen_bytes(built)
        seen += [kind for name in own for kind in kinds_of(name)]
    assert set(seen) == set(also)


def test_what_compares_frozen_weights_leaves_out_those_that_are_trained(config: Config, tmp_path: Path) -> None:
    """A replica that joins later has other embeddings in its model directory than the run has by then."""
    whole = stages.whole(TINY)
    with torch.no_grad():
        whole.model.embed_tokens.weight += 1
    whole.save_pretrained(tmp_path / "other")
    other = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(tmp_path / "other")))
    here, there = create(config, 0), create(other, 0)
    assert here.base == there.base and here.digest() != there.digest()
    there.load_state(here.state())
    assert here.digest() == there.digest()
    assert torch.equal(here.forward(TOKENS[:, :8]), there.forward(TOKENS[:, :8]))


@pytest.mark.parametrize("also", [("embeddings", "norms"), ALSO])
def test_peft_and_transformers_read_what_is_exported(config: Config, tmp_path: Path, also: tuple[str, ...]) -> None:
    import transformers
    from peft import PeftModel

    config = msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, also=also))
    path = trained(config, tmp_path / "checkpoints")
    whole, x = stages.whole(saved.adapted(path), str(path)), TOKENS[:, :8]
    assert torch.equal(shoal.Checkpoint(path).model()(x).logits, whole(x).logits)
    export.write_adapter(path, config, tmp_path / "adapter")
    names = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"]
    ends = {"embed_tokens", "lm_head"} if "head" in also else {"embed_tokens"}
    assert set(names) == ends | {"input_layernorm", "post_attention_layernorm", "norm"}
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(x).logits, whole(x).logits)
    assert same(theirs.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    export.merge(path, config, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(x).logits, whole(x).logits, rtol=1e-4, atol=1e-4)
    assert same(merged.model.norm.weight, whole.model.norm.weight)
    back = stages.whole(importing(config, tmp_path / "adapter"))
    assert faults(importing(config, tmp_path / "adapter")) == []
    for one, other in zip(whole.parameters(), back.parameters(), strict=True):
        assert same(one, other)


def test_an_adapter_of_peft_with_modules_to_save_goes_on_with_them(config: Config, tmp_path: Path) -> None:
    import peft
    import transformers

    names = ["embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm"]
    adapter = an_adapter(config, tmp_path / "adapter", modules_to_save=names)
    again = importing(config, adapter)
    assert faults(again) == [] and saved.adapted(adapter).tune.also == ("embeddings", "head", "norms")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    theirs, x = peft.PeftModel.from_pretrained(base, adapter).eval(), TOKENS[:, :8]
    first, last = (stages.build(again, stage) for stage in range(2))
    torch.testing.assert_close(last.forward(first.forward(x)), theirs(x).logits)
    assert same(dict(first.named_parameters())["model.embed_tokens.weight"], theirs.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("names", "also", "says"),
    [
        (["lm_head"], (), "has modules_to_save = ['lm_head'], and tune.also = []; set tune.also=[\"head\"]"),
        (None, ("norms",), "set tune.also=[]"),
        (["embed_tokens", "norm"], ("norms",), 'set tune.also=["embeddings", "norms"]'),
        (["gate_proj"], ("norms",), "embeddings, head and norms alone are trained beside adapters here"),
    ],
)
def test_an_adapter_with_other_parts_is_refused(
    config: Config, tmp_path: Path, names: list[str] | None, also: tuple[str, ...], says: str
) -> None:
    lora: dict[str, Any] = {"modules_to_save": names, "target_modules": ["q_proj"]}
    adapter = an_adapter(config, tmp_path / "adapter", **lora)
    (fault,) = faults(importing(config, adapter, also=also, targets=("q_proj",)))
    assert says in fault


def test_an_adapter_with_some_of_the_norms_is_refused_where_it_is_read(config: Config, tmp_path: Path) -> None:
    adapter = an_adapter(config, tmp_path / "adapter", modules_to_save=["input_layernorm"], target_modules=["q_proj"])
    again = importing(config, adapter, also=("norms",), targets=("q_proj",))
    assert faults(again) == []  # by names alone it could be all norms of its family
    with pytest.raises(ValueError, match=r"holds no model\.layers\.0\.post_attention_layernorm.*tune\.also"):
        stages.build(again, 0)
    few = importing(config, adapter, also=(), targets=("q_proj",))
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.input_layernorm\.weight, which is not trained here"):
        stages.build(few, 0)


def test_tied_embeddings_are_trained_apart_or_not_at_all(tmp_path: Path) -> None:
    for also in (("embeddings",), ("head",)):
        for stages_ in (1, 2):
            config = tied(tmp_path, *also)
            config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, stages=stages_))
            with pytest.raises(ValueError, match=r"one matrix.*set model\.extra\.tie_word_embeddings=false"):
                stages.check(config)
    stages.check(tied(tmp_path, "norms"))


@pytest.mark.parametrize("also", [("embeddings", "head"), ("embeddings",), ("head", "norms")])
def test_two_matrices_of_a_tied_one_are_exported_and_merged_as_two(tmp_path: Path, also: tuple[str, ...]) -> None:
    import transformers
    from peft import PeftModel

    config = tied(tmp_path, *also, tie_word_embeddings=False)
    stages.check(config)
    path = trained(config, tmp_path / "checkpoints")
    whole, x = stages.whole(saved.adapted(path), str(path)), TOKENS[:, :8]
    assert not torch.equal(whole.lm_head.weight, whole.model.embed_tokens.weight)
    one_matrix = stages.whole(tied(tmp_path)).lm_head.weight
    assert torch.equal(whole.lm_head.weight, one_matrix) == ("head" not in also)
    export.write_adapter(path, config, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(x).logits, whole(x).logits)
    export.merge(path, config, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(x).logits, whole(x).logits, rtol=1e-4, atol=1e-4)


def test_a_layer_with_an_adapter_has_no_other_weights_that_are_trained(config: Config) -> None:
    both = msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, targets=("q_proj", "lm_head")))
    with pytest.raises(ValueError, match=r"lm_head would get an adapter, and tune\.also trains its weights"):
        stages.build(both, 1)


def test_a_family_without_such_parts_says_so(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(TINY, model=msgspec.structs.replace(TINY.model, family="olmo"))
    with pytest.raises(ValueError, match=r"tune\.also has 'norms', and the family 'olmo' has none with weights"):
        stages.check(based(plain, tmp_path / "olmo", also=("norms",)))


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen3", "gemma2", "gpt_neox"])
def test_each_family_names_its_own(tmp_path: Path, family: str) -> None:
    none = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "opt": ("dropout",)}.get(family, ())
    model = Model(family=family, hidden_size=64, layers=2, vocab_size=256, extra=dict.fromkeys(none, 0.0))
    config = based(msgspec.structs.replace(TINY, model=model), tmp_path / family, also=ALSO)
    kinds = [
        set(saved.adapter_files._also({"modules_to_save": [name.rpartition(".")[0]]}))
        for stage in range(2)
        for name, _ in stages.build(config, stage).named_parameters()
        if "lora_" not in name
    ]
    assert set().union(*kinds) == set(ALSO)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (['tune.also=["norms"]'], "tune.also = ('norms',) has no effect: tune.method = 'full' trains all weights"),
        (["tune.method=lora", "model.path=x", 'tune.also=["norms", "norms"]'], "names one twice"),
        (["tune.method=lora", "model.path=x", 'tune.also=["biases"]'], "tune.also"),
        (["tune.method=lora", "model.path=x", 'tune.also=["norms"]', "tune.lend=true"], "with tune.lend = true"),
        (
            ["tune.method=lora", "model.path=x", 'tune.also=["norms"]', "data.source=jsonl", "data.format=preference"],
            "changes the base that data.format = 'preference' compares with",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        configuration.load(None, settings)
    assert says in str(refused.value)
