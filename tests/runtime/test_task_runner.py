"""Tasks do with tensors what messages.py says; every task is answered once; nothing wrong from a peer gets by `check`."""

from __future__ import annotations

import errno
import hashlib
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal import codec
from shoal.config import Config, Data, Device, Model, Network, Run, Train
from shoal.core import messages as m
from shoal.executor import base, create
from shoal.executor.base import Executor, boundary
from shoal.executor.delayed import Delayed
from shoal.executor.master import Master
from shoal.numerics import compress
from shoal.runtime.checkpoints.checkpoint import Store
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.tasks import coding, kinds, seat, sums, task_runner
from shoal.runtime.tasks.task_runner import TaskRunner
from shoal.transport.base import Blob

TINY = Config(
    run=Run(name="tiny", stages=3, seed=5),
    model=Model(hidden_size=16, layers=3, heads=2, kv_heads=1, intermediate_size=24),
    data=Data(source="text", sequence=8),
    train=Train(batch=4, microbatch=2, warmup=0),
    device=Device(threads=0),
)
EMULATED = msgspec.structs.replace(TINY, device=Device(executor="emulated", emulated_s=0.0, emulated_values=64))
LATE = msgspec.structs.replace(TINY, train=msgspec.structs.replace(TINY.train, staleness=1))
ONE = msgspec.structs.replace(TINY, run=Run(name="tiny", stages=1, seed=5))
ANSWER_S = 60.0


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(2000)))
    monkeypatch.chdir(tmp_path)


Maker = Callable[..., TaskRunner]


@pytest.fixture
def a_runner() -> Iterator[Maker]:
    runners: list[TaskRunner] = []

    def make(config: Config = TINY, stage: int | None = 0, *, store: Store | None = None, **given: Any) -> TaskRunner:
        config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, path="a.txt"))
        dataset = None if config.device.executor == "emulated" else open_dataset(config)
        runners.append(TaskRunner(config, dataset, store, **given))
        if stage is not None:
            done(runners[-1], m.Init("init", stage, 0))
        return runners[-1]

    yield make
    for each in runners:
        each.close()


def outcome(held: TaskRunner, task: m.Task) -> m.Done | m.Failed:
    answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
    held.submit(task, answers.put)
    return answers.get(timeout=ANSWER_S)


def done(held: TaskRunner, task: m.Task) -> m.Result:
    answer = outcome(held, task)
    assert isinstance(answer, m.Done), answer
    assert answer.id == task.id
    assert answer.seconds >= 0
    return answer.result


def failed(held: TaskRunner, task: m.Task) -> str:
    answer = outcome(held, task)
    assert isinstance(answer, m.Failed), answer
    assert answer.id == task.id
    return answer.reason


def give(sender: TaskRunner, receiver: TaskRunner, message: m.Message, *names: str) -> None:
    """As the network would: checked, then kept under the same names."""
    blobs = tuple(sender.blob(name) for name in names)
    assert receiver.check(message, blobs) == ""
    for name, blob in zip(names, blobs, strict=True):
        copied = msgspec.structs.replace(blob, data=bytearray(blob.data))
        receiver.put(name, copied)


def train_microbatch(trainer: TaskRunner, servers: list[TaskRunner], step: int, index: int) -> float:
    """All hops of one microbatch through real runner, as the trainer has them done."""
    x, last = [f"x{index}.{k}" for k in range(3)], len(servers) - 1
    done(trainer, m.Fetch("t/f", step, index, x[0]))
    for k in range(last):
        give(trainer, servers[k], m.Forward(0, step, index, k, 1, 1), *x[:1] if k == 0 else ())
        done(servers[k], m.RunForward("s/f", step, index, k, x[k], x[k + 1]))
        give(servers[k], servers[k + 1], m.BoundaryTensor(0, step, index, k + 1, False), x[k + 1])
        give(servers[k], trainer, m.Output(0, step, index, k, 1))
    grad, loss = x[0], 0.0
    for k in reversed(range(last + 1)):
        give(trainer, servers[k], m.Backward(0, step, index, k, 1, 1), *x[:1] if k in (0, last) else ())
        out = f"g{index}.{k}" if k else ""
        result = done(servers[k], m.RunBackward("s/b", step, index, k, x[k], grad if last else "", out))
        if k == last:
            assert result.loss is not None
            loss = result.loss
        if out:
            give(servers[k], servers[k - 1], m.BoundaryTensor(0, step, index, k - 1, True), out)
        give(servers[k], trainer, m.Gradient(0, step, index, k, 1))
        grad = out
    return loss


def test_documents_are_kept_apart_at_every_stage_and_nothing_more_is_sent(a_runner: Maker, tmp_path: Path) -> None:
    """Three stages have the loss of one; with borders it is another, and a peer that ends documents otherwise is refused."""
    (tmp_path / "a.txt").write_bytes(b"one\0two\0three, and more of it\0four\0" * 40)
    losses = []
    for end in (0, -1):
        config = msgspec.structs.replace(TINY, data=msgspec.structs.replace(TINY.data, document_end=end))
        servers = [a_runner(config, stage) for stage in range(3)]
        losses.append(train_microbatch(servers[0], servers, 0, 0))
    one = msgspec.structs.replace(ONE, data=msgspec.structs.replace(ONE.data, document_end=0))
    whole = a_runner(one)
    assert losses[0] == train_microbatch(whole, [whole], 0, 0) != losses[1]
    with pytest.raises(ValueError, match=r"ends documents with 0; set data\.document_end=0"):
        a_runner(msgspec.structs.replace(ONE, data=msgspec.structs.replace(ONE.data, document_end=7)))


