"""Machines broken on purpose are caught: a checker that nothing ever trips proves nothing.

Each mutant undoes one rule of 'exactly once' or of the agreement. It runs on seeds of a scenario that strains the broken
rule, until one is caught; `known` are seeds that caught it when this was written, tried first. What the machines do on a
seed changes with every change to them, so the others follow; the seed that caught it must pass without the mutant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shoal.core.allreduce import layout, rounds
from shoal.core.allreduce.layout import Layout, Role
from shoal.core.allreduce.rounds import Rounds
from shoal.core.consensus import agreed, certificates, election, register
from shoal.core.consensus.agreed import AgreedViews
from shoal.core.consensus.election import Election
from shoal.core.leader import evictions, facts
from shoal.core.leader.evictions import Conduct
from shoal.core.leader.ledger import Ledger
from shoal.core.leader.progress import RoundWatch
from shoal.core.leader.rules import commit, order, removal
from shoal.core.leader.rules.order import Check, Rule
from shoal.core.leader.rules.reassignment import reassign, takeovers
from shoal.core.leader.undo.unchecked import tracked
from shoal.core.member.judge import LeaderJudge
from shoal.core.messages import Apply, Undoing, View
from shoal.core.server import server
from shoal.core.server.hops import Hops
from shoal.core.trainer import microbatch
from shoal.core.trainer.microbatch import Hop, Microbatch, Owned
from shoal.core.trainer.trainer import Trainer
from shoal.core.transfer import catch_up
from shoal.sim.scenarios.catalogue import SCENARIOS
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm
from shoal.sim.tasks.task_runner import TaskRunner

SEEDS = 80
STORM = Scenario(
    name="storm",
    staleness=0,
    peers=(4, 8),
    stages=(1, 2),
    microbatches=(16, 24),
    steps=(4, 6),
    step_s=1.0,
    messages=Messages(drop=0.1, delay=0.5, duplicate=1.0, reorder=0.5),
    happenings=Happenings(slows=6, pauses=6),
    faults_s=60.0,
)
HALVES = Scenario(
    name="halves",
    staleness=0,
    peers=(4, 8),
    stages=(1, 3),
    steps=(3, 4),
    step_s=2.0,
    happenings=Happenings(halves=6, pauses=1),
)
ROUNDS = Scenario(
    name="rounds",
    staleness=0,
    peers=(6, 10),
    stages=(1, 3),
    steps=(4, 6),
    step_s=1.0,
    messages=Messages(drop=0.05, delay=0.1),
    happenings=Happenings(kills=3, restarts=4, pauses=5, halves=2, one_ways=2),
)
COUNTED = msgspec.structs.replace(ROUNDS, name="counted", tokens=512)
LARGE = Scenario(
    name="a large group",
    staleness=0,
    peers=(17, 19),
    stages=(1, 1),
    steps=(2, 3),
    microbatches=(18, 20),
    step_s=1.0,
    happenings=Happenings(kills=1),
    faults_s=10.0,
)
LATE = msgspec.structs.replace(ROUNDS, staleness=1)  # with delayed updates
Patch = pytest.MonkeyPatch


def accepts_a_stale_answer(patch: Patch) -> None:
    """An answer to any attempt of any step counts."""
    on_message = Trainer.on_message

    def trusting(self: Trainer, peer: str, message: Any, *rest: Any) -> Any:
        if hasattr(message, "step") and hasattr(message, "attempt"):
            message = msgspec.structs.replace(message, step=self._view.step)
        return on_message(self, peer, message, *rest)

    patch.setattr(Trainer, "on_message", trusting)
    patch.setattr(Hop, "answered_by", lambda self, peer, stage, attempt: (peer, stage) == (self.peer, self.stage))


def forgets_a_waiting_microbatch(patch: Patch) -> None:
    """One whose booking was lost is not put back."""
    wait = Owned.wait

    def forgetful(self: Owned, one: Microbatch) -> None:
        if one.progress is not microbatch.Progress.FINISHED:
            wait(self, one)

    patch.setattr(Owned, "wait", forgetful)


def averages_a_fenced_peer(patch: Patch) -> None:
    """A round goes on although a member of it has left the view."""
    patch.setattr(rounds, "fenced", lambda message, view, stages: None)
    patch.setattr(facts, "fenced", lambda message, view: None)


def books_twice_after_a_retry(patch: Patch) -> None:
    """A slow backward is sent elsewhere like a slow forward."""

    def elsewhere(self: Trainer, one: Microbatch, hop: Hop, now: float) -> None:
        one.avoid, one.hop = hop.peer, None
        self._advance(one, now)

    patch.setattr(Trainer, "_repeat", elsewhere)


def adds_a_booked_microbatch_again(patch: Patch) -> None:
    """A server looks only at what waits or runs, not at its books."""
    on_hop = Hops.on_hop

    def blind(self: Hops, *arguments: Any) -> Any:
        view = self._replica.view
        if view is None:
            return on_hop(self, *arguments)
        book = self._book_of(view.work)
        booked, book.kept = book.kept, {}
        try:
            return on_hop(self, *arguments)
        finally:
            book.kept = {**booked, **book.kept}

    patch.setattr(Hops, "on_hop", blind)


def takes_any_half_for_a_quorum(patch: Patch) -> None:
    def half(voters: Any, yes: Any, founder: str) -> bool:
        voters, yes = tuple(voters), set(yes)
        return 2 * sum(voter in yes for voter in voters) >= len(voters)

    for module in (agreed, certificates, election, register):
        patch.setattr(module, "quorum", half)


def keeps_a_fenced_peers_books(patch: Patch) -> None:
    patch.setattr(Ledger, "forget", lambda self, peer: 0)


def adopts_without_asking_for_books(patch: Patch) -> None:
    def at_once(self: Trainer, indices: list[int], now: float) -> None:
        self._own({index: {} for index in indices})

    patch.setattr(Trainer, "_take_over", at_once)


def applies_what_it_does_not_hold(patch: Patch) -> None:
    """A replica takes every commit for its own."""
    patch.setattr(Rounds, "holds", lambda self, last: True)


def counts_every_token(patch: Patch) -> None:
    patch.setattr(Ledger, "counted", lambda self, last: 0)


def counts_the_tokens_of_one_replica(patch: Patch) -> None:
    counted = Ledger.counted
    patch.setattr(Ledger, "counted", lambda self, last: counted(self, last[:1]))


def applies_without_the_scale(patch: Patch) -> None:
    def unscaled(task: str, step: int, round: int, norm: float, save: bool, skip: bool, scale: float) -> Apply:
        return Apply(task, step, round, norm, save, skip)

    patch.setattr(server, "Apply", unscaled)


def catches_up_without_the_scale(patch: Patch) -> None:
    def unscaled(task: str, step: int, round: int, norm: float, save: bool, skip: bool, scale: float) -> Apply:
        return Apply(task, step, round, norm, save, skip)

    patch.setattr(catch_up, "Apply", unscaled)


def commits_before_all_is_booked(patch: Patch) -> None:
    """The leader lets one booking lack, and the replicas do not object."""
    init = Ledger.__init__

    def generous(self: Ledger, stages: int, microbatches: int, tokens: int = 0) -> None:
        init(self, stages, microbatches, tokens)
        self.booked = 1

    patch.setattr(Ledger, "__init__", generous)
    patch.setattr(Ledger, "complete", lambda self, members: True)
    patch.setattr(layout, "_coverage", lambda group, microbatches: "")


def computes_with_the_newest_parameters(patch: Patch) -> None:
    """A step that was begun with delayed updates goes on with the parameters that are made meanwhile."""
    patch.setattr(TaskRunner, "_used", lambda self, *_: self.digest)


def never_opens_a_closed_step_again(patch: Patch) -> None:
    """What a dead peer would have brought into the average is computed by nobody."""
    patch.setattr(removal, "opens_again", lambda view, left, facts: False)


def goes_on_without_asking_for_books(patch: Patch) -> None:
    """Whoever goes on with a step does not ask what of it is booked."""
    on_view = Trainer.on_view

    class New(View, frozen=True):
        begun = False  # type: ignore[assignment]

    def as_if_new(self: Trainer, view: Any, now: float) -> Any:
        self._view = New(*msgspec.structs.astuple(self._view))
        return on_view(self, view, now)

    patch.setattr(Trainer, "on_view", as_if_new)


def adds_the_rows_but_for_the_last(patch: Patch) -> None:
    place = Layout.role

    def short(self: Layout, peer: str) -> Role:
        role = place(self, peer)
        fewer = {number: peers[: len(self.rows) - 1] for number, peers in role.adds.items() if number in role.receives}
        return msgspec.structs.replace(role, adds=role.adds | fewer)

    patch.setattr(Layout, "role", short)


def adds_as_it_comes(patch: Patch) -> None:
    """Each replica first adds what it has itself."""
    place = Layout.role

    def own_first(self: Layout, peer: str) -> Role:
        role = place(self, peer)
        turned = {number: tuple(sorted(peers, key=lambda one: one != peer)) for number, peers in role.adds.items()}
        return msgspec.structs.replace(role, adds=turned)

    patch.setattr(Layout, "role", own_first)


def meets_everybody(patch: Patch) -> None:
    patch.setattr(layout, "ONE_ROW", 1000)


def believes_any_lead(patch: Patch) -> None:
    """Whoever says that it leads is followed, without votes."""
    follow = Election.follow

    def trusting(self: Election, peer: str, term: int, *rest: Any) -> bool:
        if term >= self.term and not self.leading:
            self.proven = term, peer
        return follow(self, peer, term, *rest)

    patch.setattr(AgreedViews, "entitled", lambda self, peer: True)
    patch.setattr(Election, "follow", trusting)


def counts_complaints_of_one_peer(patch: Patch) -> None:
    patch.setattr(evictions, "ACCUSERS", 1)
    patch.setattr(evictions, "FEW", 1000)
    patch.setattr(evictions, "ALONE", 1000)
    patch.setattr(Conduct, "alone", lambda self, accuser, accused, reason: (accused, reason))


def sets_no_deadline_for_rounds(patch: Patch) -> None:
    patch.setattr(RoundWatch, "verdicts", lambda self, *_: [])


def leaves_a_hanging_microbatch_with_its_owner(patch: Patch) -> None:
    kept = tuple(rule for rule in order.RULES if rule not in (Check(takeovers), Rule(reassign)))
    assert len(kept) == len(order.RULES) - 2
    patch.setattr(order, "RULES", kept)


def takes_the_norm_of_the_first_replica(patch: Patch) -> None:
    patch.setattr(commit, "by_norm_of", lambda current, peers: {"": peers})


def goes_back_to_the_newest_checkpoint(patch: Patch) -> None:
    """However young it is."""

    def since_now(after: View, *given: Any) -> Undoing:
        known = tracked(after, *given)
        late = tuple(msgspec.structs.replace(one, since=max(known.saves, default=0)) for one in known.unchecked)
        return msgspec.structs.replace(known, unchecked=late)

    patch.setattr(removal, "tracked", since_now)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario, tuple[int, ...]]] = [
    (accepts_a_stale_answer, STORM, (23, 50)),
    (forgets_a_waiting_microbatch, ROUNDS, (12, 6)),
    (averages_a_fenced_peer, ROUNDS, (82, 89)),
    (books_twice_after_a_retry, ROUNDS, (22, 10)),
    (adds_a_booked_microbatch_again, STORM, (17, 20)),
    (takes_any_half_for_a_quorum, HALVES, (8, 1)),
    (applies_what_it_does_not_hold, ROUNDS, (11, 6)),
    (keeps_a_fenced_peers_books, STORM, (16, 28)),
    (adopts_without_asking_for_books, ROUNDS, (19, 22)),
    (commits_before_all_is_booked, ROUNDS, (20, 23)),
    (computes_with_the_newest_parameters, LATE, (19, 22)),
    (never_opens_a_closed_step_again, LATE, (31, 12)),
    (goes_on_without_asking_for_books, LATE, (12,)),
    (adds_the_rows_but_for_the_last, LARGE, (0,)),
    (adds_as_it_comes, LARGE, (0,)),
    (meets_everybody, LARGE, (0,)),
    (counts_every_token, COUNTED, (0,)),
    (counts_the_tokens_of_one_replica, COUNTED, (0,)),
    (applies_without_the_scale, COUNTED, (0,)),
    (catches_up_without_the_scale, COUNTED, (0,)),
]


# Rules that hostile peers strain: each with the scenario in which one does that alone.
STRAINED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, tuple[int, ...]]] = [
    (believes_any_lead, "outsider/coup", (8,)),
    (believes_any_lead, "member/coup", (14,)),
    (counts_complaints_of_one_peer, "member/complain", (2,)),
    (sets_no_deadline_for_rounds, "member/mute", (8,)),
    (leaves_a_hanging_microbatch_with_its_owner, "joiner/withhold", (41, 40)),
    (takes_the_norm_of_the_first_replica, "member/norm", (15,)),
]
LATE = (leaves_a_hanging_microbatch_with_its_owner, takes_the_norm_of_the_first_replica)  # shows after seconds of play


@pytest.mark.parametrize(
    ("mutant", "act", "known"),
    [pytest.param(*one, marks=pytest.mark.slow if one[0] in LATE else ()) for one in STRAINED],
    ids=lambda one: getattr(one, "__name__", one if isinstance(one, str) else ""),
)
def test_a_mutant_is_caught_by_one_who_means_harm(
    mutant: Callable[[pytest.MonkeyPatch], None],
    act: str,
    known: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a violation, or because honest peers are evicted on the word of the hostile one."""

    def caught(seed: int) -> bool:
        outcome = Swarm(draw(SCENARIOS[f"strangers/{act}"], seed)).run()
        evicted = [one for one in outcome.wronged if "after complaints by" in one]
        return bool(outcome.violations or evicted)

    for seed in (*known, *(seed for seed in range(SEEDS) if seed not in known)):
        with monkeypatch.context() as patch:
            mutant(patch)
            patch.setattr(LeaderJudge, "doubts", lambda *_: "")  # another leader would begin anew where this one hangs
            violation = caught(seed)
        if violation:
            assert not caught(seed)
            return
    pytest.fail(f"{mutant.__name__} survives {SEEDS} seeds")


