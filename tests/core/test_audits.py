"""Audited steps: when a step is audited, what replicas answer, what is compared, and whom the leader evicts for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import msgspec
import pytest
from tests.core import test_server
from tests.core.test_server import ME, OTHER, OWNER, REPLICA, SETTINGS, Play

from shoal.core import messages as m
from shoal.core.leader.audits.audits import AGAIN as TIMES
from shoal.core.leader.audits.audits import EARNED, LONGEST, SILENT, SUSPECT, Audits, Outcome
from shoal.core.leader.audits.comparing import Case, distance, encoded, parts_of, scaled
from shoal.core.leader.evictions import Conduct
from shoal.core.server.audits import TRIES

replace = msgspec.structs.replace
STAGES, EACH = 3, 2
AUDITED = m.Settings(stages=STAGES, microbatches=EACH * 3, steps=9, spot_checks=0.1)

# ------------------------------------------------------------------------------------------------------------- a swarm


def names(stage: int, replicas: int) -> list[str]:
    return [f"{letter}{stage}" for letter in "abc"[:replicas]]


def vector(what: object) -> m.Sketch:
    chance = Random(str(what))
    a, b, c, d = (chance.gauss(0.0, 1.0) for _ in range(4))
    return m.Sketch((a, b, c, d), 1.0)


def total(vectors: Iterable[m.Sketch]) -> m.Sketch:
    of = list(vectors)
    products = tuple(math.fsum(one.products[at] for one in of) for at in range(4))
    return m.Sketch(products, float(len(of)))  # type: ignore[arg-type]


class Swarm:
    """Every replica of a stage has the microbatches of its place, at all stages; `part`: what it brings instead of its hops' gradients."""

    def __init__(self, replicas: int = 3, number: int = 7) -> None:
        self.replicas = replicas
        self.serving = {name: stage for stage in range(STAGES) for name in names(stage, replicas)}
        self.part: dict[str, m.Sketch] = {}
        self.sent: dict[tuple[str, int, int, bool], str] = {}  # what a replica says to have made instead
        self.used: dict[tuple[str, int, int, bool], str] = {}
        self.output: dict[str, m.Sketch] = {}
        self.loss: dict[str, float] = {}
        self.number = number

    def indices(self, name: str) -> tuple[int, ...]:
        place = "abc".index(name[0])
        return tuple(range(EACH * place, EACH * (place + 1)))

    def gradients(self, name: str) -> m.Sketch:
        return total(vector((name[1], index)) for index in self.indices(name))

    def case(self, **changes: Any) -> Case:
        groups = tuple(
            tuple(m.Share(name, self.indices(name)) for name in names(stage, self.replicas)) for stage in range(STAGES)
        )
        message = m.Round(0, 0, self.number, 1, groups)
        reduced = {}
        for name, stage in self.serving.items():
            group = names(stage, self.replicas)
            parts = tuple(self.part.get(one, self.gradients(one)) for one in group)
            owned = m.OwnedSums("d", total(parts), parts=parts)
            sums = tuple(owned if one == name else m.OwnedSums("d", owned.sum) for one in group)
            reduced[name] = m.Reduced(0, 0, self.number, "d", 1.0, sums)
        last = names(STAGES - 1, self.replicas)
        books = {
            name: tuple(m.Booking(index, self.loss.get(name, 1.5)) for index in self.indices(name)) for name in last
        }
        return replace(
            Case(message, STAGES, reduced, books, self.serving, frozenset(), (), dict.fromkeys(self.serving, 10.0)),
            **changes,
        )

    def answer(self, name: str) -> m.AuditAnswer:
        stage, records = self.serving[name], list[m.TensorRecord]()

        def record(index: int, of: int, gradient: bool, source: str) -> None:
            key = (name, index, of, gradient)
            other = (self.used if source else self.sent).get(key)
            digest = other or f"{index} {of} {gradient}"
            sketch = vector(digest) if source or of <= stage or name not in self.output else self.output[name]
            records.append(m.TensorRecord(index, of, gradient, digest, source, sketch))

        for index in self.indices(name):
            letter = name[0]
            if stage:
                record(index, stage, False, f"{letter}{stage - 1}")
                record(index, stage - 1, True, "")
            if stage < STAGES - 1:
                record(index, stage, True, f"{letter}{stage + 1}")
                record(index, stage + 1, False, "")
            if stage in (0, STAGES - 1):
                records.append(m.TensorRecord(index, stage, stage > 0, f"tokens {index}", "a0"))
        return m.AuditAnswer(0, 0, self.number, tuple(records))

    def recomputed(self, request: m.RecomputeRequest, by: str) -> m.Recomputed:
        stage, hops = self.serving[by], []
        for hop in request.hops:
            keys = {gradient: f"{hop.index} {stage} {gradient}" for gradient in (False, True)}
            hops.append(
                m.RecomputedHop(
                    hop.index,
                    f"tokens {hop.index}" if stage in (0, STAGES - 1) else "",
                    keys[False] if stage else "",
                    keys[True] if stage < STAGES - 1 else "",
                    vector(f"{hop.index} {stage + 1} False") if stage < STAGES - 1 else m.Sketch(),
                    vector(f"{hop.index} {stage - 1} True") if stage else m.Sketch(),
                    1.5 if stage == STAGES - 1 else None,
                )
            )
        parts = (self.gradients(request.of),) * self.replicas
        return m.Recomputed(0, 0, self.number, request.of, tuple(hops), parts)


