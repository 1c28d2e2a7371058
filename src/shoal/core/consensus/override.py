"""The operator's override of the quorum: when most members of a run are gone for good, who goes on, and from where.

Without a quorum nothing is agreed, so that two halves of a split network never both commit. When the missing half is not cut off but
lost, only a person can know it. `decide` makes that person's word into the View that the survivors take for agreed: they alone, back at
the newest checkpoint, with a number, a term and an epoch so far ahead that whatever the others still agree on among
themselves is older, and void as soon as they hear of it. It refuses wherever it can see that the others may live: then both sides
would train. What it cannot see is why the command asks for the name of everybody who is given up.

Pure; for cli/recover.py. What a peer does with an Override is in member/updates.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.core.consensus.certificates import can_agree
from shoal.core.messages import Member, Override, Peer, Standing, View

AHEAD = 1 << 20  # views, terms and epochs: more than any cut-off side agrees on before somebody looks at it


class Refusal(ValueError):
    """Why going on would not be sound, and what would be."""


def decide(
    standings: Mapping[Peer, Standing],
    gone: frozenset[Peer],
    saved: int,
    microbatches: int,
    before: Override | None = None,
) -> tuple[View, int]:
    """The View to go on with, and its term. `standings`: everyone who answered; `gone`: who the operator says is gone for good;
    `saved`: the step of the newest checkpoint; `before`: the override that was given last. Refusal says what is in the way."""
    if not standings:
        raise Refusal(
            "no peer of the run answers: give `shoal run ... --resume`, which goes on from the newest checkpoint"
        )
    newest = max(standings.values(), key=lambda standing: (standing.view.epoch, standing.view.number)).view
    listed = {member.peer: member for member in newest.members + newest.joining}
    here = {peer: member for peer, member in listed.items() if peer in standings}
    _refuse_living(standings, gone)
    _refuse_unsaid(listed, here, gone)
    voters = newest.voters
    left = sum(peer in here for peer in voters)
    if can_agree(newest, here):
        raise Refusal(f"{left} of {len(voters)} voters answer, which is a quorum: they go on without anybody's word")
    if newest.finished:
        raise Refusal("the run is finished")
    if saved > newest.step:
        raise Refusal(
            f"there is a checkpoint of step {saved}, but those who answer know of step {newest.step} only: the others have gone on "
            "without them. End these peers; if the others are gone too, give `shoal run ... --resume`"
        )
    _refuse_second(newest, here, before)
    undone = (newest.step - saved) * microbatches
    account = newest.account
    account = msgspec.structs.replace(
        account,
        issued=account.committed - undone,
        committed=account.committed - undone,
        undone=account.undone + undone,
        killed=account.killed + sum(member.peer not in here for member in newest.members),
    )
    view = View(
        number=newest.number + AHEAD,
        step=saved,
        members=tuple(Member(peer=member.peer, stage=member.stage, seat=member.seat) for member in here.values()),
        epoch=newest.epoch + AHEAD,
        account=account,
        saved=saved,
        evicted=newest.evicted,
        undoing=newest.undoing,
        part_norms=newest.part_norms,
        founder=newest.founder,
        reason=f"the operator has given up {len(listed) - len(here)} of {len(listed)} peers: {len(here)} go on from step "
        f"{newest.step} back at the state of step {saved}",
    )
    return view, max(standing.term for standing in standings.values()) + AHEAD


def times_gone_back(epoch: int) -> int:
    """How often a run has gone back to a checkpoint: an override counts once."""
    return epoch // AHEAD + epoch % AHEAD


def _refuse_living(standings: Mapping[Peer, Standing], gone: frozenset[Peer]) -> None:
    for peer in sorted(gone):
        if peer in standings:
            raise Refusal(f"{peer} is said to be gone, but it answers")
        heard = sorted(other for other, standing in standings.items() if peer in standing.heard)
        if heard:
            raise Refusal(f"{peer} is said to be gone, but {heard[0]} has just heard it: end its process first")


def _refuse_unsaid(listed: Mapping[Peer, Member], here: Mapping[Peer, Member], gone: frozenset[Peer]) -> None:
    """Everybody of the newest view must answer or be given up by name."""
    unsaid = sorted(peer for peer in listed if peer not in here and peer not in gone)
    if unsaid:
        raise Refusal(
            f"{', '.join(unsaid)} do not answer. Should they be cut off and not gone, both sides would train, and one of them for "
            "nothing: end their processes or their machines, then name each with --gone"
        )
    if not here:
        raise Refusal("nobody who answers belongs to the newest view: give `shoal run ... --resume`")


def _refuse_second(newest: View, here: Mapping[Peer, Member], before: Override | None) -> None:
    """The side that an earlier override chose is the run; another side must not be chosen beside it."""
    if before is None or newest.epoch >= before.view.epoch:
        return
    chosen = ", ".join(member.peer for member in before.view.members)
    raise Refusal(
        f"an override of this run has chosen {chosen}, and those who answer ({', '.join(sorted(here))}) have not heard of it. That side "
        "is the run; should it be gone too, give `shoal run ... --resume`"
    )
