"""`make gpu` says of each part what it asks and whether that held, skips by name, and fails when a part does."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "first_hour.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_hour", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def says(text: str, code: int = 0) -> tuple[str, ...]:
    return sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"


def test_parts_are_kept_failed_rehearsed_or_skipped_by_name(
    tool: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [
        tool.Part("good", "one", says("fine"), says("played"), judge=lambda output: tool.Judged(True, output.strip())),
        tool.Part("bad", "two", says("broken", 1)),
        tool.Part("slow", "three", says("1 token/s"), judge=lambda output: tool.Judged(False, "1 token/s")),
    ]
    assert tool.run(parts, "") == 2
    good, bad, broken, slow, token = capfd.readouterr().out.splitlines()
    assert good.startswith("KEPT") and good.endswith("It asks: one. Measured: fine.")
    assert bad.startswith("FAILED") and broken == "broken" and slow.startswith("FAILED") and token == "1 token/s"
    assert tool.run(parts, "no card here") == 0
    rehearsed, *skipped = capfd.readouterr().out.splitlines()
    assert rehearsed.startswith("CPU ") and rehearsed.endswith("Measured: played.")
    assert [line.split(":")[0] for line in skipped] == ["SKIPPED  bad", "SKIPPED  slow"]
    assert all("no card here" in line for line in skipped)
    assert tool.run([tool.Part("many", "four", says("fine"), cards=99)], "") == 0
    assert capfd.readouterr().out.startswith("SKIPPED  many: it needs 99 cards. It asks: four")


def test_swapping_that_is_slower_than_fsdp2_or_above_its_limit_fails(tool: ModuleType) -> None:
    def judged(ours: float, theirs: float, within: bool = True) -> bool:
        rows = [("shoal", ours, within), ("fsdp2", theirs, True), ("resident", 9.0, True)]
        cases = [{"system": s, "limit": "12 GiB", "tokens_per_s": t, "within_limit": w} for s, t, w in rows]
        return bool(tool.judge_swapping("words\n" + json.dumps({"setting": {"cases": cases}})).kept)

    assert judged(3.0, 2.0) and not judged(2.0, 3.0) and not judged(3.0, 2.0, within=False)


def test_a_code_that_is_slower_than_the_link_fails(tool: ModuleType) -> None:
    def judged(card: object) -> bool:
        return bool(tool.judge_codecs(json.dumps({"setting": {"cuda": card}})).kept)

    assert judged({"int8": {"encode_GBps": 90.0, "decode_GBps": 40.0}}) and judged("no GPU here")
    assert not judged({"int8": {"encode_GBps": 90.0, "decode_GBps": 20.0}})


def test_every_part_names_files_that_are_there(tool: ModuleType) -> None:
    for part in tool.PARTS:
        for word in (*part.on_card, *part.rehearsal):
            if word.endswith(".py"):
                assert (SCRIPT.parents[1] / word).exists(), word
