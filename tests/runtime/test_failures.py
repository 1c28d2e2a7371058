"""Memory that runs out on purpose: a peer goes on where that is safe, else it ends and says what would fit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from tests.runtime import test_task_runner
from tests.runtime.test_task_runner import ONE, Maker, average, done, outcome

from shoal.config import Config, Device, settings
from shoal.core import messages as m
from shoal.core.peer import PeerMachine
from shoal.executor import base, create
from shoal.executor.resident import Resident
from shoal.executor.swap.groups import GroupResult, LayerGroup, Runner, Trial
from shoal.executor.swap.swapping import Swapping
from shoal.runtime.tasks.failures import SHORT_HOPS

a_runner, text = test_task_runner.a_runner, test_task_runner.text  # fixtures
SWAPPING = msgspec.structs.replace(ONE, device=Device(executor="swapping"))
SLICED = msgspec.structs.replace(ONE, device=Device(sequences=1, threads=0))
LOCAL = msgspec.structs.replace(ONE, train=msgspec.structs.replace(ONE.train, local_steps=2, local_batch=2))
LATE = msgspec.structs.replace(ONE, train=msgspec.structs.replace(ONE.train, staleness=1))
BACKWARD = m.RunBackward("b", 0, 0, 0, "tokens", "", "")


def short(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nA long explanation follows.")


def lost(answer: m.Done | m.Failed) -> str:
    assert isinstance(answer, m.Failed) and answer.lost
    return answer.reason


@pytest.mark.parametrize(
    ("config", "owner", "name"), [(ONE, Resident, "__init__"), (SWAPPING, Trial, "live"), (SWAPPING, Runner, "bind")]
)
def test_a_stage_that_cannot_be_built_for_want_of_memory_ends_its_peer_which_says_what_would_fit(
    config: Config,
    owner: type,
    name: str,
    a_runner: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, short)
    reason = lost(outcome(a_runner(config, None), m.Init("i", 0, 0)))
    assert reason.startswith("too little memory for Init: the model takes ")
    assert ("device.executor=swapping" in reason) == (config is ONE)
    assert "device.sequences=1" in reason and reason.endswith(
        "(OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


def test_a_swapping_stage_whose_coarse_groups_find_no_memory_is_built_of_finer_ones(
    a_runner: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Runner.back
    tried: list[int] = []

    def back(runner: Runner, stage: Any, group: LayerGroup, *rest: Any) -> GroupResult:
        tried.append(group.stop - group.start)
        # The device holds the parameters of one unit, whatever groups were tried before.
        bound = [value.numel() for value in runner.row.group(0, len(runner.row.units)).model.parameters()]
        runner.row.group(group.start, group.stop)
        one_unit = [sum(runner.shapes[name].numel() for name in unit) for unit in runner.row.units]
        return short() if sum(bound) > max(one_unit) else real(runner, stage, group, *rest)

    monkeypatch.setattr(Runner, "back", back)
    held = a_runner(SWAPPING, None)
    done(held, m.Init("i", 0, 0))
    monkeypatch.setattr(Runner, "back", real)
    executor = held._seated().executor
    assert isinstance(executor, Swapping)
    assert tried[0] == len(executor._runner.row.units) > 1, "all at once was tried first"
    assert executor.plan.count > 1
    done(held, m.Fetch("f", 0, 0, "tokens"))
    assert done(held, BACKWARD).loss is not None


def test_a_peer_whose_machine_has_no_room_for_the_stage_that_it_downloaded_ends_and_does_not_download_it_again(
    a_runner: Maker,
) -> None:
    config = msgspec.structs.replace(ONE, device=Device(host_bytes=1000))
    reason = lost(outcome(a_runner(config, None), m.Import("i", 0, 5, 3)))
    assert "cannot be built here" in reason and "about" in reason and "parameters would fit" in reason
    machine = PeerMachine("p", settings(config, 0), Random(1), False)
    assert m.Finish(False, reason) in machine.handle(m.Failed("y/1", reason, lost=True), 1.0)
    assert machine.handle(m.Tick(), 100.0) == []


@pytest.mark.parametrize("config", [ONE, LATE], ids=["in time", "late"])
def test_an_optimizer_step_without_memory_ends_its_peer(
    config: Config,
    a_runner: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = a_runner(config)
    average([held], 0, 0)
    monkeypatch.setattr(Resident, "make", short)
    assert "too little memory for Apply" in lost(outcome(held, m.Apply("y", 0, 0, 1.0, False)))


@pytest.mark.parametrize("config", [ONE, SLICED, SWAPPING], ids=["whole", "sliced", "swapping"])
def test_a_hop_without_memory_leaves_the_sum_and_is_refused_and_several_in_a_row_end_the_peer(
    config: Config,
    a_runner: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, alone = a_runner(config), create(ONE, 0)
    done(held, m.Fetch("f", 0, 0, "tokens"))
    tokens = held.get("tokens")
    assert isinstance(tokens, torch.Tensor)
    alone.backward(tokens[:, :-1], None, tokens)
    second = fails_at(2 if config is SLICED else 1)
    owner, name = (Runner, "back") if config is SWAPPING else (Resident, "_slice_back")
    real = getattr(owner, name)
    for _ in range(2):  # what succeeds in between starts the count again
        for _ in range(SHORT_HOPS - 1):
            monkeypatch.setattr(owner, name, second(real))
            answer = outcome(held, BACKWARD)
            assert isinstance(answer, m.Failed) and not answer.lost and "out of memory" in answer.reason
            assert not held._seated().executor.sum.any()
        monkeypatch.setattr(owner, name, real)
        assert done(held, BACKWARD).loss is not None
        if config is not SLICED:
            assert torch.equal(held._seated().executor.sum, alone.sum)
        done(held, m.Reset("r"))
    monkeypatch.setattr(owner, name, short)
    answers = [outcome(held, BACKWARD) for _ in range(SHORT_HOPS)]
    assert [answer.lost for answer in answers if isinstance(answer, m.Failed)] == [False] * (SHORT_HOPS - 1) + [True]
    assert "too little memory for RunBackward" in lost(answers[-1])


def fails_at(call: int) -> Callable[[Any], Any]:
    """A function that has no memory at its call number `call`."""

    def broken(real: Any) -> Any:
        calls = iter(range(1, call + 1))
        return lambda *given: short() if next(calls) == call else real(*given)

    return broken


def test_a_hop_of_local_steps_without_memory_ends_the_peer_at_once(
    a_runner: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = a_runner(LOCAL)
    done(held, m.Fetch("f", 0, 0, "tokens"))
    monkeypatch.setattr(Resident, "apply", short)
    lost(outcome(held, BACKWARD))


def test_memory_that_ran_out_is_known_by_each_allocators_words() -> None:
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 60)
    for error in (cpu.value, MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("MPS backend out of memory")):
        assert base.out_of_memory(error)
    assert not base.out_of_memory(RuntimeError("CUDA error: unspecified launch failure"))
