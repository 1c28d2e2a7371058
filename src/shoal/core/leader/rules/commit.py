"""The commit of a step.

A step is committed by the view that lists its round's groups, digests and norm, once every participant of the round has reported and
the replicas of every stage agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.core.allreduce.bounds import following, longest, too_long
from shoal.core.allreduce.checked import WrongSums, wrong_sums
from shoal.core.consensus.phases import ended
from shoal.core.consensus.validity import measured
from shoal.core.leader.audits.comparing import Case
from shoal.core.leader.averaging import ROUNDS_PER_TERM, OpenRound
from shoal.core.leader.evictions import Dispute
from shoal.core.leader.facts import Facts
from shoal.core.leader.ledger import counted_twice
from shoal.core.leader.membership import arrived, counting, inherit, moving, on_probation, owned
from shoal.core.leader.rebalance import Move, rebalance
from shoal.core.leader.rules.lines import by_pace
from shoal.core.leader.rules.moves import before_the_next_step, takeovers_of_leavers
from shoal.core.leader.rules.proposal import Proposal, successor, together
from shoal.core.messages import Account, Committed, HeldOut, Member, Peer, Phase, Settings, View
from shoal.core.planned import complete

FAR = 1e4  # by which a stage's squared norm may differ from that of the step before and still be likely
NORMS = 1e-6  # by which the norms of equal gradients may differ: sums of the same values on unlike machines


def disputes(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Dispute | WrongSums]:
    """Replicas of one stage report sums that are not those of their parts, different sums, or different norms of the same sums: the first
    stage where they do."""
    current = facts.rounds.open
    if current is None or not current.complete:
        return ()
    for stage, group in enumerate(current.message.groups):
        peers = [share.peer for share in group]
        wrong = wrong_sums(peers, current.reduced, settings.averaging_error)
        if wrong is not None:
            return (wrong,)
        guilty = too_long(view.part_norms, stage, group, current.reduced, settings)
        if guilty:
            return (WrongSums(guilty),)
        by_digest: dict[str, list[Peer]] = {}
        for peer in peers:
            by_digest.setdefault(current.reduced[peer].digest, []).append(peer)
        if len(by_digest) > 1:
            return (Dispute(f"its sums differ from its stage {stage}'s others", by_digest, retry=True),)
        by_norm = by_norm_of(current, peers)
        if len(by_norm) > 1:
            why = f"its norm of the same sums differs from its stage {stage}'s others"
            return (Dispute(why, by_norm, retry=True, likely=_likely(by_norm, stage, facts)),)
    return ()


def auditable(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Case]:
    """A round whose sums are made and agree: its audit is to be drawn."""
    current = facts.rounds.open
    if current is None or not current.complete or facts.evidence.audits.drawn(current.message):
        return ()
    rates = {peer: held.rate for peer, held in facts.heartbeats.items()}
    gone = frozenset(member.peer for member in view.fenced)
    books = dict(facts.ledger(view.step).books)
    return (
        Case(
            current.message,
            settings.stages,
            dict(current.reduced),
            books,
            facts.serving,
            gone,
            facts.history.norms,
            rates,
            {
                share.peer: most
                for stage, group in enumerate(current.message.groups)
                for share in group
                if (most := longest(view.part_norms, stage, group, share, settings)) is not None
            },
        ),
    )


def _likely(by_norm: dict[str, list[Peer]], stage: int, facts: Facts) -> str:
    """The norm that is next to the stage's last one, where only that is within FAR of it; '' if that tells nothing."""
    norms = facts.history.norms
    if stage >= len(norms) or norms[stage] <= 0.0:
        return ""
    near = [norm for norm in by_norm if 1.0 / FAR <= float(norm) / norms[stage] <= FAR]
    return near[0] if len(near) == 1 else ""


