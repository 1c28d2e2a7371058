"""A stage whose AdamW keeps eight bits per moment: the same bits wherever it lies, goes or comes from, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import config as configuration
from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import Executor
from shoal.executor.swap.swapping import Swapping
from shoal.model.cut import inputs
from shoal.runtime.checkpoints import checkpoint, marker
from shoal.runtime.state import Copy, join

SMALL = {"float32": 700_000, "bfloat16": 500_000}  # too little for the whole model, so that its units take turns
BATCH = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(device: Device = Device(), **train: Any) -> Config:
    given = {"batch": 8, "microbatch": 2, "warmup": 0, "learning_rate": 0.01, "moments": "8bit"}
    return Config(
        run=Run(stages=1, peers=1, steps=10),
        model=Model(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=96, vocab_size=64),
        data=Data(sequence=8),
        train=Train(**(given | train)),
        device=device,
    )


def a_step(one: Executor, step: int) -> list[float | None]:
    losses = [one.backward(inputs(tokens), None, tokens)[1] for tokens in BATCH]
    one.apply(one.contribution(), 1.0, step)
    one.zero(step + 1)
    return losses


def same(one: Executor, other: Executor) -> bool:
    here, there = one.state(), other.state()
    return list(here) == list(there) and all(torch.equal(value, there[name]) for name, value in here.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapping_has_the_resident_executors_bits_codes_and_scales_included(dtype: str) -> None:
    resident = executor.create(a_config(dtype=dtype), 0)
    swapping = executor.create(a_config(Device(executor="swapping", memory_bytes=SMALL[dtype]), dtype=dtype), 0)
    assert isinstance(swapping, Swapping) and swapping.plan.count > 1
    for step in range(3):
        assert a_step(resident, step) == a_step(swapping, step)
    assert same(resident, swapping)
    assert {value.dtype for value in resident.state().values()} == {torch.float32, torch.uint8}
    held = sum(value.nbytes for value in swapping.state().values())
    assert sum(group.optimizer_bytes for group in swapping.plan.groups) == held
    wide = executor.create(
        a_config(Device(executor="swapping", memory_bytes=SMALL[dtype]), dtype=dtype, moments="float32"), 0
    )
    assert isinstance(wide, Swapping)
    assert (
        wide.plan.host_bytes - swapping.plan.host_bytes
        == sum(value.nbytes for value in wide.state().values()) - held
        > 0
    )


def test_training_learns_as_with_fp32_moments() -> None:
    eight, fp32 = executor.create(a_config(), 0), executor.create(a_config(moments="float32"), 0)
    for step in range(10):
        losses = [torch.tensor(a_step(one, step)).mean() for one in (eight, fp32)]
    assert losses[0] < 3.0  # of 4.2
    assert abs(losses[0] - losses[1]) < 0.01 * losses[1] and losses[0] != losses[1]


def test_a_checkpoint_and_a_download_go_on_with_the_same_bits(tmp_path: Path) -> None:
    config = a_config()
    one = executor.create(config, 0)
    for step in range(2):
        a_step(one, step)
    store = checkpoint.Store(str(tmp_path))
    record = store.write_shard(2, 0, 1, one.state())
    store.publish(2, [record], checkpoint.About(config, "", "", {}))
    saved, joined = executor.create(config, 0), executor.create(config, 0)
    saved.load_state(store.load(2, saved.state()))
    copy = Copy(one.state(), 2, {}, chunk_bytes=5000)
    joined.load_state(join([copy.read(chunk) for chunk in range(copy.chunks)])[0])
    for other in (saved, joined):
        other.zero(2)
        assert same(one, other)
    losses = [a_step(other, 2) for other in (one, saved, joined)]
    assert losses[0] == losses[1] == losses[2] and same(one, saved) and same(one, joined)
    training = store.catalog.open(2)
    with pytest.raises(ValueError, match=r"train\.moments = '8bit', this run has 'float32': .*; set it back"):
        marker.refuse_foreign(training, a_config(moments="float32"), "")
    with pytest.raises(ValueError, match="foreign"):
        store.load(2, executor.create(a_config(moments="float32"), 0).state())


def test_moments_begin_anew_in_every_round_of_local_steps() -> None:
    one, other = (executor.create(a_config(local_steps=2, local_batch=4), 0) for _ in range(2))
    a_step(one, 0)
    other.load_state(one.state())
    other.zero(1)
    assert a_step(one, 1) == a_step(other, 1) and one.digest() == other.digest()


def test_delayed_updates_keep_their_moments() -> None:
    one, other = (executor.create(a_config(staleness=1, moments=moments), 0) for moments in ("8bit", "float32"))
    assert [a_step(one, step) for step in range(2)] == [
        a_step(other, step) for step in range(2)
    ]  # of the first version
    assert one.digest() != other.digest()
    assert "exp_avg_scale/model.layers.0.mlp.up_proj.weight" in one.state()


def test_host_memory_is_counted_and_what_cannot_be_is_refused() -> None:
    def least(moments: str, **device: Any) -> int:
        """Host bytes that just suffice."""
        low, high = 1, 10_000_000
        while low < high:
            middle = (low + high) // 2
            try:
                executor.check(a_config(Device(host_bytes=middle, **device), moments=moments))
                high = middle
            except ValueError:
                low = middle + 1
        return low

    state = {kind: executor.create(a_config(moments=kind), 0).state() for kind in ("8bit", "float32")}
    held = {kind: sum(value.nbytes for value in state_of_kind.values()) for kind, state_of_kind in state.items()}
    for device in ({}, {"executor": "swapping"}):
        assert least("float32", **device) - least("8bit", **device) == held["float32"] - held["8bit"]
    with pytest.raises(ValueError, match=r"run\.lost_stage = 'neighbours' blends moments.*run\.lost_stage=checkpoint"):
        configuration.load(None, ["train.moments=8bit", "run.lost_stage=neighbours"])
