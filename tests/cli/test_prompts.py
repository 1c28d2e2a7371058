"""eval.prompts: which settings go with them, what the process beside the launcher is asked and answers, and what a person sees of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal import config as configuration
from shoal.api import prompts
from shoal.cli import train
from shoal.launcher.watching import samples
from shoal.launcher.watching.samples import KEPT, Request, Sample, Samples

PROMPTS = 'eval.prompts=["once upon", "and then"]'


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((PROMPTS, "device.executor=swapping", "device.memory_bytes=1GB"), "stages lie on one device"),
        ((PROMPTS, "device.executor=emulated"), "stages lie on one device"),
        ((PROMPTS, "device.cache_bytes=0"), "device.cache_bytes = 0 keeps no keys"),
        ((PROMPTS, "eval.patience=3"), "eval.path names no held-out text"),
        (("eval.prompt_tokens=3",), "eval.prompts is empty"),
        (("eval.every=3",), "eval.path names no held-out text"),
        (('eval.prompts=[""]',), "eval.prompts"),
    ],
)
def test_what_does_not_go_with_prompts_is_refused_by_name(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        configuration.load(None, words)
    assert configuration.load(None, [PROMPTS, "eval.every=3", "eval.prompt_tokens=9"]).eval.prompt_tokens == 9


def test_one_machine_alone_refuses_them() -> None:
    with pytest.raises(ValueError, match="continued by a run's peers, and here are none"):
        train.configured([PROMPTS, "run.stages=1", "run.peers=1"])


class Echo:
    """A model that adds the prompt's tokens once more."""

    positions = 100

    class tokenizer:
        chat_template = None

        def __init__(self, text: str, add_special_tokens: bool) -> None:
            self.input_ids = list(text.encode())

        @staticmethod
        def decode(tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode()

    def generate(self, tokens: list[int], sampling: Any, take: Callable[[int], None]) -> list[int]:
        assert sampling.temperature == 0
        return tokens[: sampling.tokens]


def test_each_prompt_is_continued_with_the_likeliest_tokens_and_a_long_one_is_refused() -> None:
    config = configuration.load(None, [PROMPTS, "eval.prompt_tokens=4"])
    heard: list[Sample] = []
    prompts.samples(config, Echo(), 20, heard.append)  # type: ignore[arg-type]  # no more of a Source than is used
    assert [(each.prompt, each.text, each.steps) for each in heard] == [
        ("once upon", "once", (20, 20)),
        ("and then", "and ", (20, 20)),
    ]
    long = configuration.load(None, [f'eval.prompts=["{"x" * 100}"]'])
    with pytest.raises(ValueError, match="the model has 100 positions"):
        prompts.samples(long, Echo(), 20, heard.append)  # type: ignore[arg-type]


class Watch:
    """A run as far as it is looked at."""

    def __init__(self) -> None:
        self.books = SimpleNamespace(view=SimpleNamespace(step=0, started=True, finished=False))
        self.events: list[str] = []
        self.finished, self.failed, self.checkpoint, self.saved = False, "", "", 0

    def tell(self, kind: str, text: str, now: float) -> None:
        assert kind == "sample"
        self.events.append(text)


ANSWERS = """
import sys, json
for line in sys.stdin:
    step = json.loads(line)["step"]
    if step == 10:
        sys.exit(3)
    print(json.dumps({"step": step, "steps": [step, step + 1], "prompt": "p" * 100, "text": "\\x1b[2Jt\\n"}), flush=True)
    print(json.dumps({"step": step, "done": True}), flush=True)
"""


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_samples_are_asked_for_when_due_kept_and_shown_and_a_dead_process_is_told_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / samples.FILE).write_bytes(b"{}\n" * KEPT + b"half")
    real = asyncio.create_subprocess_exec

    async def answers(*command: str, **options: Any) -> asyncio.subprocess.Process:
        assert command[1:4] == ("-m", "shoal.api.prompts", str(tmp_path))
        process = await real(sys.executable, "-c", ANSWERS, **options)
        kill = process.kill
        monkeypatch.setattr(process, "kill", lambda: (killed.append(process.pid), kill()))
        return process

    killed: list[int] = []
    monkeypatch.setattr(asyncio, "create_subprocess_exec", answers)
    monkeypatch.setattr(samples, "LOOK_S", 0.01)
    watch = Watch()

    async def story() -> None:
        kept = Samples(configuration.load(None, [PROMPTS, "eval.every=5"]), tmp_path, watch)  # type: ignore[arg-type]
        keeping = asyncio.create_task(kept.keep())
        await _until(lambda: len(watch.events) == 1)
        watch.books.view.step = 4
        await asyncio.sleep(0.1)
        assert len(watch.events) == 1, "nothing is due before step 5"
        watch.books.view.step = 7
        await _until(lambda: len(watch.events) == 2)
        watch.books.view.step = 10
        await _until(lambda: len(watch.events) == 3)
        watch.books.view.step = 15
        await _until(lambda: len(watch.events) == 4)
        keeping.cancel()
        await kept.close()

    asyncio.run(story())
    assert len(killed) == 1, "killed again once it has ended, asyncio finds no such child and says so on the screen"
    assert watch.events[0].startswith('step 1: "…ppp') and watch.events[0].endswith('p" → "\\x1b[2Jt↵"')
    assert watch.events[1].startswith("step 8: ") and watch.events[3].startswith("step 16: ")
    assert "has ended with 3" in watch.events[2] and "started again" in watch.events[2]
    lines = (tmp_path / samples.FILE).read_bytes().splitlines()
    assert len(lines) == KEPT
    assert [msgspec.json.decode(line, type=Sample).step for line in lines[-3:]] == [0, 7, 15]


def test_at_the_end_the_last_checkpoint_is_asked_unless_the_person_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    asked: list[Request] = []
    watch = Watch()
    watch.finished, watch.checkpoint, watch.saved = True, str(tmp_path / "step-20"), 20
    kept = Samples(configuration.load(None, [PROMPTS]), tmp_path, watch)  # type: ignore[arg-type]

    async def ask(request: Request) -> None:
        asked.append(request)

    monkeypatch.setattr(kept, "_ask", ask)
    asyncio.run(kept.finish(lambda: False))
    assert not asked, "there is no such checkpoint on this machine"
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20/config.json").write_text("{}")
    asyncio.run(kept.finish(lambda: True))
    assert not asked
    asyncio.run(kept.finish(lambda: False))
    assert asked == [Request(20, str(tmp_path / "step-20"))]
