"""Forecasts: time is accounted for, deaths cost what they should, the same inputs give the same history, bad input is refused."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal import config
from shoal.cli.main import main
from shoal.core.messages import TURNS
from shoal.forecasting import churn as churns
from shoal.forecasting.arrivals import Arrivals
from shoal.forecasting.churn import Churn, Presence, presences
from shoal.forecasting.crew import EVICTION_DELAYS, LOADED_DELAYS, Crew
from shoal.forecasting.egress import Egress
from shoal.forecasting.exact import case_of
from shoal.forecasting.forecaster import OPENING, History, Parts, Run, forecast
from shoal.forecasting.job import CHUNK_BYTES, Job
from shoal.forecasting.machines import Machines, grouped
from shoal.forecasting.models.played import Played
from shoal.forecasting.models.step_time import measured
from shoal.forecasting.models.sums import Sums
from shoal.forecasting.summary import compared, summarized
from shoal.launcher.planning import forecasting as planning
from shoal.launcher.planning.forecasting import Outlook
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "configs" / "traces" / "aws-g4dn-spot.csv"
HOUR_S = 3600.0


def a_job(peers: int = 8, stages: int = 2, save_every: int = 10) -> Job:
    device = Device(name="", flops=1.0, up_Bps=25e6, down_Bps=25e6, price_per_h=0.5, losses_per_h=0.5)
    machines = Machines((device,), (0,) * peers, np.array([[0.02]]), np.array([[1e9]]))
    stage_of = tuple(slot % stages for slot in range(peers))
    forward_s, backward_s = np.full((1, stages), 0.2), np.full((1, stages), 0.4)
    seats = Seats(stage_of, (0.2,) * peers, (0.4,) * peers, (4e6,) * stages, 2e5, 4096.0, 4 * peers, 4)
    return Job(
        machines=machines,
        stage_of=stage_of,
        forward_s=forward_s,
        backward_s=backward_s,
        seats=seats,
        state_bytes=(1.2e7,) * stages,
        tokens=1000,
        save_every=save_every,
    )


def balanced(peers: int = 8, stages: int = 2) -> Job:
    """Its last stage, which runs no forward of its own, takes as long as the others: nobody moves there when one of another has died."""
    given = a_job(peers, stages)
    forward_s, backward_s = given.forward_s[0], given.backward_s[0].copy()
    backward_s[-1] += forward_s[-1]
    seats = msgspec.structs.replace(given.seats, backward_s=tuple(backward_s[stage] for stage in given.stage_of))
    return msgspec.structs.replace(given, seats=seats, backward_s=backward_s[None])


def with_a_narrow_line(stages: int) -> Job:
    """Of five machines the last has half the others' line."""
    given = a_job(5, stages)
    narrow = msgspec.structs.replace(given.machines.kinds[0], up_Bps=12.5e6, down_Bps=12.5e6)
    machines = Machines((given.machines.kinds[0], narrow), (0, 0, 0, 0, 1), np.full((2, 2), 0.02), np.full((2, 2), 1e9))
    seconds = {name: np.repeat(getattr(given, name), 2, axis=0) for name in ("forward_s", "backward_s")}
    thick = msgspec.structs.replace(given.seats, gradient_bytes=(4e7,) * stages)
    return msgspec.structs.replace(given, machines=machines, seats=thick, **seconds)


def always(peers: int, *changes: Presence) -> list[Presence]:
    return sorted([*(Presence(0.0, slot, True) for slot in range(peers)), *changes], key=lambda one: one.at_s)


def play(job: Job, changes: list[Presence], hours: float = 1.0) -> History:
    return forecast(job, Played(job), changes, 0.0, hours * HOUR_S, 0)


def test_without_churn_every_step_takes_what_the_planner_predicts() -> None:
    job = a_job()
    step = Played(job)(np.array(job.stage_of))
    assert step is not None
    history = play(job, always(8))
    assert history.steps == int(HOUR_S / step.step_s)
    assert history.tokens == history.steps * 32 * 1000
    assert (history.parts.redone, history.parts.stalled, history.deaths, history.moves) == (0, 0, 0, 0)


