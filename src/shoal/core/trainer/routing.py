"""Which replica of a stage receives the next hop, and how long its answer may take. For trainers.

Paper: SWARM parallelism (arXiv 2301.11913), stochastic wiring by interleaved weighted round robin. Claim: when each trainer chooses
the peer of least virtual time and charges it the expected time of the hop, each peer receives work in proportion to its throughput
without coordination. `Routes.choose` is the paper's choose, `Routes.on_view` its add, `Routes.answered` its success, `Routes.failed`
its ban.

What we changed: a timeout is a slow sample and not a ban. A ban is bounded, and ends with one probation request. Busy is back-pressure.
Deadlines follow the median of measured times, since the first answer of a stage may be of a peer that was stopped. The last replicas of
a stage are used even when banned. And the peer that is expected to answer first is chosen, by what this trainer has in progress there: an
answer reports the queue that its request met, and where a link or a stage is full that was long ago, so that all trainers would choose the
same peer and shares would oscillate (docs/design/2026-11-22-least-loaded.md). Virtual time breaks ties. Of peers that answer about as soon
the microbatch's index chooses, so that the trainers' choices together are even, too (docs/design/2026-11-23-turns.md). What is measured for
that choice is a peer's pace, which its queue of this trainer's hops does not change (docs/design/2026-11-24-pace.md).

What to send is microbatch.py's business, attempts are trainer.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.core.messages import Index, Member, Peer, Settings, Stage
from shoal.core.trainer.turns import Turns
from shoal.core.trainer.wiring import NOTHING, Chance, Load, Replica, Wiring

FORWARD_SIZE = 1.0
BACKWARD_SIZE = 2.5  # recomputation and two products, relative to a forward: SWARM's figure
COLD_S = 1.0  # used without a plan and without measurements: SWARM's figure
PATIENCE = 4.0  # a hop is slow after so many times its usual duration
EXTENSIONS = 4  # more deadlines for a hop, or a tensor, while others of that sender's tensors come
OTHERS = 4.0  # times as long as any hop has taken is the most that is expected of a stage that nothing is known of
# A planned peer that was too slow is chosen again when it takes at most so many times its stage's usual
CAUGHT_UP = 2.0
LEAST_WAIT_S = 0.02  # after Busy: also if the server says 0
MOST_WAIT_S = 30.0  # after Busy, whatever the server says
LEAST_TURNS = 0.5  # that a replica without any counts as
BAN_LEVELS = 4  # ban_s, 2x, 4x, 8x
MISSES = 3  # unanswered requests before a peer counts as silent, and hops in a row that it does not serve before it counts as useless


class Routes:
    """The wiring of all stages, as one trainer measures it. Calls about peers that are in no stage are ignored."""

    def __init__(self, settings: Settings, rng: Chance) -> None:
        self._settings = settings
        self._rng = rng
        self._planned = {stage: seconds for stage, seconds in enumerate(settings.stage_seconds) if seconds > 0}
        self._wirings = [Wiring(self._planned.get(stage, COLD_S), rng) for stage in range(settings.stages)]
        self._at: dict[Peer, tuple[Stage, Replica]] = {}
        self._answers, self._longest_s = 0, 0.0  # of stages that need a tensor; the longest per unit of size
        self._turns = Turns(settings.stages, settings.microbatches)

    def on_view(
        self, members: tuple[Member, ...], now: float, new_keys: Collection[str] = (), begins: bool = True
    ) -> None:
        """`new_keys`: those on probation, which get every THIRD microbatch of a stage at most, while another replica does not fail.
        `begins`: a step."""
        stage_of = {member.peer: member.stage for member in members}
        self._turns.on_view(members, new_keys, begins)
        for peer in [peer for peer, (stage, _) in self._at.items() if stage_of.get(peer) != stage]:
            self._at.pop(peer)[1].serial = -1
        for _, replica in self._at.values():  # what one lacked of those may have been their fault
            for others in (replica.unserved, replica.withheld):
                if others:
                    others[:] = [peer for peer in others if not peer or peer in stage_of]
        for member in members:
            if member.peer not in self._at:
                self._at[member.peer] = (member.stage, self._wirings[member.stage].enter(member.peer, now))
        self._share(members)

    def _share(self, members: tuple[Member, ...]) -> None:
        """What replicas pass beside their stage's usual one, as their turns say."""
        for stage, wiring in enumerate(self._wirings):
            turns = {member.peer: max(member.turns, LEAST_TURNS) for member in members if member.stage == stage}
            wiring.uneven = len(set(turns.values())) > 1
            for peer, own in turns.items():
                self._at[peer][1].share = own * len(turns) / sum(turns.values())

    def choose(
        self,
        stage: Stage,
        now: float,
        size: float = FORWARD_SIZE,
        avoid: str = "",
        *,
        home: str = "",
        planned: str = "",
        load: Load = NOTHING,
        index: Index | None = None,
    ) -> tuple[Peer, str] | None:
        """The replica for a hop of that size, which is charged for it, and the reason; None while all are busy (see `wake`), or without
        replicas.

        The one expected to answer first, with this `load`; of about equal ones the one whose turn it is with microbatch `index`.
        `home` is waited for while it is busy, and skipped when it is banned; `planned` is chosen if it is in good standing; `avoid` is
        skipped if another replica is ready."""
        if home in self._at and self._at[home][0] == stage and self._at[home][1].banned_until <= now:
            return (home, "its owner serves that stage") if self._at[home][1].busy_until <= now else None
        wiring = self._wirings[stage]
        barred = self._turns.barred(stage, index)
        why = self._skip_reason(stage, planned, now, avoid, barred) if planned else ""
        if planned and not why:
            replica = self._at[planned][1]
            wiring.take(replica)
            replica.virtual += size * wiring.estimate(replica)
            return planned, "as planned"
        turn = self._turn(stage, index, now, avoid) if index is not None else None
        chosen = wiring.choose(now, avoid, load, turn, barred)
        if chosen is None:
            return None
        replica, reason = chosen
        reason = f"{why}; {reason}" if why else reason
        replica.virtual += size * wiring.estimate(replica)
        if replica.level:  # one request per ban, until one is answered
            replica.trial = True
            replica.banned_until = max(replica.banned_until, now + self._ban_s(replica))
        wiring.place(replica, now)
        return replica.peer, reason

    def _turn(self, stage: Stage, index: Index, now: float, avoid: str) -> Replica | None:
        """Whose turn it is with that microbatch. None: it is not in good standing."""
        peer = self._turns.turn(stage, index)
        if peer is None:
            return None
        replica = self._at[peer][1]
        stands = not replica.level and replica.banned_until <= now and replica.late is None
        return replica if stands and peer != avoid else None

    def _skip_reason(self, stage: Stage, planned: Peer, now: float, avoid: str, barred: frozenset[Peer]) -> str:
        """Why the planned peer does not receive this hop; '' if it does."""
        at, replica = self._at.get(planned, (-1, None))
        if replica is None or at != stage:
            return f"it does not serve stage {stage}"
        if planned in barred:
            return "its key is new"
        if planned == avoid:
            return "it was slow or failed with this hop"
        if replica.level:
            return "it failed and is on probation"
        if replica.busy_until > now:
            return f"its queue is full for {replica.busy_until - now:.1f} s"
        if replica.lagging:
            usual_s, typical_s = self._wirings[stage].estimate(replica), self._wirings[stage].usual.value
            return f"it takes {usual_s:.2f} s a hop, its stage {typical_s:.2f} s"
        return ""

    def claim(self, peer: Peer, stage: Stage, now: float, size: float, backward: bool = False) -> bool:
        """Charge `peer`, which holds the input, for a hop of that size. False if it does not serve the stage or is not ready. One that has
        no room for forwards has it for a `backward`, which gives room."""
        at, replica = self._at.get(peer, (None, None))
        if replica is None or at != stage:
            return False
        if (
            (replica.full_until if backward else replica.busy_until) > now
            or replica.banned_until > now
            or replica.level
            or replica.late is not None
        ):
            return False
        replica.virtual += size * self._wirings[stage].estimate(replica)
        self._wirings[stage].place(replica, now)
        return True

    def wake(self, stage: Stage) -> float | None:
        """When to call `choose` again after it returned None; None if only a new view helps."""
        return self._wirings[stage].wake()

    def patience(self, peer: Peer, size: float, ahead: float = 0.0) -> float:
        """Seconds after which a hop of that size to that peer is slow, behind so much that this trainer had requested there before."""
        return max(self._settings.min_request_timeout_s, self.due(peer, size, ahead))

    def due(self, peer: Peer, size: float, ahead: float = 0.0) -> float:
        """The same by what is measured alone, however short."""
        if peer not in self._at:
            return 0.0
        stage, replica = self._at[peer]
        wiring = self._wirings[stage]
        expected_s = wiring.expected(replica)
        if not self._known(stage) and self._answers >= 2:
            expected_s = min(max(expected_s, self._longest_s), OTHERS * self._longest_s)
        behind_s = (size + ahead) * wiring.usual_pace.value if wiring.usual_pace.known else 0.0
        return PATIENCE * max(size * expected_s, behind_s) + replica.queue_s

    def knows(self, peer: Peer) -> bool:
        """The usual time of its stage is measured or planned, or what other stages take is measured. A guess may be wrong by a factor of a
        hundred."""
        return peer not in self._at or self._answers >= 2 or self._known(self._at[peer][0])

    def _known(self, stage: Stage) -> bool:
        return stage in self._planned or self._wirings[stage].usual.known

    def repeat_s(self, peer: Peer) -> float:
        """Seconds until a slow request is repeated. They follow its stage, since the peer's own average includes its timeouts."""
        if peer not in self._at:
            return self._settings.min_request_timeout_s
        wiring = self._wirings[self._at[peer][0]]
        return max(self._settings.min_request_timeout_s, PATIENCE * wiring.usual.value)

    def answered(
        self, peer: Peer, seconds: float, size: float, now: float, again: bool = False, ahead: float = 0.0
    ) -> None:
        """It answered a hop of that size after `seconds`, network and queue included; this trainer had `ahead` there before. `again`: the
        request was repeated, so that the time says nothing of its stage (Karn's rule)."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        replica.unserved.clear()
        replica.late, replica.declined = None, 0
        self._wirings[stage].measure(replica, seconds, size, ahead, usual=not again)
        if stage and not again:  # a first stage's need no tensor, and tell nothing of the others
            self._answers, self._longest_s = self._answers + 1, max(self._longest_s, seconds / size)
        if replica.lagging:
            replica.lagging = self._wirings[stage].estimate(replica) > CAUGHT_UP * self._wirings[stage].usual.value
        replica.queue_s /= 2
        if replica.trial:
            replica.trial, replica.level, replica.banned_until = False, 0, 0.0
            self._wirings[stage].place(replica, now)

    def slow(self, peer: Peer, seconds: float, size: float, now: float, ahead: float = 0.0) -> None:
        """It did not answer in time: a slow sample; on probation, or where it was asked after it had been late before and has answered
        nothing since, a failure."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        self._wirings[stage].measure(replica, seconds, size, ahead)
        again = replica.late is not None and now - seconds >= replica.late
        replica.lagging, replica.late = True, now if replica.late is None else replica.late
        if replica.trial or again:
            self.failed(peer, now)

    def failed(self, peer: Peer, now: float) -> float:
        """It cannot be reached, refuses, or sends invalid data. Seconds of a new ban; 0.0 if it is banned already."""
        if peer not in self._at:
            return 0.0
        stage, replica = self._at[peer]
        if replica.banned_until > now and not replica.trial:
            return 0.0
        replica.trial = False
        replica.level = min(replica.level + 1, BAN_LEVELS)
        ban_s = self._ban_s(replica)
        replica.banned_until = now + ban_s
        self._wirings[stage].place(replica, now)
        return ban_s

    def busy(self, peer: Peer, wait_s: float, size: float, now: float, backward: bool = False) -> None:
        """It did not accept a hop of that size: the charge is taken back, and it is not chosen for the wait, with jitter."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        wait_s = max(wait_s, LEAST_WAIT_S) if 0 <= wait_s <= MOST_WAIT_S else MOST_WAIT_S  # NaN lands here too
        replica.queue_s, replica.declined = wait_s, replica.declined + 1
        replica.busy_until = max(replica.busy_until, now + wait_s * (1.0 + 0.25 * self._rng.random()))
        replica.full_until = replica.busy_until if backward else replica.full_until
        replica.virtual -= size * self._wirings[stage].estimate(replica)
        if replica.trial:  # neither succeeded nor failed: the probation request follows after the wait
            replica.trial, replica.banned_until = False, 0.0
        self._wirings[stage].place(replica, now)

    def asked(self, peer: Peer, now: float) -> None:
        if (at := self._at.get(peer)) is not None and at[1].asked_at is None:
            at[1].asked_at = now

    def missed(self, peer: Peer, now: float) -> float:
        """A request to it timed out. Seconds for which it has sent nothing, if too many, counted anew from now; else 0.0."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.misses += 1
        # Its loop answers a Query and a Cancel while it computes.
        silent_s = now - replica.asked_at if replica.asked_at is not None else 0.0
        if replica.misses < MISSES or silent_s <= self._settings.heartbeat_timeout_s:
            return 0.0
        replica.asked_at = now
        return silent_s

    def not_served(self, peer: Peer, maker: str, now: float, late: bool) -> float:
        """A hop that it was asked for was `late`, or it said that a tensor is missing, which `maker` had made; '': it needs none. Seconds
        without a result, if it has served none for long, counted anew from now; else 0.0: also where the maker may be at fault."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.unserved_at = replica.unserved_at if replica.unserved else now
        replica.unserved.append(maker)
        # A peer that has become slow still has the time of its longest hop.
        hop_s = 2 * BACKWARD_SIZE * self.repeat_s(peer) if late else 0.0
        most_s, since_s = max(self._settings.heartbeat_timeout_s, hop_s), now - replica.unserved_at
        if since_s <= most_s or not self._several(replica.unserved):
            return 0.0
        replica.unserved.clear()
        return since_s

    def not_given(self, peer: Peer, by: Peer, now: float) -> float:
        """What it has made could not be had from it, says `by`. Seconds since a tensor of its was had, as above."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.withheld_at = replica.withheld_at if replica.withheld else now
        replica.withheld.append(by)
        since_s = now - replica.withheld_at
        if since_s <= self._settings.heartbeat_timeout_s or not self._several(replica.withheld):
            return 0.0
        replica.withheld.clear()
        return since_s

    def _several(self, others: list[Peer]) -> bool:
        """Enough failures, and not all with one other peer, where its stage has more."""
        stage = self._at[others[0]][0] if others[0] in self._at else -1
        replicas = sum(at == stage for at, _ in self._at.values())
        return len(others) >= MISSES and ("" in others or len(set(others)) >= min(2, replicas))

    def useless(self, peer: Peer) -> bool:
        """It has called too much missing since its last result, or has given too little of what it made, to be asked for more soon."""
        replica = self._at[peer][1] if peer in self._at else None
        return replica is not None and any(self._several(of) for of in (replica.unserved, replica.withheld) if of)

    def given(self, peers: Iterable[Peer]) -> None:
        """Tensors that these had made were had."""
        for peer in peers:
            if peer in self._at:
                self._at[peer][1].withheld.clear()

    def received(self, peer: Peer) -> None:
        if (at := self._at.get(peer)) is not None:
            at[1].asked_at, at[1].misses = None, 0

    def _ban_s(self, replica: Replica) -> float:
        return float(self._settings.ban_s * 2 ** (replica.level - 1))
