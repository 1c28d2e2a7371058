"""Which device a peer computes on, and how much of its memory a stage may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from shoal import executor
from shoal.config import Config, Device, Train
from shoal.executor import base, probe


def on(kind: str = "auto", **given: Any) -> Config:
    return msgspec.structs.replace(Config(), device=Device(kind=kind, **given))


def cards(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Play a machine with so many cards: torch's own answers, which is all that is asked."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if count else None)


def memory(monkeypatch: pytest.MonkeyPatch, free: int, cached: int = 0) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (free, 80 << 30),
        memory_reserved=lambda device: cached + 5,
        memory_allocated=lambda device: 5,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_is_the_accelerator_that_torch_finds_and_else_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, kind, 1)
    assert base.device_of(on()) == torch.device(kind)
    assert base.device_of(on("cpu")) == torch.device("cpu")
    swapped = base.device_of(on(executor="swapping"))
    assert swapped.type == ("cpu" if kind != "cuda" else "cuda")
    cards(monkeypatch, kind, 0)
    assert base.device_of(on()) == torch.device("cpu")


def test_a_card_by_its_number_is_taken_or_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "cuda", 2)
    for kind in ("auto", "cpu", "cuda", "cuda:1"):
        base.check_device(on(kind))
    assert base.device_of(on("cuda:1")).index == 1
    for kind in ("cuda:2", "mps", "xpu"):
        with pytest.raises(ValueError, match=rf"'{kind}', but PyTorch finds only cpu, cuda:0, cuda:1 here"):
            base.check_device(on(kind))


def test_a_stage_never_takes_more_than_its_card_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "cuda", 1)
    memory(monkeypatch, free=10 << 30, cached=2 << 30)
    assert base.memory_limit(on()) == 12 << 30  # what this process has cached is free to it
    assert base.memory_limit(on(memory_bytes=4 << 30)) == 4 << 30
    assert base.memory_limit(on(memory_bytes=20 << 30)) == 12 << 30
    assert base.memory_limit(on("cpu", memory_bytes=20 << 30)) == 20 << 30
    with pytest.raises(ValueError, match=r"device\.memory_bytes = 21,474,836,480, but cuda has 12,884,901,888 free"):
        executor.check(on(memory_bytes=20 << 30))


def test_products_are_rounded_to_tf32_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "cuda", 1)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for asked in (True, False):
            base.prepare_thread(on(tf32=asked))
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == asked
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_each_thread_of_a_peer_computes_on_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "cuda", 4)
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    for kind in ("cuda:3", "cuda", "auto", "cpu"):
        base.prepare_thread(on(kind))
    assert taken == [3]


def test_a_card_without_bfloat16_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cards(monkeypatch, "cuda", 1)
    memory(monkeypatch, free=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr("shoal.executor.fit.check", lambda config: None)
    for dtype, warnings in (("float32", 0), ("bfloat16", 1)):
        executor.check(msgspec.structs.replace(on(), train=Train(dtype=dtype)))
        assert len(caplog.records) == warnings
    assert "emulates train.dtype=bfloat16" in caplog.text


def test_the_probe_says_what_bfloat16_costs() -> None:
    words = probe.bf16_words(torch.device("cpu"))
    assert "times the rate of float32 products" in words
    assert ("train.dtype=float32 is faster" in words) == (float(words.split()[0]) < 1)
