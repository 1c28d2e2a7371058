"""A hop is done when it is computed, and its result is encoded beside the next one; what cannot be encoded fails the next hop."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from tests.runtime import test_task_runner
from tests.runtime.test_task_runner import ANSWER_S, TINY, Maker, done, outcome

from shoal.config import Network
from shoal.core import messages as m
from shoal.numerics import compress
from shoal.runtime.tasks.coding import Pending
from shoal.runtime.tasks.outgoing import BUFFERS

a_runner, text = test_task_runner.a_runner, test_task_runner.text  # fixtures
CODED = msgspec.structs.replace(TINY, network=Network(activations="bf16", gradients="int8"))


def forward(index: int) -> m.RunForward:
    return m.RunForward(f"s/{index}", 0, index, 1, "x", f"y{index}")


def test_hops_go_on_while_results_are_encoded_and_who_needs_the_bytes_waits(
    a_runner: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, encode, may = a_runner(CODED, 1), compress.encode, threading.Event()
    held.put("x", torch.randn(2, 8, 16))

    def slow(values: torch.Tensor, how: str) -> compress.Code:
        assert may.wait(ANSWER_S)
        return encode(values, how)

    monkeypatch.setattr(compress, "encode", slow)
    results = [done(held, forward(index)) for index in range(BUFFERS)]  # with nothing encoded yet
    values = [held.get(f"y{index}") for index in range(BUFFERS)]
    assert not any(value.done() for value in values if isinstance(value, Pending))
    may.set()
    assert {len(held.blob(f"y{index}").data) for index in range(BUFFERS)} == {result.nbytes for result in results}
    assert torch.equal(encode(held._seated().executor.forward(held.get("x")), "bf16").data, _bytes(held, "y1"))
    monkeypatch.undo()
    held.put("hidden", held.get("y0"))  # as a message to this peer itself would; the next stage decodes it
    done(held, m.RunForward("s/9", 0, 9, 1, "hidden", "y9"))


def test_nothing_pends_that_needs_no_work(a_runner: Maker) -> None:
    held = a_runner(TINY, 1)
    held.put("x", torch.randn(2, 8, 16))
    done(held, forward(0))
    assert isinstance(held.get("y0"), torch.Tensor)


def test_a_result_that_cannot_be_encoded_fails_the_next_hop_as_not_finite(a_runner: Maker) -> None:
    held = a_runner(CODED, 1)
    held._seated().executor.forward = lambda x: torch.full((2, 8, 16), 3.4e38)  # finite, but not in bfloat16
    held.put("x", torch.randn(2, 8, 16))
    done(held, forward(0))
    with pytest.raises(ValueError, match="overflow bfloat16"):
        held.blob("y0")
    answer = outcome(held, forward(1))
    assert isinstance(answer, m.Failed) and answer.nonfinite and "overflow bfloat16" in answer.reason
    done(held, forward(2))


def test_a_result_for_which_there_is_no_memory_fails_the_next_hop_with_that_reason(
    a_runner: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = a_runner(CODED, 1)
    held.put("x", torch.randn(2, 8, 16))

    def full(values: torch.Tensor, how: str) -> compress.Code:
        raise torch.OutOfMemoryError("nothing is left")

    with monkeypatch.context() as patch:
        patch.setattr(compress, "encode", full)
        done(held, forward(0))
        with pytest.raises(torch.OutOfMemoryError):
            held.blob("y0")
    answer = outcome(held, forward(1))
    assert isinstance(answer, m.Failed) and not answer.nonfinite and "nothing is left" in answer.reason
    done(held, forward(2))


def _bytes(held: test_task_runner.TaskRunner, name: str) -> torch.Tensor:
    return torch.frombuffer(held.blob(name).data, dtype=torch.uint8)
