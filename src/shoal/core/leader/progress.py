"""Whether each peer of a view makes progress: a heartbeat alone keeps no peer in the run. For leader.py.

Heartbeats show whether a peer takes the agreed views, a member holds the step that is trained, and a joiner's download grows. In a round
every participant must finish, or report which chunks it lacks. A verdict names a peer and how long the others waited for it. Books that
do not grow are stalls.py's.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from shoal.core.latency import Usual
from shoal.core.leader.evictions import Conduct, Verdict
from shoal.core.leader.rebalance import MOVE_S
from shoal.core.messages import Heartbeat, Member, Peer, Reduced, Round, RoundWaits, Settings, Stage, View

VIEW_SILENCES = 3.0  # for a peer that sends heartbeats to take a view that is sent to it after each
LEAST_BEATS = 120.0  # no state is waited for less,
HOLDS = 2.0  # of ready_timeout_s: the least for a member to hold the step, and for a stage's only replica to get done with a round
LOAD_HOLDS = 20.0  # of ready_timeout_s: for a joiner's next chunk, six of 16 MiB on a line of 1 Mbit/s, or for a state to be built
STEPS = 8.0  # usual steps that a member may take to hold the one that is trained
LAST_BEATS = 24.0  # for the last of a round to get done when all others are,
ROUNDS = 4.0  # or so many times what it took them
# From the first Waits to a verdict: the other participants' arrive meanwhile, or what was asked for again
HEAR_BEATS = 3.0
FRESH_BEATS = 2.5  # for which a Waits counts: it is repeated with every beat, and a message may be lost
FREED_BEATS = 12.0  # for a replica's sums to come, once what it waited for itself has come
SOON_BEATS = 24.0  # for which it need not be in vain yet


class Seen(msgspec.Struct):
    """What a peer last reported, and when each of it last advanced."""

    number: int
    number_at: float
    state: tuple[int, int, int, bool, int]
    state_at: float
    current_at: float
    since: float


class Progress:
    def __init__(self, name: Peer, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._seen: dict[Peer, Seen] = {}
        self._view_at = float("-inf")
        # Seconds from a view that gives a joiner or mover its stage until it holds the state
        self.loads = Usual(MOVE_S)
        self._loading: dict[tuple[Peer, Stage], float | None] = {}  # since when; None: it holds it

    def on_view(self, before: View | None, view: View, now: float) -> None:
        self._view_at = now
        joining = view.joining if view.started else ()  # before, states are made or read from disk, not downloaded
        loading = ((member.peer, member.stage) for member in joining)
        self._loading = {each: self._loading.get(each, now) for each in loading}
        present = {member.peer for member in view.members + view.joining}
        self._seen = {peer: seen for peer, seen in self._seen.items() if peer in present}
        fresh = before is None or (before.step, before.epoch, before.work, before.started) != (
            view.step,
            view.epoch,
            view.work,
            view.started,
        )
        if fresh:
            for seen in self._seen.values():
                seen.current_at = now

    def forgive(self, gap_s: float, now: float) -> None:
        for seen in self._seen.values():
            seen.number_at, seen.state_at = min(now, seen.number_at + gap_s), min(now, seen.state_at + gap_s)
            seen.current_at = min(now, seen.current_at + gap_s)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat, view: View, now: float) -> None:
        state = (heartbeat.epoch, heartbeat.stage, heartbeat.step, heartbeat.ready, heartbeat.loaded)
        seen = self._seen.get(peer)
        if seen is None:
            seen = self._seen[peer] = Seen(heartbeat.number, now, state, now, now, now)
        if heartbeat.number > seen.number or heartbeat.number >= view.number:
            seen.number, seen.number_at = heartbeat.number, now
        if state != seen.state:
            seen.state, seen.state_at = state, now
        if heartbeat.ready and (heartbeat.epoch, heartbeat.step) == (view.epoch, view.step):
            seen.current_at = now
            since = self._loading.get((peer, heartbeat.stage))
            if since is not None:
                self._loading[peer, heartbeat.stage] = None
                self.loads.add(now - since)

    def here_s(self, peer: Peer, now: float) -> float:
        """Since its first heartbeat to this leader."""
        seen = self._seen.get(peer)
        return now - seen.since if seen is not None else 0.0

    def late(self, view: View, step_s: float, now: float) -> dict[Peer, str]:
        """Peers to evict, with the reasons."""
        late: dict[Peer, str] = {}
        for member in view.members:
            if member.peer != self._name and member.peer in self._seen:
                why = self._behind(member.peer, view, now) or self._idle(member.peer, view, step_s, now)
                if why:
                    late[member.peer] = why
        for member in view.joining:
            if member.peer in self._seen:
                why = self._behind(member.peer, view, now) or self._unloaded(member, now)
                if why:
                    late[member.peer] = why
        return late

    def _behind(self, peer: Peer, view: View, now: float) -> str:
        seen = self._seen[peer]
        since_s = now - max(seen.number_at, self._view_at)
        frozen_s = now - seen.number_at
        most_s = VIEW_SILENCES * self._settings.heartbeat_timeout_s
        if seen.number < view.number and frozen_s > most_s and since_s > self._settings.heartbeat_timeout_s / 2:
            return f"has stayed at view {seen.number} for {frozen_s:.0f} s"
        return ""

    def _idle(self, peer: Peer, view: View, step_s: float, now: float) -> str:
        """A member that does not hold the step which the others train."""
        if not view.started:
            return ""
        usual_s = step_s if step_s < float("inf") else 0.0
        most_s = max(HOLDS * self._settings.ready_timeout_s, LEAST_BEATS * self._settings.heartbeat_s, STEPS * usual_s)
        seen = self._seen[peer]
        waited_s = now - max(seen.current_at, seen.state_at)
        return f"has not been ready for step {view.step} for {waited_s:.0f} s" if waited_s > most_s else ""

    def _unloaded(self, member: Member, now: float) -> str:
        """A joiner whose state does not grow. One that is ready waits for the others, who see whether it is."""
        seen = self._seen[member.peer]
        if seen.state[3] or not self._settings.ready_timeout_s:
            return ""
        most_s = max(LEAST_BEATS * self._settings.heartbeat_s, LOAD_HOLDS * self._settings.ready_timeout_s)
        waited_s = now - seen.state_at
        return (
            f"has not got on with the state of stage {member.stage} for {waited_s:.0f} s" if waited_s > most_s else ""
        )


class Waits(msgspec.Struct):
    """Whom a participant waits for, as it last said; since when it has said without a break that this is in vain."""

    newest: RoundWaits
    at: float
    vain_at: float


class RoundWatch:
    """One open round, as its participants report on it."""

    def __init__(self, message: Round, settings: Settings, now: float) -> None:
        self._groups = [[share.peer for share in group] for group in message.groups]
        self._settings = settings
        self._opened = self._reduced_at = now
        self._waits: dict[Peer, Waits] = {}
        self._judged_at = float("-inf")
        self._busy: set[tuple[Peer, int]] = set()
        # The highest piece at which what these waited for came, and when, the first time; only then could they make their sums of it
        self._freed: dict[Peer, tuple[int, float]] = {}

    def forgive(self, gap_s: float, now: float) -> None:
        """Messages that arrived while this process was stopped are still to be read."""
        self._opened = min(now, self._opened + gap_s)
        self._reduced_at = min(now, self._reduced_at + gap_s)
        for waits in self._waits.values():
            waits.at, waits.vain_at = min(now, waits.at + gap_s), waits.vain_at + gap_s

    def on_reduced(self, now: float) -> None:
        self._reduced_at = now

    def on_waits(self, peer: Peer, waits: RoundWaits, now: float) -> None:
        """One that names nobody withdraws those before: what was waited for came after all."""
        known = self._waits.pop(peer, None)
        if not waits.parts and not waits.sums:
            if known is not None and known.newest.piece > self._freed.get(peer, (-1, now))[0]:
                self._freed[peer] = (known.newest.piece, now)
            return
        if known is None or now - known.at > self._fresh_s:
            known = Waits(waits, now, now + SOON_BEATS * self._settings.heartbeat_s)
        vain_at = min(known.vain_at, now) if waits.vain else known.vain_at
        self._waits[peer] = Waits(waits, now, vain_at)

    @property
    def _fresh_s(self) -> float:
        return FRESH_BEATS * self._settings.heartbeat_s

    def verdicts(
        self, reduced: dict[Peer, Reduced], conduct: Conduct, leader: Peer, now: float, hops_s: float = 0.0
    ) -> list[Verdict]:
        """The peers that keep this round from being done: of each stage one, which do not wait for another's. `hops_s`: for so long its
        tasks may wait for hops of the next step."""
        hear_s = HEAR_BEATS * self._settings.heartbeat_s
        self._waits = {peer: waits for peer, waits in self._waits.items() if now - waits.at <= self._fresh_s}
        long_s = hear_s + hops_s
        long = {peer for peer, waits in self._waits.items() if now - waits.vain_at >= long_s and peer not in reduced}
        if long and now - self._judged_at >= hear_s:
            self._judged_at = now
            freed_s = FREED_BEATS * self._settings.heartbeat_s
            self._busy = {(peer, piece) for peer, (piece, since) in self._freed.items() if now - since < freed_s}
            accused = [self._accused(group, reduced, long, conduct, leader) for group in self._groups]
            if verdicts := [one for one in accused if one is not None]:
                return verdicts
        last = self._last(reduced, now, hops_s)
        return [last] if last is not None else []

    def _last(self, reduced: dict[Peer, Reduced], now: float, hops_s: float) -> Verdict | None:
        """The only peer of its stage that has not finished, and waits for no other."""
        usual_s, late_s = self._reduced_at - self._opened, now - self._reduced_at
        if not reduced or late_s <= hops_s + max(LAST_BEATS * self._settings.heartbeat_s, ROUNDS * usual_s):
            return None
        for group in self._groups:
            left = [peer for peer in group if peer not in reduced]
            if len(left) != 1 or left[0] in self._waits:
                continue
            if len(group) > 1:
                return left[0], f"has not got done with a round for {late_s:.0f} s in which the others of its stage are"
            if late_s > HOLDS * self._settings.ready_timeout_s:  # a stage's only replica: nobody takes its place
                return left[0], f"has not got done with a round for {late_s:.0f} s in which the others are"
        return None

    def _accused(
        self, group: list[Peer], reduced: dict[Peer, Reduced], long: set[Peer], conduct: Conduct, leader: Peer
    ) -> Verdict | None:
        """Each that waits and each that it waits for is an edge; whoever has most of them explains most: it sends nothing, it receives
        nothing, or it lies. Sums are looked at only where nobody lacks parts: they are made of them; and no piece whose beginning waits
        for the one before it. One of those that wait has to have done so for `long`."""
        open_ = [peer for peer in group if peer not in reduced]
        for what in ("parts", "sums"):
            edges = self._edges(group, open_, what)
            if not edges:
                continue
            known = sorted(edge for edge in edges if edge[0] in long)
            if not known:
                return None
            degree = Counter(peer for edge in edges for peer in edge)
            worst = max((peer for edge in known for peer in edge), key=lambda peer: (degree[peer], -group.index(peer)))
            if degree[worst] > 1:
                by = sum(other == worst for _, other in edges)
                for_ = degree[worst] - by
                return worst, f"keeps {by} of its stage waiting for its {what} of a round, and lacks those of {for_}"
            return self._one(group, known[-1], open_, what, conduct, leader)
        return None

    def _edges(self, group: list[Peer], open_: list[Peer], what: str) -> set[tuple[Peer, Peer]]:
        """Who waits for whose parts or sums, of the lowest piece that anybody is at."""
        waiting = {peer: waits.newest for peer, waits in self._waits.items() if peer in open_}
        lowest = min((waits.piece for waits in waiting.values()), default=0)
        return {
            (peer, other)
            for peer, waits in waiting.items()
            if waits.piece == lowest
            for other in getattr(waits, what)
            if other in group and other != peer and (what == "parts" or (other, lowest) not in self._busy)
        }

    def _one(
        self, group: list[Peer], edge: tuple[Peer, Peer], open_: list[Peer], what: str, conduct: Conduct, leader: Peer
    ) -> Verdict | None:
        """Everybody that is accused is so by one. Where all others are done, the one that is not may be the one that cannot receive. A
        leader does not judge in its own case: it lets another lead; but of a stage of two another would have its word alone, too."""
        accuser, accused = edge
        if accuser == leader and len(group) > 2:
            return leader, f"lacks {what} of a round, of {accused}, and does not judge in its own case"
        reason = f"{accuser} has waited in vain for its {what} of a round"
        if len(group) > 2 and open_ == [accuser]:
            said = f"is the only one of its stage that lacks {what} of a round, of {accused}"
            return conduct.alone(accused, accuser, said)
        return conduct.alone(accuser, accused, reason)
