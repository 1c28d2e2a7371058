"""device.checkpointing: the same bits from the inputs of blocks alone, in less memory."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.executor.test_swapping import limited
from tests.model.test_families import MIXTURES, of_family
from tests.model.test_stages import some_tokens

from shoal.config import Config
from shoal.executor.resident import Resident
from shoal.executor.swap.memory import MemoryMeter
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs


def checkpointing(config: Config) -> Config:
    return msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, checkpointing=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bloom", *MIXTURES])
def test_checkpointing_changes_no_bit_of_output_loss_and_gradients(family: str) -> None:
    config, tokens = of_family(family), some_tokens()
    results = []
    for each in (config, checkpointing(config)):
        one = Resident(stages.build(each, 0), each)
        results.append((one.forward(inputs(tokens)), one.backward(inputs(tokens), None, tokens)[1], one.sum))
    (y, loss, total), (other_y, other_loss, other_total) = results
    assert torch.equal(y, other_y) and loss == other_loss and torch.equal(total, other_total)


def test_the_inputs_of_blocks_and_one_block_are_what_is_kept() -> None:
    config = of_family("llama", 2, layers=16)
    peaks = []
    for each in (config, checkpointing(config)):
        one, x = Resident(stages.build(each, 1), each), torch.randn(2, 12, 32)
        with MemoryMeter("cpu") as meter:
            one.backward(x, None, some_tokens())
        peaks.append(meter.peak - 2 * 4 * one.length)  # less the gradients
    assert peaks[1] < peaks[0] / 2


def test_a_swapping_stage_checkpoints_inside_its_groups() -> None:
    config, tokens = checkpointing(of_family("llama")), some_tokens()
    plain = Resident(stages.build(config, 0), config)
    whole = Swapping(stages.build(config, 0), config)
    swapping = Swapping(stages.build(config, 0), limited(config, whole.plan.device_bytes * 3 // 4))
    assert swapping.plan.count > 1
    assert swapping.backward(inputs(tokens), None, tokens) == plain.backward(inputs(tokens), None, tokens)
    assert torch.equal(swapping.sum, plain.sum)