@pytest.mark.slow
def test_all_of_the_time_is_accounted_for() -> None:
    job = a_job()
    history = play(job, list(presences(Churn(life_s=1200.0), job.machines, 3 * HOUR_S, 3)), 3.0)
    parts = [getattr(history.parts, part) for part in Parts.__struct_fields__]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(3 * HOUR_S) and history.deaths > 25


def test_a_death_is_detected_first_and_its_share_is_computed_again() -> None:
    job = balanced()
    calm, struck = play(job, always(8)), play(job, always(8, Presence(600.0, 0, False)))
    assert struck.steps < calm.steps and struck.deaths == 1
    assert struck.parts.waiting / struck.steps > calm.parts.waiting / calm.steps
    worked, calmly = ((one.parts.compute + one.parts.redone) / one.steps for one in (struck, calm))
    assert worked > calmly
    assert struck.lost_stages == 0


@pytest.mark.slow
def test_a_stage_that_loses_its_last_replica_sends_everybody_back_to_the_checkpoint() -> None:
    changes = always(6, *(Presence(500.0 + 20 * slot, slot, False) for slot in (0, 2, 4)))  # all that serve stage 0
    rare, often = (play(a_job(6, save_every=every), changes) for every in (1000, 2))
    assert rare.lost_stages == often.lost_stages == 0, "a peer of the other stage moves there"
    both = always(4, Presence(500.0, 1, False), Presence(500.0, 3, False), Presence(900.0, 1, True))
    rare, often = (play(a_job(4, save_every=every), both) for every in (1000, 2))
    assert rare.lost_stages == often.lost_stages == 1
    assert rare.undone_steps > often.undone_steps and rare.steps < often.steps
    assert rare.parts.redone > often.parts.redone


def test_a_machine_that_the_plan_leaves_out_takes_no_part() -> None:
    """It may have too little memory for every stage."""
    given = a_job(4)
    wider = msgspec.structs.replace(given.machines, kind_of=(0,) * 5)
    seats = msgspec.structs.replace(
        given.seats, stage_of=(0, 1, 0, 1, -1), forward_s=(0.2,) * 5, backward_s=(0.4,) * 5, microbatches=16
    )
    job = msgspec.structs.replace(given, machines=wider, stage_of=seats.stage_of, seats=seats)
    history = play(job, always(5))
    assert history.joins == 4 and history.steps == play(given, always(4)).steps


def test_the_majority_that_dies_at_once_ends_the_run_in_words() -> None:
    history = play(a_job(4), always(4, *(Presence(500.0, slot, False) for slot in (0, 1, 2))))
    assert "no majority" in history.stuck and history.parts.stalled > HOUR_S / 2


def test_the_leaders_death_is_noticed_after_an_election() -> None:
    job = a_job(stages=1)
    leader, other = (play(job, always(8, Presence(601.0, slot, False))) for slot in (0, 1))
    last_s = other.parts.waiting / other.steps  # the hour may end a step sooner
    assert leader.parts.waiting > other.parts.waiting - last_s + 0.6 * job.patience.heartbeat_timeout_s
    assert leader.steps <= other.steps


def test_a_death_after_its_part_of_the_round_costs_the_step_nothing() -> None:
    job = msgspec.structs.replace(a_job(stages=1), round_s=0.2)
    step = Played(job)(np.array(job.stage_of))
    assert step is not None and step.exchange_s == (step.averaging_s,)
    before_s, after_s = (step.microbatches_s + share * step.averaging_s for share in (0.1, 0.99))
    runs = []
    for at_s in (before_s, after_s):
        run = Run(job, Played(job), always(8, Presence(at_s, 3, False)), 0.0, begun=True)
        run.play(100.0, steps=1)
        runs.append(run.progress.began_s)
    assert runs[1] == pytest.approx(step.step_s) and runs[0] > step.step_s + job.patience.detection_s


def test_a_joiner_goes_where_the_leader_would_put_it_and_helps() -> None:
    job = a_job(stages=1)
    without = play(job, always(8, Presence(300.0, 0, False)))
    replaced = play(job, always(8, Presence(300.0, 0, False), Presence(400.0, 0, True)))
    assert replaced.steps > without.steps and replaced.joins == 9


