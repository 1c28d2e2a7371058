"""Two versions and two sums: every step is computed with the parameters that lack the gradient of the one before."""

from __future__ import annotations

import gc
from types import FunctionType, MethodType, ModuleType

import msgspec
import pytest
import torch
from tests.executor.test_resident import BATCH, a_config
from torch import Tensor

from shoal import executor
from shoal.config import Config, Device
from shoal.executor import fit
from shoal.executor.delayed import Delayed
from shoal.model.cut import inputs

SMALL = {"float32": 180_000, "bfloat16": 110_000}  # bytes: too little for the whole model, so that its units take turns


@pytest.fixture(params=["resident", "swapping"])
def kind(request: pytest.FixtureRequest) -> str:
    """What computes: with layers that stay, or that take turns on the device."""
    return str(request.param)


def late(kind: str, dtype: str = "float32") -> tuple[Delayed, Config]:
    config = a_config(dtype=dtype, staleness=1)
    if kind == "swapping":
        device = Device(executor="swapping", memory_bytes=SMALL[dtype])
        config = msgspec.structs.replace(config, device=device)
    stage_executor = executor.create(config, 0)
    assert isinstance(stage_executor, Delayed)
    if kind == "swapping":
        assert stage_executor._inner.plan.count > 1  # type: ignore[attr-defined]
    stage_executor.zero(0)
    return stage_executor, a_config(dtype=dtype)


def add(one: executor.Executor, *which: int) -> list[float | None]:
    return [one.backward(inputs(BATCH[index]), None, BATCH[index])[1] for index in which]


def loss(one: Delayed, step: int) -> float | None:
    one.at(step)
    return add(one, 0)[0]


