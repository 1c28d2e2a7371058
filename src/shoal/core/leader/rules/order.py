"""The rules in the order in which the leader asks them. The first that has a proposal is followed.

Checks stand among them: they look for what a rule after them would trip over, and the leader notes what they find before it asks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from shoal.core.leader.facts import Facts, Finding
from shoal.core.leader.rules.admission import ADMIT_BEATS, admit, may_admit, misfits, promote
from shoal.core.leader.rules.commit import auditable, commit, disputes
from shoal.core.leader.rules.divergence import diverged
from shoal.core.leader.rules.moves import restage
from shoal.core.leader.rules.overlap import overlap
from shoal.core.leader.rules.proposal import Proposal
from shoal.core.leader.rules.reassignment import reassign, takeovers
from shoal.core.leader.rules.recovery import cannot_load, further_back, recover, stage_lost, take_back
from shoal.core.leader.rules.removal import removal_due, remove
from shoal.core.leader.rules.start import every_stage_ready, finish, start
from shoal.core.messages import Settings, View


class Check(msgspec.Struct, frozen=True):
    find: Callable[[View, Facts, Settings, float], Iterable[Finding]]


class Rule(msgspec.Struct, frozen=True):
    """Asked only while `when` holds; facts.history.since(rule) is the time since when it has. With `pace_beats` it is asked no sooner than
    so many beats after the last time."""

    propose: Callable[[View, Facts, Settings, float], Proposal | None]
    when: Callable[[View, Facts, Settings, float], bool] | None = None
    pace_beats: float = 0.0


RULES: tuple[Rule | Check, ...] = (
    Rule(remove, when=removal_due),
    Check(takeovers),
    Rule(reassign),
    Check(misfits),
    Rule(promote),
    Rule(take_back),
    Rule(recover, when=stage_lost),
    Rule(further_back, when=cannot_load),
    Rule(restage),
    Rule(start, when=every_stage_ready),
    Rule(diverged),
    Check(disputes),
    Check(auditable),
    Rule(commit),
    Rule(admit, when=may_admit, pace_beats=ADMIT_BEATS),
    Rule(finish),
    Rule(overlap),
)

# Of a swarm that serves texts: no microbatch has an owner, so that no step ends, and a lost stage is loaded again.
SERVING = tuple(
    rule
    for rule in RULES
    if isinstance(rule, Rule) and rule.propose in (remove, promote, recover, further_back, restage, start, admit)
)