def test_while_a_newcomer_downloads_rounds_take_what_its_sums_take() -> None:
    """Of a stage with even lines, where they go between those of the others."""
    given = balanced(8)
    job = msgspec.structs.replace(given, seats=msgspec.structs.replace(given.seats, gradient_bytes=(4e7, 4e7)))
    calm = Run(job, Played(job), always(7), 0.0, begun=True)
    long = msgspec.structs.replace(job, state_bytes=(1e12, 1e12))
    joined = Run(long, Played(long), always(7, Presence(60.0, 7, True)), 0.0, begun=True)
    seconds = []
    for run in (calm, joined):
        run.play(65.0)
        run.play(HOUR_S, steps=run.progress.step + 1)
        before_s = run.now
        run.play(HOUR_S, steps=run.progress.step + 1)
        seconds.append(run.now - before_s)
    assert joined.crew.joining() == (0, 1) and calm.crew.joining() == (0, 0)
    model, serving = Played(job), calm.crew.serving
    step, with_sums = model(serving), model.with_joiners(serving, (0, 1))
    assert step is not None and with_sums is not None and model.with_joiners(serving, (0, 0)) is None
    assert with_sums[0] == step.exchange_s[0] and with_sums[1] > step.exchange_s[1] + 0.2
    elsewhere = model.with_joiners(serving, (1, 0))
    assert elsewhere is not None and elsewhere[0] > step.exchange_s[0] and elsewhere[1] == step.exchange_s[1]
    assert seconds[1] - seconds[0] == pytest.approx(max(with_sums) - max(step.exchange_s), abs=1e-6)


def test_of_machines_with_unlike_lines_a_round_takes_what_the_run_measures_and_believes() -> None:
    """One line is half as wide as the others: of even shares a round would wait for it."""
    job = with_a_narrow_line(1)
    assert measured(job.seats, job, job.machines.kind_of).line_rates == (25000, 25000, 25000, 25000, 12500)
    step = Played(job)(np.array(job.stage_of))
    even_s = 2 * 4e7 * 4 / 5 / 12.5e6
    assert step is not None and step.averaging_s < 0.9 * even_s


def test_the_time_of_many_slots_is_that_of_their_kinds() -> None:
    devices = tuple(Device(name=f"p{n}", flops=1.0 + n % 2) for n in range(6))
    cluster = Cluster(devices, np.full((6, 6), 0.01), np.full((6, 6), 1e8))
    machines = grouped(cluster)
    assert len(machines.kinds) == 2 and machines.kind_of == (0, 1) * 3
    cluster.delay_s[0, 2] = 0.5
    assert len(grouped(cluster).kinds) == 6


@pytest.mark.parametrize("churn", [Churn(record=str(RECORD)), Churn(life_s=1800, shape=0.7), Churn(tide=0.5)])
def test_machines_come_before_they_go(churn: Churn) -> None:
    machines = a_job(30).machines
    there = [False] * 30
    last_s = 0.0
    for change in presences(churn, machines, 48 * HOUR_S, 5):
        assert change.at_s >= last_s and there[change.slot] != change.joins
        last_s, there[change.slot] = change.at_s, change.joins
    assert last_s > 24 * HOUR_S


def test_a_records_copies_have_as_many_nodes_as_the_record() -> None:
    machines = a_job(240).machines
    present, seconds, last_s = 0, 0.0, 0.0
    for change in presences(Churn(record=str(RECORD)), machines, 24 * HOUR_S, 1):
        seconds += present * (change.at_s - last_s)
        last_s, present = change.at_s, present + (1 if change.joins else -1)
    assert seconds / last_s / 10 == pytest.approx(12.8, rel=0.2)  # the record's own mean, ten copies


def test_lives_have_the_mean_that_was_asked_for() -> None:
    machines = a_job(300).machines
    for shape in (0.7, 1.0, 2.0):
        churn = Churn(life_s=1800.0, shape=shape, away_s=600.0)
        deaths = sum(not one.joins for one in presences(churn, machines, 24 * HOUR_S, 0))
        assert deaths == pytest.approx(300 * 24 * HOUR_S / 2400, rel=0.05)