def always(value: float = 0.0) -> Callable[[], float]:
    return lambda: value


def audited(
    swarm: Swarm,
    audits: Audits | None = None,
    lies: Callable[[str, m.Recomputed], m.Recomputed | None] = lambda _, said: said,
    silent: Iterable[str] = (),
    **changes: Any,
) -> tuple[Audits, list[Outcome]]:
    """An audit from its draw to its end; `lies`: what a replica answers instead when it has computed another's hops."""
    audits, now, outcomes = audits or Audits(AUDITED, always()), 0.0, list[Outcome]()
    case = swarm.case(**changes)
    audits.draw(case, now)
    while not audits.passed(case.round):
        sent = audits.requests(case.round, now)
        for command in sent:
            assert isinstance(command, m.Send)
            request = command.message
            if command.peer in silent:
                continue
            if isinstance(request, m.AuditRequest):
                outcomes.append(audits.on_message(command.peer, swarm.answer(command.peer), now))
            else:
                assert isinstance(request, m.RecomputeRequest)
                said = lies(command.peer, swarm.recomputed(request, command.peer))
                if said is not None:
                    outcomes.append(audits.on_message(command.peer, said, now))
        if not sent:
            now += 100.0
            outcomes.append(audits.tick(now))
    return audits, outcomes


def guilty(outcomes: list[Outcome]) -> list[str]:
    return [peer for one in outcomes for peer, _ in one.guilty]


def words(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(by, of) for one in outcomes for by, of, _ in one.words]


# ------------------------------------------------------------------------------------------------------------ the draw


def test_nobody_is_audited_before_the_draw_and_a_round_waits_for_it() -> None:
    audits, case = Audits(AUDITED, always(0.5)), Swarm().case()
    assert not audits.drawn(case.round) and not audits.passed(case.round)
    audits.draw(case, 0.0)
    assert audits.passed(case.round) and not audits.requests(case.round, 0.0)
    assert not audits.passed(replace(case.round, round=8)), "the next round is drawn anew"
    off = Audits(replace(AUDITED, spot_checks=0.0), always())
    assert off.passed(case.round)


class Drawn:
    """What the leader draws: always 0 until `chance` is given."""

    def __init__(self) -> None:
        self.chance: Callable[[], float] = always()

    def __call__(self) -> float:
        return self.chance()


def drawn(audits: Audits, numbers: range) -> list[int]:
    """Those rounds in which anybody is audited; each audit is answered."""
    return [number for number in numbers if audited(Swarm(number=number), audits)[1]]


def test_about_as_many_steps_are_audited_as_the_share_of_new_replicas_says() -> None:
    chance, count = Random(1), 0
    for number in range(2000):
        audits, case = Audits(AUDITED, chance.random), Swarm(number=number).case()
        audits.draw(case, 0.0)
        count += not audits.passed(case.round)
    assert 160 < count < 240


@pytest.mark.parametrize("share", [pytest.param(0.1, marks=pytest.mark.slow), 0.2])
def test_old_replicas_are_audited_within_a_bound_at_any_step_and_seldom(share: float) -> None:
    """Whoever lies for so many steps is audited for certain; in less than half of the steps of a new one."""
    chance, longest = Drawn(), int(LONGEST / share)
    audits = Audits(replace(AUDITED, spot_checks=share), chance)
    drawn(audits, range(1000, 1100))  # all pass
    chance.chance = Random(3).random
    steps = drawn(audits, range(2000, 4000))
    gaps = [later - step for step, later in itertools.pairwise(steps)]
    assert max(gaps) <= longest and min(gaps) == 1
    assert 0.35 * share < len(steps) / 2000 < 0.55 * share
    halves = sum(gap <= longest / 2 for gap in gaps) / len(gaps)
    assert 0.4 < halves < 0.65, "each of the steps is as likely"


