"""Spot checks: which hops an owner has computed again, what the replica compares, and whom the leader evicts for what was found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import msgspec
import pytest
from tests.core import test_server
from tests.core.test_server import ME, OTHER, OWNER, REPLICA, SETTINGS, Play

from shoal.core.leader.evictions import Conduct
from shoal.core.messages import (
    BoundaryTensor,
    Check,
    Checked,
    Complaint,
    Forward,
    Member,
    RunCheck,
    RunForward,
    Settings,
    Stage,
    TensorGone,
    TensorRequest,
    View,
)
from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, NextHop, new_microbatch
from shoal.core.trainer.spots import EARNED, SUSPECT, TRUSTED, SpotChecks

NEXT = "next"
VIEW = test_server.a_view(members=(*test_server.MEMBERS, Member(NEXT, 2)), owners=(0, 1, 0, 1))
CHECKED = msgspec.structs.replace(SETTINGS, stages=3, spot_checks=0.1)
FORWARD = Check(0, 0, 0, 1, 1, False, REPLICA, input_from=OTHER, result_from=NEXT)
BACKWARD = Check(0, 0, 0, 1, 1, True, REPLICA, input_from=OTHER, grad_from=NEXT, result_from=OTHER)


def a_server(**settings: object) -> Play:
    """ME and REPLICA serve stage 1 of 3; OWNER and OTHER stage 0, NEXT stage 2."""
    return Play(msgspec.structs.replace(CHECKED, **settings), 1, VIEW)


def asked_for(play: Play, check: Check) -> RunCheck:
    """The check is asked for, and all its tensors come."""
    play.hear(OWNER, check)
    for peer, asked, _ in play.sends(TensorRequest):
        play.hear(peer, BoundaryTensor(0, 0, 0, asked.stage, asked.gradient, asked.call), 1)
    return play.task(RunCheck)


def outcome(play: Play) -> str:
    ((peer, checked, _),) = play.sends(Checked)
    assert peer == OWNER
    return checked.outcome


# ---------------------------------------------------------------------------------------------------------- the replica


@pytest.mark.parametrize(("check", "sources"), [(FORWARD, (OTHER, NEXT)), (BACKWARD, (OTHER, NEXT, OTHER))])
def test_what_is_compared_comes_from_the_others_and_the_checked_replica_hears_nothing(
    check: Check, sources: tuple[str, ...]
) -> None:
    play = a_server()
    play.hear(OWNER, check)
    assert tuple(peer for peer, _, _ in play.sends(TensorRequest)) == sources
    task = asked_for(a_server(), check)
    assert (task.stage, task.backward, bool(task.grad)) == (1, check.backward, check.backward)
    assert len({task.x, task.grad, task.result}) == 3


@pytest.mark.parametrize("distance", [0.0, 0.009])
def test_results_within_the_tolerance_are_the_same(distance: float) -> None:
    play = a_server()
    task = asked_for(play, FORWARD)
    play.done(task, distance=distance)
    assert outcome(play) == "same" and not play.sends(Complaint)
    assert sorted(play.dropped()) == sorted((task.x, task.result))
    assert play.server.kept_bytes == 0 and not play.booked()


@pytest.mark.parametrize("distance", [0.011, float("inf"), float("nan")])
def test_a_difference_is_complained_of_with_all_who_may_be_at_fault(distance: float) -> None:
    play = a_server()
    play.done(asked_for(play, BACKWARD), distance=distance)
    assert outcome(play) == "differs"
    ((leader, complaint, _),) = play.sends(Complaint)
    assert (leader, complaint.about, complaint.kind) == (OWNER, REPLICA, "differs")
    assert complaint.others == (OWNER, OTHER, NEXT)


def test_a_loss_that_was_reported_otherwise_is_a_difference() -> None:
    view = test_server.a_view(members=(Member(OWNER, 0), Member(OTHER, 0), Member(ME, 1), Member(REPLICA, 1)))
    for loss, expected in ((3.001, "same"), (2.0, "differs")):
        play = Play(msgspec.structs.replace(SETTINGS, spot_checks=0.1), 1, view)
        play.hear(OWNER, Check(0, 0, 0, 1, 1, True, REPLICA, OTHER, "", OTHER, (), loss), 1)
        for peer, asked, _ in play.sends(TensorRequest):
            play.hear(peer, BoundaryTensor(0, 0, 0, asked.stage, asked.gradient, asked.call), 1)
        play.done(play.task(RunCheck), distance=0.0, loss=3.0)
        assert outcome(play) == expected


def test_a_tensor_that_does_not_come_ends_the_check() -> None:
    play = a_server()
    play.hear(OWNER, FORWARD)
    play.hear(NEXT, TensorGone(0, 0, 0, 2, False))
    assert outcome(play) == "unable"
    play = a_server()
    play.hear(OWNER, FORWARD)
    assert play.server.deadline is not None
    play.tick(play.server.deadline)
    assert outcome(play) == "unable" and not play.sends(Complaint)


def test_a_new_step_ends_a_check_that_waits_and_not_one_that_runs() -> None:
    play = a_server()
    task = asked_for(play, FORWARD)
    play.hear(OWNER, msgspec.structs.replace(FORWARD, index=2))
    play.view(msgspec.structs.replace(VIEW, number=2, step=1, since=2))
    assert [checked.index for _, checked, _ in play.sends(Checked)] == [2]
    play.done(task, distance=2.0)
    assert outcome(play) == "differs" and play.sends(Complaint)


def test_only_one_computes_at_a_time_and_a_check_waits_like_a_forward() -> None:
    play = a_server()
    check = asked_for(play, msgspec.structs.replace(FORWARD, index=0))
    play.hear(OTHER, BoundaryTensor(0, 0, 2, 1, False), 1)
    play.hear(OWNER, Forward(0, 0, 2, 1, 7, 1, input_from=(ME, OTHER), to=NEXT))
    assert not play.tasks()
    play.done(check, distance=0.0)
    assert play.task(RunForward).index == 2


REFUSED: dict[str, tuple[str, Check]] = {
    "of another's microbatch": (OTHER, FORWARD),
    "of an older step": (OWNER, msgspec.structs.replace(FORWARD, step=1)),
    "of another stage": (OWNER, msgspec.structs.replace(FORWARD, stage=2)),
    "of itself": (OWNER, msgspec.structs.replace(FORWARD, of=ME)),
    "of one who serves another stage": (OWNER, msgspec.structs.replace(FORWARD, of=NEXT)),
    "with an input of its own stage": (OWNER, msgspec.structs.replace(FORWARD, input_from=REPLICA)),
    "without a result": (OWNER, msgspec.structs.replace(FORWARD, result_from="")),
    "of held-out samples": (OWNER, msgspec.structs.replace(FORWARD, index=4)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_check_that_nobody_may_ask_for_costs_nothing(what: str) -> None:
    play = a_server()
    peer, check = REFUSED[what]
    play.hear(peer, check)
    assert not play.commands
    play.hear(OWNER, FORWARD)
    assert len(play.sends(TensorRequest)) == 2


def test_a_hop_is_computed_again_once_whoever_insists() -> None:
    play = a_server()
    play.done(asked_for(play, FORWARD), distance=0.0)
    play.hear(OWNER, FORWARD)
    assert not play.commands


# ------------------------------------------------------------------------------------------------------------ the owner

STAGE_OF: dict[str, Stage] = {"a0": 0, "b0": 0, "a1": 1, "b1": 1, "a2": 2, "b2": 2}
THREE = Settings(stages=3, microbatches=64, steps=9, spot_checks=1.0)
OWNED = View(number=3, step=0, members=tuple(Member(peer, stage) for peer, stage in STAGE_OF.items()))


def a_microbatch(index: int = 0) -> Microbatch:
    """Through all stages and back, by the peers whose names begin with a."""
    m = new_microbatch(index, ["a0", "a1", "a2"], OWNED)
    m.x = [("tokens",), ("a0", "a1"), ("a1", "a2")]
    m.g = [("a1", "a0"), ("a2", "a1"), ()]
    m.loss = 2.5
    for kind, stages in ((Kind.FORWARD, (0, 1)), (Kind.BACKWARD, (2, 1, 0))):
        m.asked |= {NextHop(kind, stage): {f"a{stage}": None} for stage in stages}  # type: ignore[operator]
    return m


def drawn(hop: Hop, spots: SpotChecks | None = None, index: int = 0) -> list[tuple[str, Check, tuple[str, ...]]]:
    spots = spots or SpotChecks("b2", THREE, Random(1))
    sent = spots.draw(a_microbatch(index), hop, OWNED, STAGE_OF)
    return [(one.peer, one.message, one.blobs) for one in sent]  # type: ignore[attr-defined]


def test_the_hop_before_is_checked_when_the_next_has_used_its_result() -> None:
    ((peer, check, tokens),) = drawn(Hop(Kind.FORWARD, 1, "a1", 0.0))
    assert peer == "b0" and tokens == ("tokens",)
    assert check == Check(0, 0, 0, 0, 3, False, "a0", "", "", "a1", ("a1",))
    ((peer, check, tokens),) = drawn(Hop(Kind.BACKWARD, 2, "a2", 0.0))
    assert peer == "b1" and tokens == ()
    assert check == Check(0, 0, 0, 1, 3, False, "a1", "a0", "", "a2", ("a0", "a2"))
    ((peer, check, tokens),) = drawn(Hop(Kind.BACKWARD, 1, "a1", 0.0))
    assert peer == "b2" and tokens == ("tokens",)
    assert check == Check(0, 0, 0, 2, 3, True, "a2", "a1", "", "a1", ("a1",), 2.5)
    ((peer, check, tokens),) = drawn(Hop(Kind.BACKWARD, 0, "a0", 0.0))
    assert peer == "b1" and tokens == ()
    assert check == Check(0, 0, 0, 1, 3, True, "a1", "a0", "a2", "a0", ("a0", "a2"))
    assert not drawn(Hop(Kind.FORWARD, 0, "a0", 0.0)) and not drawn(Hop(Kind.RECALL, 1, "a1", 0.0))


def test_checks_that_pass_earn_trust_and_a_difference_takes_it_from_both() -> None:
    spots = SpotChecks("b2", msgspec.structs.replace(THREE, spot_checks=0.1), Random(1))
    shares = [spots.share("a0")]

    def answer(outcome: str, times: int) -> None:
        for _ in range(times):
            spots._asked[0, 0, False] = "b0", "a0"
            spots.on_checked("b0", Checked(0, 0, 0, 0, False, "a0", outcome))  # type: ignore[arg-type]
            spots.on_checked("b0", Checked(0, 0, 0, 0, False, "a0", outcome))  # type: ignore[arg-type]  # counts once

    answer("unable", 3)
    answer("same", EARNED)
    shares.append(spots.share("a0"))
    answer("same", 100)
    shares.append(spots.share("a0"))
    assert shares == pytest.approx([0.1, 0.05, TRUSTED * 0.1])
    answer("differs", 1)
    assert spots.share("a0") == spots.share("b0") == 1.0
    answer("same", -SUSPECT)
    assert (spots.share("a0"), spots.share("b0")) == (0.1, 1.0)


def test_whoever_else_may_have_sent_a_tensor_is_named() -> None:
    """b0 was late with the forward below, and its output may have come first; b1 holds the input since it was to run the hop."""
    m = a_microbatch()
    assert m.asked is not None
    m.asked[NextHop(Kind.FORWARD, 0)] = {"b0": None, "a0": None}
    m.x[1] = ("a0", "b1", "a1")
    (sent,) = SpotChecks("b2", THREE, Random(1)).draw(m, Hop(Kind.FORWARD, 2, "a2", 0.0), OWNED, STAGE_OF)
    assert sent.message.others == ("b0", "a0", "b1", "a2")  # type: ignore[attr-defined]


def test_where_another_owner_has_asked_as_well_nothing_is_checked() -> None:
    m = a_microbatch()
    m.asked = None
    assert not SpotChecks("b2", THREE, Random(1)).draw(m, Hop(Kind.FORWARD, 2, "a2", 0.0), OWNED, STAGE_OF)


def test_an_answer_to_what_was_not_asked_changes_nothing() -> None:
    spots = SpotChecks("b2", THREE, Random(1))
    spots.on_checked("b0", Checked(0, 0, 0, 0, False, "a0", "differs"))
    assert spots.share("a0") == THREE.spot_checks


def test_about_as_many_are_checked_as_the_share_says_and_each_once() -> None:
    spots = SpotChecks("b2", msgspec.structs.replace(THREE, spot_checks=0.25, microbatches=4000), Random(1))
    hop = Hop(Kind.FORWARD, 1, "a1", 0.0)
    count = sum(len(drawn(hop, spots, index)) for index in range(4000))
    assert 900 < count < 1100
    assert not [index for index in range(4000) if len(drawn(hop, spots, index)) > 1]


def test_a_stages_only_replica_and_my_own_hops_are_not_checked() -> None:
    alone = {peer: stage for peer, stage in STAGE_OF.items() if peer != "b0"}
    hop = Hop(Kind.FORWARD, 1, "a1", 0.0)
    assert not SpotChecks("b2", THREE, Random(1)).draw(a_microbatch(), hop, OWNED, alone)
    assert not SpotChecks("a0", THREE, Random(1)).draw(a_microbatch(), hop, OWNED, STAGE_OF)


# ----------------------------------------------------------------------------------------------------------- the leader

STAGES = 3


def swarm(replicas: int) -> dict[str, Stage]:
    return {f"{letter}{stage}": stage for stage, letter in product(range(STAGES), "abcdefgh"[:replicas])}


def finding_of(liar: str, serving: dict[str, Stage], rng: Random) -> tuple[str, Complaint] | None:
    """A hop by anybody, checked by another replica of its stage; the liar sends noise with every tensor."""
    stage, backward = rng.randrange(STAGES), rng.random() < 0.5
    if stage == (0 if backward else STAGES - 1):
        return None
    of, checker = rng.sample([peer for peer, at in serving.items() if at == stage], 2)
    sources = [stage - 1, stage + 1, *([stage - 1] if backward else [])]  # the input, then a gradient or the result
    involved = [rng.choice([peer for peer, at in serving.items() if at == one]) for one in sources if 0 <= one < STAGES]
    if liar not in (of, *involved):
        return None
    others = tuple(dict.fromkeys((rng.choice(list(serving)), *involved)))
    return checker, Complaint(of, "differs", "differs", tuple(peer for peer in others if peer != checker))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_one_liar_is_convicted_and_never_an_honest_peer(replicas: int) -> None:
    serving, needed = swarm(replicas), []
    for seed in range(150):
        rng, conduct, findings = Random(seed), Conduct(), 0
        liar, verdict = rng.choice(list(serving)), None
        while verdict is None:
            finding = finding_of(liar, serving, rng)
            findings += finding is not None
            verdict = conduct.recomputed(*finding, serving) if finding is not None else None
            assert findings < 60
        assert verdict[0] == liar, (seed, verdict)
        needed.append(findings)
    assert sorted(needed)[len(needed) // 2] <= 8


def convicted(findings: Sequence[tuple[str, str, str]], serving: dict[str, Stage]) -> list[str]:
    """Of `accuser`, `accused` and the others' names: who is to be evicted after each."""
    conduct = Conduct()
    verdicts = [
        conduct.recomputed(by, Complaint(of, "x", "differs", tuple(others.split())), serving)
        for by, of, others in findings
    ]
    return [verdict[0] if verdict else "" for verdict in verdicts]


