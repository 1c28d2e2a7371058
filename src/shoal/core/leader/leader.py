"""The leader: keeps the facts, asks the rules in order, and sends proposals and rounds.

It decides who belongs to the run, which stage each peer serves, and when a step is averaged, committed, saved and finished. It acts
only while its peer leads. What must not be forgotten is in the View (consensus/register.py); the rest is learned again from the members'
heartbeats, so a leader can die at any point. One proposal is in flight at a time: that of the first rule in rules/order.py that has one.
For peer.py.
"""

from __future__ import annotations

from statistics import median

import msgspec

from shoal.core.consensus.phases import ended
from shoal.core.consensus.register import Register
from shoal.core.leader.averaging import ROUNDS_PER_TERM
from shoal.core.leader.evidence import Chance
from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import newcomers
from shoal.core.leader.rules import checks, order, rounds
from shoal.core.leader.rules.lines import expected_pace
from shoal.core.leader.rules.proposal import Proposal
from shoal.core.leader.undo.unchecked import tracked
from shoal.core.messages import BookerRequest, Command, Dismissed, Note, Peer, Round, Send, Settings, View, Wire

PROMPT = 0.4  # of what followers bear of a leader under which nothing is done: when it asks why, and again when it acts on what it heard
ROUND_HOPS = 2.0  # a delayed update's tasks wait for the hop that runs, and so do those of whom it waits for
SLOWEST = 10.0  # times that a peer may be slower than the median, by its own word, and be waited for
SEND_AGAIN_BEATS = 4  # a round, to those that have not reported