def test_of_whom_an_audit_of_all_shows_nothing_is_audited_again_and_not_for_ever() -> None:
    """The others are not."""
    chance = Drawn()
    audits, asked = Audits(AUDITED, chance), list[set[str]]()
    drawn(audits, range(1000, 1100))
    for number in range(TIMES + 2):
        chance.chance = always(0.9 if number else 0.0)
        seen = set[str]()

        def unable(by: str, said: m.Recomputed, seen: set[str] = seen) -> m.Recomputed:
            seen.add(said.of)
            return replace(said, hops=(), parts=()) if said.of == "b1" else said

        audited(Swarm(number=number), audits, lies=unable)
        asked.append(seen)
    assert len(asked[0]) == 9 and asked[1:] == [{"b1"}] * (TIMES - 1) + [set(), set()]


def test_who_could_not_compute_again_once_is_asked_another_time() -> None:
    """Its source had left, say. Else the other one of a stage of two would never be audited again."""
    audits, swarm = Audits(AUDITED, always()), Swarm(2)
    audited(swarm, audits, lies=lambda by, said: replace(said, hops=(), parts=()) if by == "a1" else said)
    swarm = Swarm(2, number=8)
    swarm.part["b1"] = vector("poison")
    assert words(audited(swarm, audits)[1]) == [("a1", "b1")]


def test_who_could_not_compute_again_is_asked_after_the_others() -> None:
    audits, asked = Audits(AUDITED, always()), list[str]()
    audited(Swarm(), audits, lies=lambda by, said: replace(said, hops=(), parts=()) if by == "a1" else said)

    def heard(by: str, said: m.Recomputed) -> m.Recomputed:
        asked.append(by)
        return said

    audited(Swarm(number=8), audits, lies=heard)
    assert "a1" not in asked and len(asked) == 9
    audited(Swarm(2, number=9), audits, lies=heard)  # nobody else could be
    asked.clear()
    audited(Swarm(number=10), audits, lies=heard)
    assert "a1" in asked and len(asked) == 9


def test_a_stages_only_replica_is_not_audited() -> None:
    audits, outcomes = audited(Swarm(replicas=1))
    assert not outcomes and audits.passed(Swarm(replicas=1).case().round)


def test_audits_that_pass_earn_trust_and_a_difference_takes_it_from_both() -> None:
    audits = Audits(AUDITED, always())
    shares = [audits.share("a1")]
    for number in range(40):
        audited(Swarm(number=number), audits)
        shares.append(audits.share("a1"))
    assert shares[0] == 0.1 and shares[EARNED] == pytest.approx(0.05) and shares[-1] < 0.01
    swarm = Swarm(2, number=99)
    swarm.part["a1"] = vector("poison")
    audited(swarm, audits)
    assert audits.share("a1") == audits.share("b1") == 1.0
    for number in range(100, 100 - SUSPECT):
        audited(Swarm(2, number=number), audits)
    assert audits.share("b1") <= audits.share("a1") == 0.1


# -------------------------------------------------------------------------------------------------------- who is wrong


@pytest.mark.parametrize("replicas", [2, 3])
def test_where_all_is_right_nobody_is_named(replicas: int) -> None:
    _, outcomes = audited(Swarm(replicas))
    assert not guilty(outcomes) and not words(outcomes) and not any(one.unlike for one in outcomes)


@pytest.mark.parametrize("liar", ["a0", "b1", "c2"])
def test_a_poisoned_part_is_found_by_two_others(liar: str) -> None:
    swarm = Swarm()
    swarm.part[liar] = total([swarm.gradients(liar), vector("poison")])
    _, outcomes = audited(swarm)
    assert guilty(outcomes) == [liar] and not words(outcomes)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_part_is_to_be_shortened_to_what_the_run_allows_and_no_further(allowed: bool) -> None:
    swarm, half = Swarm(), 0.5 * math.sqrt(3 * EACH)  # of the norm in three chunks
    swarm.part["b1"] = scaled(swarm.gradients("b1"), 0.5)
    _, outcomes = audited(swarm, longest={"b1": half if allowed else 2.0 * half})
    assert guilty(outcomes) == ([] if allowed else ["b1"])


