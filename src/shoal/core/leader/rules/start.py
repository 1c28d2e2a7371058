"""The start of a first step, of the run or of an epoch, and the end of the run."""

from __future__ import annotations

import msgspec

from shoal.core.consensus.phases import ended
from shoal.core.consensus.validity import measured
from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import arrived, counting, names, on_probation, owned
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.messages import Member, Phase, Settings, Share, View


def every_stage_ready(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """The first step has not begun, and every stage has a peer that holds its state."""
    if view.started or (not view.epoch and len(facts.present) < settings.peers):
        return False
    return len({member.stage for member in _ready(view, facts)}) >= settings.stages


def start(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Begin the first step when enough peers hold their stage and no stage is empty."""
    ready = _ready(view, facts)
    if (
        view.epoch
    ):  # back at a checkpoint: with whoever is left, but nobody waits for ever for the slowest, not even for me
        there = sum(member in ready for member in view.members)
        waited = now - facts.history.since(start) >= settings.ready_timeout_s
        enough = there == len(view.members) or (waited and 2 * there > len(view.members))
    else:
        enough = len(ready) >= settings.peers and facts.name in names(ready)
    if not enough:
        return None
    rest = tuple(
        msgspec.structs.replace(member, back=member.back or member in view.members)
        for member in view.members + view.joining
        if member not in ready
    )
    new = tuple(member for member in view.joining if member in ready) if view.epoch else ()  # since the first start
    then = "they can be asked" if settings.serve else f"step {view.step} begins"
    reason = f"{len(ready)} peers hold all {settings.stages} stages: {then}"
    view = successor(
        view,
        [reason],
        members=arrived(ready, view.number + 1),
        joining=rest,
        owners=owned(ready, _count(view, settings), (), on_probation(view), settings),
        phase=Phase.SAVING if ended(view, settings) else Phase.TRAINING,
        fenced=(),
        account=counting(view.account, new, issued=settings.microbatches * (not settings.serve)),
    )
    return Proposal(view)


def _count(view: View, settings: Settings) -> int:
    """Microbatches of the first step. After the last one only held-out ones are left, if there are any."""
    if settings.serve or (ended(view, settings) and not settings.heldout_at(view.step)):
        return 0
    return settings.count(view.step)


def finish(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """After the last step the run is over once its checkpoint is published or cannot be, and what is held out is measured or cannot be."""
    if view.finished or not complete(view, facts, settings):
        return None
    ledger, heldout, words = facts.ledger(view.step), view.heldout, [f"{view.step} steps are committed"]
    if ledger.heldout and ledger.whole:
        last = tuple(Share(one.peer, ()) for one in view.members if one.stage == settings.stages - 1)
        loss = ledger.heldout_loss(last)
        heldout = heldout if loss is None else measured(heldout, view.step, loss)
        words += [] if loss is None else [f"held-out loss {loss:.4f} at the end"]
    return Proposal(successor(view, words, phase=Phase.FINISHED, heldout=heldout))


def complete(view: View, facts: Facts, settings: Settings) -> bool:
    """Nothing is left to be trained, saved or measured. A held-out result that is not finite cannot be measured."""
    if not ended(view, settings) or not facts.saving.idle:
        return False
    ledger = facts.ledger(view.step)
    unmeasured = any(step == view.step for step, _, _ in facts.evidence.nonfinite)
    return unmeasured or not view.owners or ledger.complete(view.members)


def _ready(view: View, facts: Facts) -> tuple[Member, ...]:
    return tuple(member for member in view.members + view.joining if facts.ready(member, view))
