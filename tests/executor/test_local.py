"""Local steps: a round is a function of the outer state and of what was booked, and every sample weighs the same in it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from shoal import config as configuration
from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import Executor, NotFinite
from shoal.executor.local import LocalSteps
from shoal.model.cut import inputs

BATCH = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]


def a_config(executor: str = "resident", memory_bytes: int = 0, **train: Any) -> Config:
    given = {"batch": 8, "microbatch": 2, "local_steps": 3, "local_batch": 4, "warmup": 0, "learning_rate": 0.01}
    return Config(
        run=Run(stages=1, peers=2, steps=5, seed=2),
        model=Model(
            hidden_size=16, layers=2, heads=2, kv_heads=2, intermediate_size=24, vocab_size=64, tied_embeddings=True
        ),
        data=Data(sequence=8),
        train=Train(**(given | train)),
        device=Device(executor=executor, memory_bytes=memory_bytes),
    )


def a_replica(**given: Any) -> LocalSteps:
    replica = executor.create(a_config(**given), 0)
    assert isinstance(replica, LocalSteps)
    return replica


def book(one: Executor, indices: range | list[int]) -> list[float | None]:
    return [one.backward(inputs(BATCH[index]), None, BATCH[index])[1] for index in indices]


def a_round(replicas: list[LocalSteps], shares: list[list[int]], step: int) -> torch.Tensor:
    for one, share in zip(replicas, shares, strict=True):
        book(one, share)
    whole = torch.stack([one.contribution() for one in replicas]).sum(0)
    for one in replicas:
        one.apply(whole, 1.0, step)
    return whole


def test_replicas_of_uneven_shares_and_a_joiner_with_none_agree_after_every_round() -> None:
    replicas = [a_replica() for _ in range(3)]
    start = replicas[0].digest()
    for step in range(2):
        a_round(replicas, [list(range(7)), list(range(7, 12)), []], step)
        assert len({one.digest() for one in replicas}) == 1 != start
    assert replicas[0].digest() != start


def test_what_a_replica_brings_is_its_way_weighted_by_its_share_of_the_round() -> None:
    whole, half = a_replica(), a_replica(batch=16, local_steps=3)  # of twice as many microbatches
    for one in (whole, half):
        book(one, range(12))
    assert torch.equal(half.contribution() * 2, whole.contribution())
    assert whole.contribution().any()
    assert not a_replica().contribution().any()


def test_a_step_is_taken_after_every_local_batch_and_the_rest_when_the_round_asks() -> None:
    one, whole = a_replica(), a_replica()
    book(one, [0])
    assert torch.equal(one.forward(inputs(BATCH[5])), whole.forward(inputs(BATCH[5])))
    book(one, [1])
    assert not torch.equal(one.forward(inputs(BATCH[5])), whole.forward(inputs(BATCH[5])))
    book(one, [2])
    before = one.forward(inputs(BATCH[5]))
    contribution = one.contribution()
    assert not torch.equal(one.forward(inputs(BATCH[5])), before)
    assert torch.equal(one.contribution(), contribution)  # asked again, nothing more is done


def test_the_learning_rate_rises_anew_in_every_round() -> None:
    for step in range(2):  # the first local step of each, at half the rate
        replicas = [a_replica(), a_replica(local_warmup=2), a_replica(learning_rate=0.005)]
        for one in replicas:
            one.zero(step)
            book(one, range(2))
        plain, warming, half = (one.contribution() for one in replicas)
        assert torch.equal(warming, half) and not torch.equal(warming, plain)
    whole, shared = a_replica(learning_rate=0.005), a_replica(learning_rate=0.005, local_warmup=1)
    assert a_round([whole], [list(range(6))], 0).equal(a_round([shared], [list(range(6))], 0))


def test_the_moments_of_a_round_are_as_young_as_those_of_the_first() -> None:
    first, later = a_replica(schedule="constant"), a_replica(schedule="constant")
    later.zero(3)
    for one in (first, later):
        book(one, range(6))
    assert torch.equal(first.contribution(), later.contribution())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_a_fenced_replica_did_leaves_no_trace(count: int) -> None:
    fenced, fresh = a_replica(), a_replica()
    book(fenced, range(count))
    fenced.zero(0)
    assert a_round([fenced], [list(range(12))], 0).equal(a_round([fresh], [list(range(12))], 0))
    assert fenced.digest() == fresh.digest()


def test_a_joiner_goes_on_from_the_outer_state_alone() -> None:
    one, other = a_replica(), a_replica()
    a_round([one], [list(range(12))], 0)
    book(one, range(3))  # a round is under way: not what a joiner starts from
    state = {name: value.clone() for name, value in one.state().items()}
    assert {name.partition("/")[0] for name in state} == {"model", "momentum"}
    one.zero(1)
    other.load_state(state)
    other.zero(1)
    assert a_round([one], [list(range(12))], 1).equal(a_round([other], [list(range(12))], 1))
    assert one.digest() == other.digest()


def test_the_local_models_layers_may_take_turns_on_the_device() -> None:
    plain, swapping = a_replica(), a_replica(executor="swapping", memory_bytes=64_000)
    assert swapping._inner.plan.count > 1  # type: ignore[attr-defined]
    for step in range(2):
        assert a_round([plain], [list(range(12))], step).equal(a_round([swapping], [list(range(12))], step))
    assert plain.digest() == swapping.digest()


def test_a_refused_microbatch_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = a_replica(), a_replica()
    book(one, [0])
    with pytest.raises(ValueError, match="vocabulary"):
        one.backward(inputs(BATCH[1]) + 64, None, BATCH[1])
    for each, share in ((one, [1, 2]), (other, [0, 1, 2])):
        book(each, share)
    assert torch.equal(one.contribution(), other.contribution())
    with pytest.raises(NotFinite):
        one.apply(one.contribution(), math.nan, 0)
    with pytest.raises(ValueError, match="reduced gradient"):
        one.apply(torch.zeros(3), 1.0, 0)


def test_a_local_step_whose_sum_is_not_finite_changes_nothing_and_later_ones_are_taken() -> None:
    one = a_replica()
    book(one, [0])
    one.sum.fill_(math.inf)  # as of finite gradients that add up to more than fp32 holds
    book(one, [1])
    assert not one.contribution().any() and not one.sum.any()
    book(one, [2, 3])
    assert one.contribution().isfinite().all() and one.contribution().any()


def test_a_local_step_whose_sum_is_not_finite_fails_where_the_run_is_to_stop() -> None:
    one = a_replica(on_nonfinite="stop")
    book(one, [0])
    one.sum.fill_(math.inf)
    with pytest.raises(NotFinite, match="sum of a local step's gradients"):
        book(one, [1])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["run.stages=3", "run.peers=6", "train.local_batch=4"],
            "needs the whole model on every peer; try run.stages=1",
        ),
        (["run.stages=1", "train.local_batch=6"], r"train\.local_batch = 6 is no multiple .* try train\.local_batch=8"),
        (["run.stages=1", "run.peers=7"], r"train\.batch / run\.peers = 9\.14286 is no multiple"),
        (["run.stages=1", "run.peers=4", "train.local_warmup=21"], r"local_warmup = 21 does not end .* try 5"),
        (["run.stages=1", "run.peers=4", "device.sequences=3"], r"device\.sequences = 3 does not divide"),
    ],
)
def test_local_steps_that_cannot_work_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        configuration.load(None, ["train.local_steps=20", *words])


def test_a_step_of_the_run_is_as_many_microbatches_as_all_its_local_steps_take() -> None:
    tree = configuration.load(None, ["run.stages=1", "run.peers=4", "train.local_steps=20"])
    assert configuration.settings(tree).microbatches == 20 * 64 // 4
    assert configuration.local_batch(tree) == 16
    assert msgspec.structs.replace(tree.train, local_steps=1) == configuration.load(None, []).train
