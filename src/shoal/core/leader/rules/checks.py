"""What the leader looks at once a beat, and says to people: replicas that differ, stages without a peer, steps that take long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from shoal.core.consensus.phases import ended
from shoal.core.leader.averaging import OpenRound
from shoal.core.leader.evictions import Dispute
from shoal.core.leader.facts import Facts
from shoal.core.messages import Peer, Settings, View
from shoal.core.replica_state import TEXT

HEARD_BEATS = 8.0  # or a usual step: for the other replicas to report what they hold, when two differ
STALLED = 20.0  # beats, or twice the usual step, without a commit: everybody is told why


def different_states(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Dispute]:
    """Replicas of a stage report different parameters at the same step. The first two to report it are no majority: the others are heard,
    unless they could not change it."""
    held: dict[int, dict[str, list[Peer]]] = {}
    silent = Counter[int]()  # replicas that have not reported, by stage
    for member in view.members:
        heartbeat = facts.heartbeats.get(member.peer)
        if heartbeat is not None and heartbeat.digest and (heartbeat.step, heartbeat.epoch) == (view.step, view.epoch):
            held.setdefault(member.stage, {}).setdefault(heartbeat.digest, []).append(member.peer)
        elif member.peer not in facts.evidence.stale:
            silent[member.stage] += 1
    usual_s = facts.history.step_s if facts.history.step_s < math.inf else 0.0
    for stage, digests in held.items():
        if len(digests) > 1:
            since = facts.rounds.differing.setdefault(stage, now)
            most, second, *_ = sorted(map(len, digests.values()), reverse=True)
            known = not silent[stage] or most - second > silent[stage]
            if known or now - since >= max(HEARD_BEATS * settings.heartbeat_s, usual_s):
                yield Dispute(f"its parameters differ from its stage {stage}'s others", digests)


def unserved(view: View, settings: Settings) -> str:
    """Which stage nobody serves or is about to, in words; '' if there is none. A run that has never begun waits for peers anyway."""
    taken = {member.stage for member in view.members + view.joining}
    empty = sorted(set(range(settings.stages)) - taken)
    return f"stage {empty[0]} has nobody to serve it: the run waits for peers" if view.epoch and empty else ""


def why_stalled(view: View, facts: Facts, settings: Settings, now: float) -> str:
    """What the step waits for, in words, when none has been committed for long."""
    step_s = facts.history.step_s
    long_s = max(STALLED * settings.heartbeat_s, 2 * step_s if step_s < math.inf else 0.0)
    since = facts.history.step_at if facts.history.step_at is not None else now
    if settings.serve or not view.started or view.finished or ended(view, settings) or now - since < long_s:
        return ""
    current = facts.rounds.open
    if current is not None:
        what = f"its round {facts.rounds.count} {_round_lacks(current)}"
    else:
        what = "; ".join(facts.ledger(view.step).faults(view.members)[:3]) or "everything is booked"
        if facts.evidence.jams.in_time(now):
            what += "; lines like these make a first step long: nobody is called late yet"
    return f"step {view.step} is not committed for {now - since:.0f} s: {what}"[:TEXT]


def _round_lacks(current: OpenRound) -> str:
    """In words."""
    if current.complete:
        return "is done, its audit is not"
    late = [one.peer for group in current.message.groups for one in group if one.peer not in current.reduced]
    others = " and others" if len(late) > 4 else ""
    return f"waits for {', '.join(late[:4])}{others}"
