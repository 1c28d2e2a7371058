"""Training goes on from an adapter of PEFT's: it computes what PEFT computes, and one that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.test_adapters import TOKENS, based, same
from tests.runtime.test_node import TINY

from shoal.cli import export
from shoal.config import Config
from shoal.executor import create
from shoal.launcher.files import adapter_files
from shoal.model import stages
from shoal.runtime.checkpoints import checkpoint, marker


def an_adapter(config: Config, folder: Path, **lora: object) -> Path:
    """Written by PEFT, every matrix drawn: PEFT's own start changes nothing."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    torch.manual_seed(5)
    model = peft.get_peft_model(
        base, peft.LoraConfig(**{"r": 2, "lora_alpha": 64.0, "target_modules": "all-linear"} | lora)
    )
    generator = torch.Generator().manual_seed(5)
    for value in model.parameters():
        if value.requires_grad:
            value.data += 0.1 * torch.randn(value.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def importing(config: Config, adapter: Path, **tune: object) -> Config:
    return msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, adapter=str(adapter), **tune))


def faults(config: Config) -> list[str]:
    return list(adapter_files.faults(config))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return based(TINY, tmp_path / "base")


@pytest.mark.parametrize(
    ("lora", "tune"),
    [
        ({}, {}),
        ({"use_rslora": True}, {"rslora": True}),
        ({"use_dora": True}, {"dora": True}),
        ({"target_modules": ["q_proj", "down_proj"]}, {"targets": ("q_proj", "down_proj")}),
    ],
)
def test_stages_with_an_adapter_of_peft_compute_what_peft_computes(
    config: Config, tmp_path: Path, lora: dict[str, object], tune: dict[str, object]
) -> None:
    import peft
    import transformers

    adapter = an_adapter(config, tmp_path / "adapter", **lora)
    config = importing(config, adapter, **tune)
    assert faults(config) == []
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    first, last = (stages.build(config, stage) for stage in range(2))
    x = TOKENS[:, :8]
    logits = last.forward(first.forward(x))
    torch.testing.assert_close(logits, theirs(x).logits)
    assert torch.equal(logits, stages.whole(config)(x).logits)
    assert not torch.allclose(logits, stages.whole(TINY)(x).logits, atol=1e-2)


def test_an_adapter_that_was_exported_comes_back_with_its_bits(config: Config, tmp_path: Path) -> None:
    imported = importing(config, an_adapter(config, tmp_path / "adapter"))
    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    record = store.write_shard(
        1, 0, 1, {f"model/{n}": v.detach() for n, v in stages.whole(imported).named_parameters() if v.requires_grad}
    )
    path = Path(store.publish(1, [record], checkpoint.about(imported, "", "")))
    export.write_adapter(path, imported, tmp_path / "exported")
    back = importing(config, tmp_path / "exported")
    assert faults(back) == []
    for one, other in zip(stages.whole(imported).parameters(), stages.whole(back).parameters(), strict=True):
        assert same(one, other)


def a_checkpoint(config: Config, folder: Path) -> Path:
    """Of a run that trained nothing yet, in two shards."""
    store = checkpoint.Store(str(folder))
    records = [store.write_shard(1, stage, 2, create(config, stage).state()) for stage in range(2)]
    return Path(store.publish(1, records, checkpoint.about(config, "", "")))


def test_training_goes_on_from_the_adapters_of_another_runs_checkpoint_in_any_cut(
    config: Config, tmp_path: Path
) -> None:
    trained = importing(config, an_adapter(config, tmp_path / "adapter"))
    place = a_checkpoint(trained, tmp_path / "checkpoints")
    one = msgspec.structs.replace(importing(config, place), run=msgspec.structs.replace(config.run, stages=1))
    for again in (importing(config, place), one):
        assert faults(again) == []
        whole = dict(stages.whole(trained).named_parameters())
        for stage in range(again.run.stages):
            for name, value in stages.build(again, stage).named_parameters():
                assert same(value, whole[name])
    assert "has r = 2, and tune.rank = 4" in faults(importing(config, place, rank=4))[0]
    with pytest.raises(ValueError, match=r"holds model\.layers.*which would get no adapter"):
        stages.build(importing(config, place, targets=("q_proj",)), 0)
    model = msgspec.structs.replace(TINY.model, intermediate_size=TINY.model.intermediate_size + 8)
    other = based(msgspec.structs.replace(TINY, model=model), tmp_path / "other")
    assert "was trained beside the model in" in faults(importing(other, place))[0]
    with pytest.raises(ValueError, match=r"is of another base model: its .*mlp.* has shape"):
        stages.build(importing(other, place), 0)
    (place / "model-00002-of-00002.safetensors").unlink()
    (fault,) = faults(importing(config, place))
    assert "has no model-00002-of-00002.safetensors; copy the files of that checkpoint" in fault


