"""No access to memory on a device races with a copy: shown on the CPU, and every wait of the swapping executor is needed for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.races import Detector, Watch, watch_optimizer, watch_pieces, watch_swapping

from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import Executor
from shoal.executor.swap import link
from shoal.executor.swap.swapping import Swapping
from shoal.model.cut import inputs

BATCH = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
LIMIT = 49_000  # four groups, one slab of sums


def a_config(memory_bytes: int = 0, tied: bool = False, **train: Any) -> Config:
    return Config(
        run=Run(stages=1, peers=1, steps=5, seed=2),
        model=Model(
            hidden_size=16, layers=2, heads=2, kv_heads=2, intermediate_size=24, vocab_size=64, tied_embeddings=tied
        ),
        data=Data(sequence=8),
        train=Train(batch=8, microbatch=2, warmup=0, **train),
        device=Device(executor="swapping", memory_bytes=memory_bytes, sequences=1),
    )


def watched(monkeypatch: pytest.MonkeyPatch, detector: Detector, config: Config) -> Executor:
    monkeypatch.setattr(link, "PIECE_BYTES", 1024)  # several of each group
    watch_swapping(monkeypatch, detector)
    watch_optimizer(monkeypatch)
    watch_pieces(monkeypatch, detector)
    return executor.create(config, 0)


def passes(one: Executor) -> None:
    one.forward(inputs(BATCH[0]))
    for tokens in BATCH[:2]:  # the first from stored activations, the other recomputed
        one.backward(inputs(tokens), None, tokens)


def steps(one: Executor) -> None:
    for step in range(2):
        passes(one)
        one.apply(one.contribution(), 1.0, step)
        one.zero(step + 1)


def interrupted(one: Executor) -> None:
    with contextlib.suppress(torch.OutOfMemoryError):
        one.backward(inputs(BATCH[0]), None, BATCH[0])
    one.apply(torch.ones(one.length), 1.0, 0)


def races(monkeypatch: pytest.MonkeyPatch, detector: Detector, drive: Callable[[Executor], None]) -> bool:
    with monkeypatch.context() as patched:
        one = watched(patched, detector, a_config(LIMIT))
        with Watch(detector):
            drive(one)
    return bool(detector.races)


@pytest.mark.parametrize(
    ("limit", "groups", "slabs", "tied"),
    [
        (0, 1, 1, False),
        (0, 1, 1, True),
        (68_000, 3, 2, False),
        (49_000, 4, 1, False),
        pytest.param(68_000, 3, 2, True, marks=pytest.mark.slow),
        pytest.param(49_000, 4, 1, True, marks=pytest.mark.slow),
    ],
)
def test_no_access_races_with_a_copy_and_the_host_waits_for_the_device_once_a_pass(
    limit: int, groups: int, slabs: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = Detector()
    one = watched(monkeypatch, detector, a_config(limit, tied))
    assert isinstance(one, Swapping)
    assert (one.plan.count, one.plan.slabs) == (groups, slabs)
    with Watch(detector):
        steps(one)
    assert detector.operators > 300 and detector.races == []
    settled = [count for site, count in detector.sites.items() if site.startswith("HostLink.one_pass")]
    assert (settled, detector.scalars) == ([6], 0)  # one for each forward and each backward pass


@pytest.mark.parametrize("limit", [pytest.param(68_000, marks=pytest.mark.slow), LIMIT])
def test_copies_that_take_as_long_as_they_may_give_the_same_bits(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_optimizer(monkeypatch)
    plain = executor.create(a_config(limit), 0)
    steps(plain)
    detector = Detector(slow=True)
    one = watched(monkeypatch, detector, a_config(limit))
    with Watch(detector):
        steps(one)
    assert one.digest() == plain.digest() and detector.races == []


@pytest.mark.slow
def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out any of them is seen as a race: so the detector sees each kind, and none is superfluous."""
    whole = Detector()
    assert not races(monkeypatch, whole, passes)
    assert len(whole.sites) == 7  # six waits, and the settle at the end of a pass
    for site in whole.sites:
        assert races(monkeypatch, Detector(site), passes), f"{site} can be left out unnoticed"


@pytest.mark.slow
def test_a_device_without_memory_for_an_operator_leaves_no_copy_behind_and_the_sum_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = Detector()
    races(monkeypatch, count, interrupted)
    plain = executor.create(a_config(LIMIT), 0)
    plain.backward(inputs(BATCH[0]), None, BATCH[0])
    for fails_at in range(1, count.operators, count.operators // 4):
        detector = Detector(fails_at=fails_at)
        with monkeypatch.context() as patched:
            one = watched(patched, detector, a_config(LIMIT))
            with Watch(detector), pytest.raises(torch.OutOfMemoryError, match="on purpose"):
                one.backward(inputs(BATCH[0]), None, BATCH[0])
            assert not one.sum.any()
            with Watch(detector):
                one.backward(inputs(BATCH[0]), None, BATCH[0])
            assert torch.equal(one.sum, plain.sum) and detector.races == []
        (after,) = (site for site in detector.sites if site.endswith("after a failure"))
        if fails_at > 1:  # copies were issued by then
            assert races(monkeypatch, Detector(after, fails_at), interrupted)


@pytest.mark.parametrize(
    "more", [{"local_steps": 2, "local_batch": 4}, {"dtype": "bfloat16", "local_steps": 2}], ids=str
)
def test_local_steps_race_with_no_copy(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    detector = Detector()
    one = watched(monkeypatch, detector, a_config(LIMIT, **more))
    with Watch(detector):
        steps(one)
    assert detector.operators > 300 and detector.races == []
