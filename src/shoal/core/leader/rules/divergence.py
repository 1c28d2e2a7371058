"""What the run does when a loss or gradient is not finite at every replica that computes it: a fact about training, not about peers.

One replica alone may be broken: the owner of the microbatch asks another one, and the replica that fails is avoided (routing.py). When
two replicas of the stage, or its only one, report the same microbatch, the step is skipped: it is committed without a round, and the
parameters stay. Several such steps in a row, or one where the run's settings say so, end the run.
"""

from __future__ import annotations

import msgspec

from shoal.core.consensus.validity import skipped_in_a_row
from shoal.core.leader.facts import Facts
from shoal.core.leader.rules.commit import next_step, saves
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.messages import Committed, NonFinite, Phase, Settings, View
from shoal.core.names import key_of

WITNESSES = 2  # replicas that must find the same, where a stage has so many
IN_A_ROW = 5  # steps that are skipped one after the other, before the run ends
CAUSE = 300  # characters of a replica's reason that are quoted


def diverged(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Skip the step, or end the run, where a result is not finite whoever computes it."""
    if view.phase not in (Phase.TRAINING, Phase.REOPENED) or facts.rounds.open is not None:
        return None
    report = _attested(view, facts)
    if report is None or not all(facts.holds(member, view) for member in view.members):
        return None  # a replica that still applies the step before would miss this one
    what = f"microbatch {report.index} is not finite at stage {report.stage} ({report.reason[:CAUSE]})"
    skipped = skipped_in_a_row(view) + 1
    several = f"{skipped} steps in a row" if skipped > 1 else "training diverges"
    if settings.nonfinite == "stop" or skipped > IN_A_ROW or view.phase is Phase.REOPENED:
        saved = max(view.saved, facts.saving.published)
        kept = f"its newest checkpoint is of step {saved}" if saved else "it has no checkpoint"
        words = f"step {view.step}: {what}: {several}. The run ends; {kept}. Try a lower train.learning_rate"
        void = msgspec.structs.replace(view.account, issued=view.account.committed)  # of the step that is not trained
        return Proposal(successor(view, [words], phase=Phase.FAILED, account=void))
    over = view.step + 1 >= settings.steps  # before that, a checkpoint would only push out one from before it diverged
    last = Committed(
        step=view.step,
        round=0,
        norm=0.0,
        loss=0.0,
        digests=(),
        groups=(),
        save=facts.requests.save or (over and saves(view.step + 1, settings)),
        skipped=skipped,
    )
    return next_step(view, last, f"is skipped, no parameter changes: {what}", facts, settings, now)


def _attested(view: View, facts: Facts) -> NonFinite | None:
    """A report of this step that enough replicas of its stage make."""
    if not facts.evidence.nonfinite:
        return None
    keys: dict[int, set[str]] = {}
    for peer, stage in facts.serving.items():
        keys.setdefault(stage, set()).add(key_of(peer))
    for (step, stage, _), by in facts.evidence.nonfinite.items():
        witnesses = by.keys() & keys.get(stage, set())
        if step == view.step and witnesses and len(witnesses) >= min(WITNESSES, len(keys[stage])):
            return by[min(witnesses)]
    return None
