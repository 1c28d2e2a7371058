"""Choosing how to run: the number of stages, who serves what, what is left out, and the plan's own checks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from shoal import codec
from shoal.planner.inputs import memory
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work, profile, spans
from shoal.planner.strategy import choices, plan, pricing, relaxing, strategy
from shoal.planner.strategy.plan import Plan, StagePlan
from shoal.planner.strategy.pricing import as_planned
from shoal.planner.strategy.problem import Problem, best_stages
from shoal.planner.strategy.strategy import decide

SHAPE = Shape(hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, intermediate=2816, vocabulary=32000)
WORK = Work(microbatches=64, sequences=4, tokens=1024, value_bytes=2)


def machines(count: int = 8, bandwidth_Bps: float = 25e6, **device: Any) -> Cluster:
    fields = {"flops": 10e12, "memory_bytes": 24e9, "up_Bps": bandwidth_Bps, "down_Bps": bandwidth_Bps} | device
    devices = tuple(Device(name=f"p{i}", **fields) for i in range(count))
    return Cluster(devices, np.full((count, count), 0.02), np.full((count, count), 1e12))


def problem(cluster: Cluster | None = None, **changes: Any) -> Problem:
    return msgspec.structs.replace(Problem(shape=SHAPE, work=WORK, cluster=cluster or machines()), **changes)


def decided(given: Problem, stages: int | None = None, budget: int = 60) -> Plan:
    return decide(given, np.random.default_rng(0), budget, stages)


def step_s(best: Plan) -> float:
    assert best.predicted is not None
    return best.predicted.step_s


@pytest.mark.slow
def test_the_chosen_number_of_stages_is_no_slower_than_any_other() -> None:
    given = problem()
    best = decided(given)
    for stages in range(1, 9):
        assert step_s(best) <= step_s(decided(given, stages)) * 1.02  # the wiring has some chance in it


def test_what_travels_encoded_takes_the_bytes_that_its_codec_says_and_the_seconds_that_it_costs() -> None:
    """Hops and rounds are as large as the run's own blobs; on slow lines that pays, where lines are free it only costs."""
    int8 = codec.Travel("int8", "int8", "int8")
    given, plain = problem(travel=int8), problem()
    shape = (WORK.sequences, WORK.tokens, SHAPE.hidden)
    assert given.profile.boundary_bytes == pytest.approx(codec.nbytes("int8/1/1024", shape))
    assert given.returned_bytes == pytest.approx(codec.nbytes("int8/1/1024", shape))
    assert plain.profile.boundary_bytes == codec.nbytes("raw", shape, "bfloat16")
    narrow = problem(travel=codec.Travel("int4", "bf16", "none", narrow=4))
    assert narrow.profile.boundary_bytes == pytest.approx(codec.nbytes("int4/1/64", (math.prod(shape) // 4,)))
    assert narrow.returned_bytes == codec.nbytes("bf16/1", (math.prod(shape) // 4,))
    slow = [step_s(decided(each, 4, budget=0)) for each in (plain, given)]
    assert slow[1] < 0.7 * slow[0]
    free = [
        decided(problem(machines(bandwidth_Bps=1e15).scaled(delay=0.0), travel=each), 4, budget=0)
        for each in (codec.Travel(), int8)
    ]
    assert step_s(free[0]) < step_s(free[1])
    seconds = [given.codec_s(stage, 4, backward) for stage in range(4) for backward in (False, True)]
    values = math.prod(shape)
    encode_s, decode_s = codec.encode_s("int8", values), codec.decode_s("int8", values)
    assert seconds[:2] == [pytest.approx(encode_s), pytest.approx(decode_s)]
    assert seconds[2:4] == [pytest.approx(encode_s + decode_s), pytest.approx(encode_s + 2 * decode_s)]
    assert seconds[6:] == [pytest.approx(decode_s), pytest.approx(decode_s + encode_s)]
    assert plain.codec_s(1, 4, True) == plain.averaging_codec_s(1e9, 4) == given.averaging_codec_s(1e9, 1) == 0.0


def test_owners_that_follow_the_lines_are_in_the_plan_and_read_back() -> None:
    fleet = machines(4, memory_bytes=0.0, flops=5e11)
    wide = tuple(msgspec.structs.replace(device, up_Bps=100e6, down_Bps=100e6) for device in fleet.devices[1:])
    given = problem(msgspec.structs.replace(fleet, devices=(fleet.devices[0], *wide)), wiring="stochastic")
    best = decided(given, 1)
    assert best.line_rates == (25_000, 100_000, 100_000, 100_000) and "follows the lines' line_rates" in best.reason
    assert as_planned(given, best).line_rates == best.line_rates
    int8 = msgspec.structs.replace(given, travel=codec.Travel(averaging="int8"))
    busiest = as_planned(int8, best).averaging_codec_s
    assert busiest > int8.averaging_codec_s(as_planned(int8, best).gradient_bytes[0], 4), "who owns most adds most"
    even = decided(problem(fleet), 1)
    assert even.line_rates == () and "follows the lines' line_rates" not in even.reason
    short = msgspec.structs.replace(best, line_rates=(1, 2))
    (said,) = plan.validate(short, given.profile, given.cluster, WORK.value_bytes)
    assert "line_rates [1, 2] are not one number" in said and "4 seats" in said


def test_few_tokens_want_more_stages_and_many_tokens_one() -> None:
    few = problem(work=msgspec.structs.replace(WORK, microbatches=8, sequences=1, tokens=128))
    many = problem(machines(bandwidth_Bps=5e6), work=msgspec.structs.replace(WORK, microbatches=4096))
    assert best_stages(few) > 4 > 1 > best_stages(many)
    assert len(decided(few).stages) > len(decided(many).stages) == 1


@pytest.mark.slow
def test_faster_lines_more_memory_or_quicker_devices_never_make_the_plan_slower() -> None:
    base = step_s(decided(problem(machines(6))))
    for change in ({"bandwidth": 4.0}, {"flops": 4.0}, {"memory": 4.0}, {"delay": 0.25}):
        assert step_s(decided(problem(machines(6).scaled(**change)))) <= 1.02 * base


def test_the_order_in_which_identical_devices_are_listed_changes_nothing() -> None:
    mixed = machines()
    devices = tuple(
        msgspec.structs.replace(device, flops=30e12) if i % 3 == 0 else device for i, device in enumerate(mixed.devices)
    )
    one = Cluster(devices, mixed.delay_s, mixed.bandwidth_Bps)
    other = one.chosen([7, 2, 5, 0, 1, 6, 3, 4])
    costs = [step_s(decided(problem(cluster), 2, budget=0)) for cluster in (one, other)]
    assert costs[0] == pytest.approx(costs[1], rel=0.05)


def test_a_stage_gets_replicas_for_its_work_and_every_device_a_place() -> None:
    best = decided(problem(), 3)
    assert [len(stage.peers) for stage in best.stages] == [2, 4, 2]  # two tensors of each microbatch leave the middle
    assert sorted(peer for stage in best.stages for peer in stage.peers) == sorted(f"p{i}" for i in range(8))
    assert plan.validate(best, problem().profile, problem().cluster, 2) == []


def test_devices_that_would_hold_the_others_up_are_left_out_with_a_reason() -> None:
    quick = machines(3, bandwidth_Bps=1e9)
    slow = tuple(Device(name=f"s{i}", flops=1e11, memory_bytes=24e9, up_Bps=1e5, down_Bps=1e5) for i in range(3))
    cluster = Cluster(quick.devices + slow, np.full((6, 6), 0.02), np.full((6, 6), 1e12))
    best = decided(problem(cluster))
    assert best.left_out == ("s0", "s1", "s2")
    assert "s0, s1, s2 are left out: with one of them a step would take " in best.reason


def test_a_model_that_fits_nowhere_is_told_by_how_much() -> None:
    small = problem(machines(memory_bytes=0.4e9))
    with pytest.raises(ValueError, match=r"lacks \d+\.\d GiB; more stages, devices or memory"):
        decided(small)
    with pytest.raises(ValueError, match="17 stages of a model of 16 blocks"):
        decided(problem(machines(32)), 17)


def test_a_stage_too_large_for_its_device_swaps_when_it_may() -> None:
    tight = machines(1, memory_bytes=5e9, host_memory_bytes=64e9)
    with pytest.raises(ValueError, match="or --swap"):
        decided(problem(tight))
    best = decided(problem(tight, swapping=True))
    assert [stage.executor for stage in best.stages] == ["swapping"]
    assert best.stages[0].memory_bytes < 5e9
    assert decided(problem(machines(1))).stages[0].executor == "resident"


def test_the_optimizer_takes_the_seconds_of_the_machine_that_it_runs_on() -> None:
    """Of the slowest replica's stage; on the host, where the stage swaps; none where no rate is stated."""
    ample = problem(machines(1))
    stated = problem(machines(1, update_rate=1e8, host_update_rate=1e7))
    parameters = ample.profile.stage(range(SHAPE.layers)).parameters
    assert step_s(decided(stated)) - step_s(decided(ample)) == pytest.approx(parameters / 1e8)
    tight = {"memory_bytes": 5e9, "host_memory_bytes": 64e9}
    swapped, free = (
        problem(machines(1, **tight, **rate), swapping=True)
        for rate in ({"host_update_rate": 1e7, "update_rate": 1e8}, {})
    )
    assert step_s(decided(swapped)) - step_s(decided(free)) == pytest.approx(parameters / 1e7)
    two = machines(2, update_rate=1e8)
    two = msgspec.structs.replace(
        two, devices=(two.devices[0], msgspec.structs.replace(two.devices[1], update_rate=2e7))
    )
    best = decided(problem(two), 1)
    assert as_planned(problem(two), best).updating_s == pytest.approx(parameters / 2e7)


def test_a_stage_whose_activations_do_not_fit_keeps_the_inputs_of_its_blocks() -> None:
    ample = decided(problem(machines(1, memory_bytes=80e9))).stages[0]
    assert not ample.checkpointing and ample.executor == "resident"
    tight_stage = decided(problem(machines(1, memory_bytes=ample.memory_bytes))).stages[0]  # less the reserve
    assert tight_stage.checkpointing and tight_stage.executor == "resident"
    assert tight_stage.memory_bytes < ample.memory_bytes - 1e9
    assert ample.microbatch_s < tight_stage.microbatch_s < 4 / 3 * ample.microbatch_s


def test_several_cards_hold_as_one_peer_what_one_of_them_does_not() -> None:
    card = {"memory_bytes": 6e9, "host_memory_bytes": 64e9}
    alone, four = machines(1, **card), machines(1, **card, cards=4)
    with pytest.raises(ValueError, match="lacks"):
        decided(problem(alone))
    together = msgspec.structs.replace(four, devices=tuple(device.together() for device in four.devices))
    best = decided(problem(together, swapping=True))
    assert (best.peers[0].cards, best.stages[0].executor, best.stages[0].kept_activations) == (4, "resident", 0)
    odd = msgspec.structs.replace(WORK, sequences=6)
    with pytest.raises(ValueError, match="p0 has 4 cards, which do not divide a microbatch of 6 sequences"):
        decided(problem(together, work=odd))


def test_small_devices_with_much_memory_between_them_take_more_stages() -> None:
    best = decided(problem(machines(8, memory_bytes=3.5e9, host_memory_bytes=64e9, bandwidth_Bps=1e9)))
    assert len(best.stages) > 1
    assert all(stage.memory_bytes < 3.5e9 for stage in best.stages)
    assert "not possible: 1 stage:" in best.reason


def test_uneven_blocks_follow_the_speed_of_the_devices() -> None:
    pair = machines(2, bandwidth_Bps=1e10)
    fast = msgspec.structs.replace(pair.devices[0], flops=40e12)
    cluster = Cluster((fast, pair.devices[1]), pair.delay_s, pair.bandwidth_Bps)
    even, uneven = (decided(problem(cluster, uneven=flag), 2) for flag in (False, True))
    assert step_s(uneven) < 0.8 * step_s(even)
    blocks = {stage.peers[0]: stage.end - stage.first for stage in uneven.stages}
    assert blocks["p0"] > 2 * blocks["p1"]


def sides(bandwidth_Bps: float) -> Cluster:
    """Four machines on each of two sides with narrow links between them, two of each side in every other pair."""
    near = machines(8, bandwidth_Bps=1e9, flops=1e12)
    side = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    across = side[:, None] != side[None, :]
    return Cluster(near.devices, np.where(across, 0.08, 0.002), np.where(across, bandwidth_Bps, 1e12))


def test_plain_data_parallelism_comes_out_for_small_models_and_many_tokens() -> None:
    best = decided(problem(work=msgspec.structs.replace(WORK, microbatches=4096)))
    assert "1 stage (plain data parallelism)" in best.reason


def test_atom_comes_out_where_the_host_holds_what_the_device_does_not_and_lines_are_poor() -> None:
    """Few peers, a huge batch, 100 Mbit/s: above the crossover of moved bytes, and no stage of the model fits a device."""
    poor = machines(2, bandwidth_Bps=12.5e6, memory_bytes=5e9, host_memory_bytes=64e9)
    best = decided(problem(poor, swapping=True, work=msgspec.structs.replace(WORK, microbatches=4096)))
    assert "1 stage (whole models that swap and average: ATOM)" in best.reason
    assert [stage.executor for stage in best.stages] == ["swapping"]


def test_planned_routes_come_out_where_they_are_asked_for_and_turns_are_as_good() -> None:
    """On full lines, where sides are far apart, and in short steps: equal replicas that take turns leave nothing to plan."""

    def best(cluster: Cluster, microbatches: int, wiring: Literal["best", "planned"] = "best") -> Plan:
        work = msgspec.structs.replace(WORK, microbatches=microbatches, sequences=1)
        return decided(problem(cluster, work=work, wiring=wiring), 2, budget=0)

    for cluster, microbatches in (
        (machines(8, flops=1e12), 32),
        (sides(5e7), 32),
        (machines(8, bandwidth_Bps=1e9, flops=1e12), 16),
    ):
        by_turns, wired = best(cluster, microbatches), best(cluster, microbatches, "planned")
        assert "stages wired by measured times: SWARM" in by_turns.reason and not by_turns.routes
        assert "planned routes between stages: DT-FM" in wired.reason and wired.routes
        assert by_turns.predicted is not None and wired.predicted is not None
        assert by_turns.predicted.step_s <= wired.predicted.step_s * strategy.PLANNED_GAIN


def test_large_models_on_small_machines_swap_inside_stages() -> None:
    """Atom's general design: few stages, each swapping if it must. No host holds the whole model here."""
    small = machines(4, bandwidth_Bps=25e6, memory_bytes=2.5e9, host_memory_bytes=4e9)
    best = decided(problem(small, swapping=True))
    assert 1 < len(best.stages) <= 4 and "swapping inside stages as ATOM" in best.reason


@pytest.mark.slow
def test_sensitivities_are_sorted_and_name_what_helps() -> None:
    given = problem(machines(4, bandwidth_Bps=1e6))  # narrow lines

    def search(each: Problem, known: Plan | None = None, /) -> Plan:
        return decide(each, np.random.default_rng(0), 20, None, known)

    sensitivities = relaxing.sensitivities(given, decided(given), search)
    speeds = [choices.tokens_per_s(entry[1]) for entry in sensitivities]
    assert speeds == sorted(speeds, reverse=True)
    assert sensitivities[0][0] == "bandwidth x2"


# ------------------------------------------------------------------------------------------------------------ the plan


def test_a_plan_is_the_same_after_its_file(tmp_path: Path) -> None:
    best = decided(problem())
    plan.save(best, tmp_path / "plan.json")
    assert plan.load(tmp_path / "plan.json") == best


STAGE = '{"first": 0, "end": 2, "peers": ["a"]}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("{", "line 1, column 2: the file ends; expecting property name"),
        ('{"layers": 6,\n "stages": [}', "line 2, column 13: found '}'; expecting value"),
        ('{"layers": NaN, "stages": []}', "JSON is malformed"),
        ("{}", "the plan has no 'layers'; it must say layers, stages"),
        ("[]", "the plan is []; it must be a table"),
        ('{"layers": "six", "stages": []}', 'layers is "six"; it must be a whole number'),
        ('{"layers": 6, "stages": [], "stage": 1}', "the plan has 'stage', which is nothing; did you mean 'stages'?"),
        ('{"layers": 6, "stages": [], "x": 1}', "the plan has 'x', which is nothing; try one of layers, stages"),
        (
            '{"layers": 6, "stages": [' + STAGE + ', {"first": 2}]}',
            "stages[1] has no 'end'; it must say first, end, peers",
        ),
        (
            '{"layers": 6, "stages": [{"first": 0, "end": 2, "peers": "a"}]}',
            'stages[0].peers is "a"; it must be a list',
        ),
        (
            '{"layers": 6, "stages": [{"first": 0, "end": 2, "peers": ["a", 1]}]}',
            "stages[0].peers[1] is 1; it must be text",
        ),
        (
            '{"layers": 6, "stages": [], "peers": [{"forward_s": 1, "backward_s": 1}]}',
            "peers[0] has no 'name'; it must say name, forward_s, backward_s",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_place_what_is_there_and_what_would_do(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=r"plan\.json is not a plan: .*`shoal plan CONFIG --cluster FILE --out "
    ) as refused:
        plan.load(file)
    assert words in str(refused.value)


def test_a_file_that_is_no_text_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"layers": \xff}')
    with pytest.raises(ValueError, match="byte 11 is no UTF-8 text"):
        plan.load(tmp_path / "plan.json")


def by_hand(*stages: tuple[int, int, tuple[str, ...]], layers: int = 16) -> Plan:
    return Plan(layers, tuple(StagePlan(first, end, peers) for first, end, peers in stages))


REST = ("p2", "p3", "p4", "p5", "p6", "p7")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (by_hand((0, 16, ("p0", "p1", *REST)), layers=12), "for a model of 12 blocks, this one has 16"),
        (by_hand(), "the plan has no stages"),
        (by_hand((0, 8, ("p0", "p1")), (9, 16, REST)), "starts at block 9, not 8: blocks 8 to 8 are served by nobody"),
        (by_hand((0, 8, ("p0", "p1")), (6, 16, REST)), "starts at block 6, not 8: blocks 6 to 7 are served twice"),
        (
            by_hand((0, 8, ("p0", "p1", *REST))),
            "the last stage ends before block 8: blocks 8 to 15 are served by nobody",
        ),
        (by_hand((0, 18, ("p0", "p1", *REST))), "blocks 16 to 17 do not exist"),
        (by_hand((0, 0, ("p0", "p1")), (0, 16, REST)), "stage 0 has no blocks"),
        (by_hand((0, 8, ()), (8, 16, ("p0", "p1", *REST))), "stage 0 is served by nobody"),
        (by_hand((0, 8, ("p0", "p9")), (8, 16, ("p1", *REST))), "names p9, which the cluster does not have"),
        (by_hand((0, 8, ("p0", "p1")), (8, 16, ("p1", *REST))), "p1 serves stages 0 and 1; one peer serves one stage"),
        (by_hand((0, 16, ("p0", *REST))), "p1 serve nothing; give them a stage or list them under left_out"),
    ],
)
def test_what_is_wrong_with_a_plan_written_by_hand_is_said(given: Plan, words: str) -> None:
    problems = plan.validate(given, problem().profile, machines(), 2)
    assert any(words in text for text in problems), problems


def test_a_plan_too_large_for_its_devices_is_told_stage_by_stage() -> None:
    given = by_hand((0, 8, ("p0", "p1")), (8, 16, REST))
    assert plan.validate(given, problem().profile, machines(), 2) == []
    problems = plan.validate(given, problem().profile, machines(memory_bytes=1e9), 2)
    assert len(problems) == 8
    assert "stage 0 does not fit on p0" in problems[0] and "GiB too much" in problems[0]


def test_a_plan_of_another_model_with_as_many_blocks_is_told_by_its_gradients() -> None:
    here = problem()
    best = decide(here, np.random.default_rng(0), 50, stages=2)
    assert strategy.of_another_model(here, best) == []
    wide = msgspec.structs.replace(here, shape=msgspec.structs.replace(here.shape, hidden=2 * here.shape.hidden))
    words = strategy.of_another_model(wide, best)
    assert len(words) == 2 and "stage 0 averages" in words[0] and "another model; plan anew" in words[0]
    by_somebody = msgspec.structs.replace(
        best, stages=tuple(msgspec.structs.replace(stage, gradient_bytes=0.0) for stage in best.stages)
    )
    assert strategy.of_another_model(wide, by_somebody) == []


# --------------------------------------------------------------------------------------------------------- the profile


def test_parameters_by_stage_add_up_to_the_model_and_to_its_formula() -> None:
    counted = profile(SHAPE, WORK)
    block = 1024 * (1024 * 2 + 256 * 2) + 3 * 1024 * 2816 + 2 * 1024
    assert counted.parameters == 16 * block + 2 * 32000 * 1024 + 1024
    for stages in range(1, 17):
        assert sum(counted.stage(span).parameters for span in spans(16, stages)) == counted.parameters
        assert sum(counted.stage(span).flops for span in spans(16, stages)) == pytest.approx(counted.flops)


def test_a_tied_head_counts_once_in_one_stage_and_at_both_ends_in_more() -> None:
    counted = profile(msgspec.structs.replace(SHAPE, tied=True), WORK)
    assert counted.stage(range(16)).parameters == counted.parameters
    ends = counted.stage(range(8)).parameters + counted.stage(range(8, 16)).parameters
    assert ends == counted.parameters + 32000 * 1024


def test_stages_are_cut_as_the_model_is() -> None:
    from shoal.model.cut import spans as cut  # imports torch

    for blocks in range(1, 20):
        for stages in range(1, blocks + 1):
            assert spans(blocks, stages) == cut(blocks, stages)


def test_memory_that_is_not_stated_is_not_checked() -> None:
    need = memory.resident(profile(SHAPE, WORK).stage(range(16)), 1e6, 2)
    assert memory.lacking(need, Device(name="a", flops=1.0)) == 0.0
    assert memory.lacking(need, Device(name="a", flops=1.0, memory_bytes=1e9)) > 0.0


# ---------------------------------------------------------------------------------- boundary tensors that servers keep


@pytest.mark.parametrize(
    ("inner", "last", "tensors"),
    [(False, False, 10 * (3 + 2)), (True, False, 10 * (3 + 3 + 2 + 2)), (True, True, 10 * (3 + 2)), (False, True, 0)],
)
def test_a_server_keeps_both_ends_of_its_boundaries_for_the_whole_step(inner: bool, last: bool, tensors: int) -> None:
    """Ten microbatches, tensors of 3 bytes there and of 2 back."""
    everything = memory.StoreLimits(keep_bytes=1e9, spill_bytes=0)
    assert everything.kept_bytes(10, inner, last, 3.0, 2.0) == tensors
    assert memory.StoreLimits(1e9, spill_bytes=7).kept_bytes(10, inner, last, 3.0, 2.0) == min(tensors, 7)
    own_gradients = 10 * 2 * inner  # they stay beyond the limit
    assert memory.StoreLimits(4, spill_bytes=0).kept_bytes(10, inner, last, 3.0, 2.0) == min(tensors, own_gradients + 4)


@pytest.mark.slow
def test_what_servers_keep_is_in_the_plans_peak_memory_where_it_lies() -> None:
    store_limits = memory.StoreLimits(2.0**40, 0)
    given = problem(store_limits=store_limits)
    best, plain = decided(given, 4), decided(problem(store_limits=memory.StoreLimits(0, 0)), 4)
    tensor_bytes = given.profile.boundary_bytes
    for decision, kept_tensors in ((best, (2, 4, 4, 2)), (plain, (0, 1, 1, 1))):
        served = [math.ceil(WORK.microbatches / len(stage.peers)) for stage in decision.stages]
        expected = [kept * share * tensor_bytes for kept, share in zip(kept_tensors, served, strict=True)]
        assert [stage.kept_bytes for stage in decision.stages] == expected
    more = [one.memory_bytes - other.memory_bytes for one, other in zip(best.stages, plain.stages, strict=True)]
    kept = zip(best.stages, plain.stages, strict=True)
    assert more == pytest.approx([one.kept_bytes - other.kept_bytes for one, other in kept]), "one memory"
    apart = decided(problem(machines(host_memory_bytes=64e9), store_limits=store_limits), 4)
    alone = [stage.memory_bytes - stage.kept_bytes for stage in best.stages]
    assert [stage.memory_bytes for stage in apart.stages] == pytest.approx(alone)
    assert apart.stages[1].kept_bytes == best.stages[1].kept_bytes


@pytest.mark.parametrize("fields", [{"memory_bytes": 5.3e9}, {"host_memory_bytes": 1.5e9}])
def test_a_stage_whose_tensors_have_no_room_until_the_commit_does_not_fit(fields: dict[str, float]) -> None:
    """Four stages of two: a middle one takes 1.8 GB and its tensors 1.07 GB for every eight microbatches."""
    cluster = machines(**fields)
    roomy = problem(cluster)
    narrow = problem(
        cluster, store_limits=memory.StoreLimits(2.0**40, 0), work=msgspec.structs.replace(WORK, microbatches=512)
    )
    best = decided(roomy, 4)
    assert plan.validate(best, roomy.profile, cluster, 2) == []
    with pytest.raises(ValueError, match="fits no device left"):
        decided(narrow, 4)
    stages = tuple(msgspec.structs.replace(stage, kept_bytes=9e9) for stage in best.stages)
    words = plan.validate(msgspec.structs.replace(best, stages=stages), roomy.profile, cluster, 2)
    assert len(words) == 8 and "does not fit" in words[0]


# ------------------------------------------------------------------------------------------------ activations that are kept


def test_a_stage_with_memory_left_runs_back_in_two_forwards_and_one_without_recomputes() -> None:
    stage_of, cut = tuple(index % 4 for index in range(8)), spans(16, 4)

    def backward(kept_activations: int, memory_bytes: float) -> tuple[tuple[int, ...], list[float]]:
        given = problem(machines(memory_bytes=memory_bytes), kept_activations=kept_activations)
        option = pricing.placed(given, cut, stage_of)
        assert not any(option.swaps)
        work = [given.profile.stage(span).flops / 10e12 for span in cut]
        return option.kept[:4], [option.seats.backward_s[stage] / work[stage] for stage in range(4)]

    in_progress = WORK.inflight * 8 // 2  # at each of a stage's two replicas
    assert backward(-1, 200e9) == ((in_progress,) * 3 + (0,), [pytest.approx(n) for n in (2.0, 2.0, 2.0, 3.0)])
    assert backward(0, 200e9) == ((0,) * 4, [pytest.approx(3.0)] * 4)
    assert backward(4, 200e9) == ((4, 4, 4, 0), [pytest.approx(n) for n in (2.75, 2.75, 2.75, 3.0)])
    kept, forwards = backward(-1, 16e9)
    assert 0 < kept[1] < in_progress and forwards[1] == pytest.approx(3.0 - kept[1] / in_progress)


def test_a_plan_says_how_many_activations_its_stages_keep_and_predicts_a_shorter_step() -> None:
    keeping, not_keeping = (decided(problem(machines(memory_bytes=200e9), kept_activations=n), 4) for n in (-1, 0))
    assert [stage.kept_activations > 0 for stage in keeping.stages] == [True, True, True, False]
    assert not any(stage.kept_activations for stage in not_keeping.stages)
    assert step_s(keeping) < step_s(not_keeping)
    assert keeping.stages[1].memory_bytes > not_keeping.stages[1].memory_bytes
