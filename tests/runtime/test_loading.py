"""A peer joins and downloads while the model's classes are imported; no stage is built before, and what is wrong is told at once."""

from __future__ import annotations

import asyncio
import gc
import queue
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from tests import tiny

from shoal import build
from shoal import config as configuration
from shoal.config import Config
from shoal.core.messages import Done, Failed, Init
from shoal.launcher import peer
from shoal.launcher.launch import PeerSpec
from shoal.runtime.node import Node

ANSWER_S = 60.0
BEGIN = """
import sys
from shoal import build, config
build.load(config.load(None, sys.argv[1:])).runner.close()
print("transformers" in sys.modules)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(tiny.DATA)
    (tmp_path / "tiny.toml").write_text(tiny.tiny())
    return configuration.load(tmp_path / "tiny.toml", [])


def test_what_a_peer_begins_with_needs_no_models_classes(config: Config) -> None:
    words = ["data.source=text", "data.path=a.txt", "data.sequence=16"]
    said = subprocess.run([sys.executable, "-c", BEGIN, *words], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]


def test_no_stage_is_built_before_the_model_is_checked(config: Config) -> None:
    loaded = build.load(config)
    answers: queue.SimpleQueue[Done | Failed] = queue.SimpleQueue()
    loaded.runner.submit(Init(1, stage=0, step=0), answers.put)
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.5)
    build.check(config)
    loaded.checked.set_result(None)
    assert isinstance(answers.get(timeout=ANSWER_S), Done)
    loaded.runner.close()


def test_of_a_model_that_does_not_fit_no_stage_is_built_at_all(config: Config) -> None:
    loaded = build.load(config)
    loaded.checked.set_exception(ValueError("the model has too few layers"))
    answers: queue.SimpleQueue[Done | Failed] = queue.SimpleQueue()
    loaded.runner.submit(Init(1, stage=0, step=0), answers.put)
    failed = answers.get(timeout=ANSWER_S)
    assert isinstance(failed, Failed) and failed.lost and "the model has too few layers" in failed.reason
    loaded.runner.close()


class Waiting:
    """A node that takes part until it is ended."""

    def __init__(self) -> None:
        self.running = False
        self.begun = asyncio.Event()

    async def run(self) -> Any:
        self.running = True
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False


def test_what_the_check_finds_ends_the_peer_with_these_words() -> None:
    async def failing() -> None:
        node, checked = Waiting(), Future[None]()
        running = asyncio.ensure_future(peer._run(cast(Node, node), checked))
        await node.begun.wait()
        checked.set_exception(ValueError("the model has too few layers"))
        with pytest.raises(ValueError, match="too few layers"):
            await running
        assert not node.running

    asyncio.run(failing())


def test_a_check_without_a_finding_ends_nothing() -> None:
    async def going_on() -> None:
        node, checked = Waiting(), Future[None]()
        running = asyncio.ensure_future(peer._run(cast(Node, node), checked))
        checked.set_result(None)
        done, _ = await asyncio.wait([running], timeout=0.2)
        assert not done and node.running
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(going_on())


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_again_after_the_imports_whatever_became_of_them(
    config: Config, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Config) -> None:
        assert not gc.isenabled()
        if fails:
            raise ValueError("the model has too few layers")

    monkeypatch.setattr(build, "check", check)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        loading: Future[build.Loaded] = Future()
        peer._load(PeerSpec(config={}, directory="", label="p1", first=False), config, loading)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        assert (loading.result().checked.exception() is not None) == fails
        loading.result().runner.close()
    finally:
        gc.enable()
