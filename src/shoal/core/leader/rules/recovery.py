"""What the run does when a stage has no member left: with whose state it goes on, and from which step.

Three ways, each under a new epoch, so that everything of the one before is void: with a replica that was only cut off and comes back with
the state; from the newest checkpoint that can be loaded; or with a state made of its two neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import counting, on_probation, owned
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.leader.rules.start import complete
from shoal.core.messages import Continued, Holding, Member, Phase, Rebuilt, Settings, View
from shoal.core.planned import planned_seat

CAUSE = 500  # characters of a peer's reason that are quoted


def empty_stages(view: View, stages: int) -> list[int]:
    """Stages that no member serves."""
    return sorted(set(range(stages)) - {member.stage for member in view.members})


def lost_stages(view: View, stages: int) -> list[int]:
    """Stages whose state nobody holds. Before an epoch's first step those are not counted that are made anew: from the checkpoint,
    or from their neighbours. A peer that is moved to a lost stage has nothing to hold."""
    if view.started:
        return empty_stages(view, stages)
    made = {one.stage for one in view.rebuilt}
    return [stage for stage in empty_stages(view, stages) if view.kept and stage not in made]


def take_back(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """A peer comes back with the state of a stage that lost its last member: all go on from this step.

    The books of the step are void: a peer that was removed in the middle of it may have missed anything."""
    if not view.started or not facts.requests.joins:
        return None
    empty = empty_stages(view, settings.stages)
    wanted = {Holding(epoch=view.epoch, stage=stage, step=view.step): stage for stage in empty}
    taken = {member.seat for member in view.members + view.joining}
    back: tuple[Member, ...] = ()
    for peer, asked in facts.requests.joins.items():
        if asked.holds in wanted:
            seat = planned_seat(settings, asked.seat, wanted[asked.holds], taken)
            back, taken = (*back, Member(peer, wanted[asked.holds], seat=seat)), taken | {seat}
    if not back:
        return None
    words = ", ".join(f"{member.peer} comes back with the state of stage {member.stage}" for member in back)
    members = view.members + back
    account = counting(view.account, back, issued=-settings.microbatches if view.begun else 0)
    after = successor(
        view,
        [f"{words}: step {view.step} begins again"],
        members=members,
        owners=owned(members, settings.count(view.step), (), on_probation(view), settings),
        epoch=view.epoch + 1,
        phase=Phase.SAVING if view.phase is Phase.SAVING else Phase.TRAINING,
        continued=Continued(),
        since=view.number + 1,
        last=None,
        fenced=(),
        account=msgspec.structs.replace(account, redone=account.redone + facts.booked),
    )
    return Proposal(after)


def stage_lost(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """A stage has lost every copy of its state, and the run is not over."""
    return not complete(view, facts, settings) and bool(lost_stages(view, settings.stages))


def recover(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """All go back to the newest checkpoint, or make the lost state from its neighbours. Not at once: a replica that was only cut off
    may come back with it."""
    if settings.lost_stage == "wait" or now - facts.history.since(recover) < settings.lost_stage_wait_s:
        return None
    lost = lost_stages(view, settings.stages)
    why_not = ""
    if settings.lost_stage == "neighbours":
        rebuilt, why_not = from_neighbours(lost, settings.stages, facts.history.norms)
        if rebuilt and view.started:
            return Proposal(_rebuilt(view, rebuilt, facts, settings))
    saved = max(view.saved, facts.saving.published)
    reason = (
        f"stage {lost[0]} lost its last replica: back from step {view.step} to the state of step {saved}, "
        f"{view.step - saved} steps are trained again{why_not}"
    )
    return Proposal(gone_back(view, saved, reason, settings))


def cannot_load(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """Before an epoch's first step, a peer reports that it cannot load its stage. At the beginning, those that have not joined yet may
    have what it lacks."""
    waits = not view.epoch and len(facts.present) < settings.peers
    return not view.started and not waits and bool(facts.load_failed)


def further_back(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """No peer of a stage can load the checkpoint that all went back to: all go back to the newest older one that any of them finds whole.
    If there is none of this session, the run ends."""
    for stage in range(settings.stages):
        peers = [member.peer for member in view.members + view.joining if member.stage == stage]
        failed = [facts.load_failed[peer] for peer in peers if peer in facts.load_failed]
        others = len(view.members if view.epoch else facts.present) - 1
        reports = [one for one in failed if one.stage == stage and one.asked >= others]
        if not peers or len(reports) < len(peers):
            continue
        older = max(report.older for report in reports)
        why = f"stage {stage} cannot be loaded from the checkpoint of step {view.step} ({peers[0]}: {reports[0].reason[:CAUSE]})"
        if max(1, settings.first_step) <= older < view.step:
            undone = f"back to the state of step {older}, {view.step - older} steps more are trained again"
            return Proposal(gone_back(view, older, f"{why}: {undone}", settings))
        rest = f"the newest whole one is of step {older}, from an earlier session" if older else "no older one is whole"
        words = f"{why}; {rest}: the run ends, and --resume goes on from what is whole then"
        return Proposal(successor(view, [words], phase=Phase.FAILED))
    return None


def gone_back(view: View, saved: int, reason: str, settings: Settings, **changes: Any) -> View:
    """All go back to the checkpoint of step `saved`. `changes`: of whatever else the view says, such as its members."""
    undone = (view.step - saved) * settings.microbatches
    account = changes.pop("account", view.account)
    return successor(
        view,
        [reason],
        step=saved,
        owners=(),
        phase=Phase.GATHERING,
        fenced=(),
        epoch=view.epoch + 1,
        since=view.number + 1,
        last=None,
        account=msgspec.structs.replace(
            account,
            issued=account.committed - undone,
            committed=account.committed - undone,
            undone=account.undone + undone,
        ),
        saved=saved,
        continued=None,
        **changes,
    )


def from_neighbours(lost: Sequence[int], stages: int, norms: tuple[float, ...]) -> tuple[tuple[Rebuilt, ...], str]:
    """How the lost stages would be made from the two beside each, weighted by the squared norms of their last gradients
    (CheckFree, arXiv 2506.15461); or why that is impossible. `norms`: by stage, () when none are known."""
    for stage in lost:
        if stage in (0, stages - 1):
            return (), f"; stage {stage} has no two neighbours to be made from"
        if {stage - 1, stage + 1} & set(lost):
            return (), f"; a neighbour of stage {stage} is lost too"
    norms = norms if len(norms) == stages else (1.0,) * stages
    both = [norms[stage - 1] + norms[stage + 1] for stage in lost]
    return tuple(
        Rebuilt(stage=stage, below=norms[stage - 1] / whole if whole > 0 else 0.5)
        for stage, whole in zip(lost, both, strict=True)
    ), ""


def _rebuilt(view: View, rebuilt: tuple[Rebuilt, ...], facts: Facts, settings: Settings) -> View:
    """All go on from this step, with states made of their neighbours'."""
    words = ", ".join(
        f"stage {one.stage} lost its last replica and is made from its neighbours ({one.below:.0%} of the one below)"
        for one in rebuilt
    )
    account = view.account
    return successor(
        view,
        [f"{words}: nothing is undone, the loss will show it; step {view.step} begins again"],
        owners=(),
        phase=Phase.GATHERING,
        fenced=(),
        epoch=view.epoch + 1,
        continued=Continued(rebuilt),
        since=view.number + 1,
        last=None,
        account=msgspec.structs.replace(
            account,
            issued=account.issued - settings.microbatches * (1 + view.begun),  # issued again when the step begins again
            redone=account.redone + facts.booked,
        ),
    )
