"""One liar of six costs little more than a peer that is missing: it is found out within seconds, and no honest peer is harmed for it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import liars_simulated as liars

SECONDS, LEFT = 30.0, 0.62  # of the honest run's steps in the first half minute; a peer that is missing leaves 0.78
SOON_S = 8.0


@cache
def steps_of_the_honest() -> int:
    return liars.play(("", 6, 1, 1, SECONDS)).steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["withhold", "held", "missing", "idle", "coming", "gone", "mute", "rate"])
def test_one_liar_of_six_is_found_out_within_seconds_and_honest_peers_are_not(kind: str) -> None:
    lied = liars.play((kind, 6, 1, 1, SECONDS))
    assert lied.wronged == lied.violations == () and lied.steps >= LEFT * steps_of_the_honest()
    assert lied.evicted_s and max(lied.evicted_s) <= SOON_S