def test_a_checkpoint_wins_over_the_adapter_that_training_began_with(config: Config, tmp_path: Path) -> None:
    imported = importing(config, an_adapter(config, tmp_path / "adapter"))
    plain = stages.whole(config)
    trained = {name: value.detach() for name, value in plain.named_parameters() if value.requires_grad}
    (tmp_path / "trained").mkdir()
    save_file(trained, tmp_path / "trained" / "model.safetensors")
    resumed = stages.whole(imported, str(tmp_path / "trained"))
    assert all(map(same, resumed.parameters(), plain.parameters()))


def test_frozen_weights_are_known_wherever_and_in_however_many_files_they_lie(config: Config, tmp_path: Path) -> None:
    import transformers

    place = a_checkpoint(config, tmp_path / "checkpoints")
    training = marker.decoded((place / marker.MARKER).read_bytes())
    whole = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    whole.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    with torch.no_grad():
        whole.model.layers[1].mlp.down_proj.weight[-1, -1] += 1
    whole.save_pretrained(tmp_path / "tuned")
    (tmp_path / "base").rename(tmp_path / "moved")
    for name, is_it in (("moved", True), ("parts", True), ("tuned", False)):
        there = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(tmp_path / name)))
        words = [] if is_it else ["was trained beside the model in"]
        assert [words[0] in fault for fault in faults(importing(there, place))] == [True] * len(words)
        if is_it:
            marker.refuse_foreign(training, there)
        else:
            with pytest.raises(ValueError, match="the adapters were trained beside those"):
                marker.refuse_foreign(training, there)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"r": 4}, "has r = 4, and tune.rank = 2; set tune.rank=4"),
        ({"lora_alpha": 8}, "has lora_alpha = 8, and tune.alpha = 64.0; set tune.alpha=8"),
        ({"use_rslora": True}, "set tune.rslora=true"),
        ({"use_dora": True}, "set tune.dora=true"),
        ({"bias": "all"}, "has bias = 'all', which is not trained here"),
        ({"modules_to_save": ["lm_head"]}, 'set tune.also=["head"]'),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern"),
    ],
)
def test_an_adapter_with_other_settings_is_refused(
    config: Config, tmp_path: Path, lora: dict[str, object], says: str
) -> None:
    (fault,) = faults(importing(config, an_adapter(config, tmp_path / "adapter", **lora)))
    assert says in fault


def test_a_directory_that_is_no_adapter_is_refused(config: Config, tmp_path: Path) -> None:
    assert "has no adapter_config.json" in faults(importing(config, tmp_path / "nowhere"))[0]
    adapter = an_adapter(config, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert "it is torn" in faults(importing(config, adapter))[0]
    weights.rename(adapter / "adapter_model.bin")
    assert "pickled weights are not read" in faults(importing(config, adapter))[0]
    settings = adapter / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"peft_type": "IA3"}))
    assert "of the kind 'IA3'" in faults(importing(config, adapter))[0]
    settings.write_text("[]")
    assert "no configuration of PEFT's" in faults(importing(config, adapter))[0]


def test_an_adapter_of_another_base_or_of_other_layers_is_refused(config: Config, tmp_path: Path) -> None:
    model = msgspec.structs.replace(TINY.model, intermediate_size=TINY.model.intermediate_size + 8)
    other = based(msgspec.structs.replace(TINY, model=model), tmp_path / "other")
    adapter = an_adapter(other, tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"is of another base model: its .*mlp.* has shape"):
        stages.build(importing(config, adapter), 0)
    run = msgspec.structs.replace(TINY.run, seed=TINY.run.seed + 1)
    sibling = based(msgspec.structs.replace(TINY, run=run), tmp_path / "sibling")
    adapter = an_adapter(sibling, tmp_path / "siblings")
    (fault,) = faults(importing(config, adapter))
    assert "was trained beside the model in" in fault and "sibling" in fault
    (tmp_path / "sibling").rename(tmp_path / "moved")
    assert faults(importing(config, adapter)) == []  # it is not known any more what it was trained beside
    few = an_adapter(config, tmp_path / "few", target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"holds no model\.layers\.1.*set tune\.targets"):
        stages.build(importing(config, few), 1)
    many = an_adapter(config, tmp_path / "many")
    with pytest.raises(ValueError, match=r"holds model\.layers.*which would get no adapter: set tune\.targets"):
        stages.build(importing(config, many, targets=("q_proj",)), 0)
    weights = load_file(many / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "layers.1" not in name}, many / "adapter_model.safetensors"
    )
    stages.build(importing(config, many), 0)
    with pytest.raises(ValueError, match=r"holds no model\.layers\.1"):
        stages.build(importing(config, many), 1)