@pytest.mark.parametrize("liar", ["a0", "b1", "a2"])
def test_of_two_replicas_it_is_one_word(liar: str) -> None:
    swarm = Swarm(2)
    swarm.part[liar] = total([swarm.gradients(liar), vector("poison")])
    _, outcomes = audited(swarm)
    other = {"a": "b", "b": "a"}[liar[0]] + liar[1]
    assert words(outcomes) == [(other, liar)] and not guilty(outcomes)


def test_an_output_or_a_loss_that_is_not_what_the_input_makes() -> None:
    swarm = Swarm()
    swarm.output["b1"] = vector("invented")
    swarm.used = {("b2", index, 2, False): f"{index} 2 False" for index in swarm.indices("b2")}
    case = swarm.case()
    assert case.who["b1"].stage == 1
    # what it has made it has also sent, so that its record and its receiver's are alike
    receiver = swarm.answer

    def answer(name: str) -> m.AuditAnswer:
        said = receiver(name)
        records = tuple(
            replace(one, sketch=swarm.output["b1"]) if one.source == "b1" and one.stage == 2 else one
            for one in said.records
        )
        return replace(said, records=records)

    swarm.answer = answer  # type: ignore[method-assign]
    assert guilty(audited(swarm)[1]) == ["b1"]
    lazy = Swarm()
    lazy.loss["c2"] = 2.5
    assert guilty(audited(lazy)[1]) == ["c2"]


def test_one_who_accuses_falsely_is_not_believed_where_a_third_knows_better() -> None:
    def lies(by: str, said: m.Recomputed) -> m.Recomputed:
        return replace(said, parts=(vector("lie"),) * len(said.parts)) if by == "a1" else said

    _, outcomes = audited(Swarm(), lies=lies)
    assert not guilty(outcomes) and not words(outcomes)
    assert {(by) for one in outcomes for by, _, _ in one.unlike} <= {"a1"}


@pytest.mark.parametrize("what", ["nothing", "unable", "part", "nan"])
def test_an_answer_that_is_late_or_none_convicts_nobody_and_nan_is_no_match(what: str) -> None:
    def lies(by: str, said: m.Recomputed) -> m.Recomputed | None:
        if what == "nothing":
            return None
        if what == "unable":
            return replace(said, hops=(), parts=())
        return replace(said, hops=said.hops[1:]) if what == "part" else said

    _, outcomes = audited(Swarm(), lies=lies)
    assert not guilty(outcomes) and not words(outcomes)
    swarm = Swarm()
    swarm.part["b1"] = m.Sketch((math.nan,) * 4, math.nan)
    if what == "nan":
        assert guilty(audited(swarm)[1]) == ["b1"]


def test_who_never_says_what_it_has_used_is_evicted_and_not_at_once() -> None:
    audits, seen = Audits(AUDITED, always()), list[list[str]]()
    for number in range(SILENT):
        _, outcomes = audited(Swarm(number=number), audits, silent=["b1"])
        seen.append(guilty(outcomes))
    assert seen == [[]] * (SILENT - 1) + [["b1"]]
    audits = Audits(AUDITED, always())
    for number in range(SILENT + 2):
        _, outcomes = audited(Swarm(number=number), audits, silent=["b1"] if number % 3 else [])
        assert not guilty(outcomes)


@pytest.mark.parametrize("maker", ["x1", "c0"])
def test_one_that_has_left_in_the_step_may_have_sent_anything(maker: str) -> None:
    """Nothing is said of whoever has got something from it, even if it is back and serves another stage. Of a name that nobody bears,
    or of whoever has served another stage all the time, it evades."""
    swarm = Swarm()
    honest = swarm.answer

    def answer(name: str) -> m.AuditAnswer:
        said = honest(name)
        renamed = tuple(
            replace(one, source=maker) if one.source == "b1" and name == "b2" else one for one in said.records
        )
        return replace(said, records=renamed)

    swarm.answer = answer  # type: ignore[method-assign]
    for left, expected in ((frozenset([maker]), []), (frozenset[str](), ["b2"])):
        audits, seen = Audits(AUDITED, always()), list[str]()
        for number in range(SILENT):
            swarm.number = number
            seen += guilty(audited(swarm, audits, gone=left)[1])
        assert seen == expected


def test_one_that_has_left_in_the_step_and_is_back_need_not_know_what_it_made_before() -> None:
    swarm = Swarm()
    honest = swarm.answer

    def answer(name: str) -> m.AuditAnswer:
        said = honest(name)
        return replace(said, records=tuple(one for one in said.records if one.source)) if name == "b1" else said

    swarm.answer = answer  # type: ignore[method-assign]
    for left, differs in ((frozenset(["b1"]), False), (frozenset[str](), True)):
        _, outcomes = audited(swarm, Audits(AUDITED, always()), gone=left)
        assert any(one.unlike for one in outcomes) == differs and guilty(outcomes) == []


