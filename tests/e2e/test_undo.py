"""Real peers, of which one computes wrong sums after some honest steps: it is evicted, and all go back to before it contributed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal import config as configuration
from shoal.executor.answers import known_answers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 150.0  # at most
HONEST = 2  # steps


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_liar_contributed_before_it_was_found_out_is_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import liars

    small = ["model.hidden_size=32", "model.layers=3", "train.batch=12", "data.sequence=32"]
    config = configuration.load(liars.QUICKSTART, small)
    network = msgspec.structs.replace(config.network, host="127.0.0.1", discovery="gossip", transport="tls")
    run = msgspec.structs.replace(config.run, steps=5000, spot_checks=0.1, undo="checkpoint")
    config = msgspec.structs.replace(config, run=run, network=network)
    seen: list[liars.Seen] = []
    really = liars.views

    def views(folder: Path) -> list[liars.Seen]:
        seen[:] = really(folder)
        return seen

    def trained_again(known: list[liars.Seen]) -> bool:
        return bool(known[-1].undone_steps) and known[-1].step > HONEST

    monkeypatch.setattr(liars, "views", views)
    outcome = liars.played(f"wrong sums@{HONEST}", config, known_answers(config), SECONDS, trained_again)
    back = next(at for at, one in enumerate(seen) if one.undone_steps)
    before, after = seen[back - 1], seen[back]
    assert (before.step, after.step, after.undone_steps) == (HONEST, 0, HONEST), after
    assert f"is undone: back from step {HONEST} to the state of step 0, {HONEST} steps" in after.reason
    evicted = [peer for peer in before.members if peer not in after.members]
    assert len(evicted) == 1 and evicted[0] in after.reason
    assert outcome.evictions >= 1 and not outcome.harmed
    assert seen[-1].step > HONEST and not seen[-1].reason.startswith("failed")
    assert [one.step for one in seen[back:]] == sorted(one.step for one in seen[back:]) or outcome.evictions > 1
