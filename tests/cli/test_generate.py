"""Sampling from a checkpoint that any program could load."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import main as program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama over bytes, with the built-in tokenizer's files beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.runtime.data.tokenizer import open_tokenizer

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, vocab_size=256, **shape)).save_pretrained(path)
    for name, content in open_tokenizer("bytes").files().items():
        (path / name).write_bytes(content)
    return path


def test_the_same_seed_gives_the_same_text_after_the_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert program.main(["generate", str(model), "def ", "--tokens", "20", "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("def ") for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_what_a_library_prints_is_not_on_standard_output(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    load = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: print("loading") or load(path))
    assert program.main(["generate", str(model), "def ", "--tokens", "3", "--temperature", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("def ") and "loading" not in printed.out and "loading" in printed.err


def test_temperature_0_needs_no_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 2):
        assert (
            program.main(["generate", str(model), "", "--temperature", "0", "--tokens", "8", "--seed", str(seed)]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_directory_that_is_no_model_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert program.main(["generate", str(tmp_path), "x"]) == 2
    assert f"{tmp_path}: not a model that can be loaded" in capsys.readouterr().err


def test_senseless_options_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--tokens", "0"], ["--temperature", "-1"], ["--top-k", "-2"]):
        assert program.main(["generate", str(model), "x", *option]) == 2
        assert option[0] in capsys.readouterr().err
