"""A stage over several devices (processes with gloo here) is a replica beside any other: same layout, same bits after an update."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from tests.e2e.test_run import alive, wait_for

from shoal.config import Config, Data, Device, Model, Run, Train, validate
from shoal.executor.base import NotFinite, device_of
from shoal.executor.resident import Resident
from shoal.executor.shards import group as groups
from shoal.executor.shards.commands import Start
from shoal.executor.shards.group import Group, group_of
from shoal.executor.shards.sharded import Sharded
from shoal.model import stages
from shoal.model.cut import inputs


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """It starts processes that import torch."""
    return pytest.mark.slow(pytest.mark.timeout(300)(test))


TOKENS = [torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(stages: int = 2, dtype: str = "float32", count: int = 2, **train: Any) -> Config:
    return Config(
        run=Run(stages=stages, steps=9, seed=2),
        model=Model(hidden_size=32, layers=4, heads=4, kv_heads=2, intermediate_size=49, vocab_size=65),
        data=Data(sequence=12),
        train=Train(**{"batch": 8, "microbatch": 2, "dtype": dtype, "warmup": 2, "learning_rate": 0.01} | train),
        device=Device(kind="cpu", count=count),
    )


def plain(config: Config, stage: int) -> Resident:
    return Resident(stages.build(config, stage, device=str(device_of(config))), config)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Of two processes, which build one stage after another."""
    group = Group(torch.device("cpu"), 2)
    yield group
    group.close()


@slow
@pytest.mark.parametrize(
    ("stage", "dtype", "checkpointing"),
    [(0, "float32", False), (1, "float32", True), (0, "bfloat16", True), (1, "bfloat16", False)],
)
def test_a_sharded_replica_stands_beside_a_resident_one(
    stage: int, dtype: str, checkpointing: bool, group: Group
) -> None:
    config = a_config(dtype=dtype)
    device = Device(kind="cpu", count=2, checkpointing=checkpointing)
    stands_beside(msgspec.structs.replace(config, device=device), stage, group)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_a_stage_over_two_cards_stands_beside_one_on_a_card(stage: int, dtype: str) -> None:
    config = msgspec.structs.replace(a_config(dtype=dtype), device=Device(kind="cuda", count=2))
    stands_beside(config, stage, group_of(torch.device("cuda"), 2))


def stands_beside(config: Config, stage: int, group: Group) -> None:
    """A sharded replica against a resident one: near sums, and the same bits after each of three updates."""
    dtype = config.train.dtype
    one = plain(config, stage)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.1, "atol": 0.02}
    many = Sharded(config, stage, group=group)
    assert many.length == one.length and many.digest() == one.digest()
    for step in range(3):
        for tokens in TOKENS:
            hidden = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step)).to(one._dtype)
            x = hidden if stage else inputs(tokens)
            grad, ends = (None, tokens) if stage else (hidden * 0.01, None)
            if not stage:
                assert torch.allclose(many.forward(x), one.forward(x), **near)
            (grad_one, loss_one), (grad_many, loss_many) = (each.backward(x, grad, ends) for each in (one, many))
            if stage:
                assert loss_many == pytest.approx(loss_one, rel=1e-5 if dtype == "float32" else 1e-2)
                assert grad_one is not None and grad_many is not None and torch.allclose(grad_many, grad_one, **near)
        assert torch.allclose(many.sum, one.sum.cpu(), **near)
        averaged = (one.contribution() + many.contribution()) / 2
        assert torch.equal(many.contribution(7, 1234), many.contribution()[7:1234])
        for each in (one, many):
            each.apply(averaged, 1.5, step, 1.25)
            each.zero(step + 1)
        assert many.digest() == one.digest()
        assert not many.sum.any()
    for (name, value), (other, theirs) in zip(one.state().items(), many.state().items(), strict=True):
        assert name == other and torch.equal(value.cpu(), theirs), name


@slow
def test_state_moves_both_ways(group: Group) -> None:
    config = a_config()
    one, gradient = plain(config, 0), torch.linspace(-1, 1, plain(config, 0).length)
    one.apply(gradient, 1.0, 0)
    many = Sharded(config, 0, group=group)
    many.load_state(one.state())
    assert many.digest() == one.digest()
    for each in (one, many):
        each.apply(gradient.flip(0), 1.0, 1)
    joiner = plain(config, 0)
    joiner.load_state(many.state())
    assert joiner.digest() == many.digest() == one.digest()
    for name, value in one.state().items():
        assert torch.equal(joiner.state()[name], value), name
    with pytest.raises(ValueError, match="another model"):
        many.load_state({name: value[:1] for name, value in one.state().items()})
    assert many.digest() == one.digest()