def pieces_of(answer: m.AuditAnswer, size: int) -> list[m.AuditAnswer]:
    parts = [answer.records[at : at + size] for at in range(0, len(answer.records), size)]
    return [replace(answer, records=part, part=number, parts=len(parts)) for number, part in enumerate(parts)]


@pytest.mark.parametrize("lost", [False, True])
def test_an_answer_in_several_messages_is_looked_at_when_all_have_come(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, some of them twice; of one that lacks a message nothing is known."""
    monkeypatch.setattr("shoal.core.leader.audits.audits.AUDIT_RECORDS", 3)
    swarm, audits = Swarm(), Audits(AUDITED, always())
    case = swarm.case()
    audits.draw(case, 0.0)
    for command in audits.requests(case.round, 0.0):
        assert isinstance(command, m.Send)
        pieces = pieces_of(swarm.answer(command.peer), 3)
        assert len(pieces) > 1
        for piece in (*reversed(pieces[lost:]), *pieces[1:]):
            audits.on_message(command.peer, piece, 0.0)
    asked = [command.message for command in audits.requests(case.round, 0.0) if isinstance(command, m.Send)]
    assert [isinstance(one, m.RecomputeRequest) for one in asked] == ([] if lost else [True] * 9)


@pytest.mark.parametrize("parts", [0, 1, 3, 2**40])
def test_an_answer_is_in_no_more_messages_than_a_run_can_need(parts: int) -> None:
    """A liar could have the leader keep any number of them; and there is no message after the last."""
    swarm, audits = Swarm(), Audits(AUDITED, always())
    case = swarm.case()
    audits.draw(case, 0.0)
    for name in swarm.serving:
        audits.on_message(name, replace(swarm.answer(name), part=1, parts=parts), 0.0)
        audits.on_message(name, swarm.answer(name), 0.0)
    asked = [command.message for command in audits.requests(case.round, 0.0) if isinstance(command, m.Send)]
    assert [type(one) for one in asked] == [m.RecomputeRequest] * 9


# ------------------------------------------------------------------------------------------- what is sent and received


def verdicts(outcomes: list[Outcome], serving: dict[str, int], conduct: Conduct | None = None) -> list[str]:
    conduct = conduct or Conduct()
    return [peer for one in outcomes for peer, _ in conduct.unlike(one.unlike, one.agree, serving)]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("liar", ["a0", "b1", "a2"])
def test_who_sends_other_tensors_than_it_has_made_is_found_at_once(liar: str, replicas: int) -> None:
    """To all: each of those who received them has one opponent, and it has them all."""
    swarm, stage = Swarm(replicas), int(liar[1])
    received = {"a": "ab", "b": "ba"}[liar[0]]
    swarm.used |= {
        (f"{liar[0]}{at}", index, at, at < stage): f"noise {index}"
        for at in (stage - 1, stage + 1)
        for index in swarm.indices(liar)
        if 0 <= at < STAGES
    }
    honest = swarm.answer

    def answer(name: str) -> m.AuditAnswer:  # the other microbatches of its stage came from it as well
        said = honest(name)
        if name[0] != received[1] or abs(int(name[1]) - stage) != 1:
            return said
        records = tuple(
            replace(one, source=liar, digest="noise") if one.source and one.source[1] == liar[1] else one
            for one in said.records
        )
        return replace(said, records=records)

    def all_records(name: str) -> m.AuditAnswer:
        said = answer(name)
        if name != liar:
            return said
        other = received[1]
        return replace(
            said, records=(*said.records, *[one for one in honest(f"{other}{stage}").records if not one.source])
        )

    swarm.answer = all_records  # type: ignore[method-assign]
    _, outcomes = audited(swarm)
    assert verdicts(outcomes, swarm.serving) == [liar] and not guilty(outcomes)


def test_of_two_that_have_only_each_other_the_receivers_word_counts_once() -> None:
    pairs = [("a1", "a0", "x")] * 3
    serving, conduct = Swarm().serving, Conduct()
    assert [peer for peer, _ in conduct.unlike(pairs, (), serving)] == ["a0"]
    conduct.keep([peer for peer in serving if peer != "a0"])
    assert [peer for peer, _ in conduct.unlike([("a1", "b0", "x")] * 3, (), serving)] == ["a1"]


def test_whoever_agrees_with_nobody_is_found_before_one_who_agrees_with_others() -> None:
    """Two liars around an honest stage of two: all have two opponents each."""
    serving = Swarm(2).serving
    pairs = [(by, of, "x") for by in ("a1", "b1") for of in ("a0", "b2")] * 3
    assert not Conduct().unlike(pairs, (), serving)
    agree = [(by, of) for by in ("a1", "b1") for of in ("b0", "a2")]
    assert sorted(peer for peer, _ in Conduct().unlike(pairs, agree, serving)) == ["a0", "b2"]


def test_parameters_that_differ_and_strangers_are_another_matter() -> None:
    conduct, pairs = Conduct(), [("a1", "a0", "x")] * 3
    conduct.differed_now.add("a0")
    assert not conduct.unlike(pairs, (), Swarm().serving)
    assert not Conduct().unlike([("a1", "nobody", "x")] * 3, (), Swarm().serving)


def test_a_stages_only_replica_has_its_word() -> None:
    serving = {**Swarm(2).serving}
    del serving["b1"]
    assert [peer for peer, _ in Conduct().unlike([("a0", "a1", "x")] * 3, (), serving)] == ["a0"]


# ------------------------------------------------------------------------------------------------------------ distances


def test_the_distance_is_that_of_the_vectors() -> None:
    chance = Random(3)
    signs = [[chance.choice((-1.0, 1.0)) for _ in range(400)] for _ in range(4)]
    values = [chance.gauss(0.0, 1.0) for _ in range(400)]
    other = [value + 0.1 * chance.gauss(0.0, 1.0) for value in values]

    def sketch(of: list[float]) -> m.Sketch:
        a, b, c, d = (math.fsum(x * s for x, s in zip(of, row, strict=True)) for row in signs)
        return m.Sketch((a, b, c, d), math.fsum(x * x for x in of))

    assert 0.03 < distance([sketch(values)], [sketch(other)]) < 0.3
    assert distance([m.Sketch()], [m.Sketch()]) == 0.0 and distance([m.Sketch()], [vector("x")]) == math.inf
    assert distance([vector("x")], []) == math.inf


def test_encoding_widens_what_a_part_may_be_off_by_what_it_loses() -> None:
    swarm = Swarm(2)
    case = swarm.case()
    assert encoded("a1", parts_of("a1", case), case) == 0.0
    lossy = dict(case.reduced)
    for name in ("a1", "b1"):
        sums = tuple(replace(one, lost=m.Sketch((0.0,) * 4, 1e-4 * one.sum.norm_sq)) for one in lossy[name].sums)
        lossy[name] = replace(lossy[name], sums=sums)
    first, later = (
        encoded("a1", parts_of("a1", case), replace(case, reduced=lossy, norms=norms))
        for norms in ((), (1.0, 8.0, 1.0))
    )
    assert first == pytest.approx(0.02) and 0.02 < later < 0.06


# ---------------------------------------------------------------------------------------------------------- the replica

NEXT = "next"
VIEW = test_server.a_view(members=(*test_server.MEMBERS, m.Member(NEXT, 2)), owners=(0, 1, 0, 1))
REQUEST = m.AuditRequest(0, 0, 7, "5")
AGAIN = m.RecomputeRequest(0, 0, 7, REPLICA, "5", 7, (m.AuditedHop(1, OTHER, NEXT), m.AuditedHop(3, OTHER, NEXT)))


def a_server(**settings: object) -> Play:
    """ME and REPLICA serve stage 1 of 3; OWNER and OTHER stage 0, NEXT stage 2. OWNER leads."""
    return Play(replace(replace(SETTINGS, stages=3, spot_checks=0.1), **settings), 1, VIEW)


def book(play: Play, index: int) -> None:
    """A forward and a backward of one of OWNER's microbatches."""
    play.hear(OWNER, m.BoundaryTensor(0, 0, index, 1, False), 1)
    play.hear(OWNER, m.Forward(0, 0, index, 1, 1, 1, input_from=(ME, OWNER), to=NEXT))
    play.done(play.task(m.RunForward), nbytes=8)
    play.hear(NEXT, m.BoundaryTensor(0, 0, index, 1, True), 1)
    play.hear(OWNER, m.Backward(0, 0, index, 1, 2, 1, (ME,), (ME,), OWNER))
    play.done(play.task(m.RunBackward), nbytes=8)


def test_it_says_what_its_hops_have_used_and_what_it_has_made() -> None:
    play = a_server()
    book(play, 0)
    play.hear(OTHER, m.BoundaryTensor(0, 0, 3, 1, False), 1)  # of a hop that it has not run
    play.hear(OWNER, REQUEST)
    task = play.task(m.Describe)
    digests = tuple(str(at) for at in range(len(task.blobs)))
    play.done(task, digests=digests, sketches=tuple(map(vector, digests)))
    ((leader, answer, _),) = play.sends(m.AuditAnswer)
    assert leader == OWNER and answer.round == 7
    said = {(one.index, one.stage, one.gradient, one.source) for one in answer.records}
    assert said == {(0, 1, False, OWNER), (0, 2, False, ""), (0, 1, True, NEXT), (0, 0, True, "")}
    play.hear(OWNER, REQUEST)
    assert play.sends(m.AuditAnswer) and not play.tasks(), "asked again it answers the same"


def test_what_one_message_cannot_hold_is_said_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.core.server.audits.AUDIT_RECORDS", 3)
    play = a_server()
    book(play, 0)
    play.hear(OWNER, REQUEST)
    task = play.task(m.Describe)
    play.done(task, digests=("d",) * 4, sketches=(m.Sketch(),) * 4)
    said = [answer for _, answer, _ in play.sends(m.AuditAnswer)]
    assert [(one.part, one.parts, len(one.records)) for one in said] == [(0, 2, 3), (1, 2, 1)]
    assert len({one for answer in said for one in answer.records}) == 4
    play.hear(OWNER, REQUEST)
    assert [answer for _, answer, _ in play.sends(m.AuditAnswer)] == said


def test_what_goes_for_want_of_room_is_described_before() -> None:
    play = a_server(activation_store_bytes=10)
    book(play, 0)
    play.hear(OTHER, m.BoundaryTensor(0, 0, 3, 1, True), 1)
    dropped = play.task(m.Describe)
    assert dropped.seed == "" and set(dropped.blobs) <= set(play.dropped())
    play.done(dropped, digests=("old",) * len(dropped.blobs))
    play.hear(OWNER, REQUEST)
    task = play.task(m.Describe)
    play.done(task, digests=("new",) * len(task.blobs), sketches=(m.Sketch(),) * len(task.blobs))
    ((_, answer, _),) = play.sends(m.AuditAnswer)
    assert {one.digest for one in answer.records if one.index == 0 and one.source} >= {"old"}


def dropping() -> tuple[Play, m.Describe]:
    """There is no room for what a booked hop has used and made; the task that describes it."""
    play = a_server(activation_store_bytes=10)
    book(play, 0)
    play.hear(OTHER, m.BoundaryTensor(0, 0, 3, 1, True), 1)
    return play, play.task(m.Describe)


@pytest.mark.parametrize("first", ["fails", "request"])
def test_who_cannot_say_what_it_made_says_nothing_in_that_step_as_a_list_without_it_accuses_others(first: str) -> None:
    """Found 2026-11-25: `lost` seed 323."""
    play, dropped = dropping()
    if first == "fails":
        play.fail(dropped)
    play.hear(OWNER, REQUEST)
    asked = [one for one in play.tasks() if isinstance(one, m.Describe)]
    if first == "request":
        play.fail(dropped)
    for task in asked:
        play.done(task, digests=("new",) * len(task.blobs), sketches=(m.Sketch(),) * len(task.blobs))
        assert not play.sends(m.AuditAnswer)
    assert bool(asked) is (first == "request")


def test_what_is_described_when_its_step_is_over_is_no_tensor_of_the_next_step() -> None:
    """Found 2026-11-25: `frozen` seed 13."""
    play, dropped = dropping()
    play.view(replace(VIEW, number=2, step=1, since=2))
    play.take(play.server.load_state(1, 0, 1, 10, "d1", play.now))
    play.done(dropped, digests=("old",) * len(dropped.blobs))
    play.hear(OWNER, replace(REQUEST, step=1))
    task = play.task(m.Describe)
    play.done(task, digests=("new",) * len(task.blobs), sketches=(m.Sketch(),) * len(task.blobs))
    ((_, answer, _),) = play.sends(m.AuditAnswer)
    assert "old" not in {one.digest for one in answer.records}


def asked_again(play: Play, index: int) -> m.RunAudit:
    play.hear(OTHER, m.BoundaryTensor(0, 0, index, 1, False, 2), 1)
    play.hear(NEXT, m.BoundaryTensor(0, 0, index, 1, True, 2), 1)
    return play.task(m.RunAudit)


def test_hops_are_computed_again_from_what_others_have_made() -> None:
    play = a_server()
    play.hear(OWNER, AGAIN)
    assert [peer for peer, _, _ in play.sends(m.TensorRequest)] == [OTHER, NEXT] * 2
    for index, first in ((1, True), (3, False)):
        task = asked_again(play, index)
        assert (task.index, task.first, task.seed) == (index, first, "5") and set(play.dropped()) == {task.x, task.grad}
        play.done(task, digests=("", "x", "g"), sketches=(vector(1), vector(2)))
    play.done(play.task(m.EndAudit))
    ((leader, said, _),) = play.sends(m.Recomputed)
    assert leader == OWNER and [hop.index for hop in said.hops] == [1, 3] and said.hops[0].input == "x"
    assert not play.booked() and play.server.kept_bytes == 0
    play.hear(OWNER, AGAIN)
    assert play.sends(m.Recomputed) and not play.tasks()


@pytest.mark.parametrize("how", ["gone", "never", "failed", "left"])
def test_what_cannot_be_computed_again_is_said_and_nothing_is_left_over(how: str) -> None:
    play = a_server()
    play.hear(OWNER, AGAIN)
    task = asked_again(play, 1)
    match how:
        case "gone":
            play.hear(OTHER, m.TensorGone(0, 0, 3, 1, False))
        case "never":
            for _ in range(TRIES):
                assert play.server.deadline is not None
                play.tick(play.server.deadline)
        case "failed":
            play.fail(task)
        case "left":
            play.view(replace(VIEW, number=2, members=tuple(one for one in VIEW.members if one.peer != REPLICA)))
    ((_, said, _),) = play.sends(m.Recomputed)
    assert said.hops == () and said.of == REPLICA
    assert [task for task in play.tasks() if isinstance(task, m.EndAudit)], "the sum beside the step's is given up"


def test_inputs_that_are_said_to_wait_for_a_line_are_waited_for_twice_as_long_each_time() -> None:
    """And an answer that is one too many, or of another peer, moves nothing."""

    def asked() -> list[tuple[m.Peer, int]]:
        return [(peer, one.call - m.AUDIT_CALL) for peer, one, _ in play.sends(m.TensorRequest) if one.index == 3]

    play, waited_s, began_s = a_server(), [], 0.0
    play.hear(OWNER, AGAIN)
    asked_again(play, 1)
    play.hear(NEXT, m.BoundaryTensor(0, 0, 3, 1, True, 2), 1)
    said = m.TensorPending(0, 0, 3, 1, False, 4)
    for number in range(1, TRIES):
        at = play.server.deadline
        assert at is not None
        waited_s.append(at - began_s)
        began_s = at
        play.commands.clear()
        play.tick(at)
        assert asked() == [(OTHER, number)]
        asked_at = play.server.deadline
        play.hear(NEXT, said)
        assert play.server.deadline == asked_at
        play.hear(OTHER, said)
        play.now += 0.5
        play.hear(OTHER, said)
    assert waited_s == [play.server.settings.min_request_timeout_s * 2**at for at in range(TRIES - 1)]
    assert not play.sends(m.Recomputed)
    last = play.server.deadline
    assert last is not None
    play.tick(last)
    assert play.sends(m.Recomputed), "and not for ever"


def test_a_new_step_ends_it_and_what_runs_is_forgotten() -> None:
    play = a_server()
    play.hear(OWNER, AGAIN)
    task = asked_again(play, 1)
    play.view(replace(VIEW, number=2, step=1, since=2))
    assert [one for one in play.tasks() if isinstance(one, m.EndAudit)] and not play.sends(m.Recomputed)
    play.done(task, digests=("", "x", "g"), sketches=(vector(1), vector(2)))
    assert not play.sends(m.Recomputed)


REFUSED: dict[str, tuple[str, m.RecomputeRequest]] = {
    "of another than the leader": (OTHER, AGAIN),
    "of an older step": (OWNER, replace(AGAIN, step=1)),
    "of itself": (OWNER, replace(AGAIN, of=ME)),
    "of another stage": (OWNER, replace(AGAIN, of=NEXT)),
    "of nothing": (OWNER, replace(AGAIN, hops=())),
}


@pytest.mark.parametrize("what", [what for what in REFUSED if what != "of another than the leader"])
def test_what_may_not_be_asked_costs_nothing(what: str) -> None:
    play = a_server()
    play.hear(*REFUSED[what])
    assert not play.commands
