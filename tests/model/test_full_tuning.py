"""Full fine-tuning from a model directory: what may differ from the model that lies there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shoal import config as configuration
from shoal.config import Config
from shoal.model import stages
from shoal.model.cut import inputs, next_token_loss, targets

SEQUENCE = 24
TOKENS = torch.randint(0, 64, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))


def published(folder: Path, tied: bool = False) -> str:
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=64, max_position_embeddings=12, rope_theta=5e5, tie_word_embeddings=tied)
    ).save_pretrained(folder)
    return str(folder)


def a_config(path: str, *words: str, cut: int = 2) -> Config:
    own = [f"model.path={path}", f"run.stages={cut}", f"run.peers={cut}", "data.sequence=12"]
    return configuration.load(None, [*own, *words])


def whole_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(inputs(tokens), use_cache=False).logits, targets(tokens))


def through(config: Config, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of all stages."""
    x = inputs(tokens)
    for stage in range(config.run.stages - 1):
        x = stages.build(config, stage, source=config.model.path).forward(x)
    return stages.build(config, config.run.stages - 1, source=config.model.path).loss(x, tokens)


def test_a_larger_vocabulary_keeps_every_row_and_begins_new_tokens_with_their_mean(tmp_path: Path) -> None:
    path = published(tmp_path)
    config = a_config(path, "model.extra.vocab_size=70")
    stored = AutoModelForCausalLM.from_pretrained(path)
    first, last = (dict(stages.build(config, stage, source=path).named_parameters()) for stage in range(2))
    for name, value in {**first, **last}.items():
        original = stored.get_parameter(name)
        if "embed_tokens" not in name and "lm_head" not in name:
            assert torch.equal(value, original)
            continue
        assert len(value) == 70 and torch.equal(value[:64], original)
        assert all(torch.equal(row, value[64]) for row in value[64:])
        torch.testing.assert_close(value[64], original.mean(0))
    stored.resize_token_embeddings(70)
    with torch.no_grad():
        stored.get_input_embeddings().weight.copy_(first["model.embed_tokens.weight"])
        stored.get_output_embeddings().weight.copy_(last["lm_head.weight"])
    tokens = TOKENS[:, :13].clone()
    tokens[0, 5] = 69
    assert torch.equal(through(config, tokens), whole_loss(stored, tokens))


def test_a_smaller_vocabulary_keeps_the_first_rows(tmp_path: Path) -> None:
    path = published(tmp_path)
    (name, value), *_ = stages.build(a_config(path, "model.extra.vocab_size=60"), 0, source=path).named_parameters()
    assert torch.equal(value, AutoModelForCausalLM.from_pretrained(path).get_parameter(name)[:60])


def test_tied_embeddings_are_refused_over_stages_and_begin_equal_where_they_are_set_apart(tmp_path: Path) -> None:
    path = published(tmp_path, tied=True)
    with pytest.raises(ValueError, match=r"set model\.extra\.tie_word_embeddings=false to train them apart"):
        stages.check(a_config(path))
    apart = a_config(path, "model.extra.tie_word_embeddings=false", "model.extra.vocab_size=66")
    first, last = (dict(stages.build(apart, stage, source=path).named_parameters()) for stage in range(2))
    assert torch.equal(first["model.embed_tokens.weight"], last["lm_head.weight"])
    assert len(last["lm_head.weight"]) == 66


@pytest.mark.parametrize("cut", [1, 2])
def test_a_longer_context_has_the_rope_that_is_asked_for_and_the_base_of_the_model(tmp_path: Path, cut: int) -> None:
    path = published(tmp_path)
    rope = '{rope_type = "yarn", factor = 2.0, original_max_position_embeddings = 12}'
    words = [
        f"data.sequence={SEQUENCE}", f"model.extra.max_position_embeddings={SEQUENCE}", f"model.extra.rope_parameters={rope}"
    ]  # fmt: skip
    config = a_config(path, *words, cut=cut)
    hf = stages.hf_config(config)
    assert (hf.rope_parameters["rope_theta"], hf.rope_parameters["factor"]) == (5e5, 2.0)
    wanted = whole_loss(AutoModelForCausalLM.from_pretrained(path, config=hf), TOKENS)
    assert torch.equal(through(config, TOKENS), wanted)
    assert not torch.equal(wanted, whole_loss(AutoModelForCausalLM.from_pretrained(path), TOKENS))
    assert configuration.from_tree(configuration.to_tree(config)) == config
