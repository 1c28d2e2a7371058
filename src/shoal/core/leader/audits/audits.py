"""Audited steps, the leader's part: which steps are audited, who computes whose hops again, and who is wrong.

When every sum of a round is made, and before it is committed, the leader draws whether this step is audited: until then nobody knows. All
replicas are at one of the next LONGEST / share steps, each of which is as likely, and then at one of the next as many: so nobody is
unaudited for long or safe for a step. New and suspected ones are in other steps, too. If a step is audited, every participant says what its
hops have used and made, by digests and by sketches whose signs are drawn now, and what one has got is compared with what another has made
(comparing.py). Then another replica computes all hops of the audited one again, from the same inputs.
The sketch of the sum of their gradients is compared with that of the part that the audited one brought into the round. Of three
replicas and more a third one decides who of two is wrong. What is late or does not come convicts nobody by itself.
For facts.py and leader.py; core/server/audits.py answers. docs/design/2026-11-24-audited-steps.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from shoal.core.leader.audits.comparing import Case, Listed, Participant, Unlike, difference, unlike_inputs
from shoal.core.messages import (
    AUDIT_HOPS,
    AUDIT_RECORDS,
    AuditAnswer,
    AuditedHop,
    AuditRequest,
    Command,
    Peer,
    Recomputed,
    RecomputeRequest,
    Round,
    Send,
    Settings,
)
from shoal.core.names import key_of

LONGEST = (
    4.4  # over the share of a new replica: within how many steps all are audited; evicting within 50 needs a few more
)
AGAIN = 3  # audits in a row, of a replica of whose hops the audit of all has shown nothing
EARNED = 4  # audits that were passed after which the share is half
SUSPECT = -4  # audits that have to be passed before a suspect is a new replica again
SILENT = 4  # audits in a row in which a replica does not say what it has used, while it answers all else: it is evicted
RECORDS = 10  # of a microbatch at a replica, at most: of tokens, input and output, both ways; again, if they went and came back
REPEAT_BEATS = 4  # between two requests for the same
PATIENCE, HOPS = (
    8.0,
    4.0,
)  # of min_request_timeout_s, and of the time that the hops should take: how long an answer is awaited

Asked = tuple[Peer, Peer]  # whose hops, by whom
Key = tuple[int, int, int]  # epoch, step and round


class Outcome(msgspec.Struct, frozen=True):
    """What an audit of `step` has shown. `guilty`: by several, or by their own answers; `words`: the word of the first against
    the second; `unlike`: one of two is wrong, others `agree` (findings.py); `passed`: their hops, computed again, are the same."""

    guilty: tuple[tuple[Peer, str], ...] = ()
    words: tuple[tuple[Peer, Peer, str], ...] = ()
    unlike: tuple[Unlike, ...] = ()
    agree: tuple[tuple[Peer, Peer], ...] = ()
    passed: tuple[Peer, ...] = ()
    step: int = 0


class Audit(msgspec.Struct):
    """Of one round. `due`: when what has not been answered by then is given up. `found`: by whom whose hops were found to differ, and how;
    '' where they do not; None where nothing could be said."""

    case: Case
    who: dict[Peer, Participant]
    audited: list[Peer]
    seed: str
    due: float
    sent_at: dict[Peer | Asked, float] = {}
    answers: dict[Peer, AuditAnswer] = {}  # whole ones
    pieces: dict[Peer, dict[int, AuditAnswer]] = {}  # of others
    listed: Listed | None = None
    asked: dict[Asked, RecomputeRequest] = {}
    found: dict[Asked, str | None] = {}

    @property
    def over(self) -> bool:
        return self.listed is not None and len(self.found) == len(self.asked)


class Audits:
    """`draw` when a round's sums are made, `passed` before it is committed. `chance`: nobody else may know what it gives."""

    def __init__(self, settings: Settings, chance: Callable[[], float]) -> None:
        self._settings, self._chance = settings, chance
        self._passed: Counter[str] = Counter()  # audits, by key
        self._silent: Counter[str] = Counter()  # audits in a row that it evades, by key
        self._unable: set[str] = set()  # keys of those that could not compute hops again when they were asked last
        self._since = 0  # rounds that were drawn since all were audited
        self._owed: dict[str, int] = {}  # by key: audits until one shows something of its hops
        self._drawn: Key | None = None
        self._audit: Audit | None = None

    def share(self, peer: Peer) -> float:
        """Of the steps in which not all are, in how many that replica is audited."""
        passed = self._passed[key_of(peer)]
        if passed < 0 or self._silent[key_of(peer)] or self._owed.get(key_of(peer)):
            return 1.0
        return self._settings.spot_checks * EARNED / (EARNED + passed)

    @property
    def share_of_all(self) -> float:
        """With which chance all are audited now: each of the steps up to the last possible one is as likely."""
        longest = max(1, int(LONGEST / self._settings.spot_checks))
        return 1.0 / max(1, longest - self._since)

    def drawn(self, of: Round) -> bool:
        """It is known whether that round is audited."""
        return not self._settings.spot_checks or self._drawn == _key(of)

    def passed(self, of: Round) -> bool:
        """Nothing is under way that could speak against that round."""
        return self.drawn(of) and self._audit is None

    def draw(self, case: Case, now: float) -> None:
        """All sums of that round are made."""
        if self.drawn(case.round):
            return
        self._drawn, self._audit = _key(case.round), None
        drawn, who = self._chance(), case.who
        everybody = drawn < self.share_of_all
        self._since = 0 if everybody else self._since + 1
        replicas = Counter(one.stage for peer, one in who.items() if peer in case.serving)
        audited = [
            peer
            for peer, one in who.items()
            if peer in case.serving and one.indices and replicas[one.stage] > 1
            if everybody or drawn < self.share(peer)
        ]
        self._owe(map(key_of, audited), everybody)
        if audited:
            seed = f"{int(self._chance() * 2**52):015x}"
            self._audit = Audit(case, who, audited, seed, now + PATIENCE * self._settings.min_request_timeout_s)

    def _owe(self, audited: Iterable[str], everybody: bool) -> None:
        """Whoever is audited now has its next chance to pass."""
        if everybody:
            self._owed = dict.fromkeys(audited, AGAIN - 1)
        else:
            self._owed |= {key: self._owed[key] - 1 for key in audited if self._owed.get(key)}

    # --------------------------------------------------------------------------------------------------------- asking

    def requests(self, of: Round, now: float) -> list[Command]:
        """What is to be sent now; what was not answered for some beats is sent again. `of`: the round that is open."""
        audit = self._audit
        if audit is None or self._drawn != _key(of):
            return []
        commands: list[Command] = []
        if audit.listed is None:
            for peer in audit.who:
                if peer not in audit.answers and self._due(audit, peer, now):
                    commands.append(Send(peer, AuditRequest(of.epoch, of.step, of.round, audit.seed)))
        for asked, request in audit.asked.items():
            if asked not in audit.found and self._due(audit, asked, now):
                commands.append(Send(asked[1], request))
        return commands

    def _due(self, audit: Audit, what: Peer | Asked, now: float) -> bool:
        if now < audit.sent_at.get(what, -math.inf) + REPEAT_BEATS * self._settings.heartbeat_s:
            return False
        audit.sent_at[what] = now
        return True

    def tick(self, now: float) -> Outcome:
        """What has not been answered in time is given up."""
        audit = self._audit
        if audit is None or now < audit.due:
            return Outcome()
        if audit.listed is None:
            return self._compare(audit, now)
        waiting = [asked for asked in audit.asked if asked not in audit.found]
        audit.found.update(dict.fromkeys(waiting))
        return self._decide(audit, dict.fromkeys(of for of, _ in waiting))

    # -------------------------------------------------------------------------------------------------------- answers

    def on_message(self, peer: Peer, message: AuditAnswer | Recomputed, now: float) -> Outcome:
        audit = self._audit
        if audit is None or self._drawn != _key(message):
            return Outcome()
        if isinstance(message, AuditAnswer):
            if audit.listed is not None or peer not in audit.who:
                return Outcome()
            self._on_answer(audit, peer, message)
            return self._compare(audit, now) if len(audit.answers) == len(audit.who) else Outcome()
        asked = message.of, peer
        if asked not in audit.asked or asked in audit.found:
            return Outcome()
        return self._on_recomputed(audit, asked, message, now)

    def _on_answer(self, audit: Audit, peer: Peer, message: AuditAnswer) -> None:
        """All its messages together; as many as a replica of this run can need."""
        pieces = audit.pieces.setdefault(peer, {})
        same = all(message.parts == other.parts for other in pieces.values())
        needed = 1 + RECORDS * self._settings.microbatches // AUDIT_RECORDS
        if not (same and message.part < message.parts <= needed) or peer in audit.answers:
            return
        pieces.setdefault(message.part, message)
        if len(pieces) == message.parts:
            records = tuple(record for number in range(len(pieces)) for record in pieces[number].records)
            audit.answers[peer] = AuditAnswer(message.epoch, message.step, message.round, records)

    def _compare(self, audit: Audit, now: float) -> Outcome:
        """All have said what they have, or will not: whose inputs are agreed upon is computed again."""
        audit.listed = listed = Listed(audit.answers)
        unlike, guilty, agree = list[Unlike](), list[tuple[Peer, str]](), list[tuple[Peer, Peer]]()
        for peer, one in audit.who.items():
            inputs = listed.inputs(peer, one, audit.case)
            unlike += inputs.unlike
            agree += [(peer, other) for other in inputs.agree]
            if peer not in audit.case.serving:
                continue
            if peer in audit.answers and not inputs.evades:
                self._silent.pop(key_of(peer), None)
            else:
                self._silent[key_of(peer)] += 1
            if self._silent[key_of(peer)] >= SILENT:
                guilty.append((peer, f"does not say in {SILENT} audits what its hops have used"))
            if peer in audit.audited and inputs.whole and not inputs.unlike:
                self._ask(audit, peer, tuple(inputs.hops), now)
        self._suspect(peer for one in unlike for peer in one[:2])
        return self._ended(audit, Outcome(tuple(guilty), (), tuple(unlike), tuple(agree)))

    def _ask(self, audit: Audit, of: Peer, hops: tuple[AuditedHop, ...], now: float) -> bool:
        """Another replica computes them again: one that has the least to do, of those that can and have not."""
        busy = Counter(by for _, by in audit.asked)
        others = [
            peer
            for peer, one in audit.who.items()
            if one.stage == audit.who[of].stage and peer != of and peer in audit.case.serving
            if (of, peer) not in audit.asked
        ]
        load = {peer: (key_of(peer) in self._unable, busy[peer]) for peer in others}
        others = [peer for peer in others if load[peer] == min(load.values())]
        if not others or len(hops) > AUDIT_HOPS:
            return False
        by, round_ = others[int(self._chance() * len(others))], audit.case.round
        exchange = round_.round_of(audit.who[of].stage)
        audit.asked[of, by] = RecomputeRequest(round_.epoch, round_.step, round_.round, of, audit.seed, exchange, hops)
        rate = audit.case.rates.get(by, 0.0)
        hops_s = HOPS * len(hops) * (busy[by] + 1) / rate if rate > 0.0 else 0.0
        audit.due = max(audit.due, now + PATIENCE * self._settings.min_request_timeout_s + hops_s)
        return True

    def _on_recomputed(self, audit: Audit, asked: Asked, result: Recomputed, now: float) -> Outcome:
        assert audit.listed is not None
        (of, by), hops, settings = asked, audit.asked[asked].hops, self._settings
        if sorted(hop.index for hop in result.hops) != sorted(hop.index for hop in hops):
            self._unable.add(key_of(by))
            audit.found[asked] = None
            self._ask(audit, of, hops, now)
            return self._decide(audit, (of,))
        self._unable.discard(key_of(by))
        unlike = unlike_inputs(of, by, result, audit.case, audit.listed)
        if unlike:
            audit.found[asked] = None
            self._suspect(peer for one in unlike for peer in one[:2])
            return self._ended(audit, Outcome(unlike=tuple(unlike)))
        tolerances = settings.spot_tolerance, settings.part_tolerance
        why = audit.found[asked] = difference(of, result, audit.case, audit.listed, *tolerances)
        if why and len(self._said(audit, of)) == 1 and self._ask(audit, of, hops, now):
            return Outcome()
        return self._decide(audit, (of,))

    def _said(self, audit: Audit, of: Peer) -> dict[Peer, str]:
        return {by: why for (one, by), why in audit.found.items() if one == of and why is not None}

    def _decide(self, audit: Audit, about: Iterable[Peer]) -> Outcome:
        """Of those whose hops nobody computes any more: one that two accuse is guilty, one that one accuses has its word against that; who
        accuses and is not confirmed is one of two that differ."""
        found = [
            self._verdict(audit, of)
            for of in about
            if not any(asked[0] == of and asked not in audit.found for asked in audit.asked)
        ]
        return self._ended(
            audit,
            Outcome(
                tuple(one for each in found for one in each.guilty),
                tuple(one for each in found for one in each.words),
                tuple(one for each in found for one in each.unlike),
                passed=tuple(one for each in found for one in each.passed),
                step=audit.case.round.step,
            ),
        )

    def _verdict(self, audit: Audit, of: Peer) -> Outcome:
        said = self._said(audit, of)
        accusers = {by: why for by, why in said.items() if why}
        if not accusers:
            self._passed[key_of(of)] += bool(said)
            if said:
                self._owed.pop(key_of(of), None)
            return Outcome(passed=(of,) if said else ())
        self._suspect((of, *accusers))
        if len({key_of(by) for by in accusers}) > 1:
            return Outcome(guilty=((of, f"{next(iter(accusers.values()))}, say {' and '.join(accusers)}"),))
        if len(said) == 1:
            return Outcome(words=tuple((by, of, f"{why}, says {by}") for by, why in accusers.items()))
        return Outcome(unlike=tuple((by, of, why) for by, why in accusers.items()))

    def _ended(self, audit: Audit, outcome: Outcome) -> Outcome:
        if audit.over:
            self._audit = None
        return outcome

    def _suspect(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._passed[key_of(peer)] = SUSPECT


def _key(of: Round | AuditAnswer | Recomputed) -> Key:
    return of.epoch, of.step, of.round