def average(group: list[TaskRunner], step: int, round_: int) -> list[m.Result]:
    """A round of a group: cut, add, gather."""
    length = group[0]._seated().executor.length
    bounds = tuple(length * c // len(group) for c in range(len(group) + 1))
    for r, held in enumerate(group):
        done(held, m.Cut("s/c", step, bounds, tuple(f"part{r}.{c}" for c in range(len(group)))))
    for c, owner in enumerate(group):
        for r, held in enumerate(group):
            if held is not owner:
                give(held, owner, m.ReduceChunk(0, step, round_, c), f"part{r}.{c}")
        done(owner, m.Add("s/a", tuple(f"part{r}.{c}" for r in range(len(group))), f"sum{c}"))
        for held in group:
            if held is not owner:
                give(owner, held, m.GatherChunk(0, step, round_, c), f"sum{c}")
    sums = tuple(f"sum{c}" for c in range(len(group)))
    return [done(held, m.Gather("s/g", step, round_, sums)) for held in group]


def test_what_the_codes_of_a_gradients_pieces_leave_out_is_fed_back_in_its_place() -> None:
    config = msgspec.structs.replace(ONE, network=Network(averaging="int8"))
    one, whole = coding.Averaging(config), torch.randn(2000, generator=torch.Generator().manual_seed(1))

    def sent(values: torch.Tensor, name: str) -> torch.Tensor:
        residuals = []
        for bounds in ((0, 400, 1000), (1000, 1500, 2000)):
            outs = tuple(f"{name}{start}" for start in bounds[:-1])
            residuals += one.parts(values[bounds[0] : bounds[-1]].clone(), bounds, outs, 2000)
        return torch.cat([coding.plain(part) for part in residuals])

    first = sent(whole, "a")
    left = one.left()
    assert left is not None and left.any() and torch.equal(left, whole - first)
    total = torch.randn(500, generator=torch.Generator().manual_seed(2))
    summed = coding.plain(one.sum(total.clone(), ("a1000", "another's")))  # of the chunk that begins there
    left_of_sum = torch.zeros(2000)
    left_of_sum[1000:1500] = total - summed
    one.applied(one.left())
    second = sent(torch.zeros(2000), "b")
    again = one.left()
    assert again is not None
    assert torch.allclose(second + again, whole - first + left_of_sum, atol=1e-6)


@pytest.mark.parametrize("lives", [True, False], ids=["one operator", "device lost"])
def test_a_task_that_a_device_fails_says_whether_the_device_is_lost(
    a_runner: Maker, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = a_runner(ONE)
    done(held, m.Fetch("f", 0, 0, "tokens"))

    def fail(*given: Any) -> None:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patched:
        patched.setattr(held._seat.executor, "backward", fail)  # type: ignore[union-attr]
        patched.setattr(base, "alive", lambda config: lives)
        answer = outcome(held, m.RunBackward("b", 0, 0, 0, "tokens", "", ""))
    assert isinstance(answer, m.Failed)
    assert (answer.lost, answer.reason) == (
        not lives,
        "the device is lost: " * (not lives) + "RuntimeError: CUDA error",
    )
    assert base.alive(ONE)
    assert done(held, m.RunBackward("again", 0, 0, 0, "tokens", "", "")).loss is not None


def test_two_replicas_per_stage_train_as_one_machine_does(a_runner: Maker) -> None:
    """Microbatch i is served by replica i of each stage; one machine adds in the same order and gets the same bits."""
    grid = [[a_runner(TINY, k), a_runner(TINY, k)] for k in range(3)]
    trainer = a_runner(TINY, None)
    alone = [create(TINY, k) for k in range(3)]
    for step in range(3):
        losses = [train_microbatch(trainer, [grid[k][i] for k in range(3)], step, i) for i in range(2)]
        results = [average(group, step, step) for group in grid]
        norm = sum(group[0].norm_sq for group in results) ** 0.5
        sums = []
        for i in range(2):  # each replica's sum by itself, then both added
            for executor in alone:
                executor.zero()
            tokens = trainer.get(f"x{i}.0")
            hidden = [tokens[:, :-1]]
            for executor in alone[:-1]:
                hidden.append(executor.forward(hidden[-1]))
            grad, loss = alone[2].backward(hidden[2], None, tokens)
            assert loss == losses[i]
            grad, _ = alone[1].backward(hidden[1], grad, None)
            alone[0].backward(hidden[0], grad, None)
            sums.append([executor.sum.clone() for executor in alone])
        reduced = [one + two for one, two in zip(*sums, strict=True)]
        for k, group in enumerate(grid):
            assert {result.digest for result in results[k]} == {base.digest_of([reduced[k]])}
            alone[k].apply(reduced[k], norm, step)
            applied = {done(held, m.Apply("s/y", step, step, norm, False)).digest for held in group}
            assert applied == {alone[k].digest()}
            assert not any(held._seated().executor.sum.any() for held in group)
        for held in [trainer, *(held for group in grid for held in group)]:
            for name in held._blobs.names():
                held.drop(name)
    assert norm > 0


def test_a_model_of_one_stage_runs_from_tokens_alone(a_runner: Maker) -> None:
    held = a_runner(ONE)
    loss = train_microbatch(held, [held], 0, 1)
    alone = create(ONE, 0)
    tokens = held.get("x1.0")
    assert alone.backward(tokens[:, :-1], None, tokens) == (None, loss)
    assert torch.equal(held._seated().executor.sum, alone.sum)


def test_an_emulated_run_needs_no_data(a_runner: Maker) -> None:
    servers = [a_runner(EMULATED, k) for k in range(3)]
    assert train_microbatch(servers[0], servers, 0, 0) == 1.0
    assert train_microbatch(servers[0], servers, 0, 1) == 1.0
    (result,) = average(servers[:1], 0, 0)
    assert result.norm_sq == 256.0
    done(servers[0], m.Apply("s/y", 0, 0, 16.0, False))


def test_parts_are_added_in_the_order_given() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert float(sums.add_up(parts)) == 0.0  # 1e8 + 1 = 1e8 in fp32
    assert float(sums.add_up([parts[0], parts[2], parts[1]])) == 1.0
    assert float(parts[0]) == 1e8  # not added to in place


# ------------------------------------------------------------------------------------------------------ wrong tasks


def test_a_task_for_another_stage_or_step_fails_and_changes_nothing(a_runner: Maker) -> None:
    held, empty = a_runner(TINY, 1), a_runner(TINY, None)
    x = torch.zeros(2, 8, 16)
    held.put("x", x)
    empty.put("x", x)
    for task, match in (
        (m.RunForward("f", 0, 0, 2, "x", "y"), "stage 1 at step 0 is here, not stage 2 at step 0"),
        (m.RunForward("f", 1, 0, 1, "x", "y"), "not stage 1 at step 1"),
        (m.RunBackward("b", 1, 0, 1, "x", "x", "y"), "not stage 1 at step 1"),
        (m.Cut("c", 1, (0, 5), ("y",)), "not stage 1 at step 1"),
        (m.Cut("c", 0, (0, 10**9), ("y",)), "do not cut"),
        (m.Cut("c", 0, (5, 0), ("y",)), "do not cut"),
        (m.Cut("c", 0, (0, 5, 9), ("y",)), "do not cut"),
        (m.Apply("a", 0, 3, 1.0, False), "no reduced gradient of step 0, round 3"),
        (m.Export("e", 4), "not stage 1 at step 4"),
        (m.ReadChunk("r", 0, 0, "y"), "no copy of step 0"),
        (m.RunForward("f", 0, 0, 1, "gone", "y"), "blob gone is not held"),
        (m.Import("i", 1, 0, 2), "chunk 0 of 2 was not downloaded"),
    ):
        assert match in failed(held, task)
    assert "no stage is here" in failed(empty, m.RunForward("f", 0, 0, 1, "x", "y"))
    assert "no place for checkpoints" in failed(empty, m.Init("i", 1, 5))
    held_without = TaskRunner(TINY)
    assert "no data" in failed(held_without, m.Fetch("f", 0, 0, "y"))
    held_without.close()
    assert held.held() == 1


def test_a_backward_that_is_not_finite_leaves_the_sum(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    held.put("x", torch.randn(2, 8, 16))
    held.put("good", torch.randn(2, 8, 16))
    held.put("bad", torch.full((2, 8, 16), float("inf")))
    done(held, m.RunBackward("b", 0, 0, 1, "x", "good", "g"))
    before = held._seated().executor.sum.clone()
    assert "not finite" in failed(held, m.RunBackward("b", 0, 1, 1, "x", "bad", "h"))
    assert torch.equal(held._seated().executor.sum, before)
    assert before.any()
    done(held, m.Reset("r"))
    assert not held._seated().executor.sum.any()


def test_a_reduced_gradient_that_is_not_whole_or_finite_is_refused(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    length = held._seated().executor.length
    held.put("short", torch.zeros(length - 1))
    held.put("nan", torch.full((1,), float("nan")))
    held.put("zero", torch.zeros(1))
    held.put("square", torch.zeros(1, 1))
    assert "values together" in failed(held, m.Gather("g", 0, 0, ("short",)))
    assert "not finite" in failed(held, m.Gather("g", 0, 0, ("short", "nan")))
    assert "not flat fp32" in failed(held, m.Gather("g", 0, 0, ("short", "square")))
    assert "cannot be added" in failed(held, m.Add("a", ("short", "zero"), "out"))
    assert "cannot be added" in failed(held, m.Add("a", (), "out"))
    assert "no reduced gradient" in failed(held, m.Apply("a", 0, 0, 1.0, False))
    done(held, m.Gather("g", 0, 1, ("short", "zero")))


def test_a_commit_may_name_the_round_before_the_last(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    held.put("sum", torch.zeros(held._seated().executor.length))
    for round_ in range(4):
        done(held, m.Gather("g", 0, round_, ("sum",)))
    assert "round 1" in failed(held, m.Apply("a", 0, 1, 1.0, False))
    done(held, m.Apply("a", 0, 2, 1.0, False))


def test_a_task_that_breaks_is_answered_and_the_next_one_runs(
    a_runner: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    def make(config: Config, stage: int) -> Executor:
        if stage == 1:
            raise RuntimeError("broken")
        return create(config, stage)

    held = a_runner(TINY, None, make=make)
    with caplog.at_level(logging.CRITICAL):
        assert failed(held, m.Init("i", 1, 0)) == "RuntimeError: broken"
    assert done(held, m.Init("i", 0, 0)).length == create(TINY, 0).length


# ------------------------------------------------------------------------------------------------------------ blobs


def test_inputs_may_be_dropped_at_once_and_outputs_before_they_are_made(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    gate = threading.Event()
    executor = held._seated().executor
    forward = executor.forward

    def waiting(x: torch.Tensor) -> torch.Tensor:
        gate.wait(ANSWER_S)
        return forward(x)

    executor.forward = waiting  # type: ignore[method-assign]
    answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
    for n in range(3):
        held.put(f"x{n}", torch.zeros(2, 8, 16))
        held.submit(m.RunForward(f"f{n}", 0, n, 1, f"x{n}", f"y{n}"), answers.put)
        held.drop(f"x{n}")
    held.drop("y1")
    gate.set()
    assert all(isinstance(answers.get(timeout=ANSWER_S), m.Done) for _ in range(3))
    assert held.held() == 2
    with pytest.raises(KeyError):
        held.get("y1")
    held.put("y1", torch.zeros(1))  # the name is free again
    assert held.held() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_a_tensor_is_the_same_after_the_network(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(100, 100 + torch.Size(shape).numel()).to(dtype).reshape(shape)
    blob = kinds.blob_of(tensor)
    shifted = memoryview(b"x" + bytes(blob.data))[1:]
    for given in (blob.data, bytes(blob.data), bytearray(blob.data), shifted):
        decoded = kinds.tensor_of(Blob(blob.dtype, blob.shape, given))
        assert decoded.dtype == dtype
        assert torch.equal(decoded, tensor)


def test_blobs_share_memory_both_ways() -> None:
    tensor = torch.zeros(4, 4)
    blob = kinds.blob_of(tensor)
    tensor[0, 0] = 1
    assert bytes(blob.data[:4]) == b"\0\0\x80\x3f"
    assert kinds.tensor_of(blob).data_ptr() == tensor.data_ptr()
    turned = kinds.tensor_of(kinds.blob_of(tensor.T))
    assert torch.equal(turned, tensor.T)


# ----------------------------------------------------------------------------------------------------------- checks

TOKENS = torch.zeros(2, 9, dtype=torch.int64)
HIDDEN = torch.zeros(2, 8, 16)
INPUT, GRADIENT = m.BoundaryTensor(0, 0, 0, 1, False), m.BoundaryTensor(0, 0, 0, 1, True)


def forward(stage: int) -> m.Forward:
    return m.Forward(0, 0, 0, stage, 1, 1)


def backward(stage: int) -> m.Backward:
    return m.Backward(0, 0, 0, stage, 1, 1)


def test_what_is_right_passes(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    length = held._seated().executor.length
    for message, tensors in (
        (forward(0), (TOKENS,)),
        (forward(1), ()),
        (backward(0), (TOKENS,)),
        (backward(1), ()),
        (backward(2), (TOKENS,)),
        (m.Output(0, 0, 0, 1, 1), ()),
        (m.Gradient(0, 0, 0, 2, 1), ()),
        (INPUT, (HIDDEN,)),
        (GRADIENT, (HIDDEN,)),
        (GRADIENT, (torch.full((2, 8, 16), 1e15),)),  # the largest that nothing overflows from
        (m.ReduceChunk(0, 0, 0, 1), (torch.zeros(length),)),
        (m.GatherChunk(0, 0, 0, 1), (torch.zeros(1),)),
        (m.Chunk(0, 0, 1, 0), (torch.zeros(5, dtype=torch.uint8),)),
        (m.Chunk(0, 0, 1, 0, gone=True), ()),
        (m.Leave(), ()),
    ):
        assert held.check(message, tuple(map(kinds.blob_of, tensors))) == ""


@pytest.mark.parametrize(
    ("message", "tensors", "match"),
    [
        (forward(0), (HIDDEN,), "tokens: type float32, not int64"),
        (forward(0), (TOKENS + 256,), "tokens from 256 to 256, not 0 to 255"),
        (forward(0), (TOKENS - 1,), "tokens from -1"),
        (forward(0), (TOKENS[:, 1:].contiguous(),), "shape (2, 8), not (2, 9)"),
        (INPUT, (HIDDEN.double(),), "type 'float64'"),
        (INPUT, (HIDDEN.bfloat16(),), "type bfloat16, not float32"),
        (INPUT, (HIDDEN.reshape(2, 16, 8),), "shape (2, 16, 8), not (2, 8, 16)"),
        (INPUT, (HIDDEN[:, 1:].contiguous(),), "shape (2, 7, 16), not (2, 8, 16)"),
        (INPUT, (HIDDEN.log(),), "not finite"),
        (INPUT, (HIDDEN.log().sqrt(),), "not finite"),
        (INPUT, (), "0 blobs with a BoundaryTensor, not 1"),
        (INPUT, (HIDDEN, HIDDEN), "2 blobs with a BoundaryTensor, not 1"),
        (GRADIENT, (HIDDEN / 0,), "not finite"),
        (m.BoundaryTensor(0, 0, 0, 0, False), (HIDDEN,), "stage 0 has no such boundary"),
        (m.BoundaryTensor(0, 0, 0, 2, True), (HIDDEN,), "stage 2 has no such boundary"),
        (m.BoundaryTensor(0, 0, 0, 3, False), (HIDDEN,), "BoundaryTensor of stage 3 in a run of 3 stages"),
        (forward(1), (HIDDEN,), "1 blobs with a Forward, not 0"),
        (forward(0), (), "0 blobs with a Forward, not 1"),
        (forward(3), (), "Forward of stage 3 in a run of 3 stages"),
        (backward(0), (TOKENS, HIDDEN), "2 blobs with a Backward, not 1"),
        (backward(1), (HIDDEN,), "1 blobs with a Backward, not 0"),
        (backward(2), (HIDDEN,), "tokens: type float32"),
        (m.Output(0, 0, 0, 1, 1), (HIDDEN,), "1 blobs with a Output, which has none"),
        (m.Gradient(0, 0, 0, 0, 1), (HIDDEN,), "1 blobs with a Gradient, which has none"),
        (m.ReduceChunk(0, 0, 0, 0), (torch.zeros(10**5),), "not one dimension of 1 to"),
        (m.ReduceChunk(0, 0, 0, 0), (torch.zeros(0),), "not one dimension of 1 to"),
        (m.ReduceChunk(0, 0, 0, 0), (torch.zeros(2, 2),), "not one dimension of 1 to"),
        (m.GatherChunk(0, 0, 0, 0), (torch.tensor([1.0, float("nan")]),), "not finite"),
        (m.GatherChunk(0, 0, 0, 0), (TOKENS[0],), "type int64, not float32"),
        (m.Chunk(0, 0, 0, 0), (), "0 blobs"),
        (m.Chunk(0, 0, 0, 0), (HIDDEN,), "type float32, not uint8"),
        (m.Chunk(0, 0, 0, 0, gone=True), (HIDDEN,), "1 blobs with a Chunk, not 0"),
        (m.Leave(), (HIDDEN,), "1 blobs with a Leave, which has none"),
    ],
)
def test_what_is_wrong_is_named(
    a_runner: Maker, message: m.Message, tensors: tuple[torch.Tensor, ...], match: str
) -> None:
    fault = a_runner(TINY, 1).check(message, tuple(map(kinds.blob_of, tensors)))
    assert match in fault


@pytest.mark.parametrize(
    ("blob", "match"),
    [
        (Blob("float32", (2, 8, 16), b"123"), "3 bytes are not float32"),
        (Blob("float32", (2, -8, -16), bytes(1024)), "1024 bytes are not"),
        (Blob("object", (2, 8, 16), bytes(1024)), "type 'object'"),
        (Blob("float32", (2, 8, 16), bytes(1024), codec="zip"), "codec 'zip'"),
        (Blob("float32", (2**62, 2**62), b""), "0 bytes are not"),
    ],
)
def test_a_malformed_blob_is_neither_passed_nor_kept(a_runner: Maker, blob: Blob, match: str) -> None:
    held = a_runner(TINY, 1)
    assert match in held.check(INPUT, (blob,))
    with pytest.raises(ValueError, match=match[:8]):
        held.put("x", blob)
    assert held.held() == 0


def test_boundaries_are_of_the_type_that_is_trained_in(a_runner: Maker) -> None:
    half = msgspec.structs.replace(TINY, train=msgspec.structs.replace(TINY.train, dtype="bfloat16"))
    servers = [a_runner(half, k) for k in range(3)]
    train_microbatch(servers[0], servers, 0, 0)
    assert servers[0].get("x0.1").dtype == torch.bfloat16
    assert "type float32, not bfloat16" in servers[0].check(INPUT, (kinds.blob_of(HIDDEN),))


# ---------------------------------------------------------------------------------------------------- encoded tensors


def coded(config: Config = TINY, **network: Any) -> Config:
    return msgspec.structs.replace(config, network=Network(**network))


def test_both_ends_and_the_recomputation_use_the_decoded_tensor(a_runner: Maker) -> None:
    config = coded(activations="int8", gradients="int8")
    servers = [a_runner(config, k) for k in range(3)]
    trainer, alone = a_runner(config, None), [create(config, k) for k in range(3)]
    loss = train_microbatch(trainer, servers, 0, 0)
    tokens = trainer.get("x0.0")
    assert isinstance(tokens, torch.Tensor)

    def through(tensor: torch.Tensor) -> torch.Tensor:
        return compress.decode(compress.encode(tensor, "int8"))

    hidden = [tokens[:, :-1]]
    for executor in alone[:-1]:
        hidden.append(through(executor.forward(hidden[-1])))
    grad, expected = alone[2].backward(hidden[2], None, tokens)
    assert grad is not None and loss == expected
    grad, _ = alone[1].backward(hidden[1], through(grad), None)
    assert grad is not None
    alone[0].backward(hidden[0], through(grad), None)
    for k, held in enumerate(servers):
        assert torch.equal(held._seated().executor.sum, alone[k].sum)
    blob = servers[0].blob("x0.1")
    assert blob.codec == "int8/1/1024" and len(memoryview(blob.data)) == codec.nbytes(blob.codec, blob.shape)


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_replicas_average_codes_to_equal_bits_and_feed_back_what_was_left_out(a_runner: Maker, how: str) -> None:
    """The sums of many steps come to what they would be without codecs; one step by itself does not."""
    group = [a_runner(coded(averaging=how), 1) for _ in range(3)]
    length = group[0]._seated().executor.length
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(length, generator=generator) for _ in group]
    wanted = grads[0] + grads[1] + grads[2]
    total, errors = torch.zeros(length, dtype=torch.float64), []
    for step in range(12):
        for held, grad in zip(group, grads, strict=True):
            held._seated().executor.sum.copy_(grad)
        if step == 5:  # a round that was given up counts for nothing: the next one says the same
            first = average(group, step, 99)
            assert average(group, step, step) == first
        else:
            average(group, step, step)
        reduced = [held._sums.reduced[step, step].reduced for held in group]
        assert all(torch.equal(one, reduced[0]) for one in reduced)
        total += reduced[0].double()
        errors.append(float((total / (step + 1) - wanted).norm() / wanted.norm()))
        assert len({done(held, m.Apply("s/y", step, step, 1.0, False)).digest for held in group}) == 1
        for held in group:
            for name in held._blobs.names():
                held.drop(name)
    assert 0 < errors[0] < 0.02
    assert errors[-1] < errors[0] / 4


def test_what_a_replica_left_out_goes_with_its_seat_and_is_sent_when_it_is_alone(a_runner: Maker) -> None:
    pair = [a_runner(coded(averaging="int8"), 1) for _ in range(2)]
    length = pair[0]._seated().executor.length
    grad = torch.linspace(-1, 1, length)
    for held in pair:
        held._seated().executor.sum.copy_(grad)
    average(pair, 0, 0)
    first = pair[0]._sums.reduced[0, 0].reduced.clone()
    for held in pair:
        done(held, m.Apply("s/y", 0, 0, 1.0, False))
    left = [held._sums.averaging._residual for held in pair]
    assert left[0] is not None and left[1] is not None
    assert torch.allclose(first + left[0] + left[1], 2 * grad, atol=1e-6)
    for held, owed in zip(pair, left, strict=True):
        average([held], 1, 1)
        assert torch.equal(held._sums.reduced[1, 1].reduced, owed)
        done(held, m.Apply("s/y", 1, 1, 1.0, False))
        average([held], 2, 2)
        assert not held._sums.reduced[2, 2].reduced.any()
    done(pair[0], m.Init("i", 1, 0))
    assert pair[0]._sums.averaging.left() is None


def test_codes_that_nobody_honest_sends_are_refused_by_name(a_runner: Maker) -> None:
    held = a_runner(coded(activations="int8", gradients="bf16", averaging="int8"), 1)
    good = coding.packed(HIDDEN, "int8")
    assert isinstance(good, Blob)
    assert held.check(INPUT, (good,)) == ""
    raw = kinds.blob_of(HIDDEN)
    scales = bytearray(good.data)
    scales[2:4] = b"\xff\xff"
    for blob, words in (
        (raw, "a boundary tensor: codec raw, not int8, which this run uses"),
        (coding.packed(HIDDEN, "int4"), "codec int4/1/64, not int8"),
        (msgspec.structs.replace(good, data=scales), "scales are not finite"),
        (msgspec.structs.replace(good, data=bytes(good.data)[:-1]), "bytes are not float32"),
        (msgspec.structs.replace(good, codec="int8/9/1024"), "int8 of version 9"),
        (coding.packed(HIDDEN[:1], "int8"), "shape (1, 8, 16)"),
    ):
        assert isinstance(blob, Blob)
        assert words in held.check(INPUT, (blob,))
    assert "a boundary gradient: codec raw, not bf16" in held.check(GRADIENT, (raw,))
    part = kinds.blob_of(torch.zeros(4))
    assert "a chunk of the gradient: codec raw, not int8" in held.check(m.ReduceChunk(0, 0, 0, 0), (part,))


# --------------------------------------------------------------------------------------------- state and checkpoints


def a_step(held: TaskRunner, step: int, *, save: bool = False) -> m.Result:
    held.put("sum", torch.linspace(-1, 1, held._seated().executor.length))
    done(held, m.Gather("g", step, 0, ("sum",)))
    return done(held, m.Apply("a", step, 0, 1.0, save))


def output(held: TaskRunner, step: int) -> torch.Tensor:
    """Of a middle stage, for the same input always."""
    held.put("x", torch.ones(boundary(held._config).shape))
    done(held, m.RunForward("f", step, 0, 1, "x", "y"))
    tensor = held.get("y")
    assert isinstance(tensor, torch.Tensor)
    return tensor


def download(giver: TaskRunner, taker: TaskRunner, stage: int, step: int) -> int:
    manifest = done(giver, m.Export("y/e", step)).manifest
    assert manifest is not None
    for chunk, (size, digest) in enumerate(zip(manifest.sizes, manifest.hashes, strict=True)):
        assert done(giver, m.ReadChunk("y/r", step, chunk, f"c{chunk}")).nbytes == size
        give(giver, taker, m.Chunk(0, step, stage, chunk), f"c{chunk}")
        done(taker, m.CheckChunk("y/c", chunk, digest, f"c{chunk}"))
        taker.drop(f"c{chunk}")
    return len(manifest.sizes)


@pytest.mark.parametrize("config", [TINY, LATE], ids=["in time", "late"])
def test_a_joiner_goes_on_with_the_bits_of_the_one_it_downloads_from(
    config: Config, a_runner: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_runner.Copy.__init__, "__defaults__", (1000,))  # several chunks
    giver, taker = a_runner(config, 1), a_runner(config, 0)
    digest = [a_step(giver, step) for step in range(2)][-1].digest
    chunks = download(giver, taker, 1, 2)
    assert chunks > 5
    result = done(taker, m.Import("y/i", 1, 2, chunks))
    assert (result.digest, result.length) == (digest, giver._seated().executor.length)
    for step in (2, 3) if config is LATE else (2,):
        assert torch.equal(output(taker, step), output(giver, step)), step
    assert a_step(taker, 2).digest == a_step(giver, 2).digest  # the optimizer's state came along
    assert "was not downloaded" in failed(taker, m.Import("y/i", 1, 2, chunks))


def test_an_exported_copy_outlives_the_next_step_and_is_replaced_by_the_next_export(a_runner: Maker) -> None:
    giver, taker = a_runner(TINY, 1), a_runner(TINY, None)
    digest = a_step(giver, 0).digest
    manifest = done(giver, m.Export("y/e", 1)).manifest
    assert manifest is not None
    a_step(giver, 1)
    done(giver, m.ReadChunk("y/r", 1, 0, "c"))
    done(giver, m.CheckChunk("y/c", 0, manifest.hashes[0], "c"))
    give(giver, taker, m.Chunk(0, 1, 1, 0), "c")
    done(taker, m.CheckChunk("y/c", 0, manifest.hashes[0], "c"))
    assert done(taker, m.Import("y/i", 1, 1, 1)).digest == digest
    done(giver, m.Export("y/e", 2))
    assert "no copy of step 1" in failed(giver, m.ReadChunk("y/r", 1, 0, "c"))
    assert "chunk 99 of 1" in failed(giver, m.ReadChunk("y/r", 2, 99, "c"))


@pytest.mark.parametrize("config", [TINY, LATE], ids=["in time", "late"])
@pytest.mark.parametrize("skip", [False, True])
def test_hops_and_rounds_do_not_wait_for_a_state_that_is_copied_and_the_copy_is_of_its_step(
    config: Config, skip: bool, a_runner: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat.Snapshots.go_on, "__defaults__", (1.0,))  # a tensor at a time
    giver, taker = a_runner(config, 1), a_runner(config, None)
    digest = a_step(giver, 0).digest
    length = giver._seated().executor.length
    giver.put("x", torch.ones(boundary(config).shape))
    giver.put("sum", torch.linspace(-1, 1, length))
    done(giver, m.Gather("g", 1, 0, ("sum",)))
    go, answers = threading.Event(), queue.Queue[m.Done | m.Failed]()
    giver._lanes["compute"].put(lambda: bool(go.wait(ANSWER_S)))
    step = m.Apply("a", 1, 0, 1.0, False, skip=skip)
    for task in (
        m.Export("e", 1),
        m.RunForward("f", 1, 0, 1, "x", "y"),
        m.Cut("c", 1, (0, length), ("part",)),
        step,
    ):
        giver.submit(task, answers.put)
    go.set()
    done_ = {(answer := answers.get(timeout=ANSWER_S)).id: answer for _ in range(4)}
    assert list(done_).index("e") > max(list(done_).index(one) for one in "fc")
    exported, applied = done_["e"], done_["a"]
    assert isinstance(exported, m.Done) and isinstance(applied, m.Done)
    manifest = exported.result.manifest
    assert manifest is not None and len(manifest.sizes) == 1
    done(giver, m.ReadChunk("y/r", 1, 0, "chunk"))
    give(giver, taker, m.Chunk(0, 1, 1, 0), "chunk")
    done(taker, m.CheckChunk("y/c", 0, manifest.hashes[0], "chunk"))
    assert done(taker, m.Import("y/i", 1, 1, 1)).digest == digest
    assert skip or applied.result.digest != digest


def test_a_copy_that_is_being_made_is_given_up_with_its_stage(a_runner: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat.Snapshots.go_on, "__defaults__", (1.0,))
    giver = a_runner(TINY, 1)
    go, answers = threading.Event(), queue.Queue[m.Done | m.Failed]()
    giver._lanes["compute"].put(lambda: bool(go.wait(ANSWER_S)))
    for task in (m.Export("e", 0), m.Init("i", 2, 0)):
        giver.submit(task, answers.put)
    go.set()
    built, given_up = answers.get(timeout=ANSWER_S), answers.get(timeout=ANSWER_S)
    assert isinstance(built, m.Done) and built.id == "i"
    assert isinstance(given_up, m.Failed) and "no copy of step 0" in given_up.reason


def test_a_state_of_another_stage_or_step_or_a_damaged_chunk_is_refused(a_runner: Maker) -> None:
    giver, taker = a_runner(TINY, 1), a_runner(TINY, None)
    for task in (m.Import("y/i", 2, 0, 1), m.Import("y/i", 1, 3, 1)):
        assert download(giver, taker, 1, 0) == 1
        assert "the downloaded state is of" in failed(taker, task)
    taker.put("c", torch.zeros(9, dtype=torch.uint8))
    assert "SHA-256" in failed(taker, m.CheckChunk("y/c", 0, "0" * 64, "c"))
    assert "was not downloaded" in failed(taker, m.Import("y/i", 1, 0, 1))
    done(taker, m.CheckChunk("y/c", 0, hashlib.sha256(bytes(9)).hexdigest(), "c"))
    assert "header" in failed(taker, m.Import("y/i", 1, 0, 1))


@pytest.mark.parametrize("config", [TINY, LATE], ids=["in time", "late"])
def test_a_checkpoint_is_written_by_each_stage_and_trained_on_from_there(
    config: Config, a_runner: Maker, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "checkpoints"))
    servers = [a_runner(config, k, store=store) for k in range(3)]
    digests = [a_step(held, 0, save=True).digest for held in servers]
    after = [a_step(held, 1).digest for held in servers]  # the copy is of step 1, not of now
    records = tuple(done(held, m.RunSave("s/s", k, 1)).record for k, held in enumerate(servers))
    path = done(servers[1], m.RunPublish("s/p", 1, records)).record
    assert path == str(tmp_path / "checkpoints" / "step-1")
    assert store.catalog.open(1).data == open_dataset(servers[0]._config).digest
    again = [a_runner(config, None, store=store) for _ in range(3)]
    assert [done(held, m.Init("y/i", k, 1)).digest for k, held in enumerate(again)] == digests
    assert [a_step(held, 1).digest for held in again] == after
    assert "no copy of step 1" in failed(servers[0], m.RunSave("s/s", 0, 1))
    assert "torn" in failed(again[0], m.Init("y/i", 0, 9))


@pytest.mark.parametrize("config", [TINY, LATE], ids=["in time", "late"])
def test_a_checkpoint_is_written_in_the_middle_of_a_step_of_the_parameters_it_began_with(
    config: Config, a_runner: Maker, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "checkpoints"))
    servers = [a_runner(config, k, store=store) for k in range(3)]
    digests = [a_step(held, 0).digest for held in servers]
    done(servers[0], m.Fetch("t/f", 1, 0, "x"))
    done(servers[0], m.RunForward("s/f", 1, 0, 0, "x", "y"))
    records = tuple(done(held, m.RunSave("s/s", k, 1)).record for k, held in enumerate(servers))
    done(servers[0], m.RunPublish("s/p", 1, records))
    again = [a_runner(config, None, store=store) for _ in range(3)]
    assert [done(held, m.Init("y/i", k, 1)).digest for k, held in enumerate(again)] == digests


def test_an_emulated_run_writes_checkpoints_too(a_runner: Maker, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "checkpoints"))
    servers = [a_runner(EMULATED, k, store=store) for k in range(3)]
    digests = [a_step(held, 0, save=True).digest for held in servers]
    records = tuple(done(held, m.RunSave("s/s", k, 1)).record for k, held in enumerate(servers))
    done(servers[0], m.RunPublish("s/p", 1, records))
    assert done(servers[2], m.Init("y/i", 0, 1)).digest == digests[0]


class Stuck(Store):
    """A storage that takes as long as the test wants, then is full."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.entered, self.gate = threading.Event(), threading.Event()

    def write_shard(self, *given: Any) -> str:
        self.entered.set()
        self.gate.wait(ANSWER_S)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_training_goes_on_while_a_checkpoint_is_written_and_the_full_disk_is_the_reason(
    a_runner: Maker, tmp_path: Path
) -> None:
    store = Stuck(str(tmp_path))
    held = a_runner(TINY, 0, store=store)
    a_step(held, 0, save=True)
    answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
    held.submit(m.RunSave("s/s", 0, 1), answers.put)
    assert store.entered.wait(ANSWER_S)
    done(held, m.Fetch("t/f", 1, 0, "x"))
    done(held, m.RunForward("s/f", 1, 0, 0, "x", "y"))
    a_step(held, 1)
    assert answers.empty()
    store.gate.set()
    answer = answers.get(timeout=ANSWER_S)
    assert isinstance(answer, m.Failed)
    assert f"writing the checkpoint of step 1 to {tmp_path}: [Errno 28] No space left on device" in answer.reason


class Beside:
    """Holds up the optimizer step of delayed updates until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        finish = Delayed.finish

        def held_up(executor: Delayed, *given: Any) -> None:
            self.entered.set()
            assert self.go.wait(ANSWER_S)
            finish(executor, *given)

        monkeypatch.setattr(Delayed, "finish", held_up)


@pytest.mark.parametrize(("executor", "first"), [("resident", 0), ("resident", 1), ("resident", 2), ("swapping", 0)])
def test_hops_of_the_next_step_run_while_the_optimizer_does_and_nothing_else_sees_half_a_step(
    a_runner: Maker, monkeypatch: pytest.MonkeyPatch, executor: str, first: int
) -> None:
    """`first`: which of those that have to wait for it is asked for first, and makes the others wait too."""
    device = Device(threads=0, executor=executor, memory_bytes=1 << 20 if executor == "swapping" else 0)
    config = msgspec.structs.replace(LATE, device=device)
    plain, held = a_runner(config, 1), a_runner(config, 1)
    for one in (plain, held):
        a_step(one, 0)
    older = output(plain, 1)
    digest = a_step(plain, 1).digest
    newer, newest = output(plain, 2), output(plain, 3)
    assert not torch.equal(older, newer) and not torch.equal(newer, newest)

    beside = Beside(monkeypatch)
    assert torch.equal(output(held, 1), older)
    held.put("sum", torch.linspace(-1, 1, held._seated().executor.length))
    done(held, m.Gather("g", 1, 0, ("sum",)))
    answers: queue.Queue[m.Done | m.Failed] = queue.Queue()
    held.submit(m.Apply("a", 1, 0, 1.0, False), answers.put)
    assert beside.entered.wait(ANSWER_S)
    assert torch.equal(output(held, 2), newer)  # with the parameters that step 1 is applied to
    waiting: queue.Queue[m.Done | m.Failed] = queue.Queue()
    held.put("x", torch.ones(boundary(config).shape))
    hop = m.RunForward("f", 3, 0, 1, "x", "z")  # with those that are being made
    tasks: list[m.Task] = [hop, m.Export("e", 2), m.Reset("r")]
    for task in tasks[first:] + tasks[:first]:
        held.submit(task, waiting.put)
    with pytest.raises(queue.Empty):
        waiting.get(timeout=0.2)
    assert answers.empty()
    beside.go.set()
    applied = answers.get(timeout=ANSWER_S)
    assert isinstance(applied, m.Done) and applied.result.digest == digest
    assert all(isinstance(waiting.get(timeout=ANSWER_S), m.Done) for _ in range(3))
    assert torch.equal(coding.plain(held.get("z")), newest)


def test_an_optimizer_step_that_fails_beside_the_hops_is_answered_and_the_state_may_come_anew(
    a_runner: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, held = a_runner(LATE, 1), a_runner(LATE, 1)
    digest = a_step(giver, 0).digest

    def broken(*given: Any) -> None:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(Master, "apply", broken)
        held.put("sum", torch.ones(held._seated().executor.length))
        done(held, m.Gather("g", 0, 0, ("sum",)))
        assert "no memory left" in failed(held, m.Apply("a", 0, 0, 1.0, False))
    chunks = download(giver, held, 1, 1)
    assert done(held, m.Import("y/i", 1, 1, chunks)).digest == digest


def test_close_does_not_wait_for_what_waits_for_a_step_that_is_not_made(a_runner: Maker) -> None:
    asked = threading.Event()

    class Told(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                asked.set()
            return super().wait(timeout)

    held = a_runner(LATE, 1)
    held.put("sum", torch.ones(held._seated().executor.length))
    done(held, m.Gather("g", 0, 0, ("sum",)))
    entered, go = threading.Event(), threading.Event()
    held._lanes["average"].put(lambda: (entered.set(), go.wait(ANSWER_S))[0])
    assert entered.wait(ANSWER_S)
    held._stepped = Told()
    held._stepped.set()
    held.submit(m.Apply("a", 0, 0, 1.0, False), lambda answer: None)  # its second half waits for that lane
    held.submit(m.Reset("r"), lambda answer: None)
    assert asked.wait(ANSWER_S)
    for lane in held._lanes.values():
        lane.stop()
    go.set()
    began = time.monotonic()
    held.close()
    assert time.monotonic() - began < 9.0
    assert not any(lane.thread.is_alive() for lane in held._lanes.values())


def test_close_answers_what_runs_and_leaves_no_thread() -> None:
    held = TaskRunner(EMULATED)
    done(held, m.Init("i", 0, 0))
    held.close()
    assert not any(lane.thread.is_alive() for lane in held._lanes.values())


def test_the_first_round_finds_its_loops_loaded() -> None:
    """Six peers on two cores loaded numba in their first round for 3.5 s, and an honest one was evicted: its partner waited for a sum."""
    program = (
        "import sys, threading\n"
        "from tests.runtime.test_task_runner import EMULATED, TaskRunner\n"
        "runner, idle = TaskRunner(EMULATED), threading.Event()\n"
        "runner._lanes['read'].put(idle.set)\n"  # behind what it does first
        "sys.exit(not idle.wait(60) or not sys.modules['shoal.numerics.loops'].sketch.signatures)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90, cwd=Path(__file__).parents[2])
