"""Texts through a simulated swarm that trains, loses peers and messages: each token is the one that follows from the text alone."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.inference.server import InferenceServer
from shoal.sim import run
from shoal.sim.scenarios.catalogue import load
from shoal.sim.swarm import Outcome, simulate


@pytest.mark.parametrize("seed", [1, 3, 7])
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


def test_the_checker_sees_a_replica_that_uses_keys_and_values_of_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a server took every request of a session that it knows."""
    fault = InferenceServer._fault

    def lax(server: InferenceServer, request: object) -> tuple[str, str]:
        kind, reason = fault(server, request)  # type: ignore[arg-type]
        return ("", "") if kind == "missing" and request.key in server._kept else (kind, reason)  # type: ignore[attr-defined]

    monkeypatch.setattr(InferenceServer, "_fault", lax)
    outcomes: list[Outcome] = [simulate("texts", seed) for seed in (2,)]
    assert any(violation.checker == "text" for outcome in outcomes for violation in outcome.violations)