def test_a_region_fails_as_a_whole() -> None:
    device = Device(name="", flops=1.0, region="east")
    kinds = (device, msgspec.structs.replace(device, region="west"))
    machines = Machines(kinds, (0, 0, 1), np.zeros((2, 2)), np.ones((2, 2)))
    changes = presences(Churn(region_failures_per_h=0.5), machines, 24 * HOUR_S, 0)
    of = {slot: [(one.at_s, one.joins) for one in changes if one.slot == slot] for slot in range(3)}
    assert of[0] == of[1] != of[2] and len(of[0]) > 4


def noticed_s(job: Job) -> float:
    """From a death to the eviction, while the leader lives."""
    return job.patience.detection_s + EVICTION_DELAYS * job.delay_s + 1e-9


def test_a_dead_peer_that_the_leader_moves_is_evicted_all_the_same() -> None:
    crew = Crew(a_job(6))
    for slot in range(6):
        crew.begin(f"p{slot}.1")
    for slot in (0, 2):  # stage 0 keeps one of three replicas
        crew.die(f"p{slot}.1", 1.0 - noticed_s(crew.job), 0.0)
        crew.evict(1.0)
    for slot in (1, 3, 5):
        crew.die(f"p{slot}.1", 9.0 - noticed_s(crew.job), 0.0)
    moved = [member.peer for member, _ in crew.rebalance(5.0, math.inf, 0.0, 10.0)]
    assert moved and moved[0] in crew.dead and not crew.ready(8.0)
    assert len(crew.evict(9.0)) == 3 and set(crew.members) == {"p4.1"} and not crew.joiners


@pytest.mark.parametrize("moment", ["averaging", "agreeing"])
def test_a_stages_last_replica_that_dies_after_its_part_of_the_round_is_not_waited_for(moment: str) -> None:
    job = a_job(3)
    step = Played(job)(np.array(job.stage_of))
    assert step is not None and step.agreeing_s > 0
    before_s = step.microbatches_s + OPENING * step.agreeing_s
    before_s += step.averaging_s * (1.0 if moment == "agreeing" else 0.999999)
    at_s = 9 * step.step_s + before_s + (0.5 * (1 - OPENING) * step.agreeing_s if moment == "agreeing" else 0.0)
    run = Run(job, Played(job), always(3, Presence(at_s, 1, False)), 0.0, begun=True)
    run.play(HOUR_S, steps=10)
    assert run.now == pytest.approx(10 * step.step_s) and list(run.crew.dead) == ["p1.1"]
    run.play(HOUR_S)
    assert run.tally.lost_stages == 1 and run.progress.step > 300 and not run.stuck


def test_a_death_in_a_round_begins_its_own_stages_exchange_again_and_no_other() -> None:
    job = a_job(8)
    step = Played(job)(np.array(job.stage_of))
    assert step is not None
    at_s = step.microbatches_s + OPENING * step.agreeing_s + 0.5 * step.averaging_s
    run = Run(job, Played(job), always(8, Presence(at_s, 1, False)), 0.0, begun=True)
    run.play(at_s + noticed_s(job) + 1e-6)
    lost = job.stage_of[1]
    again, went_on = run.progress.exchanges.left_s[lost], run.progress.exchanges.left_s[1 - lost]
    assert run.progress.phase.value == "averaging" and run.progress.redo[lost] > 0 == run.progress.redo[1 - lost]
    assert went_on <= 0.5 * step.averaging_s < again
    run.play(HOUR_S, steps=1)
    assert run.progress.step == 1


def test_an_exchange_that_begins_again_takes_what_its_own_stage_takes() -> None:
    """The other stage's gradient takes a hundred times as long."""
    given = balanced(8)
    job = msgspec.structs.replace(given, seats=msgspec.structs.replace(given.seats, gradient_bytes=(4e6, 4e8)))
    step = Played(job)(np.array(job.stage_of))
    assert step is not None and step.exchange_s[0] < 0.3 * step.averaging_s == 0.3 * step.exchange_s[1]
    at_s = step.microbatches_s + OPENING * step.agreeing_s + 0.5 * step.exchange_s[0]
    run = Run(job, Played(job), always(8, Presence(at_s, 2, False)), 0.0, begun=True)
    run.play(at_s + noticed_s(job) + 1e-6)
    assert 0 < run.progress.exchanges.left_s[0] < 0.3 * step.averaging_s
    assert run.progress.exchanges.left_s[1] == pytest.approx(
        step.averaging_s - 0.5 * step.exchange_s[0] - noticed_s(job), abs=1e-3
    )


