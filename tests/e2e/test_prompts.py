"""eval.prompts in a real run: its peers continue them while it trains, its last checkpoint at the end; training is as without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_run import Start, alive, assert_balanced, end, start, steps_done, summary, wait_for
from tests.e2e.test_serve import GREEDY, PROMPT, expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture
PROMPTED = ["eval.every=5", f'eval.prompts=["{PROMPT}", "hello"]', f"eval.prompt_tokens={GREEDY.tokens}"]


def samples(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs/tiny/samples.jsonl"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def sampler(launcher: int) -> list[int]:
    """The process that continues the prompts."""
    return [pid for pid in below(launcher) if b"shoal.api.prompts" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def below(launcher: int) -> list[int]:
    return [int(pid) for path in Path(f"/proc/{launcher}/task").glob("*/children") for pid in path.read_text().split()]


def test_prompts_are_continued_by_the_peers_and_at_the_end_by_the_last_checkpoint(start: Start, tmp_path: Path) -> None:
    settings = ("run.steps=400", "data.sequence=128", "checkpoint.every=100")
    launcher = start("run", "tiny.toml", *settings, *PROMPTED)
    wait_for(lambda: launcher.poll() is not None or samples(tmp_path))
    (first,) = sampler(launcher.pid)
    os.kill(first, signal.SIGKILL)
    seen = len(samples(tmp_path))
    wait_for(lambda: launcher.poll() is not None or len(samples(tmp_path)) > seen)
    assert launcher.poll() is None, "it trained all the while"
    output = end(launcher)
    lines = samples(tmp_path)
    while_training, last = lines[:-2], lines[-2:]
    assert {each["prompt"] for each in while_training} == {PROMPT, "hello"}
    assert all(0 <= min(each["steps"]) <= max(each["steps"]) <= 400 for each in while_training)
    assert f'sample     step 400: "{PROMPT}" → "' in output
    checkpoint = tmp_path / "runs/tiny/checkpoints/step-400"
    for each in last:
        assert each["steps"] == [400, 400]
        tokens = expected(checkpoint, list(each["prompt"].encode()))
        assert each["text"] == bytes(tokens).decode(errors="replace")
    assert_balanced(summary(tmp_path), 400)


def test_ctrl_c_leaves_the_last_samples_out(start: Start, tmp_path: Path) -> None:
    launcher = start("run", "tiny.toml", "run.steps=20", "data.sequence=128", *PROMPTED)
    wait_for(lambda: launcher.poll() is not None or (steps_done(tmp_path) == 20 and sampler(launcher.pid)))
    left = below(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    end(launcher, code=130)
    wait_for(lambda: not any(alive(pid) for pid in left))
