"""What `shoal serve` founds of a directory with adapters, and what `shoal generate` does with one here."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.model.test_adapter_import import a_checkpoint, an_adapter
from tests.model.test_adapters import based
from tests.runtime.test_node import TINY

from shoal import config as configuration
from shoal.api import evaluating, prompts
from shoal.api.generating import Local, Sampling
from shoal.cli import main as program
from shoal.cli import serve
from shoal.config import Config, Tune
from shoal.launcher import preflight
from shoal.launcher.files import adapter_files, saved
from shoal.runtime.data.tokenizer import ByteTokenizer

GREEDY = Sampling(tokens=6, temperature=0.0, top_k=0, top_p=1.0, seed=0)
TEXT = list(b"once")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run that tunes, in bfloat16."""
    tuned = based(TINY, tmp_path / "base", quantize="nf4")
    return msgspec.structs.replace(tuned, train=msgspec.structs.replace(tuned.train, dtype="bfloat16"))


def with_tokenizer(folder: Path) -> Path:
    for name, content in ByteTokenizer().files().items():
        (folder / name).write_bytes(content)
    return folder


def served(path: Path, *settings: str, base: str | None = None) -> Config:
    return configuration.from_tree(configuration.overridden(serve.tree(path, list(settings), base), settings))


def test_a_runs_checkpoint_is_served_with_the_runs_base_model_and_its_settings_of_adapters(
    config: Config, tmp_path: Path
) -> None:
    place = a_checkpoint(config, tmp_path / "run" / "checkpoints")
    founded = served(saved.checkpoint(str(tmp_path / "run")))
    assert founded.tune == msgspec.structs.replace(config.tune, adapter=str(place))
    assert founded.model == config.model and founded.train.dtype == "bfloat16"
    assert founded.run.serve and (founded.run.stages, founded.run.peers) == (2, 4), "the model has two blocks"
    assert founded.run.name == "serve-run-step-1" and not list(adapter_files.faults(founded))
    assert adapter_files.tokenizer(founded) == str(place), "the checkpoint has the run's tokenizer"
    plain = served(place, "tune.quantize=none", "train.dtype=float32", "run.stages=1")
    assert (plain.tune.quantize, plain.train.dtype, plain.run.peers) == ("none", "float32", 2)


def test_a_base_model_that_has_moved_is_named(config: Config, tmp_path: Path) -> None:
    place = a_checkpoint(config, tmp_path / "checkpoints")
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"the base model of .* is not at .*base; say where it lies with --base DIR"):
        served(place)
    assert served(place, base=str(moved)).model.path == served(place, f"model.path={moved}").model.path == str(moved)


def test_a_directory_of_peft_is_served_with_its_own_settings(config: Config, tmp_path: Path) -> None:
    adapter = an_adapter(config, tmp_path / "adapter", use_rslora=True, target_modules=["q_proj", "down_proj"])
    founded = served(adapter)
    tune = Tune(method="lora", adapter=str(adapter), rank=2, alpha=64.0, rslora=True, targets=("down_proj", "q_proj"))
    assert founded.tune == tune and founded.model.path == str(tmp_path / "base")
    assert founded.train.dtype == "float32" and not list(adapter_files.faults(founded))
    assert adapter_files.tokenizer(founded) == founded.model.path, "an adapter without a tokenizer has its base model's"


def test_what_cannot_be_served_is_refused_in_words(config: Config, tmp_path: Path) -> None:
    adapter = an_adapter(config, tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds no adapters, but a whole model; leave --base out"):
        served(tmp_path / "base", base=str(tmp_path / "base"))
    other = based(msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, seed=4)), tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"was trained beside the model in .*, and the weights in model.path = .* are others"
    ):
        served(adapter, base=other.model.path)
    stored = adapter / "adapter_config.json"
    fields = json.loads(stored.read_text())
    for changed, says in (
        ({"target_modules": ".*_proj"}, r"has target_modules = '\.\*_proj', a pattern"),
        ({"bias": "all"}, "has bias = 'all', which is not trained here"),
        ({"r": 0}, "tune.rank"),
        (
            {"base_model_name_or_path": "meta-llama/Llama-3"},
            "is not at meta-llama/Llama-3; say where it lies with --base",
        ),
        ({"base_model_name_or_path": None}, "is not at a place that it does not name; say where it lies with --base"),
        ({"peft_type": "IA3"}, "is an adapter of the kind 'IA3'"),
    ):
        stored.write_text(json.dumps(fields | changed))
        with pytest.raises(ValueError, match=says):
            served(adapter)


def test_libraries_that_are_not_installed_are_named_before_anything_starts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(preflight.libraries(config.tune))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    peft, bitsandbytes = preflight.libraries(config.tune)
    assert "tune.method = 'lora' needs peft, which is not installed" in peft
    assert "tune.quantize = 'nf4' needs bitsandbytes" in bitsandbytes and "shoal[tune]" in bitsandbytes
    assert not list(preflight.libraries(Tune()))


def test_an_adapter_of_peft_is_used_here_as_peft_uses_it(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers
    from peft import PeftModel

    with_tokenizer(tmp_path / "base")
    adapter = an_adapter(config, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    given = torch.tensor([TEXT])
    expected = PeftModel.from_pretrained(base, adapter).generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert Local(adapter, None, "cpu").generate(TEXT, GREEDY, lambda token: None) == expected[0, len(TEXT) :].tolist()
    (tmp_path / "held-out.txt").write_text("a text that nobody was trained on " * 20)
    ours, alone = (
        evaluating.evaluate(place, [tmp_path / "held-out.txt"], "data.sequence=8", "data.tokenizer=bytes")[0].loss
        for place in (adapter, tmp_path / "base")
    )
    assert abs(ours - alone) > 1e-4, "it is evaluated with its adapter"
    assert program.main(["export", str(adapter), "--adapter", str(tmp_path / "again")]) == 2
    assert "was not written by shoal" in capsys.readouterr().err


def test_a_text_ends_where_the_base_models_generation_config_says(config: Config, tmp_path: Path) -> None:
    adapter = an_adapter(config, tmp_path / "adapter")
    with_tokenizer(tmp_path / "base")
    first = Local(adapter, None, "cpu").generate(TEXT, GREEDY, lambda token: None)
    assert len(first) == GREEDY.tokens
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, first[2]]}))
    ends = first.index(first[2]) + 1
    assert Local(adapter, None, "cpu").generate(TEXT, GREEDY, lambda token: None) == first[:ends]


def test_a_checkpoint_is_loaded_at_the_end_of_a_run_if_it_and_its_base_model_fit(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = a_checkpoint(config, tmp_path / "checkpoints")
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (place, tmp_path / "base")]
    monkeypatch.setattr("shoal.host.free_bytes", lambda: int(sum(sizes) / prompts.LOADED_SHARE) + 2)
    assert prompts.local(place).positions == TINY.data.sequence
    monkeypatch.setattr("shoal.host.free_bytes", lambda: int((sum(sizes) - 1) / prompts.LOADED_SHARE) - 2)
    with pytest.raises(ValueError, match=r"are free here: serve it \(`shoal serve .*step-1`\)"):
        prompts.local(place)