def test_until_a_death_is_noticed_the_others_do_their_part_and_no_more() -> None:
    """Their own pace is what it was: the dead peer's part of the requests waits."""
    job = a_job(8)
    step = Played(job)(np.array(job.stage_of))
    assert step is not None and noticed_s(job) > 2.0
    run = Run(job, Played(job), always(8, Presence(1.0, 3, False)), 0.0, begun=True)
    run.play(3.0)
    assert run.progress.passed == pytest.approx((1.0 + 0.75 * 2.0) / step.microbatches_s)


def test_of_a_lost_microbatch_only_the_backward_is_computed_again() -> None:
    """A forward is a third of a hop at the first stage; the last stage's hop is its backward. Where a death is not played."""
    job = a_job(8)
    for slot, part in ((2, 2 / 3), (3, 1.0)):
        run = Run(job, Sums(job), always(8, Presence(1.0, slot, False)), 0.0, begun=True)
        run.play(1.0 + 1e-9)
        passed = run.progress.passed
        run.play(1.0 + noticed_s(job) + 1e-6)
        assert run.progress.redo[job.stage_of[slot]] == pytest.approx(0.25 * passed * job.microbatches * part, rel=1e-3)


def test_in_the_first_step_no_line_is_measured_and_a_round_is_even() -> None:
    """One stage sends no tensor before it: the first round waits for the narrow line, the others give it less."""
    job = with_a_narrow_line(1)
    model, planned = Played(job), np.array(job.stage_of)
    first, later = model.first(planned), model(planned)
    assert first is not None and later is not None and first.averaging_s > 1.1 * later.averaging_s
    run = Run(job, Played(job), always(5), 0.0)
    run.play(HOUR_S, steps=2)
    assert run.now == pytest.approx(first.step_s + later.step_s)
    planned[4] = -1
    assert model.first(planned) == model(planned)


def test_a_replica_with_a_narrow_line_is_asked_as_often_as_the_leader_says() -> None:
    """Its line carries a quarter of what the stage's others compute: a step in which it had its even share would wait for it."""
    given = with_a_narrow_line(2)
    job = msgspec.structs.replace(given, seats=msgspec.structs.replace(given.seats, boundary_bytes=1.5e7))
    seats = measured(job.seats, job, job.machines.kind_of)
    assert seats.turns[:4] == (TURNS,) * 4 and 0 < seats.turns[4] < TURNS
    cluster = job.machines.cluster(list(range(5)))
    by_turns, even = (
        predict(each, cluster, np.random.default_rng(0), 0.1).microbatches_s
        for each in (seats, msgspec.structs.replace(seats, turns=(TURNS,) * 5))
    )
    assert by_turns < 0.95 * even


@pytest.mark.parametrize(("moment", "evicted"), [("opening", True), ("averaging", True), ("agreeing", False)])
def test_a_round_waits_for_who_died_before_its_part_was_done(moment: str, evicted: bool) -> None:
    """Heartbeats and Round come before the sums: who dies then is missed, and what it booked is computed again."""
    job = a_job()
    step = Played(job)(np.array(job.stage_of))
    assert step is not None
    at_s = step.microbatches_s + 0.5 * OPENING * step.agreeing_s
    if moment != "opening":
        at_s = (
            step.microbatches_s + OPENING * step.agreeing_s + (0.1 if moment == "averaging" else 1.0) * step.averaging_s
        )
    run = Run(job, Played(job), always(8, Presence(at_s + 1e-6, 3, False)), 0.0, begun=True)
    run.play(HOUR_S, steps=1)
    late_s = run.now - step.step_s
    assert (late_s > noticed_s(job)) if evicted else (late_s == pytest.approx(0.0, abs=1e-6))


def test_a_clock_too_coarse_for_the_rest_of_a_phase_ends_the_phase() -> None:
    """A double of many seconds counts in steps that are longer than what is left of some phases."""
    after_s = 3e9
    run = Run(a_job(), Played(a_job()), always(8), after_s)
    run.play(after_s + HOUR_S)
    assert run.progress.step == pytest.approx(play(a_job(), always(8)).steps, rel=1e-3)