def by_norm_of(current: OpenRound, peers: list[Peer]) -> dict[str, list[Peer]]:
    """Replicas by the norm that they report of their equal gradients: alike where rounding explains the difference."""
    replicas: dict[str, list[Peer]] = {}
    for peer in peers:
        norm = current.reduced[peer].norm_sq
        same = (other for other in replicas if abs(float(other) - norm) <= NORMS * max(abs(norm), abs(float(other))))
        replicas.setdefault(next(same, repr(norm)), []).append(peer)
    return replicas


def commit(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Every replica of every stage holds the same reduced gradient: the step is committed, the next one begins."""
    current = facts.rounds.open
    if current is None or not current.complete or not facts.evidence.audits.passed(current.message):
        return None
    groups = current.message.groups
    norms = tuple(current.reduced[group[0].peer].norm_sq for group in groups)
    ledger = facts.ledger(view.step)
    counted = ledger.counted(groups[-1])
    scale = settings.scale(counted)
    last = Committed(
        step=view.step,
        round=current.message.round,
        norm=math.sqrt(sum(norms)) * scale,
        loss=ledger.loss(groups[-1]) * scale,
        digests=tuple(current.reduced[group[0].peer].digest for group in groups),
        groups=groups,
        save=(facts.requests.save and not 0 < facts.saving.published == view.step) or saves(view.step + 1, settings),
        joiners=tuple(peer for group in current.message.joiners for peer in group),
        counted=counted,
        heldout=ledger.heldout_loss(groups[-1]),
        rewards=ledger.rewards(groups[-1]),
        heldout_rewards=ledger.rewards(groups[-1], heldout=True),
        kept=current.message.kept,
    )
    outcome = f"committed: loss {last.loss:.4f}, norm {last.norm:.3g}, round {last.round % ROUNDS_PER_TERM}"
    if last.rewards is not None:
        outcome += f", accuracy {last.rewards.accuracy:.1%}"
    if last.heldout is not None:
        outcome += f", held-out loss {last.heldout:.4f} before it"
    proposal = next_step(view, last, outcome, facts, settings, now)
    part_norms = following(view.part_norms, groups, current.reduced, settings)
    after = msgspec.structs.replace(proposal.view, part_norms=part_norms)
    return msgspec.structs.replace(proposal, norms=norms, view=after)


def saves(step: int, settings: Settings) -> bool:
    """A checkpoint of that version of the parameters is to be written."""
    if (step >= settings.steps and settings.save_last) or (settings.save_measured and settings.heldout_at(step)):
        return True
    return settings.save_every > 0 and step % settings.save_every == 0


def next_step(view: View, last: Committed, outcome: str, facts: Facts, settings: Settings, now: float) -> Proposal:
    """The view that begins the step after `last`, which ended with `outcome`: leavers go, joiners that took part become members.

    In the middle of the next step, with delayed updates, nobody leaves, and no peer enters that was removed from it."""
    heldout = view.heldout if last.heldout is None else measured(view.heldout, last.step, last.heldout)
    over, goes_on = ended(msgspec.structs.replace(view, step=view.step + 1, heldout=heldout), settings), view.ahead
    last = msgspec.structs.replace(last, save=last.save or (over and settings.save_last))
    new = _took_part(view, last)
    members, joining, left = _staying(view, new, facts.requests.leaves, goes_on)
    moves = () if over or goes_on else _moves(members, joining, view, facts, settings, now)
    members, joining = moving(members, joining, moves)
    members = by_pace(members, facts, settings)
    after = successor(
        view,
        [*_reasons(f"step {last.step} {outcome}", new, left, moves), *_stops(over, heldout, view.step + 1, settings)],
        step=view.step + 1,
        members=members,
        joining=joining,
        owners=_owners(view, members, over, facts, settings),
        phase=_phase(view.step + 1, last, settings) if over else Phase.TRAINING,
        heldout=heldout,
        last=last,
        account=_account(view, last, new, settings.microbatches, begins=not (over or goes_on)),
        fenced=view.fenced if goes_on else (),
        continued=None,
    )
    return Proposal(after, moves)


def _moves(
    members: tuple[Member, ...], joining: tuple[Member, ...], view: View, facts: Facts, settings: Settings, now: float
) -> tuple[Move, ...]:
    """To the stages of leavers; else where it balances the pipeline: while everybody is as planned, the plan does."""
    moves = takeovers_of_leavers(members, joining, facts, settings, now)
    if moves or complete(settings, members):
        return moves
    return rebalance(before_the_next_step(members, joining, view, facts, settings, now))


def _stops(over: bool, heldout: HeldOut | None, step: int, settings: Settings) -> list[str]:
    """Why the run is over before its last step, if it is."""
    if not over or step >= settings.steps or heldout is None:
        return []
    return [f"the run stops early: no held-out loss below {heldout.best_loss:.4f} since step {heldout.best_step}"]


def _phase(step: int, last: Committed, settings: Settings) -> Phase:
    """After the last step, with the parameters of version `step`."""
    return Phase.SAVING if last.save or settings.heldout_at(step) else Phase.FINISHED


def _owners(view: View, members: tuple[Member, ...], over: bool, facts: Facts, settings: Settings) -> tuple[int, ...]:
    """Of the next step's microbatches; with delayed updates they have begun. After the last step only held-out ones are left."""
    if over and not settings.heldout_at(view.step + 1):
        return ()
    if view.ahead:
        return inherit(view, members, ())
    rest = facts.evidence.stalls.resting([one.peer for one in members])
    return owned(members, settings.count(view.step + 1), rest, on_probation(view), settings)


def _reasons(outcome: str, new: tuple[Member, ...], left: dict[Peer, str], moves: tuple[Move, ...]) -> list[str]:
    return [
        outcome,
        *(f"{member.peer} serves stage {member.stage}" for member in new),
        *(f"{peer} leaves: {left[peer]}" for peer in sorted(left)),
        *(move.reason for move in moves),
    ]


def _account(view: View, last: Committed, new: tuple[Member, ...], microbatches: int, begins: bool) -> Account:
    """With the step's microbatches, and those of the next one if it `begins` now."""
    account = counting(view.account, new, issued=microbatches if begins else 0)
    return msgspec.structs.replace(
        account,
        committed=account.committed + microbatches,
        counted_twice=account.counted_twice + counted_twice(last.groups),
        skipped=account.skipped + (microbatches if last.skipped else 0),
    )


def _staying(
    view: View, new: tuple[Member, ...], leaves: dict[Peer, str], goes_on: bool
) -> tuple[tuple[Member, ...], tuple[Member, ...], dict[Peer, str]]:
    """Members and joiners without those that leave, as many as may together; and the members that left."""
    leaving = {} if goes_on else {one.peer: leaves[one.peer] for one in view.members if one.peer in leaves}
    there = view.members + arrived(new, view.number + 1)
    may = [*_without(leaving, there)[1], *(one.peer for one in view.joining if one.peer in leaves)]
    going = together(view, may)
    members, left = _without({peer: why for peer, why in leaving.items() if peer in going}, there)
    return members, tuple(one for one in view.joining if one not in new and one.peer not in going), left


def _without(leaving: dict[Peer, str], members: tuple[Member, ...]) -> tuple[tuple[Member, ...], dict[Peer, str]]:
    """Members that stay, and those that leave: all but the last replica of a stage."""
    replicas = Counter(member.stage for member in members)
    staying, left = list[Member](), dict[Peer, str]()
    for member in members:
        if member.peer in leaving and replicas[member.stage] > 1:
            replicas[member.stage] -= 1
            left[member.peer] = leaving[member.peer]
        else:
            staying.append(member)
    return tuple(staying), left


def _took_part(view: View, last: Committed) -> tuple[Member, ...]:
    """Joiners that hold the step's state and averaged it with the others."""
    averaged = {share.peer for group in last.groups for share in group}
    void = {(member.peer, member.stage) for member in view.fenced} if view.ahead else set()
    return tuple(one for one in view.joining if one.peer in averaged and (one.peer, one.stage) not in void)
