"""What the leader knows: what peers have reported since it leads, and what it remembers of its own decisions.

Facts change with messages, with agreed views and with what the Leader notes; the rules (rules/) only read them. Nothing here has to
survive the leader: what must not be forgotten is in the View, and a new leader learns the rest from the members' heartbeats.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.core.allreduce.checked import WrongSums
from shoal.core.allreduce.layout import fenced
from shoal.core.consensus.phases import ended
from shoal.core.leader.audits.audits import Outcome
from shoal.core.leader.audits.comparing import Case
from shoal.core.leader.averaging import DISAGREEMENTS, OpenRound, StepRounds
from shoal.core.leader.books.stalls import Takeovers
from shoal.core.leader.evictions import Dispute, Misfit, Verdict
from shoal.core.leader.evidence import Chance, Evidence
from shoal.core.leader.history import History
from shoal.core.leader.ledger import Ledger
from shoal.core.leader.requests import Requests, unfit
from shoal.core.leader.saving import Saving
from shoal.core.messages import (
    AuditAnswer,
    Booker,
    Command,
    Complaint,
    Heartbeat,
    Join,
    JoinRefused,
    Leave,
    LoadFailed,
    Member,
    NonFinite,
    Note,
    Peer,
    Recomputed,
    Reduced,
    RoundFailed,
    RoundWaits,
    Send,
    Settings,
    View,
    Wire,
)
from shoal.core.names import key_of
from shoal.core.replica_state import NOBODY, Known, owner_of

FAILURES = 5  # rounds of one step that a peer may give up,
QUIET_BEATS = 3  # after which a peer is silent, and not one that answers nobody
GIVEN_UP = 2  # times as many in evictions.AGE steps
JOINS = 256  # requests to join that are kept; a peer that is not among them repeats its request
NEAR, NEAR_BEATS = 2, 4  # steps that a joiner may be behind for the others to wait for it, or as many as take so long
SAME = 5  # rounds of one step that a peer may give up because of one other peer

Finding = Dispute | Misfit | Takeovers | WrongSums | Case  # of a check (rules/order.py)


class Facts:
    """Call `on_view` with every agreed view and `on_message` with every message to the leader."""

    def __init__(self, name: Peer, settings: Settings, chance: Chance) -> None:
        """`chance` gives numbers from 0 up to 1 that nobody else can foresee."""
        self.name, self.settings = name, settings
        self.known: Known = NOBODY  # the agreed view, and who is in it
        self.received_at: dict[Peer, float] = {}  # each peer's last message
        self.doubted: dict[Peer, float] = {}  # since when its connections are broken, with no sign of life
        self.heartbeats: dict[Peer, Heartbeat] = {}
        self.ledgers: dict[int, Ledger] = {}  # of the steps that are open: one, with delayed updates at most two
        self.load_failed: dict[Peer, LoadFailed] = {}  # who cannot load the checkpoint that all went back to
        self.requests = Requests(settings)
        self.evidence = Evidence(name, settings, chance)
        self.rounds = StepRounds()
        self.history = History()
        self.saving = Saving(settings)
        self.changed = True  # something happened that the rules look at
        self.scan = True  # this decision is the one that each beat has, and looks at silence and replicas, too

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def view(self) -> View | None:
        return self.known.view

    @property
    def serving(self) -> dict[Peer, int]:
        """Members -> stage."""
        return self.known.serving

    @property
    def present(self) -> dict[Peer, int]:
        """Members and joiners -> stage."""
        return self.known.present

    def ledger(self, step: int) -> Ledger:
        """The books of that step; empty ones if nothing of it is known."""
        over = self.view is not None and ended(self.view, self.settings)
        return self.ledgers.get(step) or Ledger.of(self.settings, step, over)

    def share(self, view: View) -> float:
        """How much of what is computed now is booked."""
        ledger = self.ledger(view.work)
        return ledger.booked / max(1, ledger.needed)

    @property
    def booked(self) -> int:
        """Bookings of all steps that are open."""
        return sum(ledger.booked for ledger in self.ledgers.values())

    def alive(self, peer: Peer) -> bool:
        """It has sent a heartbeat since this peer leads, and its connections have not broken since. Otherwise it sends one within a
        beat or is removed."""
        return peer == self.name or (peer in self.heartbeats and peer not in self.doubted)

    def confirmed(self, joiner: Peer) -> bool:
        """That joiner has reported that it holds the view which made it one: before, it accepts nothing that is meant for it."""
        held = self.heartbeats.get(joiner)
        return held is not None and held.number >= self.requests.joined_in.get(joiner, 0)

    def holds(self, member: Member, view: View) -> bool:
        """It reports the state of its stage at the step that is trained. `misfit` says whether it is another one than the members'."""
        heartbeat = self.heartbeats.get(member.peer)
        return (
            heartbeat is not None
            and heartbeat.ready
            and heartbeat.number >= self.requests.joined_in.get(member.peer, 0)
            and (heartbeat.step, heartbeat.epoch, heartbeat.stage) == (view.step, view.epoch, member.stage)
        )

    def misfit(self, member: Member, view: View) -> bool:
        """A joiner that holds another state of its stage than the stage's members."""
        return self.holds(member, view) and self._differs(member, view)

    def _differs(self, member: Member, view: View) -> bool:
        serving, own = self.known.serving, self.heartbeats[member.peer].digest
        if member.peer in serving:
            return False
        differ, state = False, (view.step, view.epoch)
        for peer in view.replicas.get(member.stage, ()):
            other = self.heartbeats.get(peer)
            if other is not None and other.digest and (other.step, other.epoch) == state:
                if other.digest == own:
                    return False
                differ = True
        return differ

    def ready(self, member: Member, view: View) -> bool:
        """It holds the state of its stage at the step that is trained."""
        return self.holds(member, view) and not self._differs(member, view)

    def near(self, member: Member, view: View) -> bool:
        """That joiner holds its stage and applies what was committed meanwhile: worth waiting for, unlike a download. Where a step is
        shorter than a round trip, its report is some steps old."""
        heartbeat = self.heartbeats.get(member.peer)
        most = max(NEAR, NEAR_BEATS * self.settings.heartbeat_s / max(self.history.step_s, 1e-3))
        return (
            heartbeat is not None
            and bool(heartbeat.digest)
            and self.confirmed(member.peer)
            and (heartbeat.epoch, heartbeat.stage) == (view.epoch, member.stage)
            and view.step - heartbeat.step <= most
        )

    # ------------------------------------------------------------------------------------------------ agreed views

    def lead(self, view: View, now: float) -> None:
        """This peer now leads, with `view` agreed."""
        self.on_view(view, now)
        self.received_at = {member.peer: now for member in view.members + view.joining}

    def on_view(self, view: View, now: float) -> None:
        """A view is agreed (this leader proposed it, or it is the one it begins with)."""
        before = self.view
        self.known = Known(view, view.serving, view.serving | {one.peer: one.stage for one in view.joining})
        self.changed = True
        self._on_members(before, view, now)
        self._forget_absent()
        self.evidence.on_view(before, view, self.present, now)
        current = self.rounds.open
        opened_again = before is not None and before.ahead and not view.ahead
        if opened_again or (current is not None and fenced(current.message, view) is not None):
            self.rounds.interrupt()
        if before is None or (before.step, before.epoch) != (view.step, view.epoch):
            self._on_step(before, view, now)
        if self.history.step_at is None and view.started:
            self.history.step_at = now
        self.saving.on_view(view)

    def _on_step(self, before: View | None, view: View, now: float) -> None:
        self.rounds.open = None
        self.rounds.on_step()
        self.evidence.conduct.step()
        self.history.on_step(before, self.ledger(before.step if before is not None else view.step), now)
        self.load_failed.clear()
        same, evidence = before is not None and before.epoch == view.epoch, self.evidence
        evidence.nonfinite = {what: by for what, by in evidence.nonfinite.items() if same and what[0] >= view.step}
        self.ledgers = {step: kept for step, kept in self.ledgers.items() if same and step >= view.step}
        if view.last is not None and view.last.save:
            self.saving.begin(view)
            self.requests.save = False
        elif 0 < view.saved == view.step - 1:
            self.requests.save = False  # what that step began with was saved while it went on
        for peer, heartbeat in list(self.heartbeats.items()):
            self._take_books(peer, heartbeat)

    def _forget_absent(self) -> None:
        """Nothing is kept of peers that are not in the view, and no books of those that are no members."""
        for ledger in self.ledgers.values():
            for peer in [peer for peer in ledger.books if peer not in self.serving]:
                ledger.forget(peer)
        evidence, requests = self.evidence, self.requests
        tables: tuple[dict[Peer, Any], ...] = (
            self.heartbeats,
            self.received_at,
            self.doubted,
            self.load_failed,
            requests.leaves,
            requests.leave_at,
            evidence.guilty,
            evidence.unfit,
            self.history.waited_s,
        )
        for table in tables:
            for peer in [peer for peer in table if peer not in self.present]:
                del table[peer]
        for held in (evidence.stale, evidence.parted):
            for peer in [peer for peer in held if peer not in self.serving]:
                del held[peer]

    def _on_members(self, before: View | None, view: View, now: float) -> None:
        self.requests.pauses.on_view(view.evicted, now)
        for peer in self.present:
            self.received_at.setdefault(peer, now)
            self.requests.joins.pop(peer, None)
        known = self.requests.joined_in
        self.requests.joined_in = {
            member.peer: known.get(member.peer, view.number)
            if before is not None and member in before.joining
            else view.number
            for member in view.joining
        }

    # ---------------------------------------------------------------------------------------------------- messages

    def doubt(self, peer: Peer, now: float) -> None:
        """The network says that peer cannot be reached."""
        if peer in self.received_at:
            self.doubted.setdefault(peer, now)

    def bar(self, peers: tuple[Peer, ...]) -> None:
        """The run's authority has revoked these."""
        for peer in peers:
            self.requests.joins.pop(peer, None)
            if peer in self.present and peer not in self.evidence.guilty:
                self.evidence.guilty[peer] = "revoked by the run's authority"
                self.changed = True

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: no peer's silence in that time counts."""
        self.received_at = {peer: min(now, at + gap_s) for peer, at in self.received_at.items()}
        self.doubted.clear()
        self.evidence.forgive(gap_s, now)
        self.rounds.forgive(gap_s, now)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        present = peer in self.present
        if present:
            self.received_at[peer] = now
            self.doubted.pop(peer, None)
        if isinstance(message, Heartbeat):  # as most are
            if present:
                self._on_heartbeat(peer, message, now)
            return []
        self.changed = True
        match message:
            case Join():
                return self._on_join(peer, message)
            case _ if not present:
                pass
            case Leave() if peer not in self.requests.leaves:
                self._on_leave(peer, message, now)
            case Complaint():
                self._on_complaint(peer, message, now)
            case LoadFailed():
                self._on_load_failed(peer, message)
            case NonFinite():
                self._on_nonfinite(peer, message)
            case Reduced() | RoundFailed() | RoundWaits():
                return self._on_round(peer, message, now)
            case AuditAnswer() | Recomputed():
                return self.judge(self.evidence.audits.on_message(peer, message, now))
            case Booker():
                self._on_booker(peer, message)
                self.evidence.on_answer(peer, message, now)
            case _:
                return self.saving.on_message(peer, message, self.places)
        return []

    def _on_leave(self, peer: Peer, message: Leave, now: float) -> None:
        """Where nobody else that stays serves its stage, what it holds is saved: it may be gone before another peer has it."""
        requests = self.requests
        requests.leaves[peer], requests.leave_at[peer] = message.reason, now - message.waited_ms / 1000
        stages = {-1} | {stage for other, stage in self.serving.items() if other not in requests.leaves}
        requests.save |= self.serving.get(peer, -1) not in stages

    @property
    def places(self) -> dict[Peer, str]:
        """Where each peer that has sent a heartbeat writes checkpoints."""
        return {peer: heartbeat.place for peer, heartbeat in self.heartbeats.items()}

    def _on_join(self, peer: Peer, join: Join) -> list[Command]:
        if peer in self.present:
            return []
        if fault := unfit(self.settings.answers, join.answers):
            return [Send(peer, JoinRefused(fault))]
        joins = self.requests.joins
        if peer in joins or len(joins) < JOINS:
            joins[peer] = join
        return []

    def _on_heartbeat(self, peer: Peer, heartbeat: Heartbeat, now: float) -> None:
        view = self.view
        assert view is not None
        self.changed |= peer not in self.serving or not view.started or view.finished or bool(self.evidence.nonfinite)
        self.heartbeats[peer] = heartbeat
        self.evidence.progress.on_heartbeat(peer, heartbeat, view, now)
        self._take_books(peer, heartbeat)

    def _take_books(self, peer: Peer, heartbeat: Heartbeat) -> None:
        view = self.view
        assert view is not None
        if heartbeat.epoch != view.epoch or self.serving.get(peer) != heartbeat.stage:
            return
        for step, books in ((heartbeat.work, heartbeat.books), (heartbeat.work - 1, heartbeat.closed)):
            if books and view.step <= step <= view.step + view.begun:
                ledger = self.ledgers.get(step) or self.ledgers.setdefault(step, self.ledger(step))
                wrong = ledger.report(peer, books, heartbeat.stage)
                if wrong:
                    self.convict((peer, wrong))
                self.changed |= ledger.whole

    def _on_complaint(self, peer: Peer, complaint: Complaint, now: float) -> None:
        """`unreachable`: a link may be to blame, so a stage's last replica stays; whom I do not hear is only silent; lines may be full."""
        about, reason, stage = complaint.about, complaint.reason, self.serving.get(complaint.about)
        if complaint.kind == "stale":
            if about == peer:
                self.evidence.stale[peer] = reason
            return
        if stage is None or peer not in self.serving:
            return
        if complaint.kind == "unreachable":
            quiet_s = now - self.received_at.get(about, now) if about in self.heartbeats else math.inf
            alone = sum(other == stage for other in self.serving.values()) < 2
            silent = about != self.name and quiet_s > QUIET_BEATS * self.settings.heartbeat_s
            if alone or silent or self.evidence.jams.in_time(now):
                return
        self.convict(self.evidence.conduct.accuse(peer, about, reason, witnesses=len(self.serving) - 1))

    def _on_load_failed(self, peer: Peer, message: LoadFailed) -> None:
        """Only a report about the step that all go back to now."""
        if self.view is not None and (message.epoch, message.step) == (self.view.epoch, self.view.step):
            self.load_failed[peer] = message

    def _on_nonfinite(self, peer: Peer, message: NonFinite) -> None:
        """Only of what is computed now, at the stage that it serves."""
        view = self.view
        assert view is not None
        if (message.epoch, message.step) != (view.epoch, view.work) or message.index >= self.settings.count(view.work):
            return
        if self.serving.get(peer) == message.stage:
            self.evidence.nonfinite.setdefault((message.step, message.stage, message.index), {})[key_of(peer)] = message

    def _on_round(self, peer: Peer, message: Reduced | RoundFailed | RoundWaits, now: float) -> list[Command]:
        current = self.rounds.reporting(peer, message)
        match message:
            case _ if current is None:
                pass
            case Reduced():
                self._on_reduced(peer, message, current, now)
            case RoundFailed():
                return self._on_round_failed(peer, message, current, now)
            case RoundWaits():
                current.watch.on_waits(peer, message, now)
        return []

    def _on_reduced(self, peer: Peer, reduced: Reduced, current: OpenRound, now: float) -> None:
        if not (math.isfinite(reduced.norm_sq) and reduced.norm_sq >= 0.0):
            self.evidence.guilty[peer] = f"reports a gradient with the squared norm {reduced.norm_sq}"
        else:
            current.reduced.setdefault(peer, reduced)
            current.watch.on_reduced(now)

    def _on_round_failed(self, peer: Peer, failed: RoundFailed, current: OpenRound, now: float) -> list[Command]:
        groups = current.message.groups
        group = next((group for group in groups if any(share.peer == peer for share in group)), ())
        self.rounds.retry(self.settings, now)
        failures, conduct, culprit = self.rounds.failures, self.evidence.conduct, failed.culprit
        failures[peer] += 1
        failures[peer, culprit] += 1
        if any(share.peer == culprit for share in group):
            self.convict(conduct.accuse(peer, culprit, failed.reason, len(group) - 1))
            if failures[peer, culprit] >= SAME and culprit not in self.evidence.guilty:
                self.convict(conduct.alone(peer, culprit, f"{peer}: {failed.reason}"))
        elif culprit:  # a replica names only whose chunk it has got
            self.convict((peer, f"blames {culprit} for a round, which has no part in its stage's exchange"))
        elif max(failures[peer], conduct.gives_up(peer) / GIVEN_UP) >= FAILURES:
            self.convict((peer, f"has given up {failures[peer]} rounds of a step, the last: {failed.reason}"))
        return [Note("round", f"round given up: {peer} says {failed.reason}")]

    def _on_booker(self, peer: Peer, answer: Booker) -> None:
        """An owner says which of two members has booked its microbatch."""
        view, asked = self.view, self.rounds.asked_owner
        if view is None or asked is None or (answer.epoch, answer.step) != (view.epoch, view.step):
            return
        twice = asked[0]
        asked_for = (answer.index, answer.stage, peer) == (twice.index, twice.stage, owner_of(view, twice.index))
        if asked_for and answer.peer in (twice.one, twice.two):
            liar = twice.two if answer.peer == twice.one else twice.one
            self.convict((liar, f"booked microbatch {twice.index}, whose owner has its gradient from {answer.peer}"))

    # ---------------------------------------------------------------------------------------------------- verdicts

    def judge(self, outcome: Outcome) -> list[Command]:
        """What an audit has shown. Of one word against another the accuser's counts, once."""
        conduct, pairs = self.evidence.conduct, {one[:2]: one[2] for one in (*outcome.words, *outcome.unlike)}
        words = [conduct.alone(by, of, why) for by, of, why in outcome.words]
        for verdict in (*outcome.guilty, *words, *conduct.unlike(outcome.unlike, outcome.agree, self.serving)):
            self.convict(verdict, false=True)
        for peer in outcome.passed:
            self.evidence.values.passes(peer, outcome.step)
        found = [f"{by} and {of} differ: {why}" for (by, of), why in pairs.items()]
        return [Note("audit", text) for text in (*(f"{peer} {why}" for peer, why in outcome.guilty), *found)]

    def convict(self, verdict: Verdict | None, *, false: bool = False) -> None:
        """A leader cannot evict itself: it lets another lead, which judges anew. `false`: for values that it sent, which were believed."""
        if verdict is None:
            return
        peer, why = verdict
        if peer == self.name:
            self.evidence.resigns = why
        elif peer in self.present:
            self.evidence.guilty[peer] = why
            self.evidence.values.false |= {peer} if false else set()
            self.changed = True

    def note(self, finding: Finding, now: float) -> None:
        """What a check has found."""
        match finding:
            case Misfit():
                self._on_misfit(finding.member)
            case Case():
                self.evidence.audits.draw(finding, now)
            case Takeovers():
                self.evidence.stalls.settle(finding)
                self.evidence.reassigning, self.evidence.takeovers = {}, finding
                for verdict in finding.verdicts:
                    self.convict(verdict)
            case WrongSums():
                words = finding.words  # each of one peer about another, which nobody else can judge
                verdicts = [self.evidence.conduct.accuse(by, owner, why, 1) for by, owner, why in words]
                for one in (*finding.guilty, *verdicts):
                    self.convict(one, false=True)
                self.rounds.retry(self.settings, now)
            case Dispute(retry=False):
                self._on_differing(finding)
            case Dispute():
                self.rounds.disagreements += 1
                if self.rounds.disagreements >= DISAGREEMENTS or self.evidence.conduct.has_differed(finding.replicas):
                    self._on_differing(finding)
                self.rounds.retry(self.settings, now)

    def _on_differing(self, dispute: Dispute) -> None:
        """Those not taken to be right download their state again, and go if they had to too often."""
        evidence = self.evidence
        right = evidence.conduct.right(dispute.replicas, self.name, dispute.likely)
        tie = len({key_of(peer) for peers in dispute.replicas.values() for peer in peers}) == 2
        for peers in dispute.replicas.values():
            for peer in peers if peers is not right else ():
                if not any(peer in known for known in (evidence.stale, evidence.unfit, evidence.guilty)):
                    verdict = evidence.conduct.differs(peer, dispute.why, tie)
                    if verdict is not None and peer in self.serving and evidence.conduct.undecided(peer):
                        evidence.parted[peer] = verdict[1]
                        continue
                    (evidence.stale if peer in self.serving else evidence.unfit)[peer] = dispute.why
                    self.convict(verdict)

    def _on_misfit(self, member: Member) -> None:
        evidence, peer = self.evidence, member.peer
        others = [other for other, stage in self.serving.items() if stage == member.stage]
        if peer not in evidence.unfit and not any(one in evidence.guilty for one in (peer, *others)):
            odd = evidence.conduct.odd_one(peer, others[0]) if len(others) == 1 else None
            if odd is not None and odd[0] != self.name:
                return self.convict(odd)
            why = f"came with another state of stage {member.stage} than its replicas have"
            if peer == self.name:  # it would stay a joiner for ever, and those who wait for its donors with it
                return self.convict((peer, why))
            evidence.unfit[peer] = why
            self.convict(evidence.conduct.differs(peer, why, tie=len(others) == 1))