@slow
def test_what_is_not_finite_changes_nothing_and_three_sequences_are_refused(group: Group) -> None:
    config = a_config()
    many = Sharded(config, 1, group=group)
    x = torch.randn(2, 12, 32)
    many.backward(x, None, TOKENS[0])
    before = many.contribution()
    broken = x.clone()
    broken[1, 3, 3] = math.nan  # in the rows of the other process
    with pytest.raises(NotFinite):
        many.backward(broken, None, TOKENS[0])
    with pytest.raises(ValueError, match=r"3 sequences cannot be shared out"):
        many.backward(torch.randn(3, 12, 32), None, TOKENS[0])
    assert torch.equal(many.contribution(), before)
    many.backward(x, None, TOKENS[0])
    assert torch.allclose(many.contribution(), 2 * before, rtol=1e-5)


@slow
def test_each_process_holds_its_part_alone(group: Group) -> None:
    many = Sharded(a_config(), 0, group=group)
    own = many._member
    held = [*own._master.state().values(), own._sum]
    assert sum(value.numel() for value in held) < 0.55 * 4 * many.length


# In a process of its own, since torch's default process group is the process's.
LEADER = """
import os, signal, sys
import torch
from tests.executor.test_sharded import TOKENS, a_config
from shoal.executor.base import DeviceLost
from shoal.executor.shards.group import Group, group_of
from shoal.executor.shards.sharded import Sharded
from shoal.model.cut import inputs

config = a_config()
group = Group(torch.device("cpu"), 2, deadline_s=float(sys.argv[1]))
many = Sharded(config, 0, group=group)
many.forward(inputs(TOKENS[0]))
follower = group.processes[0]
print(follower.pid, flush=True)
sys.stdin.readline()
try:
    many.forward(inputs(TOKENS[0]))
except DeviceLost as error:
    assert follower.poll() is not None, "no process is left"
    print(error)
try:
    many.digest()
except DeviceLost as error:
    print(error)
"""


@contextmanager
def leading(deadline_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that leads a group, waits for a line and computes; and its follower."""
    words = [sys.executable, "-c", LEADER, str(deadline_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    leader = subprocess.Popen(words, env=environment, **pipes)
    assert leader.stdout is not None
    try:
        yield leader, int(leader.stdout.readline())
    finally:
        leader.kill()
        leader.communicate()


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_dies_or_hangs_ends_the_group(number: signal.Signals) -> None:
    with leading(deadline_s=5.0) as (leader, follower):
        os.kill(follower, number)
        said, _ = leader.communicate("go\n")
    assert leader.returncode == 0 and not alive(follower)
    assert said.count("over 2 devices: ") == 2 and "the group of devices has ended" in said, said
    assert number != signal.SIGKILL or "the process of device 1 ended (-9)" in said


def test_a_process_that_neither_reads_nor_answers_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "COMMAND_S", 0.1)
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            start = Start(
                device="cpu", rank=1, count=2, store="x" * (1 << 20), deadline_s=1.0
            )  # more than a pipe holds
            with pytest.raises(TimeoutError, match="has not read a command"):
                groups._send(process, start)
            with pytest.raises(TimeoutError, match="is not ready"):
                groups._wait_ready(process, 0.1)
        finally:
            process.kill()


@slow
def test_a_follower_ends_with_its_leader_and_not_before() -> None:
    with leading(deadline_s=60.0) as (leader, follower):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(follower, number)
        said, _ = leader.communicate("go\n")
        assert leader.returncode == 0 and not said, said
    wait_for(lambda: not alive(follower))
    with leading(deadline_s=60.0) as (leader, follower):
        leader.kill()
        wait_for(lambda: not alive(follower))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (Device(kind="cpu", count=2, executor="swapping"), "only a resident stage is shared out"),
        (Device(kind="cuda:1", count=2), "which is one device; try device.kind=cuda"),
        (Device(count=3), "does not divide train.microbatch = 2"),
        (Device(count=2, compile=True), "with device.compile = true"),
        (Device(count=2, sequences=1), "with device.sequences = 1"),
        (Train(batch=8, microbatch=2, staleness=1), "with train.staleness = 1"),
        (Train(batch=8, microbatch=2, moments="8bit"), "with train.moments = '8bit'"),
    ],
)
def test_what_several_devices_cannot_do_is_refused_in_words(section: Device | Train, words: str) -> None:
    config = msgspec.structs.replace(a_config(), model=Model(), device=Device(kind="cpu", count=2))
    validate(config)
    with pytest.raises(ValueError, match=re.escape(words)):
        validate(msgspec.structs.replace(config, **{"device" if isinstance(section, Device) else "train": section}))