def test_a_history_in_which_a_stage_lost_its_last_replica_while_a_step_was_agreed_ends() -> None:
    """It repeated one moment for ever: a commit waited for the stage that nobody served, and the eviction for the commit."""
    job, churn = a_job(3, save_every=0), Churn(life_s=3600.0, away_s=1.0, start_s=0.0)
    changes = presences(churn, job.machines, 6 * HOUR_S, 961729)
    history = forecast(job, Sums(job), changes, churn.start_s, 6 * HOUR_S, 0)
    assert history.steps + history.undone_steps > 1000 and history.lost_stages > 0


def test_a_dead_peer_that_the_leader_moves_leaves_its_slot_to_its_successor() -> None:
    crew = Crew(a_job(12))
    for slot in range(12):
        crew.begin(f"p{slot}.1")
    for slot in (0, 2, 4, 6, 8):  # stage 0 keeps one of six replicas
        crew.die(f"p{slot}.1", 1.0 - noticed_s(crew.job), 0.0)
        crew.evict(1.0)
    crew.die("p11.1", 9.0, 0.0)
    crew.begin("p11.2")
    served = crew.serving[11]
    moved = [member.peer for member, _ in crew.rebalance(9.0, math.inf, 0.0, 10.0)]
    assert "p11.1" in moved and crew.serving[11] == served == crew.members["p11.2"].stage
    assert "p11.1" in crew.joiners and "p11.1" not in crew.living_joiners()


def test_seeds_are_compared_in_pairs() -> None:
    job = a_job()
    planned = Played(job)(np.array(job.stage_of))
    assert planned is not None
    histories = [
        History(seed=n, seconds=HOUR_S, steps=n, tokens=1000 + n, parts=Parts(), peer_hours=(8.0,)) for n in range(5)
    ]
    better = [msgspec.structs.replace(one, tokens=one.tokens * 1.1) for one in histories]
    one, other = (summarized(name, job, planned, each) for name, each in (("a", histories), ("b", better)))
    difference = compared(one, other)
    assert difference.more_percent == pytest.approx(10)
    assert difference.low_percent is not None and difference.low_percent == pytest.approx(10)
    assert one.cost.rent is not None and one.cost.egress is None and "egress_price_per_GB" in one.cost.missing[0]


# ------------------------------------------------------------------------------------------------------------ the command

CLUSTER = """
[link]
delay_s = "20 ms"
bandwidth_Bps = "1 Gbit/s"
[[device]]
name = "p"
count = 6
flops = "1 TFLOP/s"
up_Bps = "200 Mbit/s"
down_Bps = "200 Mbit/s"
"""
LAB = str(ROOT / "configs" / "lab.toml")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "churn.toml").write_text('life_s = "2 h"\nshape = 0.8\n')
    return tmp_path


def words(*more: str) -> list[str]:
    return [
        "forecast",
        LAB,
        "--cluster",
        "cluster.toml",
        "--churn",
        "churn.toml",
        "--hours",
        "1",
        "--seeds",
        "2",
        *more,
    ]


def test_both_speeds_know_the_room_that_a_run_gives_its_replicas(there: Path) -> None:
    tree = config.load(LAB, ["run.queue_limit=3"])
    job = planning._job(Outlook(cluster=str(there / "cluster.toml")), tree)
    assert job.seats.queue_limit == case_of(job, 2, 0).settings.queue_limit == 3


