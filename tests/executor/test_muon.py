"""A stage whose matrices Muon steps: the same bits wherever it lies, goes or comes from, late or in time, and one moment of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests import reference
from tests.executor.test_moments import SMALL, a_config, a_step, same
from tests.pipeline import Pipeline

from shoal import config as configuration
from shoal import executor
from shoal.config import Config, Device
from shoal.core.leader.requests import unfit
from shoal.executor.answers import known_answers
from shoal.executor.base import Executor
from shoal.executor.delayed import Delayed
from shoal.executor.swap.swapping import Swapping
from shoal.numerics import muon
from shoal.runtime.checkpoints import checkpoint, marker
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.state import Copy, join

MATRIX = "model.layers.0.mlp.up_proj.weight"


def with_muon(device: Device = Device(), **train: Any) -> Config:
    return a_config(device, **({"optimizer": "muon", "moments": "float32"} | train))


def swapped(**train: Any) -> Config:
    return with_muon(Device(executor="swapping", memory_bytes=SMALL[train.get("dtype", "float32")]), **train)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_swapping_has_the_resident_executors_bits_late_or_in_time(dtype: str, staleness: int) -> None:
    resident = executor.create(with_muon(dtype=dtype, staleness=staleness), 0)
    swapping = executor.create(swapped(dtype=dtype, staleness=staleness), 0)
    inner = swapping.inside() if isinstance(swapping, Delayed) else swapping
    assert isinstance(inner, Swapping) and inner.plan.count > 1
    for step in range(3):
        for one in (resident, swapping):
            if isinstance(one, Delayed):
                one.at(step)
        assert a_step(resident, step) == a_step(swapping, step)
    assert same(resident, swapping)
    held = sum(value.nbytes for value in swapping.state().values())
    assert sum(group.optimizer_bytes for group in inner.plan.groups) == held


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_stages_have_the_bits_of_one_process_that_sums_whole_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    words = """run.stages=2 run.steps=6 train.batch=4 train.microbatch=2 train.warmup=0 train.optimizer=muon data.source=text
    data.path=a.txt data.sequence=16 model.hidden_size=32 model.layers=4 model.heads=2 model.kv_heads=1 model.intermediate_size=48"""
    config = configuration.load(None, [*words.split(), f"train.staleness={staleness}"])
    dataset = open_dataset(config, cache=tmp_path)
    stages, process = Pipeline(config, dataset), reference.OneProcess(config, dataset)
    order = reference.one_after_the_other(2, 2)
    for _ in range(3):
        ours, theirs = stages.train(order, (("a",), ("b",))), process.train(order)
        assert ours.digests == theirs.digests and ours.loss == theirs.loss
    state = stages.executors[0].state() | stages.executors[1].state()
    expected = process.state()
    assert set(state) == set(expected) and all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_matrix_of_a_block_has_one_moment_and_embedding_head_and_norms_have_two() -> None:
    state = executor.create(with_muon(), 0).state()
    parameters = [name.removeprefix("model/") for name in state if name.startswith("model/")]
    with_two = [name for name in parameters if f"exp_avg_sq/{name}" in state]
    assert all(f"exp_avg/{name}" in state for name in parameters)
    assert MATRIX not in with_two
    assert sorted({name.split(".")[-2] for name in with_two}) == [
        "embed_tokens", "input_layernorm", "lm_head", "norm", "post_attention_layernorm",
    ]  # fmt: skip


def test_a_checkpoint_and_a_download_go_on_with_the_same_bits_and_another_optimizer_is_refused(tmp_path: Path) -> None:
    config = with_muon(staleness=1)
    one = executor.create(config, 0)
    for step in range(2):
        a_step(one, step)
    store = checkpoint.Store(str(tmp_path))
    record = store.write_shard(2, 0, 1, one.state())
    store.publish(2, [record], checkpoint.About(config, "", "", {}))
    saved, joined = executor.create(config, 0), executor.create(config, 0)
    saved.load_state(store.load(2, saved.state()))
    assert isinstance(one, Delayed)
    copy = Copy(one.state() | one.previous(), 2, {}, chunk_bytes=5000)
    joined.load_state(join([copy.read(chunk) for chunk in range(copy.chunks)])[0])
    assert same(one, saved) and same(one, joined)
    for other in (one, joined):
        other.zero(2)
    assert a_step(one, 2) == a_step(joined, 2) and same(one, joined)
    resumed, again = saved, executor.create(config, 0)
    again.load_state(store.load(2, again.state()))
    for other in (resumed, again):
        other.zero(2)
    assert a_step(resumed, 2) == a_step(again, 2) and same(resumed, again)
    training = store.catalog.open(2)
    with pytest.raises(ValueError, match=r"train\.optimizer = 'muon', this run has 'adamw': .*; set it back"):
        marker.refuse_foreign(training, with_muon(optimizer="adamw"), "")
    with pytest.raises(ValueError, match="foreign"):
        store.load(2, executor.create(with_muon(optimizer="adamw"), 0).state())


def test_host_memory_is_counted_with_one_moment() -> None:
    def least(config: Config) -> int:
        """Host bytes that just suffice."""
        low, high = 1, 10_000_000
        while low < high:
            middle = (low + high) // 2
            device = msgspec.structs.replace(config.device, host_bytes=middle)
            try:
                executor.check(msgspec.structs.replace(config, device=device))
                high = middle
            except ValueError:
                low = middle + 1
        return low

    def held(one: Executor) -> int:
        return sum(value.nbytes for value in one.state().values())

    wide = with_muon(optimizer="adamw")
    saved = held(executor.create(wide, 0)) - held(executor.create(with_muon(), 0))
    assert least(wide) - least(with_muon()) == saved > 0


def test_a_joiner_whose_products_have_other_bits_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.load(None, ["train.optimizer=muon"])
    ours = known_answers(config)
    assert unfit(ours, known_answers(configuration.load(None, [])))
    monkeypatch.setattr(muon, "exact_product", torch.matmul)
    assert "optimizer step" in unfit(ours, known_answers(config))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["train.moments=8bit"], r"keeps its momentum in fp32.*train\.moments=float32"),
        (["train.local_steps=4", "run.stages=1"], r"train\.local_steps = 4.*train\.optimizer=adamw"),
        (["run.lost_stage=neighbours"], r"blends AdamW's moments.*run\.lost_stage=checkpoint"),
        (['plan.allow=["local_steps"]'], r"local_steps in plan\.allow"),
        (["tune.method=lora", "model.path=m"], r"whose matrices are thin.*train\.optimizer=adamw"),
        (["device.count=2"], r"train\.optimizer = 'muon', which a stage over several devices cannot do"),
    ],
)
def test_what_muon_does_not_do_is_refused(words: list[str], refusal: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.optimizer = 'muon'.*{refusal}|{refusal}"):
        configuration.load(None, ["train.optimizer=muon", *words])
