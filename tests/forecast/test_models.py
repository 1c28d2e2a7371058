"""What a step takes by sums, corrected by plays, beside what playing each composition gives."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import fmean

import msgspec
import numpy as np
import pytest
from tests.forecast.test_forecast import HOUR_S, RECORD, ROOT, a_job, always

from shoal.forecasting.churn import Churn, Presence, presences
from shoal.forecasting.exact import ExactRun
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job
from shoal.forecasting.machines import Machines
from shoal.forecasting.models import samples as samples_module
from shoal.forecasting.models.choice import SAMPLES_LEAST, SAMPLES_MOST, corrected, model_of, rehearsed
from shoal.forecasting.models.corrected import Corrected, fitted
from shoal.forecasting.models.played import Played
from shoal.forecasting.models.samples import LARGEST, thin
from shoal.forecasting.models.step_time import Composition
from shoal.forecasting.models.sums import Sums
from shoal.planner.inputs.cluster import Device


def of_two_kinds(peers: int, stages: int) -> Job:
    """Of each stage's machines every second is half as fast, on half the line."""
    given = a_job(peers, stages)
    kind = given.machines.kinds[0]
    slow = msgspec.structs.replace(kind, flops=0.5, up_Bps=12.5e6)
    kind_of = tuple(slot // stages % 2 for slot in range(peers))
    forward_s, backward_s = (np.concatenate([row, 2 * row]) for row in (given.forward_s, given.backward_s))
    seats = msgspec.structs.replace(
        given.seats,
        boundary_bytes=2e6,
        forward_s=tuple(float(forward_s[kind, 0]) for kind in kind_of),
        backward_s=tuple(float(backward_s[kind, 0]) for kind in kind_of),
    )
    machines = Machines((kind, slow), kind_of, np.array([[0.02, 0.06], [0.06, 0.02]]), np.full((2, 2), 1e9))
    return msgspec.structs.replace(given, machines=machines, seats=seats, forward_s=forward_s, backward_s=backward_s)


def lacking(job: Job, *slots: int) -> Composition:
    composition = np.array(job.stage_of)
    composition[list(slots)] = -1
    return composition


def short_lives(job: Job, seeds: int = 2) -> list[list[Presence]]:
    churn = Churn(life_s=2400.0, away_s=600.0)
    return [list(presences(churn, job.machines, HOUR_S, seed)) for seed in range(seeds)]


def test_a_fit_has_the_mean_of_its_values_and_holds_back_what_few_of_them_say() -> None:
    features = [[x, 7.0] for x in np.linspace(-1, 1, 200)]
    many = fitted(features, [3 + 2 * x for x, _ in features])
    assert many([0.5, 7.0]) == pytest.approx(4.0, rel=0.01) and many([0.5, 9.0]) == many([0.5, 7.0])
    few = fitted([[-1.0], [1.0]], [1.0, 5.0])
    assert few([0.0]) == pytest.approx(3.0) and 4.0 < few([1.0]) < 4.5


def test_compositions_are_rehearsed_for_as_long_as_they_are_there() -> None:
    """In the second half, of longer and fewer steps, a third of the machines is away; another one in the last twelfth."""
    job = a_job(12, 2)
    history = always(12, *(Presence(1800.0, slot, False) for slot in (4, 6, 8, 10)), Presence(3300.0, 5, False))
    samples = rehearsed(job, [history], 0.0, HOUR_S, 24)
    there = [sum(bool(composition[slot] >= 0) for composition in samples) for slot in (4, 5, 2)]
    assert len(samples) == 24 and there == [12, 22, 24]
    assert rehearsed(job, [], 0.0, HOUR_S, 24) == []


def test_where_steps_are_long_few_compositions_are_played_and_the_largest_fleets_are_thinned() -> None:
    counts = list[int]()
    for peers, stages, microbatches in ((8, 2, 32), (12, 12, 100), (12, 12, 900)):
        given = a_job(peers, stages)
        job = msgspec.structs.replace(given, seats=msgspec.structs.replace(given.seats, microbatches=microbatches))
        with pytest.raises(InterruptedError):  # before anything is played

            def tell(played: int, of: int) -> None:
                counts.append(of)
                raise InterruptedError

            corrected(job, [always(peers)], 0.0, HOUR_S, tell=tell)
    assert counts == [SAMPLES_MOST, 28, SAMPLES_LEAST]
    large = a_job(400, 2)
    composition, microbatches = thin(large, np.array(large.stage_of))
    assert (composition >= 0).sum() == LARGEST and microbatches == 4 * LARGEST


@pytest.mark.parametrize(
    ("peers", "stages", "each", "kept"), [(400, 4, 10, 102), (400, 4, 100, 64), (480, 31, 10, 124), (480, 31, 2, 256)]
)
def test_a_large_fleet_is_thinned_until_a_step_is_played_whole_or_shows_its_windows(
    peers: int, stages: int, each: int, kept: int
) -> None:
    job = a_job(peers, stages)
    job = msgspec.structs.replace(job, seats=msgspec.structs.replace(job.seats, microbatches=each * peers, inflight=4))
    composition, microbatches = thin(job, np.array(job.stage_of))
    machines = int((composition >= 0).sum())
    assert abs(machines - kept) <= stages / 2 and microbatches == each * machines
    assert len(set(composition[composition >= 0])) == stages


def test_of_all_planned_machines_a_step_and_the_first_take_what_playing_gives() -> None:
    job = of_two_kinds(16, 2)
    planned = np.array(job.stage_of)
    model, plays = Corrected(job, []), Played(job)
    seconds = []
    for one, other in ((model(planned), plays(planned)), (model.first(planned), plays.first(planned))):
        assert one is not None and other is not None
        assert one.microbatches_s == pytest.approx(other.microbatches_s, rel=0.03)
        seconds.append(one.microbatches_s)
    assert seconds[1] > 1.05 * seconds[0]
    assert model.first(lacking(job, 3)) == model(lacking(job, 3))


@pytest.mark.slow
def test_of_a_runs_own_compositions_steps_deaths_and_entries_are_as_long_as_playing_has_them() -> None:
    """Sums alone are 18 % off."""
    job = of_two_kinds(20, 4)
    histories = short_lives(job)
    model, sums, plays = corrected(job, histories, 0.0, HOUR_S), Sums(job), Played(job)
    rng = np.random.default_rng(1)
    seconds = list[tuple[float, float, float]]()
    deaths_s, entries_s = list[float](), list[float]()
    for composition in rehearsed(job, histories, 0.0, HOUR_S, 19):  # others than the model's samples
        one, summed, other = model(composition), sums(composition), plays(composition)
        assert one is not None and summed is not None and other is not None
        seconds.append((one.microbatches_s, summed.microbatches_s, other.microbatches_s))
        spare = [slot for slot in np.flatnonzero(composition >= 0) if (composition == composition[slot]).sum() > 1]
        slot, at_s = int(rng.choice(spare)), float(rng.random()) * other.microbatches_s
        deaths = [each.with_death(composition, slot, at_s, at_s + 4.5) for each in (model, plays)]
        entries = [each.with_entry(composition, [slot], at_s) for each in (model, plays)]
        for apart, (own_s, played_s) in ((deaths_s, deaths), (entries_s, entries)):
            assert own_s is not None and played_s is not None
            apart.append((own_s - one.microbatches_s) - (played_s - other.microbatches_s))
    table = np.array(seconds)
    step_s = table.mean(axis=0)
    assert step_s[0] == pytest.approx(step_s[2], rel=0.015) and abs(step_s[1] / step_s[2] - 1) > 0.1
    assert np.abs(table[:, 0] / table[:, 2] - 1).max() < 0.1
    assert max(abs(fmean(deaths_s)), abs(fmean(entries_s))) < 0.05 * step_s[2]


@pytest.mark.slow
def test_where_queues_are_full_a_play_takes_what_every_message_does() -> None:
    """With room for all, a step takes 12 % less."""
    given = of_two_kinds(12, 3)
    shape = msgspec.structs.replace(given.seats, microbatches=72, inflight=6)
    seconds = []
    for limit in (4, 100):
        job = msgspec.structs.replace(given, seats=msgspec.structs.replace(shape, queue_limit=limit))
        run = ExactRun(job, always(12), 0.0, 0)
        run.play(600.0)
        times_s = run.watch.commits.times_s
        step = Corrected(job, [])(np.array(job.stage_of))
        assert step is not None
        seconds.append(((times_s[-1] - times_s[-13]) / 12, step.step_s))
    for exact_s, played_s in seconds:
        assert played_s == pytest.approx(exact_s, rel=0.06)
    assert seconds[0][0] > 1.08 * seconds[1][0]


def test_a_death_of_a_stages_last_replica_is_no_models() -> None:
    job = of_two_kinds(8, 2)
    model = corrected(job, short_lives(job), 0.0, HOUR_S)
    assert model(lacking(job, 0, 2, 4, 6)) is None
    assert model.with_death(lacking(job, 2, 4, 6), 0, 1.0, 5.5) is None
    late_s = model.with_death(lacking(job, 2, 4), 0, 1.0, 500.0)
    assert late_s == 500.0  # a step does not end before it is known who is left


def test_a_small_fleet_that_changes_rarely_is_played() -> None:
    job = a_job(8)
    assert isinstance(model_of(job, [always(8)], 0.0, HOUR_S), Played)
    assert isinstance(model_of(job, [always(8)] * 60, 0.0, 60.0), Corrected)


def test_machines_that_are_all_unlike_need_no_link_to_themselves() -> None:
    """A cluster file that names its pairs leaves the diagonal at 0."""
    given = a_job(20, 2)
    devices = tuple(Device(name="", flops=1.0 + slot, up_Bps=25e6, down_Bps=25e6) for slot in range(20))
    off = ~np.eye(20, dtype=bool)
    machines = Machines(devices, tuple(range(20)), 0.02 * off, 1e9 * off)
    seconds = {name: np.repeat(getattr(given, name), 20, axis=0) for name in ("forward_s", "backward_s")}
    job = msgspec.structs.replace(given, machines=machines, **seconds)
    alike, unlike = (Sums(each)(np.array(given.stage_of)) for each in (given, job))
    assert alike is not None and unlike is not None
    assert unlike.averaging_s == pytest.approx(alike.averaging_s, rel=0.01)


@pytest.mark.slow
def test_a_large_fleet_with_delayed_updates_hides_its_averaging() -> None:
    given = a_job(20, 2)
    wide = msgspec.structs.replace(given.seats, gradient_bytes=(1e8,) * 2)  # half as long as is computed
    jobs = [
        msgspec.structs.replace(given, seats=msgspec.structs.replace(wide, staleness=staleness)) for staleness in (0, 1)
    ]
    composition = np.array(given.stage_of)
    plain, delayed = (corrected(job, [always(20)], 0.0, HOUR_S, 4)(composition) for job in jobs)
    assert plain is not None and delayed is not None and plain.averaging_s > plain.microbatches_s / 3
    played = Played(jobs[1])(composition)
    assert played is not None
    assert delayed.step_s < 0.8 * plain.step_s and delayed.step_s == pytest.approx(played.step_s, rel=0.15)


def six_hours() -> str:
    job = a_job(12, 3)
    changes = list(presences(Churn(record=str(RECORD)), job.machines, 6 * HOUR_S, 1))
    model = corrected(job, [changes], 60.0, 6 * HOUR_S)
    return forecast(job, model, changes, 60.0, 6 * HOUR_S, 1).digest


@pytest.mark.slow
def test_one_digest_whatever_the_hash_seed() -> None:
    code = "from tests.forecast.test_models import six_hours; print(six_hours())"
    digests = []
    for seed in ("0", "1", "2"):
        path = os.pathsep.join([str(ROOT), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        digests.append(done.stdout.strip())
    assert len(set(digests)) == 1 and len(digests[0]) == 16


def test_an_exchange_with_joiners_takes_as_much_longer_as_playing_it_shows() -> None:
    """Between the sums of even lines go those for the newcomers."""
    given = of_two_kinds(12, 2)
    job = msgspec.structs.replace(given, seats=msgspec.structs.replace(given.seats, gradient_bytes=(4e7,) * 2))
    planned = np.array(job.stage_of)
    model, plays = corrected(job, short_lives(job), 0.0, HOUR_S), Played(job)
    exchanges = [each.with_joiners(planned, (1, 0)) for each in (model, plays)]
    step = model(planned)
    assert step is not None and exchanges[0] is not None and exchanges[1] is not None
    assert exchanges[0][0] == pytest.approx(exchanges[1][0], rel=0.1) and exchanges[0][1] == step.averaging_s
    assert exchanges[0][0] > 1.05 * step.averaging_s
    assert model.with_joiners(planned, (0, 0)) is None


@pytest.mark.slow
def test_a_fleet_that_is_thinned_for_its_plays_takes_what_the_whole_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a third of the machines; a factor that followed how many are played would be applied to three times as many."""
    job = of_two_kinds(36, 2)
    histories = short_lives(job)
    models = [corrected(job, histories, 0.0, HOUR_S, 16)]
    monkeypatch.setattr(samples_module, "LARGEST", 12)
    models.append(corrected(job, histories, 0.0, HOUR_S, 16))
    compositions = rehearsed(job, histories, 0.0, HOUR_S, 11)
    steps = [[step.step_s for each in compositions if (step := model(each)) is not None] for model in models]
    assert fmean(steps[1]) == pytest.approx(fmean(steps[0]), rel=0.06)
    deaths = []
    for model in models:
        slots = [int(np.flatnonzero(each >= 0)[3]) for each in compositions]
        ends = [model.with_death(each, slot, 5.0, 9.5) or 0.0 for each, slot in zip(compositions, slots, strict=True)]
        deaths.append(fmean(ends))
    assert deaths[1] == pytest.approx(deaths[0], rel=0.2)
