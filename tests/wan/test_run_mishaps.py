"""Runs of real processes in the laboratory whose hosts or lines fail in the middle of something (benchmarks/wan_mishaps.py): they go on,
all that live hold a stage in the end, and every sample counts once."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def mishaps(real: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import wan_mishaps

    return wan_mishaps


@pytest.mark.parametrize(
    "name", ["h2 killed, averaging", "h2 cut for 15 s, hops", "h2 port blocked, hops", "h4 cut for 2 s, download"]
)
def test_a_run_goes_on_and_every_sample_counts_once(mishaps: ModuleType, tmp_path: Path, name: str) -> None:
    (scenario,) = [each for each in mishaps.SCENARIOS if each.name == name]
    row = mishaps.play(scenario, tmp_path)
    assert not row["trouble"], row
    assert not row["wrong"], row


def test_a_step_with_a_sample_twice_or_missing_is_seen(mishaps: ModuleType) -> None:
    """The check itself."""
    whole = list(range(mishaps.BATCH))

    def step(number: int, one: list[int], other: list[int]) -> dict[str, object]:
        groups = [[["a", one, 0], ["b", other, 0]], [["c", whole, 0]]]
        return {"commit": [number, 7, 1.0, 1.0, [], groups]}

    assert not mishaps.wrong_samples([step(0, whole[:9], whole[9:]), step(1, whole, [])])
    assert mishaps.wrong_samples([step(0, whole[:9], whole[8:])])
    assert mishaps.wrong_samples([step(0, whole[:9], whole[10:])])
    assert mishaps.wrong_samples([step(1, whole, [])]), "step 0 is missing"
