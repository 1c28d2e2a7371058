"""What a member thinks of its leader: which of its proposals it does not accept, and when another should lead.

Rules that every member can recompute from what it holds: what it reported itself must be what is committed, owners follow from the
members, a run goes back only for a lost stage or an undone eviction. A leader under which nothing is done for much longer than ever
before, or whose proposal is not agreed, stalls. A member that is evicted says so to the others, and so does one that refuses a
proposal: two words, or more evicted than a leader should need, count for those who see nothing wrong themselves.

A doubt changes nothing by itself: who doubts follows on, reports and accepts what is right, but no longer refuses others its vote since
it hears a leader (election.py). When a majority doubts, another is elected. For peer.py; docs/design/2026-11-25-lying-leader.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal.core.consensus.certificates import can_agree
from shoal.core.consensus.register import Register
from shoal.core.leader.membership import inherit, may_rest, most_resting, on_probation, owned
from shoal.core.member.notes import StallNotes
from shoal.core.messages import Command, Note, Objection, Peer, Phase, Send, Settings, View
from shoal.core.names import key_of

if TYPE_CHECKING:
    from shoal.core.member.departure import Departure
    from shoal.core.server.server import Server

# In heartbeat timeouts: how long a proposal may be in flight; how long nothing may be done at all, once steps were measured and before;
# how long a word counts; how long between two objections to the same leader
PENDING, IDLE, FIRST, WORDS, AGAIN = 2.0, 6.0, 15.0, 16.0, 1.0
IDLE_TIMES, STEP_TIMES = 3.0, 10.0  # of the longest pause, and of the longest step, among the last
KEPT, MEASURED = 16, 3  # steps whose times are kept, and that are enough
PATIENT = 4.0  # times as long at most, after leaders that were doubted in vain
ACCUSERS = 2  # other members that object, where there are so many
EVICTED = 0.3  # of all members, with those, a leader may evict against their word: as many may lie, together,
FEW = 2  # and in any case so many; likewise leaders that one member may accuse
EVICTS = "it evicts me"
WORK = (Phase.TRAINING, Phase.OVERLAPPING, Phase.REOPENED)


class Pauses:
    """How long steps took, and how long nothing was done here within each."""

    def __init__(self) -> None:
        self.worked_at = self.stepped_at = math.inf
        self._longest_s = 0.0
        self._patience = 1.0  # so many times as long: the leaders that were doubted since the last commit may have been right to wait
        self._pauses: deque[float] = deque(maxlen=KEPT)
        self._steps: deque[float] = deque(maxlen=KEPT)

    def work(self, now: float) -> None:
        self._longest_s = max(self._longest_s, now - self.worked_at)
        self.worked_at = now

    def commit(self, now: float) -> None:
        self.work(now)
        if self.stepped_at < math.inf:
            self._steps.append(now - self.stepped_at)
            self._pauses.append(self._longest_s)
        self.stepped_at, self._longest_s, self._patience = now, 0.0, 1.0

    def doubted(self) -> None:
        """In vain, it may be: a leader waits for peers it knows to be slow, and each new one begins to wait anew."""
        self._patience = min(PATIENT, 2 * self._patience)

    def begin(self, now: float) -> None:
        """Nothing before counts: the run was interrupted."""
        self.worked_at = self.stepped_at = now
        self._longest_s = 0.0

    def forgive(self, gap_s: float, now: float) -> None:
        self.worked_at, self.stepped_at = (min(now, at + gap_s) for at in (self.worked_at, self.stepped_at))

    def idle_s(self, timeout_s: float) -> float:
        """How long nothing may be done here under a leader, before others were doubted."""
        known = len(self._steps) >= MEASURED
        return max((IDLE if known else FIRST) * timeout_s, IDLE_TIMES * max(self._pauses, default=0.0))

    def too_long(self, timeout_s: float, now: float) -> str:
        """Why it is likely that nothing will be done any more, in words."""
        known = len(self._steps) >= MEASURED
        if (
            now - self.worked_at <= (IDLE if known else FIRST) * timeout_s
            and now - self.stepped_at <= FIRST * timeout_s
        ):
            return ""
        idle_s = self.idle_s(timeout_s) * self._patience
        if now - self.worked_at > idle_s:
            return f"for {now - self.worked_at:.0f} s there is nothing to do"
        step_s = max(FIRST * timeout_s, STEP_TIMES * max(self._steps, default=math.inf)) * self._patience
        if known and now - self.stepped_at > step_s:
            return f"for {now - self.stepped_at:.0f} s nothing is committed"
        return ""


class Words:
    """What other members say of leaders, by the keys of both."""

    def __init__(self) -> None:
        self._said: dict[str, dict[str, tuple[float, bool]]] = {}  # leader: accuser: when, and whether it was evicted

    def add(self, leader: Peer, by: Peer, evicted: bool, since: float, now: float) -> None:
        self._said = {
            one: kept
            for one, said in self._said.items()
            if (kept := {who: word for who, word in said.items() if word[0] >= since})
        }
        about = sum(key_of(by) in said for one, said in self._said.items() if one != key_of(leader))
        if about < FEW:
            self._said.setdefault(key_of(leader), {})[key_of(by)] = now, evicted

    def enough(self, leader: Peer, voters: Collection[str]) -> str:
        """Whether they are as many as count, in words. `voters`: the keys of those that there are now."""
        said = self._said.get(key_of(leader), {})
        evicted = [who for who, (_, out) in said.items() if out]
        others = [who for who, (_, out) in said.items() if not out]
        if len(others) >= min(ACCUSERS, max(1, len(voters) - 2)):
            return f"{' and '.join(others)} refuse what it proposes"
        if len(evicted) > max(FEW, EVICTED * len({*voters, *evicted})):
            return f"it has evicted {', '.join(evicted)}, who object"
        return ""


class LeaderJudge:
    """peer.py calls `tick` after each event, `show_work` when a task is done, and `on_view` with each agreed view."""

    def __init__(
        self, name: Peer, settings: Settings, register: Register, server: Server, departure: Departure
    ) -> None:
        self._name, self._settings, self._register, self._server = name, settings, register, server
        self._departure = departure
        self.notes = StallNotes(settings)  # in the leader's own words
        self._pauses, self._words = Pauses(), Words()
        self._pending: tuple[tuple[int, int], float] | None = (
            None  # term and number of the proposal in flight, since when
        )
        self.objects: tuple[Peer, int, str, bool] | None = None  # to whose view, why; am I evicted: to be told
        self._told: dict[Peer, float] = {}
        self._gone: dict[Peer, float] = {}  # voters that a view has removed, and when
        self._doubted = ""
        self.look_at = 0.0
        register.judge = self.objection

    # ------------------------------------------------------------------------------------------------------ proposals

    def objection(self, leader: Peer, before: View, view: View, now: float) -> str:
        """Why I do not accept that view as the next one; '' if I do. I accept that it evicts me, as long as it is not half of us: the
        others will miss me if I am cut off. But I tell them."""
        present = {one.peer for one in view.members + view.joining}
        if self._name in before.votes and self._name not in present and not self._departure.leaving:
            self.objects = leader, view.number, EVICTS, True
            gone = sum(peer not in present for peer in before.voters)
            return f"{EVICTS}, and {gone - 1} others" if 2 * gone >= len(before.voters) else ""
        wrong = self._evicts_too_many(before, present) or self._wrong(before, view)
        if wrong:
            self.objects = leader, view.number, wrong, False
            self._doubt(leader, wrong, now)
        return wrong

    def _evicts_too_many(self, before: View, present: Collection[Peer]) -> str:
        """Without a quorum those that are left could not agree on it, and those that it evicts refuse it. Accepted by some all the same,
        every later leader would have to propose it, and it would never be agreed."""
        left = [peer for peer in before.voters if peer in present]
        return "" if can_agree(before, left) else f"it evicts {len(before.voters) - len(left)} of {len(before.voters)}"

    def _wrong(self, before: View, view: View) -> str:
        if view.epoch > before.epoch:
            return self._back(before, view)
        if view.step == before.step:
            return ""
        return self._commits(view) or self._owners(before, view)

    def _back(self, before: View, view: View) -> str:
        """A new epoch: a stage has lost its last member, or an eviction undoes what was contributed."""
        served = {one.stage for one in before.members}
        undone = view.undoing is not None and (before.undoing is None or view.undoing.times > before.undoing.times)
        evicts = len(view.members + view.joining) < len(before.members + before.joining)
        if not before.started or len(served) < self._settings.stages or (undone and evicts):
            return ""
        return f"it goes back from step {before.step} to {view.step} though every stage is served"

    def _commits(self, view: View) -> str:
        """Of my stage I have reported the gradient that is committed, of the same microbatches."""
        last, stage = view.last, self._server.stage
        if last is None or last.skipped or not self._server.has_state or stage >= len(last.groups):
            return ""
        group = last.groups[stage]
        if self._name not in [share.peer for share in group] or self._server.vouches(last):
            return ""
        return f"it commits what stage {stage} did not report"

    def _owners(self, before: View, view: View) -> str:
        """Who owns what follows from the members. Few rest, since others took over from them."""
        if not view.owners or not view.members or view.phase not in WORK:
            return ""
        if before.ahead:
            right = view.owners == inherit(before, view.members, ())
        else:
            new, most = on_probation(before), most_resting(len(view.members))
            resting = may_rest(view, new)
            if len(view.owners) >= len(view.members) and len(resting[0]) > most:
                return f"{len(resting[0])} of {len(view.members)} members own no microbatch"
            count = self._settings.count(view.step)
            right = any(
                view.owners == owned(view.members, count, rest, new, self._settings)
                for rest in resting
                if sum(peer not in new for peer in rest) <= most
            )
        return "" if right else "its owners are not those that follow from the members"

    # ----------------------------------------------------------------------------------------------------------- time

    @property
    def idle_s(self) -> float:
        """After so long without work a leader is doubted here; other members have about as much patience."""
        return self._pauses.idle_s(self._settings.heartbeat_timeout_s)

    def show_work(self, now: float) -> None:
        """Something was done for the run here."""
        self._pauses.work(now)

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for so long."""
        self._pauses.forgive(gap_s, now)
        if self._pending is not None:
            self._pending = self._pending[0], min(now, self._pending[1] + gap_s)

    def on_view(self, before: View | None, view: View, now: float) -> None:
        if before is not None:
            since = now - WORDS * self._settings.heartbeat_timeout_s
            self._gone = {peer: at for peer, at in self._gone.items() if at > since}
            self._gone |= dict.fromkeys((peer for peer in before.voters if peer not in view.votes), now)
        if before is None or not before.started or view.epoch != before.epoch or view.phase not in WORK:
            self._pauses.begin(now)
        elif view.step > before.step:
            self._pauses.commit(now)
            leader = self._register.leader
            if self._doubted and leader is not None and leader == self._doubted:  # it goes on after all
                self._register.election.trust(leader)
                self._doubted = ""

    def doubts(self, view: View, now: float) -> str:
        """Why the leader seems to have stopped leading, in words."""
        timeout_s, accepted = self._settings.heartbeat_timeout_s, self._register.accepted
        if self._register.proposing and accepted is not None:
            rank = accepted.term, accepted.view.number
            if self._pending is None or self._pending[0] != rank:
                self._pending = rank, now
            if now - self._pending[1] > PENDING * timeout_s:
                return f"its view {rank[1]} is not agreed for {now - self._pending[1]:.0f} s"
        else:
            self._pending = None
        if view.phase not in WORK or len(view.replicas) < self._settings.stages or self._settings.serve:
            self._pauses.begin(now)
            return ""
        return self._pauses.too_long(timeout_s, now)

    def tick(self, now: float) -> list[Command]:
        """Notes, and words to the others. Time passes slowly for this: twice in a heartbeat is enough."""
        if now < self.look_at and self.objects is None:
            return []
        view, leader = self._register.agreed, self._register.leader
        commands = self._tell(view, now)
        if now < self.look_at:
            return commands
        self.look_at = now + self._settings.heartbeat_s / 2
        if view is None or leader is None or self._register.leading or not self._register.views.votes_here():
            return commands
        why = self.doubts(view, now)
        if why and not self._register.election.distrusts(leader, now):
            self._doubted = leader
            self._pauses.begin(now)
            self._pauses.doubted()
            commands += self._doubt(leader, why, now)
        return commands

    # ---------------------------------------------------------------------------------------------------------- words

    def on_message(self, peer: Peer, message: Objection, now: float) -> list[Command]:
        view, leader = self._register.agreed, self._register.leader
        if view is None or leader is None or message.leader != leader or leader == self._name or peer == leader:
            return []
        since = now - WORDS * self._settings.heartbeat_timeout_s
        if peer not in view.voters and not (message.evicted and self._gone.get(peer, since) > since):
            return []
        self._words.add(leader, peer, message.evicted, since, now)
        why = self._words.enough(leader, [key_of(voter) for voter in view.voters])
        return self._doubt(leader, why, now) if why else []

    def _doubt(self, leader: Peer, why: str, now: float) -> list[Command]:
        if self._register.election.distrusts(leader, now):
            return []
        self._register.election.distrust(leader, now)
        return [Note("leader", f"{self._name} doubts its leader {leader}: {why}")]

    def _tell(self, view: View | None, now: float) -> list[Command]:
        """The others, what I object to: once in a while."""
        objects, self.objects = self.objects, None
        if objects is None or view is None:
            return []
        leader, number, why, evicted = objects
        if now - self._told.get(leader, -math.inf) < AGAIN * self._settings.heartbeat_timeout_s:
            return []
        self._told = {leader: now}
        message = Objection(leader, number, why, evicted)
        return [Send(peer, message) for peer in view.voters if peer not in (self._name, leader)]
