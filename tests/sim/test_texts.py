"""Texts through a simulated swarm that trains, loses peers and messages: each token is the one that follows from the text alone."""

from __future__ import annotations

import msgspec
import pytest

from shoal.sim import run
from shoal.sim.scenarios.catalogue import load
from shoal.sim.swarm import simulate


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 3, 8])
def test_tokens_are_right_whoever_dies_and_training_finishes(seed: int) -> None:
    outcome = simulate("texts", seed)
    assert not outcome.violations, f"{outcome.violations[0]}\nrerun: {run.rerun('texts', seed)}"
    assert not outcome.stuck
    assert min(tokens for tokens, _ in outcome.texts) > 0
    assert sum(replays for _, replays in outcome.texts) > 0


def test_without_faults_only_moves_replay_a_text_and_training_is_not_changed() -> None:
    calm = msgspec.structs.replace(load("calm"), texts=2)
    outcome, undisturbed = simulate(calm, 1), simulate(load("calm"), 1)
    assert not outcome.violations
    assert sum(replays for _, replays in outcome.texts) <= 1, "one for the peer that moves to another stage"
    assert min(tokens for tokens, _ in outcome.texts) > 0
    assert (outcome.committed, outcome.redone) == (undisturbed.committed, undisturbed.redone)
