"""Counting on the meta device: equal to arithmetic where that is known, and possible for families it is not."""

from __future__ import annotations

import pytest
import torch
from torch.utils import flop_counter

from shoal import config
from shoal.launcher.planning.problem import shape, work
from shoal.model import analysis
from shoal.model.cut import spans
from shoal.model.stages import build
from shoal.planner.inputs.profile import COUNTED, profile

SMALL = ("model.hidden_size=32", "model.layers=3", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=48")
WORK = ("model.vocab_size=256", "data.sequence=16", "train.batch=4", "train.microbatch=2")


def test_a_plain_decoder_counts_what_its_formula_says() -> None:
    tree = config.load(None, [*SMALL, *WORK])
    counted, formula = analysis.count(tree), profile(shape(tree), work(tree))
    assert counted.basis == COUNTED != formula.basis
    assert [part.name for part in counted.parts] == [part.name for part in formula.parts]
    assert [part.flops for part in counted.parts] == [part.flops for part in formula.parts]
    assert counted.parameters == formula.parameters
    assert (counted.boundary_bytes, counted.tokens_bytes) == (formula.boundary_bytes, formula.tokens_bytes)
    kept, guessed = counted.parts[1].activation_bytes, formula.parts[1].activation_bytes
    assert 0.5 < kept / guessed < 2


def test_attention_is_counted_where_pytorch_counts_none_with_fewer_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of PyTorch 2.11: its formula refuses them. Numbers are those of 2.13's own."""
    tree = config.load(None, [*SMALL, *WORK, "model.heads=4", "model.kv_heads=2"])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    kernels = (kernel, torch.ops.aten._scaled_dot_product_flash_attention_backward)

    def counted() -> list[tuple[float, float]]:
        return [(part.flops, part.activation_bytes) for part in analysis.count(tree).parts]

    ours = counted()

    def refuses(*_: object, **__: object) -> int:
        raise AssertionError("query/key/value shapes are incompatible")

    with monkeypatch.context() as older:
        for each in kernels:
            older.setitem(flop_counter.flop_registry, each, refuses)
        assert counted() == ours
    with monkeypatch.context() as own:
        own.setattr(analysis, "_counter", lambda: flop_counter.FlopCounterMode(display=False))
        assert counted() == ours


def test_of_a_large_vocabulary_a_slice_of_the_logits_counts_and_all_of_their_flops() -> None:
    """All logits of 2,048 tokens take 3.2 GB."""
    sizes = ["model.vocab_size=131072", "data.sequence=1024"]
    tree = config.load(None, [*SMALL, *WORK, *sizes])
    counted, formula = (each.parts[-1] for each in (analysis.count(tree), profile(shape(tree), work(tree))))
    assert counted.flops == formula.flops == 2.0 * 2048 * 131072 * 32
    assert formula.activation_bytes == 12 * 2**24
    assert counted.activation_bytes + counted.working_bytes < 2 * formula.activation_bytes


def test_parameters_are_those_of_the_stages_that_a_run_builds() -> None:
    tree = config.load(None, [*SMALL, *WORK, "run.stages=2"])
    counted = analysis.count(tree)
    for stage, span in enumerate(spans(3, 2)):
        held = sum(value.numel() for _, value in build(tree, stage).named_parameters())
        assert counted.stage(span).parameters == held


def test_more_tokens_are_more_flops_and_bytes_and_attention_grows_with_their_square() -> None:
    one, two = (analysis.count(config.load(None, [*SMALL, *WORK, f"data.sequence={length}"])) for length in (16, 32))
    assert two.parts[-1].flops == 2 * one.parts[-1].flops
    assert 2 * one.parts[1].flops < two.parts[1].flops < 4 * one.parts[1].flops
    assert two.parts[1].activation_bytes == pytest.approx(2 * one.parts[1].activation_bytes, rel=0.1)


def test_a_family_without_fused_attention_keeps_its_scores_and_is_named() -> None:
    """Gemma 2 caps the scores, which no fused kernel of transformers does: of the same sizes, Gemma keeps less."""
    gemma, gemma2 = (
        analysis.count(config.load(None, [*SMALL, *WORK, "data.sequence=256", f"model.family={family}"]))
        for family in ("gemma", "gemma2")
    )
    scores_bytes = 4 * 2 * 4 * 256 * 256  # one fp32 copy: of 2 sequences, 4 heads
    assert gemma2.parts[1].activation_bytes > gemma.parts[1].activation_bytes + 2 * scores_bytes
    assert "gemma2 attends without a fused kernel" in gemma2.basis and "fused" not in gemma.basis


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "gpt_neox", "phi3", "olmo2"]
)
def test_other_families_are_counted_without_being_built(family: str) -> None:
    tree = analysis.count(config.load(None, [f"model.family={family}", "model.layers=2", "run.stages=1"]))
    assert len(tree.parts) == 4
    assert all(part.flops > 0 and part.activation_bytes > 0 for part in tree.parts[1:])