class Leader:
    """Call `lead` when this peer becomes leader, `on_view` with every view that is agreed then, `decide` after every event."""

    def __init__(self, name: Peer, settings: Settings, chance: Chance) -> None:
        """`chance`: see Facts."""
        self.name, self.settings, self._chance = name, settings, chance
        self.facts = Facts(name, settings, chance)
        self.followed_s = float("inf")  # followers doubt it after so long in which nothing is done
        self._begin(0)

    def _begin(self, term: int) -> None:
        self.term = term
        save = self.facts.requests.save
        self.facts = Facts(self.name, self.settings, self._chance)
        self.facts.requests.save = save
        self.stall = ""  # why nothing has been committed for long
        self._unserved = ""  # which stage nobody serves, in words
        self._check_at = float("-inf")  # when silence and replicas are looked at again
        self._farewell_at: float | None = None

    # ---------------------------------------------------------------------------------------------------- receiving

    def lead(self, view: View, term: int, now: float) -> list[Command]:
        """This peer now leads `term`, with `view` agreed. It forgets what it knew when it led last."""
        self._begin(term)
        self.facts.lead(view, now)
        return [Note("leader", f"{self.name} leads term {term} from view {view.number}, step {view.step}")]

    def on_view(self, view: View, now: float) -> None:
        """A view is agreed that this leader proposed."""
        self.facts.on_view(view, now)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        return self.facts.on_message(peer, message, now)

    def doubt(self, peer: Peer, now: float) -> None:
        """The network says that peer cannot be reached."""
        self.facts.doubt(peer, now)

    def bar(self, peers: tuple[Peer, ...]) -> None:
        """The run's authority has revoked these."""
        self.facts.bar(peers)

    def request_save(self) -> None:
        """The run is about to be ended: a checkpoint is to be saved. Every peer is asked, so that a later leader knows it, too."""
        self.facts.requests.save = True

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: no peer's silence in that time counts."""
        self.facts.forgive(gap_s, now)

    @property
    def resigns(self) -> str:
        """Why another peer should lead, in words."""
        return self.facts.evidence.resigns

    @property
    def dismissed(self) -> bool:
        """Everybody has been told that the run is over."""
        return self._farewell_at == float("-inf")

    def asks_to_join(self, peer: Peer) -> bool:
        return peer in self.facts.requests.joins

    # ----------------------------------------------------------------------------------------------------- deciding

    def waits(self, now: float) -> bool:
        """`decide` has nothing to look at, as after most heartbeats."""
        return not (self.facts.changed or self.stall or self.facts.evidence.resigns) and now < self._check_at

    def decide(self, register: Register, now: float) -> list[Command]:
        """At most one proposal, and messages. Without news the rules are asked once a beat."""
        view, facts = register.agreed, self.facts
        if view is None or facts.view is not view or register.proposing:
            return []
        if not facts.changed and now < self._check_at:
            return []
        facts.changed, facts.scan = False, now >= self._check_at
        if facts.scan:
            self._check_at = now + 0.9 * self.settings.heartbeat_s
            self.stall = checks.why_stalled(view, facts, self.settings, now)
        if view.finished:
            return self._dismiss(view, now)
        commands = self._look(view, now) if facts.scan else []
        commands += self._save(view, now)  # before the rules: the run is finished once this ends
        for entry in order.SERVING if self.settings.serve else order.RULES:
            proposal = self._ask(entry, view, now)
            if proposal is not None:
                return commands + self._propose(proposal, view, register, now)
        if facts.requests.save and view.started:
            facts.saving.begin_now(view)
            commands += self._save(view, now)
        return commands + self._average(view, now)

    def _ask(self, entry: order.Rule | order.Check, view: View, now: float) -> Proposal | None:
        facts = self.facts
        if isinstance(entry, order.Check):
            for finding in entry.find(view, facts, self.settings, now):
                facts.note(finding, now)
            return None
        if entry.when is not None:
            name, history = entry.propose.__name__, facts.history
            if not entry.when(view, facts, self.settings, now):
                history.held_since.pop(name, None)
                return None
            history.held_since.setdefault(name, now)
            if entry.pace_beats:
                if now < history.due.get(name, now):
                    return None
                history.due[name] = now + entry.pace_beats * self.settings.heartbeat_s
        proposal = entry.propose(view, facts, self.settings, now)
        if proposal is not None and entry.when is not None:
            del facts.history.held_since[entry.propose.__name__]
        return proposal

    def _propose(self, proposal: Proposal, view: View, register: Register, now: float) -> list[Command]:
        self.facts.history.remember(proposal.moves, proposal.norms)
        after, published = proposal.view, self.facts.saving.published
        if after.epoch == view.epoch and published > after.saved:
            after = msgspec.structs.replace(after, saved=published)
        if self.settings.probation:
            after = msgspec.structs.replace(after, newcomers=newcomers(view, after, self.settings))
        if self.settings.undo != "none":
            passed, newest = self.facts.evidence.values.passed, max(published, after.saved)
            after = msgspec.structs.replace(after, undoing=tracked(after, passed, newest, self.settings))
        return register.propose(after, now)

    def _look(self, view: View, now: float) -> list[Command]:
        """Once a beat: which stages nobody serves, which replicas differ, which peers make no progress."""
        commands: list[Command] = []
        unserved = checks.unserved(view, self.settings)
        if unserved != self._unserved:
            self._unserved = unserved
            commands.append(Note("stall", unserved or "every stage is served again"))
        facts = self.facts
        for dispute in checks.different_states(view, facts, self.settings, now):
            facts.note(dispute, now)
        for verdict in facts.evidence.progress.late(view, facts.history.step_s, now).items():
            facts.convict(verdict)
        return commands

    def _save(self, view: View, now: float) -> list[Command]:
        saving = self.facts.saving
        return [] if saving.idle else saving.tick(view, self.facts.places, now)

    def _dismiss(self, view: View, now: float) -> list[Command]:
        """A finished run: tell the others once all know, or after a while."""
        if self._farewell_at is None:
            self._farewell_at = now + 2 * self.settings.heartbeat_timeout_s
        others = [member.peer for member in view.members + view.joining if member.peer != self.name]
        heartbeats = self.facts.heartbeats
        aware = all(peer in heartbeats and heartbeats[peer].number >= view.number for peer in others)
        if aware or now >= self._farewell_at:
            self._farewell_at = float("-inf")
            return [Send(peer, Dismissed(number=view.number)) for peer in others]
        return []

    # ---------------------------------------------------------------------------------------------------- averaging

    def _average(self, view: View, now: float) -> list[Command]:
        """Open a round when the books are complete; send it again to participants that have not reported."""
        if not view.started or self.settings.serve or not view.owners:
            return []
        facts = self.facts
        commands = self._inquire(view, now) if facts.scan else []
        if ended(view, self.settings):
            return commands
        current = facts.rounds.open
        if current is None:
            return commands + self._open_round(view, now)
        if facts.scan:
            hops_s = ROUND_HOPS * self._slowest_s() if self.settings.staleness else 0.0
            for verdict in current.watch.verdicts(current.reduced, facts.evidence.conduct, self.name, now, hops_s):
                facts.convict(verdict)
            commands += facts.judge(facts.evidence.audits.tick(now))
        commands += facts.evidence.audits.requests(current.message, now)
        late = [
            peer
            for peer, sent_at in current.sent_at.items()
            if peer not in current.reduced and now - sent_at > SEND_AGAIN_BEATS * self.settings.heartbeat_s
        ]
        current.sent_at.update(dict.fromkeys(late, now))
        return commands + [Send(peer, current.message) for peer in late]

    def _inquire(self, view: View, now: float) -> list[Command]:
        """Ask the owners of what is missing where it hangs, and judge by their answers."""
        facts, evidence = self.facts, self.facts.evidence
        ledger = facts.ledger(view.work)
        for peer in evidence.tails.look(view, ledger, now):
            evidence.stalls.rest(peer)
        if ledger.whole:
            return []
        slowest_s = self._slowest_s()
        most_s = PROMPT * self.followed_s
        commands = evidence.stalls.ask(view, ledger, slowest_s, most_s, now)
        verdicts, evidence.reassigning = evidence.stalls.judge(view, ledger, evidence.conduct, now)
        jams, pace = evidence.jams, 0.0
        if not jams.paced:
            pace = self.settings.stages * expected_pace(view.members, facts, self.settings)
        jam = jams.look(view, ledger, evidence.stalls, slowest_s, most_s, pace, facts.received_at, now)
        evidence.reassigning = jam.moves | evidence.reassigning
        for verdict in (*verdicts, *jam.verdicts):
            facts.convict(verdict)
        facts.changed |= bool(evidence.reassigning)
        return commands + jam.commands

    def _slowest_s(self) -> float:
        """Seconds of a microbatch at the slowest peer, of those that are believed; 0: nothing is known."""
        beats = self.facts.heartbeats.items()
        rates = [beat.rate for peer, beat in beats if peer in self.facts.serving and beat.rate > 0.0]
        return 1.0 / max(min(rates), median(rates) / SLOWEST) if rates else 0.0

    def _open_round(self, view: View, now: float) -> list[Command]:
        facts, ledger = self.facts, self.facts.ledger(view.step)
        if not ledger.whole or now < facts.rounds.not_before:
            return []
        if not ledger.complete(view.members):
            return self._settle_double_booking(view, now)
        if not rounds.can_average(view, facts):
            return []
        history = facts.history
        if history.complete_at is None:
            history.complete_at = now
        for misfit in rounds.misfits(view, facts):
            facts.note(misfit, now)
        complete_s = now - history.complete_at
        opening = rounds.opening(view, facts, self.settings, complete_s)
        if opening is None:
            return []
        for peer in opening.waited_for:
            history.waited_s[peer] = history.waited_s.get(peer, 0.0) + complete_s
        facts.rounds.count += 1
        number = self.term * ROUNDS_PER_TERM + facts.rounds.count
        goes_on = any(kept is not None for kept in opening.kept)
        message = Round(
            epoch=view.epoch,
            step=view.step,
            round=number,
            view=view.number,
            groups=opening.groups,
            joiners=opening.joiners,
            kept=tuple(number if kept is None else kept for kept in opening.kept) if goes_on else (),
        )
        facts.rounds.opened(message, self.settings, now)
        return [Send(share.peer, message) for group in message.groups for share in group]

    def _settle_double_booking(self, view: View, now: float) -> list[Command]:
        facts = self.facts
        double = rounds.double_booking(view, facts, self.settings, now)
        if double is None:
            return []
        first, asked = double.first, facts.rounds.asked_owner
        if first is not None and (asked is None or asked[0] != first):
            facts.rounds.asked_owner = first, now
        facts.convict(double.verdict)
        if first is None or double.owner is None or not facts.scan:
            return []
        return [Send(double.owner, BookerRequest(view.epoch, view.step, first.index, first.stage))]
