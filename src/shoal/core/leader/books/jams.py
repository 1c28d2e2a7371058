"""When nothing is booked though hops are known to be quick: for whom do all wait, by owners' and servers' own words? For leader.py.

The leader asks the owners of what is open, and the servers for which they wait, as long as books do not grow. Asking costs nothing. An
owner that finds a server late names it; the server says that it has the hop, or which tensor's maker it waits for in turn. A peer for
which two others wait, without a break, while its heartbeats come, is evicted. A server that says that it never got what its owner waits
for is a dispute of two: another owner takes the microbatch over, and whoever is in disputes with several is to blame.
What stalls.py does about longer waits goes on beside it. docs/design/2026-11-24-jams.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from math import inf

import msgspec

from shoal.core.leader.books.stalls import FIRST, HOPS, KNOWN, Stalls
from shoal.core.leader.evictions import Verdict
from shoal.core.leader.ledger import Ledger
from shoal.core.messages import Booker, BookerRequest, Command, Index, Peer, Send, Settings, Stage, View
from shoal.core.names import key_of
from shoal.core.replica_state import owner_of

ASK_BEATS = 2.0  # without a booking, before anybody is asked,
GAPS = 1.5  # or so many times the longest that this step or the one before has had, or HOPS microbatches of the slowest peer,
QUICK_BEATS = 4.0  # and before anybody is judged: also min_request_timeout_s
HOLD_BEATS = 1.5  # for which what convicts has been said without a break: two answers
DISPUTE_FLOORS = 0.5  # of min_request_timeout_s: longer than that until a server is said never to get anything: it may have been lost,
# and its owner learns so when it asks (trainer/trainer.py)
FRESH_BEATS = 2.5  # a peer that has sent nothing for so long is not judged: its process may have been stopped, and silence has its own rule
LONGEST = 4.0  # times as long as anything in this step has taken is late, where the owner has no measure of its own
# The same where so many servers say that they wait for one maker
MANY, MANY_LONGEST = 4, 2.0
PARTS = 8.0  # of what is open: as long as one is booked books grow
USUAL = 2.0  # times as long as such a part takes in the quickest of KNOWN steps nobody is judged, FIRST times at a step's beginning
# Times as long as is expected, where nothing is measured: forwards may all come before the first backward, whose tensors may be larger
UNSURE = 4.0
ASKED = 64  # microbatches that are asked after at a time
ALONE = (
    2.0  # times as long as before anybody is judged: an owner that waits alone for a server hands its microbatch over
)
WITNESSES = 2  # keys that wait for one peer, where there can be so many
AGE = 64  # steps after which disputes are forgotten


class Outcome(msgspec.Struct):
    """Whom to ask, whom to evict, and which microbatches need another owner, with the reasons."""

    commands: list[Command] = []
    verdicts: list[Verdict] = []
    moves: dict[Index, str] = {}


class Hang(msgspec.Struct):
    """A microbatch that hangs: its owner, the stage that lacks it, and for whom its owner waits, as it says."""

    owner: Peer
    stage: Stage
    at: Peer = ""
    slow: int = 0
    at_since: float = 0.0


class Mark(msgspec.Struct, frozen=True):
    """What was booked, and left to be, when books last grew by enough."""

    booked: int = -1
    left: int = 0
    at: float = 0.0


class Jams:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._number = -1  # the view's
        self._mark = Mark()
        self._hangs: dict[Index, Hang] = {}
        self._servers: dict[tuple[Peer, Index], Booker] = {}  # what each says of the hop that an owner waits for
        self._ungiven: dict[
            Peer, dict[str, int]
        ] = {}  # whose tensors do not come: servers that have said so, in this jam
        self._alone: dict[Peer, set[str]] = {}  # who waited alone for each, and handed its microbatch over, in this jam
        self._since: dict[
            tuple[Peer, Index], float
        ] = {}  # of each verdict, or dispute: since when nothing speaks against it
        self._disputes: dict[str, set[str]] = {}  # keys, by key
        self._steps = 0
        self._began_at: float | None = None  # of this step, as far as this leader saw it
        self._booked = (0, 0)  # in it, when this leader looked first, and last
        self._looked_at = 0.0  # last
        self._rates: deque[float] = deque(maxlen=KNOWN)  # bookings per second, of the steps before
        self._in_time = False  # nothing is measured, and books grow as expected or may not have to yet, when this leader looked last

    def on_step(self, now: float) -> None:
        self._steps += 1
        if self._steps % AGE == 0:
            self._disputes.clear()
        first, last = self._booked
        if self._began_at is not None and last > first and self._looked_at > self._began_at:
            self._rates.append((last - first) / (self._looked_at - self._began_at))
        self._began_at, self._booked = now, (0, 0)
        self.clear()

    def clear(self) -> None:
        """The step is over, or this process was stopped: what was said is no longer true."""
        self._in_time = False
        self._mark = Mark()
        self._hangs.clear()
        self._servers.clear()
        self._ungiven.clear()
        self._alone.clear()
        self._since.clear()

    @property
    def paced(self) -> bool:
        """A step has been measured: nothing needs to be expected."""
        return bool(self._rates)

    def in_time(self, now: float) -> bool:
        """In a first step whose books are as far as can be expected no trainer knows how long hops take on lines that all of them fill."""
        return self._in_time and now - self._looked_at <= ASK_BEATS * self._settings.heartbeat_s

    def on_answer(self, peer: Peer, answer: Booker, now: float) -> None:
        hang = self._hangs.get(answer.index)
        if hang is None or hang.stage != answer.stage:
            return
        if peer == hang.owner:
            if answer.at != hang.at:
                hang.at, hang.at_since = answer.at, now
                self._servers.pop((answer.at, answer.index), None)  # of another time
            hang.slow = answer.slow
        elif peer == hang.at:
            self._servers[peer, answer.index] = answer

    def look(
        self,
        view: View,
        ledger: Ledger,
        stalls: Stalls,
        slowest_s: float,
        most_s: float,
        expected: float,
        heard: Mapping[Peer, float],
        now: float,
    ) -> Outcome:
        """`slowest_s`: of the slowest peer for a microbatch; after `most_s` it asks in any case. `expected`: bookings per second, where no
        step has been measured; 0: not known. `heard`: when each peer was heard last."""
        self._keep(view)
        quiet_s, usual_s = self._quiet_s(ledger, now), self._usual_s(expected)
        self._in_time = not self._rates and quiet_s < usual_s
        if quiet_s < min(most_s, max(ASK_BEATS * self._settings.heartbeat_s, HOPS * slowest_s)):
            return Outcome()
        outcome = Outcome(self._ask(view, ledger, now), [], {})
        stalls.gaps.remedied |= self._blamed
        if quiet_s < min(most_s, max(self._quick_s, usual_s, GAPS * max(stalls.gaps.now_s, stalls.gaps.before_s))):
            return outcome
        long_s = max(self._quick_s, usual_s, LONGEST * stalls.gaps.longest_s) if ledger.booked else inf
        if quiet_s >= MANY_LONGEST / LONGEST * long_s:
            self._note_ungiven(view, MANY if quiet_s < long_s else 1)
        late = {index: hang for index, hang in self._hangs.items() if self._late(index, hang, long_s, now)}
        suspects = self._judge(view, late, heard, outcome, now)
        self._settle(stalls, outcome, now)
        self._hand_over({index: hang for index, hang in late.items() if hang.at not in suspects}, stalls, outcome, now)
        if quiet_s >= long_s:
            self._take_from_idle(stalls, outcome, now)
        return outcome

    def _keep(self, view: View) -> None:
        """A newer view: what was said by owners that are none any more, by those that left and about them is void."""
        if view.number == self._number:
            return
        self._number, members = view.number, {member.peer for member in view.members}
        self._hangs = {i: hang for i, hang in self._hangs.items() if owner_of(view, i) == hang.owner}
        self._servers = {key: said for key, said in self._servers.items() if key[0] in members}
        self._ungiven = {peer: by for peer, by in self._ungiven.items() if peer in members}
        self._since = {what: at for what, at in self._since.items() if what[0] in members}

    def _quiet_s(self, ledger: Ledger, now: float) -> float:
        """Seconds in which less than a part of what is open was booked: among many some always come through."""
        mark, left = self._mark, ledger.needed - ledger.booked
        first = ledger.booked if mark.booked < 0 and not self._booked[1] else self._booked[0]
        self._booked, self._looked_at = (first, ledger.booked), now
        if not mark.booked <= ledger.booked < mark.booked + max(1.0, mark.left / PARTS):
            self._mark = Mark(ledger.booked, left, now)
            self._ungiven.clear()
            self._alone.clear()
        return now - self._mark.at

    def _usual_s(self, expected: float) -> float:
        """For so long less than a part of what was open may be booked: on full lines hops end at the pace of the lines, and late at first.
        The quickest step says so, since whoever is to blame only makes them slower; before there is one, what is expected."""
        mark, rate = self._mark, max(self._rates, default=expected / UNSURE)
        if not rate:
            return 0.0
        needed = mark.booked + mark.left
        part = max(mark.left, needed / 2) / PARTS  # not less at the end, when hops drain through all stages
        return (USUAL if mark.booked else FIRST) * part / rate

    @property
    def _blamed(self) -> bool:
        """Some have found others late: how long that took is no measure of how long the next such wait may be."""
        return bool(self._ungiven) or any(hang.slow > 0 and hang.at != hang.owner for hang in self._hangs.values())

    @property
    def _quick_s(self) -> float:
        return max(QUICK_BEATS * self._settings.heartbeat_s, self._settings.min_request_timeout_s)

    def _ask(self, view: View, ledger: Ledger, now: float) -> list[Command]:
        commands: list[Command] = []
        open_ = dict(ledger.open_at(view.members))
        self._hangs = {index: hang for index, hang in self._hangs.items() if open_.get(index) == hang.stage}
        for index, stage in list(open_.items())[:ASKED]:
            owner = owner_of(view, index)
            if owner is None:
                continue
            hang = self._hangs.get(index)
            if hang is None or (hang.owner, hang.stage) != (owner, stage):
                hang = self._hangs[index] = Hang(owner, stage, at_since=now)
            request = BookerRequest(view.epoch, view.work, index, stage)
            commands += [Send(peer, request) for peer in dict.fromkeys((owner, hang.at)) if peer]
        return commands

    def _late(self, index: Index, hang: Hang, long_s: float, now: float) -> bool:
        """Its owner finds the server late, or cannot know, and has waited for it for too long for anybody, or for what it has booked."""
        if not hang.at or hang.at == hang.owner:
            return False
        said = self._servers.get((hang.at, index))
        return hang.slow > 0 or now - hang.at_since > long_s or (said is not None and bool(said.peer))

    def _note_ungiven(self, view: View, least: int) -> None:
        """Servers say that a tensor does not come. They are believed one by one, as owners go from one to the next; at first only where
        at least so many say so of one maker at once."""
        stage_of = {member.peer: member.stage for member in view.members}
        replicas, now = Counter(stage_of.values()), dict[Peer, dict[str, int]]()
        for (server, _), said in self._servers.items():
            if said.at and said.at != server and not said.peer and {said.at, server} <= stage_of.keys():
                now.setdefault(said.at, {})[key_of(server)] = replicas[stage_of[server]]
        for maker, by in now.items():
            if len(by) >= least:
                self._ungiven.setdefault(maker, {}).update(by)

    def _judge(
        self, view: View, late: dict[Index, Hang], heard: Mapping[Peer, float], outcome: Outcome, now: float
    ) -> set[Peer]:
        """Whoever several wait for, as long as it does not wait for another. Returns those who will be convicted if that stays so."""
        stage_of = {member.peer: member.stage for member in view.members}
        replicas, waits = Counter(stage_of.values()), self._waits(late, {key_of(peer) for peer in stage_of})
        suspects = set[Peer]()
        for peer, stage in stage_of.items():
            by = waits.get(peer, {})
            enough = bool(by) and len(by) >= min(WITNESSES, *by.values()) and replicas[stage] > 1
            fresh = now - heard.get(peer, now) <= FRESH_BEATS * self._settings.heartbeat_s
            suspects |= {peer} if enough and fresh else set()
            if self._holds((peer, -1), enough and fresh, now):
                outcome.verdicts.append((peer, f"keeps {' and '.join(sorted(by))} waiting while nothing is booked"))
        return suspects

    def _waits(self, late: dict[Index, Hang], keys: set[str]) -> dict[Peer, dict[str, int]]:
        """By whom each peer is waited for: keys, and how many such there could be."""
        waits: dict[Peer, dict[str, int]] = {}
        for index, hang in late.items():
            if self._is_to_blame(index, hang):
                waits.setdefault(hang.at, {})[key_of(hang.owner)] = len(keys - {key_of(hang.at)})
        for peer, by_owners in self._alone.items():  # the word of one that was evicted since is void
            waits.setdefault(peer, {}).update(dict.fromkeys(by_owners & keys, len(keys - {key_of(peer)})))
        for peer, by_servers in self._ungiven.items():
            waits.setdefault(peer, {}).update(by_servers)
        return waits

    def _is_to_blame(self, index: Index, hang: Hang) -> bool:
        """The server, by its own words: else it is a dispute, or waits for another."""
        said = self._servers.get((hang.at, index))
        return said is None or bool(said.peer) or said.at == hang.at

    def _settle(self, stalls: Stalls, outcome: Outcome, now: float) -> None:
        """A server that never got what an owner waits for: one of the two lies, or nothing gets through between them."""
        for index, hang in self._hangs.items():
            said = self._servers.get((hang.at, index)) if hang.at != hang.owner else None
            never = said is not None and not said.at and not said.peer
            if not self._holds((hang.at, index), never, now, DISPUTE_FLOORS * self._settings.min_request_timeout_s):
                continue
            pair = key_of(hang.owner), key_of(hang.at)
            for one, two in (pair, pair[::-1]):
                self._disputes.setdefault(one, set()).add(two)
            if stalls.hand_over(index, hang.owner, hang.stage, hang.at, now):
                outcome.moves[index] = f"{hang.owner} waits for microbatch {index} at {hang.at}, which has not got it"
        for index, why in outcome.moves.items():
            for peer in (self._hangs[index].owner, self._hangs[index].at):
                only = [one for one in self._disputes[key_of(peer)] if self._disputes[one] == {key_of(peer)}]
                if len(only) >= WITNESSES:
                    outcome.verdicts.append((peer, f"is in dispute with {' and '.join(sorted(only))}: {why}"))

    def _hand_over(self, late: dict[Index, Hang], stalls: Stalls, outcome: Outcome, now: float) -> None:
        """One owner alone waits for a server: another one takes over, and gets on, or is the second that waits for it."""
        for index, hang in late.items():
            if index in outcome.moves or now - hang.at_since < ALONE * self._quick_s:
                continue
            if stalls.hand_over(index, hang.owner, hang.stage, hang.at, now):
                outcome.moves[index] = f"{hang.owner} alone waits for microbatch {index} at {hang.at}"
                if self._is_to_blame(index, hang):
                    self._alone.setdefault(hang.at, set()).add(key_of(hang.owner))

    def _take_from_idle(self, stalls: Stalls, outcome: Outcome, now: float) -> None:
        """An owner waits for itself, as it says, and nobody else can tell for what: another one gets on, or not."""
        for index, hang in self._hangs.items():
            if index in outcome.moves or hang.at != hang.owner or now - hang.at_since < self._quick_s:
                continue
            if stalls.hand_over(index, hang.owner, hang.stage, "", now):
                outcome.moves[index] = f"{hang.owner} waits for itself with microbatch {index}"

    def _holds(self, what: tuple[Peer, Index], true: bool, now: float, longer_s: float = 0.0) -> bool:
        """It has been so for HOLD_BEATS, and for so much longer."""
        if not true:
            self._since.pop(what, None)
            return False
        return now - self._since.setdefault(what, now) >= HOLD_BEATS * self._settings.heartbeat_s + longer_s
