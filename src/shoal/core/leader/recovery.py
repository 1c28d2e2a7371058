"""What is made of a view when a stage has no member left: with whose state the run goes on, and from which step.

For leader.py, which says when. Three ways, each under a new epoch, so that everything of the one before is void: with a replica that
was only cut off and comes back with the state; from the newest checkpoint; or with a state made of its two neighbours'. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shoal.core.leader import overlap
from shoal.core.leader.membership import counting, owners_of
from shoal.core.messages import Holding, Join, Member, Peer, Rebuilt, Settings, View
from shoal.core.planned import holder


def empty(view: View, stages: int) -> list[int]:
    """Stages that no member serves."""
    return sorted(set(range(stages)) - {member.stage for member in view.members})


def lost(view: View, stages: int) -> list[int]:
    """Before an epoch's first step: stages whose state nobody has and nobody can make. Who is moved there has nothing to hold."""
    made = {one.stage for one in view.rebuilt}  # or will be, as soon as somebody is there
    return [stage for stage in empty(view, stages) if view.kept and stage not in made]


def taken_back(view: View, settings: Settings, joins: Mapping[Peer, Join], booked: int) -> View | None:
    """A peer comes back with the state of a stage that lost its last member: all go on from this step.

    The books of the step are void (`booked`: entries in them): whoever was put out in the middle of it may have missed anything."""
    if not view.started or not joins:
        return None
    gone = empty(view, settings.stages)
    wanted = {Holding(epoch=view.epoch, stage=stage, step=view.step): stage for stage in gone}
    taken = {member.seat for member in view.members + view.joining}
    back: tuple[Member, ...] = ()
    for peer, asked in joins.items():
        if asked.holds in wanted:
            seat = holder(settings, asked.seat, wanted[asked.holds], taken)
            back, taken = (*back, Member(peer, wanted[asked.holds], seat=seat)), taken | {seat}
    if not back:
        return None
    words = ", ".join(f"{member.peer} comes back with the state of stage {member.stage}" for member in back)
    members = view.members + back
    return msgspec.structs.replace(
        view,
        number=view.number + 1,
        members=members,
        owners=owners_of(members, settings.microbatches),
        epoch=view.epoch + 1,
        kept=True,
        rebuilt=(),
        last=None,
        fenced=(),
        **overlap.nothing_ahead(view.number + 1),
        account=msgspec.structs.replace(
            counting(view.account, back, issued=-settings.microbatches if view.begun else 0),
            redone=view.account.redone + booked,
        ),
        reason=f"{words}: step {view.step} begins again",
    )


def gone_back(view: View, stage: int, saved: int, microbatches: int, why_not: str) -> View:
    """All go back to the checkpoint of step `saved`. `why_not`: what else was wanted, and what was in its way."""
    undone = (view.step - saved) * microbatches
    account = msgspec.structs.replace(
        view.account,
        issued=view.account.committed - undone,
        committed=view.account.committed - undone,
        undone=view.account.undone + undone,
    )
    return msgspec.structs.replace(
        view,
        number=view.number + 1,
        step=saved,
        owners=(),
        started=False,
        fenced=(),
        epoch=view.epoch + 1,
        **overlap.nothing_ahead(view.number + 1),
        last=None,
        account=account,
        saved=saved,
        kept=False,
        rebuilt=(),
        reason=f"stage {stage} lost its last replica: back from step {view.step} to the state of step {saved}, "
        f"{view.step - saved} steps are trained again{why_not}",
    )


def neighbours(gone: Sequence[int], stages: int, norms: tuple[float, ...]) -> tuple[tuple[Rebuilt, ...], str]:
    """How the lost stages would be made from the two beside each, weighted by the squared norms of their last gradients
    (CheckFree, arXiv 2506.15461); or why that is impossible. `norms`: by stage, () when none are known."""
    for stage in gone:
        if stage in (0, stages - 1):
            return (), f"; stage {stage} has no two neighbours to be made from"
        if {stage - 1, stage + 1} & set(gone):
            return (), f"; a neighbour of stage {stage} is lost too"
    norms = norms if len(norms) == stages else (1.0,) * stages
    both = [norms[stage - 1] + norms[stage + 1] for stage in gone]
    return tuple(
        Rebuilt(stage=stage, below=norms[stage - 1] / whole if whole > 0 else 0.5)
        for stage, whole in zip(gone, both, strict=True)
    ), ""


def rebuilt(view: View, made: tuple[Rebuilt, ...], microbatches: int, booked: int) -> View:
    """All go on from this step, with states made of their neighbours'."""
    words = ", ".join(
        f"stage {one.stage} lost its last replica and is made from its neighbours ({one.below:.0%} of the one below)"
        for one in made
    )
    return msgspec.structs.replace(
        view,
        number=view.number + 1,
        owners=(),
        started=False,
        fenced=(),
        epoch=view.epoch + 1,
        kept=True,
        rebuilt=made,
        **overlap.nothing_ahead(view.number + 1),
        last=None,
        account=msgspec.structs.replace(
            view.account,
            # issued again when the steps begin again
            issued=view.account.issued - microbatches * (1 + view.begun),
            redone=view.account.redone + booked,
        ),
        reason=f"{words}: nothing is undone, the loss will show it; step {view.step} begins again",
    )