def test_the_report_says_that_it_is_simulated_and_what_is_left_out(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (there / "other.toml").write_text(Path(LAB).read_text())
    assert main(words("other.toml", "--pictures", "drawn")) == 0
    text = capsys.readouterr().out
    assert "simulated" in text and "left out      rent: 6 of 6 machines have no price_per_h" in text
    assert "other makes +0.0 % tokens against lab" in text
    assert {file.name for file in (there / "drawn").iterdir()} == {"tokens.png", "tokens.svg", "time.png", "time.svg"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--hours", "0.0001"], "a step takes"),
        (["--hours", "0"], "more than 0"),
        (["--seeds", "0"], "wanted 1 to 10000"),
        (["--churn", "backwards.csv"], "not in order of time"),
        (["--churn", "odd.toml"], "shape = 50.0 must be from 0.1 to 10"),
        (["--churn", "unknown.toml"], "unknown field `lief_s`"),
        (["--plan", "plan.json"], "nowhere"),
        (["--cluster", "other.toml"], "is no device or region"),
        (["--churn", "deadly.toml"], "cannot make progress"),
        (["--churn", "slow.toml"], "no machine had started after 1 h 00 min"),
        (["--churn", "words.csv"], "'soon' is no number of milliseconds"),
    ],
)
def test_bad_input_is_refused_in_words(
    there: Path, capsys: pytest.CaptureFixture[str], change: list[str], says: str
) -> None:
    (there / "backwards.csv").write_text("2000,add,a\n1000,add,b\n")
    (there / "odd.toml").write_text("life_s = 100.0\nshape = 50.0\n")
    (there / "unknown.toml").write_text("lief_s = 100.0\n")
    (there / "deadly.toml").write_text('life_s = "1 s"\naway_s = "1 h"\nstart_s = "0 s"\n')
    (there / "slow.toml").write_text('start_s = "2 h"\n')
    (there / "words.csv").write_text("soon,add,a\n")
    (there / "plan.json").write_text('{"layers": 6, "stages": [{"first": 0, "end": 6, "peers": ["nowhere"]}]}')
    (there / "other.toml").write_text(CLUSTER + '[[links]]\nfrom = "p-0"\nto = "mars"\ndelay_s = "1 s"\n')
    assert main([*words(), *change]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_refused(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / "small.toml").write_text(CLUSTER.replace("up_Bps", 'memory_bytes = "1 MB"\nup_Bps', 1))
    config = str(ROOT / "configs" / "four-machines.toml")
    assert main(["forecast", config, "--cluster", "small.toml", "--hours", "1", "--seeds", "1"]) == 2
    assert "fits no device" in capsys.readouterr().err


def test_a_record_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(ValueError, match="holds no change"):
        churns.load(str(tmp_path / "empty.csv"))


def test_those_who_ask_at_once_are_members_in_the_order_in_which_they_are_listed() -> None:
    """By their deaths they were: the newest, whom the leader moves first, was always the one that lived longest."""
    changes = always(4, Presence(9.0, 0, False), Presence(5.0, 2, False), Presence(7.0, 3, False))
    asks = [peer for what, peer in Arrivals(changes, 1.0, 4).due(2.0) if what == "asks"]
    assert asks == ["p0.1", "p1.1", "p2.1", "p3.1"]


def test_what_machines_send_in_a_step_is_what_is_counted_of_it() -> None:
    job = a_job(8)
    serving, egress = np.array(job.stage_of), Egress(job)
    egress.microbatches(serving, 1.0)
    handed_on = egress.nbytes.sum()
    egress.averaging(serving, [])
    each = egress.of_step(serving)
    assert each.sum() == pytest.approx(egress.nbytes.sum()) and 0 < handed_on < each.sum()
    serving[3] = -1
    assert egress.of_step(serving)[3] == 0


@pytest.mark.parametrize(("step_s", "spare"), [(math.inf, 0.5), (0.001, 0.1)])
@pytest.mark.parametrize(("chunks", "donors"), [(1, 1), (2, 2), (9, 3)])
def test_a_chunk_of_a_state_comes_from_one_replica(chunks: int, donors: int, step_s: float, spare: float) -> None:
    """Lines that a step fills have a tenth for it, others a half."""
    given = a_job(8, 1)
    job = msgspec.structs.replace(given, state_bytes=(float(chunks * CHUNK_BYTES),))
    crew = Crew(job)
    for slot in range(7):
        crew.begin(f"p{slot}.1")
    crew.admit("p7.1", 0.0, step_s)
    joiner = crew.joiners["p7.1"]
    assert len(joiner.donors) == donors
    told_s = LOADED_DELAYS * job.delay_s + job.patience.heartbeat_s / 2
    seconds = joiner.ready_s - job.patience.entry_s - told_s
    caught_up = max(1 - job.seats.gradient_bytes[0] / 25e6 / step_s, 0.1)
    assert seconds == pytest.approx(chunks * CHUNK_BYTES / min(25e6, donors * 25e6 * spare) / caught_up)
