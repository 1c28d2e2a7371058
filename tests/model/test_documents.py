"""data.document_end: a document's logits do not depend on its neighbours in a sample, at any cut."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.executor.test_swapping import limited
from tests.model.test_families import FAMILIES, MIXTURES, of_family
from tests.model.test_stages import a_config
from torch import Tensor

from shoal.config import Config
from shoal.executor.resident import Resident
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import document_starts, inputs, positions, with_borders
from shoal.model.families import PACKED

END = 63


def apart(config: Config) -> Config:
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, document_end=END))


def some_tokens() -> Tensor:
    """Two samples, of which the first has documents of 5 and 8 tokens, the second of 9 and 4."""
    tokens = torch.randint(0, END, (2, 13), generator=torch.Generator().manual_seed(1))
    tokens[0, 4] = tokens[1, 8] = END
    return tokens


def logits(config: Config, x: Tensor) -> Tensor:
    """Through all stages, with the borders that the task runner adds and takes off."""
    starts = document_starts(x, END)
    for stage in range(config.run.stages):
        one = stages.build(config, stage)
        x = one.forward(x if stage == 0 else with_borders(x, starts)).detach()
        if config.data.document_end >= 0 and not one.last:
            assert torch.equal(x[..., -1] > 0, starts)
            x = x[..., :-1]
    return x


def test_positions_begin_anew_behind_the_token_that_ends_a_document() -> None:
    tokens = torch.tensor([[5, 9, 9, 1, 2], [9, 4, 4, 4, 9]])
    assert positions(document_starts(tokens, 9)).tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]


@pytest.mark.parametrize("family", sorted(PACKED))
def test_a_document_has_the_logits_that_it_has_alone(family: str) -> None:
    config, tokens = apart(of_family(family, 3)), inputs(some_tokens())
    y = logits(config, tokens)
    other = tokens.clone()
    other[0, :4] = (other[0, :4] + 7) % END
    assert torch.equal(logits(config, other)[0, 5:], y[0, 5:])
    assert torch.allclose(y[:1, 5:], logits(of_family(family, 1), tokens[:1, 5:]), atol=1e-6)
    assert torch.allclose(y[1:, 9:], logits(of_family(family, 1), tokens[1:, 9:]), atol=1e-6)


def test_joined_documents_do_attend_to_one_another() -> None:
    config, tokens = of_family("llama", 1), inputs(some_tokens())
    assert not torch.allclose(logits(config, tokens)[:1, 5:], logits(config, tokens[:1, 5:]), atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma2", *MIXTURES])
def test_a_cut_model_has_the_gradients_of_the_whole(family: str) -> None:
    config, tokens = apart(of_family(family, 3)), some_tokens()
    starts = document_starts(inputs(tokens), END)
    one = Resident(stages.build(apart(of_family(family)), 0), apart(of_family(family)))
    one.backward(inputs(tokens), None, tokens)
    parts = [Resident(stages.build(config, stage), config) for stage in range(3)]
    first = parts[0].forward(inputs(tokens))
    second = parts[1].forward(first)
    grad, _ = parts[2].backward(second, None, tokens)
    assert grad is not None and not grad[..., -1].any()
    grad, _ = parts[1].backward(first, with_borders(grad[..., :-1], torch.zeros_like(starts)), None)
    parts[0].backward(inputs(tokens), grad, None)
    assert torch.equal(torch.cat([part.sum for part in parts]), one.sum)


def test_a_swapping_stage_in_the_middle_has_the_resident_ones_bits() -> None:
    config, tokens = apart(a_config("llama", cut=(1, 4, 1), layers=6)), some_tokens()
    x = with_borders(torch.randn(2, 12, 32), document_starts(inputs(tokens), END))
    grad = with_borders(torch.randn(2, 12, 32), torch.zeros(2, 12))
    plain, whole = Resident(stages.build(config, 1), config), Swapping(stages.build(config, 1), config)
    swapping = Swapping(stages.build(config, 1), limited(config, whole.plan.device_bytes * 3 // 4))
    assert swapping.plan.count > 1
    results = [each.backward(x, grad, None)[0] for each in (plain, swapping)]
    assert results[0] is not None and torch.equal(*results)
    assert torch.equal(swapping.sum, plain.sum)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - PACKED))
def test_a_family_that_ignores_positions_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=rf"{family} is not known to keep documents apart.*set data\.document_end=-1"):
        stages.check(apart(of_family(family)))
