"""The loss in slices of the vocabulary is that of all logits at once, within rounding, in a fraction of their memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.executor.test_swapping import limited
from tests.model.test_stages import a_config

from shoal.executor.resident import Resident
from shoal.executor.swap.memory import MemoryMeter
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs
from shoal.model.layers import vocabulary
from shoal.model.stages import HuggingFaceStage

WITHIN = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of a gradient's norm: measured 9e-7 and 1.2e-2
# Families whose head is a plain matrix, caps logits, scales them, has biases.
FAMILIES = ["llama", "gemma2", "cohere", "granite", "phi"]


def some_tokens(sequences: int, length: int, entries: int) -> torch.Tensor:
    return torch.randint(0, entries, (sequences, length + 1), generator=torch.Generator().manual_seed(1))


def result(stage: HuggingFaceStage, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients; the loss has a weight, as in a step of several microbatches."""
    loss = stage.loss(inputs(tokens), tokens)
    parameters = [value for _, value in stage.named_parameters()]
    return [loss.detach(), *torch.autograd.grad(loss / 3, parameters)]


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_give_the_loss_and_gradients_of_the_whole(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages.build(a_config(family, vocab_size=1000, layers=2), 0)
    stage.model.to(dtype)
    tokens = some_tokens(2, 12, 1000)
    whole = result(stage, tokens)
    monkeypatch.setattr(vocabulary, "LOGITS", 24 * 130)  # seven slices of 130, and one of 90
    sliced, again = result(stage, tokens), result(stage, tokens)
    assert float(sliced[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    for one, other, same in zip(whole[1:], sliced[1:], again[1:], strict=True):
        assert float((one - other).norm()) <= WITHIN[dtype] * float(one.norm())
        assert torch.equal(other, same), "deterministic"


@pytest.mark.parametrize("tied", [False, True])
def test_a_slice_of_logits_is_all_that_exists_at_a_time(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, length, size = 8192, 64, 1 << 14
    monkeypatch.setattr(vocabulary, "LOGITS", size)
    config = a_config(vocab_size=entries, layers=1, tied_embeddings=tied)
    stage = stages.build(config, 0)
    tokens = some_tokens(1, length, entries)
    with MemoryMeter("cpu") as meter:
        result(stage, tokens)
    gradients = sum(value.nbytes for _, value in stage.named_parameters())
    if tied:
        gradients *= 3  # one of the embedding, one of the head, their sum
    assert meter.peak - gradients < 6 * 4 * size < 4 * entries * length


def test_a_swapping_stage_has_the_resident_ones_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "LOGITS", 24 * 130)
    config = a_config(vocab_size=1000, layers=2)
    tokens = some_tokens(2, 12, 1000)
    plain = Resident(stages.build(config, 0), config)
    swapping = Swapping(stages.build(config, 0), limited(config, 700_000))
    assert swapping.plan.count > 1
    assert swapping.backward(inputs(tokens), None, tokens) == plain.backward(inputs(tokens), None, tokens)
    assert torch.equal(swapping.sum, plain.sum)


LARGE = """
import resource, torch
from tests.model.test_vocabulary import a_config, result, some_tokens
from shoal.model import stages
stage = stages.build(a_config(vocab_size=1 << 17, layers=1), 0)
result(stage, some_tokens(1, 8, 1 << 17))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result(stage, some_tokens(4, 2048, 1 << 17))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_8192_tokens_of_128k_entries_take_less_than_2_GB() -> None:
    """All logits at once take 12 GB. The small microbatch before has allocated weights and gradients."""
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) * 1024 < 2e9, f"{int(ran.stdout) / 1e6:.2f} GB"
