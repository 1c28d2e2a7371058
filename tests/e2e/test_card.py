"""A run on a card, by real processes: peers that share it train what those on the CPU train, and a joiner without one keeps their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.e2e.test_run import Start, assert_balanced, end, start, summary
from tests.e2e.test_sharded import invite_of, most_replicas

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]),
]
__all__ = ["start"]  # a fixture


def test_peers_that_share_a_card_lose_as_those_on_the_cpu(kind: str, start: Start, tmp_path: Path) -> None:
    def losses(kind: str, name: str) -> list[float]:
        end(start("run", "tiny.toml", "run.peers=6", f"device.kind={kind}", f"run.dir={name}"))
        (tmp_path / name / "tiny").rename(tmp_path / "runs" / "tiny")
        account = summary(tmp_path)
        (tmp_path / "runs" / "tiny").rename(tmp_path / f"{name}-read")
        assert_balanced(account, 4)
        return [float(loss) for loss in account["losses"]]

    (tmp_path / "runs").mkdir()
    assert losses(kind, "there") == pytest.approx(losses("cpu", "here"), rel=1e-4)


def test_a_joiner_on_the_cpu_serves_beside_replicas_on_the_card(kind: str, start: Start, tmp_path: Path) -> None:
    words = ("run.stages=2", "run.peers=3", "model.layers=2", "network.delay_s=0.4", "run.steps=4", "--here", "2")
    host = start("run", "tiny.toml", *words, f"device.kind={kind}")
    invite = invite_of(start, host, tmp_path)
    guest = start("join", invite, "--files", ".", "run.dir=guest", "device.kind=cpu")
    assert "the run is finished" in end(guest)
    assert "Every sample counted once." in end(host)
    assert_balanced(summary(tmp_path), 4)
    assert most_replicas(tmp_path) == 2, "replicas on card and CPU hold the same bits"