def test_one_who_accuses_whomever_it_checks_is_found_by_what_its_findings_share() -> None:
    findings = [("a1", "b1", "a0 b2"), ("a1", "c1", "b0 a2"), ("a1", "b1", "b0 b2")]
    assert convicted(findings, swarm(3)) == ["", "", "a1"]


def test_of_two_replicas_the_word_of_one_counts_once() -> None:
    of_two = [("a1", "b1", "a0 b2"), ("a1", "b1", "b0 a2"), ("a1", "b1", "b0 b2")]
    assert convicted(of_two, swarm(2)) == ["", "", "b1"]
    conduct, serving = Conduct(), swarm(2)
    for accused in ("b1", "c1"):
        serving = {**serving, accused: 1}
        verdicts = [
            conduct.recomputed("a1", Complaint(accused, "x", "differs", tuple(others.split())), serving)
            for _, _, others in of_two
        ]
        conduct.keep([peer for peer in serving if peer != accused])
        serving.pop(accused)
    assert verdicts[-1] is not None and verdicts[-1][0] == "a1"


def test_nobody_is_evicted_while_another_explains_as_much_beside() -> None:
    """b1 stands between two liars: its findings share only itself, and each liar has as many without it."""
    serving = swarm(4)
    beside = [("c1", "d1", "a0 c2"), ("d1", "c1", "a0 d2"), ("d1", "a1", "a0 b2")]
    about_b = [("a1", "b1", "a0 c2"), ("c1", "b1", "a0 d2"), ("d1", "b1", "b0 a2")]
    assert convicted([beside[0], *about_b], serving)[-1] == "b1"
    assert "b1" not in convicted([*beside[:2], about_b[0], beside[2], *about_b[1:]], serving)


def test_a_neighbour_that_serves_its_stage_alone_is_no_suspect() -> None:
    serving = {peer: stage for peer, stage in swarm(2).items() if peer != "b2"}
    findings = [("a1", "b1", "a0 a2"), ("a1", "b1", "b0 a2"), ("a1", "b1", "b0 a2")]
    assert convicted(findings, serving) == ["", "", "b1"]


@pytest.mark.parametrize(
    ("by", "of", "others"), [("a0", "a1", ""), ("a1", "a1", ""), ("a1", "b1", "stranger"), ("x", "b1", "")]
)
def test_a_finding_that_cannot_be_is_none(by: str, of: str, others: str) -> None:
    assert not any(convicted([(by, of, others)] * 5, swarm(2)))