class Plain:
    """The same training as its definition says it, with an executor for every version."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.versions = [executor.create(config, 0)]

    def gradient(self, step: int, *which: int) -> Tensor:
        """The sum of those microbatches, with version step - 1."""
        one = self.versions[max(step - 1, 0)]
        one.zero()
        add(one, *which)
        return one.sum.clone()

    def apply(self, gradient: Tensor, step: int) -> None:
        """Make version step + 1 of the newest."""
        stage_executor = executor.create(self.config, 0)
        stage_executor.load_state(self.versions[-1].state())
        stage_executor.apply(gradient, 1.0, step)
        self.versions.append(stage_executor)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_step_goes_on_with_its_own_parameters_while_the_next_version_is_made(kind: str, dtype: str) -> None:
    stage_executor, config = late(kind, dtype)
    plain = Plain(config)
    sums = [plain.gradient(0, 0, 1, 2, 3)]
    add(stage_executor, 0, 1, 2, 3)
    assert torch.equal(stage_executor.contribution(), sums[0])
    for step in range(4):
        stage_executor.at(step + 1)
        add(stage_executor, 0, 1)
        stage_executor.at(step)  # the round of the step before
        assert torch.equal(stage_executor.contribution(), sums[step])
        stage_executor.apply(sums[step], 1.0, step)
        plain.apply(sums[step], step)
        stage_executor.at(step + 1)
        add(stage_executor, 2, 3)
        sums.append(plain.gradient(step + 1, 0, 1, 2, 3))
        assert torch.equal(stage_executor.contribution(), sums[-1])
        assert stage_executor.digest() == plain.versions[-1].digest() != plain.versions[-2].digest()
    state = plain.versions[-1].state()
    assert all(torch.equal(value, state[name]) for name, value in stage_executor.state().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_version_is_made_beside_hops_of_the_step_that_the_older_one_computes(kind: str, dtype: str) -> None:
    stage_executor, config = late(kind, dtype)
    plain = Plain(config)
    gradient = plain.gradient(0, 0)
    plain.apply(gradient, 0)
    stage_executor.begin(0)
    stage_executor.at(1)
    add(stage_executor, 0, 1)
    stage_executor.finish(gradient, 1.0, 0)
    add(stage_executor, 2)
    assert torch.equal(stage_executor.contribution(), plain.gradient(1, 0, 1, 2))
    assert stage_executor.digest() == plain.versions[1].digest()
    stage_executor.begin(1)
    stage_executor.at(2)  # with the version that has just been made
    add(stage_executor, 3)
    assert torch.equal(stage_executor.contribution(), plain.gradient(2, 3))
    for half_made in (
        stage_executor.state,
        stage_executor.digest,
        stage_executor.zero,
        lambda: loss(stage_executor, 3),
    ):
        with pytest.raises(AssertionError):
            half_made()


def resident_bytes(root: object) -> int:
    """Of all tensors that an object holds, each storage once."""
    storages: dict[int, int] = {}
    seen, ahead = {id(root)}, [root]
    while ahead:
        one = ahead.pop()
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType | MethodType):
                seen.add(id(other))
                ahead.append(other)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_versions_and_two_sums_take_what_is_asked_for_before_training_begins(kind: str, dtype: str) -> None:
    stage_executor, config = late(kind, dtype)
    device = Device(executor=kind, memory_bytes=SMALL[dtype] if kind == "swapping" else 0)
    config = msgspec.structs.replace(config, device=device)
    in_time = executor.create(config, 0)
    for one in (stage_executor, in_time):
        add(one, 0)
        one.apply(one.contribution(), 1.0, 0)
    stage_executor.at(1)
    add(stage_executor, 0)
    stage_executor.at(2)
    add(stage_executor, 0)
    train = msgspec.structs.replace(config.train, staleness=1)
    each = fit.host_bytes(msgspec.structs.replace(config, train=train)) - fit.host_bytes(config)
    assert resident_bytes(stage_executor) - resident_bytes(in_time) == pytest.approx(
        each * stage_executor.length, rel=0.02
    )


def test_a_step_that_is_opened_again_is_computed_as_before_and_the_next_ones_sum_stays(kind: str) -> None:
    stage_executor, config = late(kind)
    plain = Plain(config)
    plain.apply(plain.gradient(0, 0), 0)
    add(stage_executor, 0)
    stage_executor.apply(stage_executor.contribution(), 1.0, 0)
    stage_executor.at(1)
    add(stage_executor, 0, 1)
    stage_executor.at(2)
    add(stage_executor, 3)
    stage_executor.at(1)
    add(stage_executor, 2)
    assert torch.equal(stage_executor.contribution(), plain.gradient(1, 0, 1, 2))
    stage_executor.at(2)
    add(stage_executor, 0)
    assert torch.equal(stage_executor.contribution(), plain.gradient(2, 3, 0))


def test_the_next_ones_sum_stays_when_the_step_that_was_opened_again_is_applied_before_another_hop(kind: str) -> None:
    """This replica had booked all its share of step 1, then some more of step 0, which was opened again; others do the rest."""
    stage_executor, config = late(kind)
    plain = Plain(config)
    add(stage_executor, 0)
    stage_executor.at(1)
    add(stage_executor, 1, 2)
    stage_executor.at(0)
    add(stage_executor, 3)
    sums = [plain.gradient(0, 0, 3)]
    assert torch.equal(stage_executor.contribution(), sums[0])
    stage_executor.apply(sums[0], 1.0, 0)
    stage_executor.at(1)
    plain.apply(sums[0], 0)
    sums.append(plain.gradient(1, 1, 2))
    assert torch.equal(stage_executor.contribution(), sums[1])
    add(stage_executor, 0)
    assert torch.equal(stage_executor.contribution(), plain.gradient(1, 1, 2, 0))


def test_the_step_after_next_is_refused(kind: str) -> None:
    stage_executor, _ = late(kind)
    with pytest.raises(ValueError, match="step 2 is not computed with versions -1 and 0"):
        stage_executor.at(2)


def test_a_joiner_takes_both_versions_and_a_checkpoint_has_one(kind: str) -> None:
    stage_executor, _ = late(kind)
    add(stage_executor, 0)
    stage_executor.apply(stage_executor.contribution(), 1.0, 0)
    joiner, resumed = late(kind)[0], late(kind)[0]
    joiner.load_state({**stage_executor.state(), **stage_executor.previous()})
    resumed.load_state(stage_executor.state())
    for one in (joiner, resumed):
        one.zero(1)
    assert joiner.digest() == resumed.digest() == stage_executor.digest()
    losses = [[loss(one, step) for step in (1, 2)] for one in (stage_executor, joiner, resumed)]
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    assert losses[2] == [losses[0][1]] * 2  # the first step after a start has no other parameters


def test_a_joiner_takes_the_versions_of_a_replica_in_the_middle_of_a_step(kind: str) -> None:
    stage_executor, _ = late(kind)
    add(stage_executor, 0)
    stage_executor.apply(stage_executor.contribution(), 1.0, 0)  # the older version is inside when the copy is made
    stage_executor.at(1)
    add(stage_executor, 1)
    joiner = late(kind)[0]
    joiner.load_state(
        {name: value.clone() for name, value in {**stage_executor.state(), **stage_executor.previous()}.items()}
    )
    joiner.zero(1)
    for step in (1, 2):
        stage_executor.at(step)
        joiner.at(step)
        assert add(stage_executor, 2) == add(joiner, 2)


def test_what_is_void_is_void_in_both_sums(kind: str) -> None:
    stage_executor, _ = late(kind)
    add(stage_executor, 0)
    stage_executor.at(1)
    add(stage_executor, 1)
    stage_executor.zero(0)
    for step in (0, 1):
        stage_executor.at(step)
        assert not stage_executor.contribution().any()


def test_a_skipped_step_changes_no_parameter_and_the_next_one_computes_with_the_newest(kind: str) -> None:
    one, config = late(kind)
    plain = executor.create(config, 0)
    add(one, 0, 1)
    reduced = one.contribution()
    one.apply(reduced, 0.5, 0)
    plain.apply(reduced, 0.5, 0)
    newest = one.digest()
    one.at(1)
    add(one, 2)
    one.skip(1)
    assert one.digest() == newest and not one.contribution().any()
    assert loss(one, 2) == add(plain, 0)[0]


def test_a_step_after_a_skipped_one_is_applied_as_ever(kind: str) -> None:
    one, _ = late(kind)
    one.skip(0)
    one.at(1)
    add(one, 0)
    reduced, before = one.contribution(), one.digest()
    one.apply(reduced, 0.5, 1)
    assert one.digest() != before