@pytest.mark.slow
def test_going_back_to_a_checkpoint_that_is_too_young_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(SCENARIOS["undone"], 3)
    liars = tuple(msgspec.structs.replace(one, acts=("poison",)) for one in case.hostile)  # found out some steps later
    settings = msgspec.structs.replace(case.settings, save_every=2, steps=40)
    case = msgspec.structs.replace(case, hostile=liars, settings=settings)
    assert not Swarm(case).run().violations
    goes_back_to_the_newest_checkpoint(monkeypatch)
    assert "undone" in {one.checker for one in Swarm(case).run().violations}


@pytest.mark.parametrize(("scenario", "seed"), [(STORM, 2), (STORM, 54), (ROUNDS, 0), (ROUNDS, 21)])
def test_a_leader_that_stands_down_for_a_term_does_not_lead_it(scenario: Scenario, seed: int) -> None:
    assert not Swarm(a_case(scenario, seed)).run().violations


def a_case(scenario: Scenario, seed: int) -> Case:
    """All of the scenario's faults at once, to the limit, and averaging so slow that they meet it."""
    case = draw(scenario, seed)
    settings = msgspec.structs.replace(case.settings, min_request_timeout_s=0.3, inflight=4, queue_limit=16)
    rounds = 30.0 if scenario.name == ROUNDS.name else case.rounds
    replaced = {"messages": scenario.messages, "happenings": scenario.happenings, "rounds": rounds}
    return msgspec.structs.replace(case, **replaced, settings=settings)


@pytest.mark.parametrize(("mutant", "scenario", "known"), MUTANTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_mutant_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None],
    scenario: Scenario,
    known: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in (*known, *(seed for seed in range(SEEDS) if seed not in known)):
        with monkeypatch.context() as patch:
            mutant(patch)
            caught = Swarm(a_case(scenario, seed)).run().violations
        if caught:
            assert not Swarm(a_case(scenario, seed)).run().violations
            return
    pytest.fail(f"{mutant.__name__} survives {SEEDS} seeds")
