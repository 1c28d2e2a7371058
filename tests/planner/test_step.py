"""The predicted step of the runtime: by hand where that is possible, and what any prediction must obey."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.core.messages import PASSED, TURNS, BoundaryTensor, Forward, rank
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction import averaging, play, timed
from shoal.planner.prediction.lines import Lines
from shoal.planner.prediction.play import Play
from shoal.planner.prediction.seats import Seats, handed_bytes, paced, part_of, request_bytes
from shoal.planner.prediction.step import Step, predict, rough_s, weighted


def lines(peers: int, bandwidth_Bps: float = 25e6, delay_s: float = 0.05, down_Bps: float = 0.0) -> Cluster:
    line = {"up_Bps": bandwidth_Bps, "down_Bps": down_Bps or bandwidth_Bps}
    devices = tuple(Device(name=f"p{i}", flops=1.0, **line) for i in range(peers))
    return Cluster(devices, np.full((peers, peers), delay_s), np.full((peers, peers), 1e15))


def seats(stage_of: tuple[int, ...], **changes: object) -> Seats:
    peers, stages = len(stage_of), max(stage_of) + 1
    result = Seats(stage_of, (0.2,) * peers, (0.4,) * peers, (0.0,) * stages, 8e6, 0.0, 24, 4)
    return msgspec.structs.replace(result, **changes)


def predicted(given: Seats, cluster: Cluster, seed: int = 0) -> Step:
    return predict(given, cluster, np.random.default_rng(seed))


def test_joiners_sums_go_between_those_of_even_lines_and_after_those_of_uneven_ones() -> None:
    def round_s(rates_Bps: tuple[float, ...], joiners: int) -> float:
        devices = tuple(Device(name=f"p{i}", flops=1.0, up_Bps=rate, down_Bps=1e9) for i, rate in enumerate(rates_Bps))
        peers = len(devices)
        cluster = Cluster(devices, np.full((peers, peers), 0.05), np.full((peers, peers), 1e15))
        given = seats((0,) * peers, gradient_bytes=(1e8,), line_rates=tuple(int(rate / 1e3) for rate in rates_Bps))
        return max(averaging.averaging_ends(given, cluster, (joiners,) if joiners else ())[0])

    even = (2.5e7, 2.5e7, 2.5e7)
    one_more_s = 1e8 / 3 / 2.5e7  # the third of the sums that each adds up
    assert one_more_s * 0.7 < round_s(even, 1) - round_s(even, 0) <= one_more_s
    assert round_s(even, 2) - round_s(even, 0) > 1.5 * one_more_s
    uneven = (1.5e7, 2.5e7, 2.5e7)
    assert round_s(uneven, 2) == pytest.approx(round_s(uneven, 0), rel=0.01)
    assert round_s((2.5e7,), 1) == 0.0, "nobody waits for what a stage's only replica sends"


def test_one_peer_alone_takes_its_compute() -> None:
    step = predicted(seats((0,)), lines(1))
    assert step.step_s == pytest.approx(24 * 0.4)  # a single stage runs no forward of its own
    assert step.compute_busy == pytest.approx((1.0,))
    assert "compute of stage 0" in step.bottleneck
    assert step.sent_bytes == (0.0,)


def test_one_microbatch_through_two_peers_is_the_sum_of_its_hops() -> None:
    """Owner p0, stage 0 at p0 itself and stage 1 at p1: there and back once, 8 MB each way at 25 MB/s and 50 ms."""
    step = predicted(seats((0, 1), microbatches=1), lines(2))
    compute_s = 0.2 + 0.4 + 0.4
    assert step.microbatches_s == pytest.approx(compute_s + 2 * (8e6 / 25e6 + 0.05))
    assert step.sent_bytes == pytest.approx((8e6, 8e6))


def test_one_microbatch_waits_for_its_tensor_or_for_its_request_whichever_is_last() -> None:
    """Owner p0 serves stage 0; outputs and inputs 8 MB, gradients 4 MB, at 25 MB/s and 50 ms. A tensor takes 0.37 s one way,
    its gradient 0.21 s; a receipt to p0 and the next request 0.05 s each.
    Downlinks are wide: one that tokens pass while a tensor arrives takes the whole tensor after them, as in shaped.py."""
    given = seats((0, 1, 2), microbatches=1, returned_bytes=4e6)
    compute_s = 0.2 + 0.2 + 3 * 0.4
    step = predicted(given, lines(3, down_Bps=1e15))
    assert step.microbatches_s == pytest.approx(compute_s + 2 * 0.37 + 2 * 0.21)
    assert step.sent_bytes == pytest.approx((8e6, 12e6, 4e6))
    wide = predicted(given, lines(3, bandwidth_Bps=1e15))  # p0 tells itself at once: of its own hop, and of the last
    assert wide.microbatches_s == pytest.approx(compute_s + (0.05 + 0.1) + (0.1 + 0.05))
    tokens = msgspec.structs.replace(given, tokens_bytes=20e6)  # come with the last stage's request: 0.8 s more
    late = predicted(tokens, lines(3, down_Bps=1e15))
    assert late.microbatches_s == pytest.approx(compute_s + 0.37 + (0.05 + 0.05 + 0.8) + 2 * 0.21)


@pytest.mark.parametrize("stage_of", [(0, 1, 2) * 2, (0, 0, 1, 1, 2, 2, 2), (0, 1, 2, 3), (0, 1) * 3])
def test_hops_fill_the_lines_and_never_more_and_cross_every_boundary_once_each_way(
    stage_of: tuple[int, ...],
) -> None:
    """Lines of 200 Mbit/s and tensors of 8 MB: the bound of benchmarks/hops.py, for the stage with the fewest replicas."""
    peers = len(stage_of)
    given = seats(stage_of, forward_s=(0.01,) * peers, backward_s=(0.02,) * peers, microbatches=192)
    bound = min(
        len(given.replicas(stage)) * 25e6 / (8e6 * (1 if stage in (0, given.stages - 1) else 2))
        for stage in range(given.stages)
    )
    least = 0.93 if given.stages > 2 else 0.75
    for seed in range(3):
        step = predicted(given, lines(peers), seed)
        assert least * bound < 192 / step.microbatches_s <= bound * (1 + 1e-9)
        assert sum(step.sent_bytes) == pytest.approx(192 * 2 * (given.stages - 1) * 8e6, rel=1e-12)


def test_a_backward_goes_to_whoever_ran_the_forward_and_tensors_go_to_whoever_is_asked() -> None:
    """At stage 0 it may go to another replica: its input, the tokens, comes with the request."""
    play = Play(seats((0, 0, 1, 1, 1, 2)), lines(6), np.random.default_rng(0))
    play.run(24, 0.0)
    ran = {(bar.microbatch, bar.stage, bar.forward): bar.device for bar in play.bars}
    assert len(play.bars) == len(ran) == 24 * 5
    assert all(device == ran[microbatch, stage, False] for (microbatch, stage, _), device in ran.items() if stage > 0)
    counts = [
        sum(bar.device == device and (bar.stage, bar.forward) != (0, True) for bar in play.bars) for device in range(6)
    ]
    assert play.lines.down_used == pytest.approx(np.array(counts) * 8e6 / 25e6)
    assert all(counts)


def test_one_stage_has_nothing_to_hand_on() -> None:
    """Only tokens travel: none where owners run their own, a turn's share of them where a plan shares them out."""
    for routes, shared in (((), 0), ((((0, 1),), ((1, 0),)), 12)):
        given = seats((0, 0), routes=routes, tokens_bytes=1e3)
        step = predicted(given, lines(2))
        assert sum(step.sent_bytes) == pytest.approx(shared * 1e3)
        assert step.microbatches_s == pytest.approx(12 * 0.4, rel=0.05)


@pytest.mark.parametrize("peers", [2, 3, 4, 8])
def test_averaging_fills_equal_lines_from_the_first_byte_to_the_last(peers: int) -> None:
    """Two passes of (n - 1)/n of the gradient: nobody waits for a line that all others send to first, and the last slice alone is late."""
    step = predicted(seats((0,) * peers, gradient_bytes=(100e6,), boundary_bytes=0.0), lines(peers))
    full_s = 100e6 * (peers - 1) / peers / 25e6
    assert step.averaging_s == pytest.approx(2 * full_s + 0.05)


NARROW = (25e6, 25e6, 12.5e6, 25e6)


def unlike(widths_Bps: tuple[float, ...], pair_Bps: float = 1e15) -> Cluster:
    given = lines(len(widths_Bps))
    devices = zip(given.devices, widths_Bps, strict=True)
    result = tuple(msgspec.structs.replace(device, up_Bps=width, down_Bps=width) for device, width in devices)
    return Cluster(result, given.delay_s, np.full_like(given.bandwidth_Bps, pair_Bps))


@pytest.mark.parametrize(
    ("widths_Bps", "least_s"), [(NARROW, 8.0), (4 * NARROW, 8.0), ((12.5e6, 12.5e6, 12.5e6, 25e6), 9.6)]
)
def test_owners_by_their_lines_come_near_what_the_narrowest_line_needs(
    widths_Bps: tuple[float, ...], least_s: float
) -> None:
    """100 MB. Evenly owned the narrow line carries 2 (n - 1) / n of them each way, else little more than them; one slice comes after."""
    peers, cluster = len(widths_Bps), unlike(widths_Bps)
    even = seats((0,) * peers, gradient_bytes=(100e6,), boundary_bytes=0.0)
    by_lines = weighted(even, cluster)
    assert by_lines.line_rates == tuple(round(width / 1000) for width in widths_Bps)
    assert predicted(even, cluster).averaging_s >= 2 * (peers - 1) / peers * 100e6 / 12.5e6
    step = predicted(by_lines, cluster)
    assert least_s < step.averaging_s < 1.2 * least_s + 2 * 0.05
    assert rough_s(even, cluster) == pytest.approx(step.step_s, rel=0.2), "a search prices what will be chosen"
    sent = [(nbytes, width) for nbytes, width in zip(step.sent_bytes, widths_Bps, strict=True)]
    assert max(nbytes / width for nbytes, width in sent) == pytest.approx(least_s, rel=0.1)


def test_owners_stay_even_on_lines_alike_and_where_pairs_are_narrower_than_lines() -> None:
    even = seats((0,) * 4, gradient_bytes=(100e6,), boundary_bytes=0.0)
    assert weighted(even, lines(4)) is even
    assert weighted(even, unlike(NARROW, pair_Bps=1e6)) is even


def test_a_group_of_one_averages_nothing() -> None:
    assert predicted(seats((0, 1), gradient_bytes=(100e6, 100e6)), lines(2)).averaging_s == 0.0


@pytest.mark.parametrize(
    ("gradient_bytes", "averaging_s", "seen_s"), [(50e6, 2.05, 0.0), (200e6, 8.05, 8.05 + 0.2 - 4.8)]
)
def test_with_delayed_updates_averaging_is_seen_only_where_it_takes_longer_than_the_microbatches(
    gradient_bytes: float, averaging_s: float, seen_s: float
) -> None:
    """Two replicas of one stage, 24 microbatches of 0.4 s; round, reduced and view take 0.2 s of delays beside them."""
    given = seats((0, 0), gradient_bytes=(gradient_bytes,), boundary_bytes=0.0)
    in_time = predicted(given, lines(2))
    assert in_time.averaging_s == pytest.approx(averaging_s)
    late = msgspec.structs.replace(given, staleness=1)
    step = predicted(late, lines(2))
    assert (step.averaging_s, step.agreeing_s) == pytest.approx((seen_s, 0.15))
    assert step.step_s == pytest.approx(4.8 + seen_s + 0.15) and step.step_s < in_time.step_s
    assert rough_s(late, lines(2)) == pytest.approx(step.step_s)


def test_with_delayed_updates_a_line_that_is_full_of_tensors_hides_no_averaging() -> None:
    given = seats((0, 0, 1, 1), boundary_bytes=50e6, inflight=12)
    full = predicted(given, lines(4))
    assert "link" in full.bottleneck
    late = predicted(msgspec.structs.replace(given, gradient_bytes=(200e6, 200e6), staleness=1), lines(4))
    busiest = max(*full.up_busy, *full.down_busy)
    assert late.averaging_s == pytest.approx(8.0 - full.microbatches_s * (1 - busiest), abs=0.01)


def test_agreeing_takes_six_ways_between_equally_far_peers() -> None:
    assert predicted(seats((0, 0, 0)), lines(3, delay_s=0.1)).agreeing_s == pytest.approx(0.6)


def test_bytes_by_stage_are_tokens_of_owners_and_what_replicas_hand_on() -> None:
    given = seats((0, 1, 2), boundary_bytes=5.0, returned_bytes=3.0, tokens_bytes=7.0)
    assert request_bytes(given) == [14.0, 0.0, 7.0]  # stage 0 forward and backward, the last stage once
    assert handed_bytes(given) == ([5.0, 8.0, 3.0], [3.0, 8.0, 5.0])
    alone = seats((0,), boundary_bytes=5.0, tokens_bytes=7.0)
    assert (request_bytes(alone), handed_bytes(alone)) == ([7.0], ([0.0], [0.0]))
    step = predicted(msgspec.structs.replace(given, microbatches=24), lines(3))
    foreign = 24 * (14 + 7) * 2 / 3  # owners take turns, and each serves a third of the tokens' hops itself
    assert sum(step.sent_bytes) == pytest.approx(24 * (5.0 + 8.0 + 3.0) + foreign)


@pytest.mark.parametrize("stage_of", [(0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 1), (0, 1, 2, 3, 4, 5)])
def test_no_step_is_shorter_than_its_slowest_stages_compute(stage_of: tuple[int, ...]) -> None:
    given = seats(stage_of)
    step = predicted(given, lines(len(stage_of)))
    for stage in range(given.stages):
        hop_s = 0.4 + (0.2 if stage < given.stages - 1 else 0.0)
        assert step.step_s >= 24 * hop_s / len(given.replicas(stage)) * (1 - 1e-9)
    assert all(0 <= share <= 1 + 1e-9 for share in step.compute_busy + step.up_busy + step.down_busy)


def test_wider_lines_and_faster_devices_shorten_the_step() -> None:
    given = seats((0, 1, 2, 0, 1, 2))
    slow, wide = predicted(given, lines(6, bandwidth_Bps=10e6)), predicted(given, lines(6, bandwidth_Bps=250e6))
    assert wide.step_s < 0.8 * slow.step_s
    quick = predicted(msgspec.structs.replace(given, forward_s=(0.02,) * 6, backward_s=(0.04,) * 6), lines(6, 250e6))
    assert quick.step_s < 0.5 * wide.step_s
    assert rough_s(given, lines(6, 250e6)) < rough_s(given, lines(6))


def test_the_rough_formula_is_near_what_is_played() -> None:
    for stage_of in ((0,) * 4, (0, 1, 2, 0, 1, 2), (0, 1, 0, 1)):
        for bandwidth_Bps in (5e6, 25e6, 1e9):
            gradients = (20e6,) * (max(stage_of) + 1)
            given = seats(stage_of, gradient_bytes=gradients, microbatches=96)
            cluster = lines(len(stage_of), bandwidth_Bps)
            assert 0.4 < rough_s(given, cluster) / predicted(given, cluster).step_s < 2.0


def test_a_long_step_is_extended_from_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = seats((0, 1, 0, 1), microbatches=192)
    whole = predicted(given, lines(4))
    monkeypatch.setattr(timed, "LONGEST", 96)
    assert predicted(given, lines(4)).step_s == pytest.approx(whole.step_s, rel=0.1)


def large_fleet(peers: int, stages: int, each: int, **changes: object) -> tuple[Seats, Cluster]:
    rng = np.random.default_rng(5)
    devices = tuple(
        Device(name=f"p{i}", flops=1.0, up_Bps=25e6 * float(rng.uniform(0.5, 1.5)), down_Bps=25e6) for i in range(peers)
    )
    slower = rng.uniform(1.0, 1.8, peers)
    given = seats(
        tuple(device % stages for device in range(peers)),
        forward_s=tuple(0.2 * slower),
        backward_s=tuple(0.4 * slower),
        microbatches=each * peers,
    )
    return msgspec.structs.replace(given, **changes), Cluster(
        devices, np.full((peers, peers), 0.05), np.full((peers, peers), 1e15)
    )


@pytest.mark.parametrize("stages", [3, 4])
def test_a_part_of_a_large_fleet_plays_what_its_long_steps_take(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    given, cluster = large_fleet(48, stages, 20)
    monkeypatch.setattr(timed, "MOST_PLAYED", 10**6)
    whole = predicted(given, cluster)
    monkeypatch.setattr(timed, "MOST_PLAYED", 448)  # 16 of each of 28 machines
    assert len(timed.shown_by(given)) in range(28 - stages, 28 + stages)
    part = predicted(given, cluster)
    assert part.microbatches_s == pytest.approx(whole.microbatches_s, rel=0.06)
    for name in ("compute_busy", "up_busy", "down_busy"):
        assert np.mean(getattr(part, name)) == pytest.approx(np.mean(getattr(whole, name)), rel=0.1), name
    assert sum(part.sent_bytes) == pytest.approx(sum(whole.sent_bytes), rel=0.02)


def test_a_part_has_not_exactly_a_stages_share_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 of 48 replicas are 5 of 20, which would take 8 % longer."""
    given = seats(tuple(int(device % 48 < 13) for device in range(48)), microbatches=48 * 20, turns=(TURNS,) * 48)
    whole = predicted(given, lines(48, bandwidth_Bps=1e9))
    monkeypatch.setattr(timed, "MOST_PLAYED", 320)
    part = predicted(given, lines(48, bandwidth_Bps=1e9))
    assert len(timed.shown_by(given)) == 20
    assert part.microbatches_s == pytest.approx(whole.microbatches_s, rel=0.03)
    for group in (range(13), range(13, 48)):
        assert np.mean([part.compute_busy[at] for at in group]) == pytest.approx(
            np.mean([whole.compute_busy[at] for at in group]), rel=0.03
        )


def test_routes_and_steps_that_are_played_whole_are_of_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    given, _ = large_fleet(48, 3, 20)
    monkeypatch.setattr(timed, "MOST_PLAYED", 320)
    assert timed.shown_by(msgspec.structs.replace(given, microbatches=320)) == list(range(48))
    assert timed.shown_by(msgspec.structs.replace(given, routes=(((0,),),) * 48)) == list(range(48))
    assert len(timed.shown_by(given)) < 48


def test_a_part_of_a_fleet_keeps_each_machines_own() -> None:
    given, _ = large_fleet(
        6, 2, 4, turns=(1, 2, 3, 4, 5, 6), line_rates=(10, 20, 30, 40, 50, 60), leader=4, unseated=(1, 5)
    )
    part = part_of(given, [0, 3, 4, 5])
    assert (part.stage_of, part.turns, part.line_rates) == ((0, 1, 0, 1), (1, 4, 5, 6), (10, 40, 50, 60))
    assert (part.leader, part.unseated, part.microbatches) == (2, (3,), 16)
    assert part.forward_s == tuple(given.forward_s[device] for device in (0, 3, 4, 5))
    assert part_of(given, [0, 1]).leader is None


def test_who_is_left_out_does_nothing_and_delays_nobody() -> None:
    far = lines(5)
    far.delay_s[4, :] = far.delay_s[:, 4] = 30.0
    given = seats((0, 1, 0, 1, -1))
    step = predicted(given, far)
    assert step.step_s == pytest.approx(predicted(seats((0, 1, 0, 1)), lines(4)).step_s)
    assert step.sent_bytes[4] == 0.0 and step.compute_busy[4] == 0.0


def test_a_slow_link_between_two_is_a_limit_even_when_their_lines_are_wide() -> None:
    cluster = lines(2, bandwidth_Bps=1e9)
    wide = predicted(seats((0, 1)), cluster)
    cluster.bandwidth_Bps[0, 1] = 1e6
    assert predicted(seats((0, 1)), cluster).step_s > 3 * wide.step_s


def test_links_of_pairs_are_filled_side_by_side_and_hold_nobody_else_up() -> None:
    """As in transport/emulated/shaped.py: 8 MB take 0.32 s off the uplink, 8 s over the narrow pair, and 0.32 s more to the next peer."""
    cluster = lines(3, bandwidth_Bps=25e6, delay_s=0.0)
    cluster.bandwidth_Bps[0, 1] = 1e6
    sent = Lines(cluster)
    assert sent.leave(0, 1, 8e6, 0.0) == pytest.approx(8.0)
    assert sent.leave(0, 2, 8e6, 0.0) == pytest.approx(0.64)
    assert sent.leave(0, 1, 8e6, 0.0) == pytest.approx(16.0)


def test_averaging_over_narrow_pairs_takes_one_pairs_time_and_not_their_sum() -> None:
    """Measured so (benchmarks/averaging.py): parts and sums go to all others at once."""
    cluster = lines(6, bandwidth_Bps=1e9, delay_s=0.0)
    cluster.bandwidth_Bps[:] = 1e6
    step = predicted(seats((0,) * 6, gradient_bytes=(6e6,), boundary_bytes=0.0), cluster)
    assert step.averaging_s == pytest.approx(2 * 1.0, rel=0.01)


def test_one_stage_is_run_by_its_owners_unless_a_plan_shares_it_out() -> None:
    """Two devices, one three times as fast, 24 microbatches: 12 each at home, 18 and 6 by routes."""
    given = seats((0, 0), forward_s=(0.1, 0.3), backward_s=(0.2, 0.6), tokens_bytes=0.0)
    wide = lines(2, bandwidth_Bps=1e12, delay_s=0.0)
    assert predicted(given, wide).microbatches_s == pytest.approx(12 * 0.6)
    shared = msgspec.structs.replace(given, routes=(((0,),), ((0, 1),)))
    assert predicted(shared, wide).microbatches_s == pytest.approx(18 * 0.2)


@pytest.mark.parametrize("replicas", [6, 20, 21])
def test_many_replicas_are_averaged_by_formula(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    given = seats((0,) * replicas, gradient_bytes=(60e6,))
    played = predicted(given, lines(replicas))
    monkeypatch.setattr(averaging, "PAIRS_MOST", 0)
    formula = predicted(given, lines(replicas))
    assert formula.averaging_s == pytest.approx(played.averaging_s, rel=0.05)
    assert formula.sent_bytes == pytest.approx(played.sent_bytes, rel=0.05)


@pytest.mark.parametrize("inflight", [4, 6])
def test_where_tensors_fill_the_lines_only_filling_and_draining_is_lost(inflight: int) -> None:
    """The lab's run: three stages of two, 96 microbatches, 8 MB each way at 24 MB/s. Uneven shares of two replicas cost 4 % more."""
    given = seats((0, 0, 1, 1, 2, 2), microbatches=96, inflight=inflight)
    step = predicted(given, lines(6, bandwidth_Bps=24e6))
    assert 0.92 < 48 * 2 * 8e6 / 24e6 / step.step_s < 0.95
    assert max(step.sent_bytes) == pytest.approx(48 * 2 * 8e6), "each replica serves as many"


@pytest.mark.parametrize(
    ("changes", "line", "fixed", "gain"),
    [
        ({}, {"bandwidth_Bps": 24e6}, 4, 0.98),
        ({"boundary_bytes": 1e5, "forward_s": (0.02,) * 6, "backward_s": (0.04,) * 6}, {"delay_s": 0.15}, 4, 1.5),
    ],
)
def test_what_is_in_flight_follows_bandwidth_and_delay(
    changes: dict[str, object], line: dict[str, float], fixed: int, gain: float
) -> None:
    """Where tensors fill the lines, as quick as four at once, which are right there; where delay limits, four are too few."""
    given = seats((0, 0, 1, 1, 2, 2), microbatches=96, inflight=fixed, **changes)
    by_itself = msgspec.structs.replace(given, inflight=0)
    assert predicted(given, lines(6, **line)).step_s > gain * predicted(by_itself, lines(6, **line)).step_s


def test_a_gradient_leaves_before_tensors_that_wait_and_they_leave_later_by_its_time() -> None:
    cluster = Cluster(
        tuple(Device(name=name, flops=1.0, up_Bps=1e6, down_Bps=1e9) for name in "ab"),
        np.zeros((2, 2)),
        np.full((2, 2), 1e12),
    )
    lines = Lines(cluster, np.random.default_rng(0), 0.1)
    assert [lines.leave(0, 1, 1e6, 0.0, rank=2) for _ in range(2)] == pytest.approx([1.0, 2.0])
    assert lines.leave(0, 1, 1e6, 0.5, rank=0) == pytest.approx(1.5 + 1 / PASSED[2])
    assert lines.leave(0, 1, 1e6, 0.6, rank=2) == pytest.approx(4.0) and lines.free(0) == pytest.approx(4.0)
    in_order = Lines(cluster)
    assert [in_order.leave(0, 1, 1e6, 0.0, rank) for rank in (2, 0)] == pytest.approx([1.0, 2.0]), "as shaped.py does"


def test_an_encoded_gradient_is_averaged_in_as_many_slices_as_it_has_values() -> None:
    """A megabyte of int8 has four slices: sums of the first leave behind the parts of the last, and no line pauses. One of fp32 has one,
    whose parts have all arrived before its first sum leaves."""
    given = seats((0,) * 4, gradient_bytes=(float(1 << 20),))
    encoded = msgspec.structs.replace(given, value_bytes=1.0)
    raw_s, encoded_s = (averaging.averaging(each, lines(4, 7e6))[0] for each in (given, encoded))
    line_s = 3 / 4 * (1 << 20) / 7e6  # one way
    assert raw_s == pytest.approx(2 * (line_s + 0.05), rel=0.02)
    assert encoded_s == pytest.approx(2 * line_s + 0.05, rel=0.02)


def test_who_serves_another_stage_than_its_seats_owns_after_the_others() -> None:
    """As members without a seat do, and their turns come first (core/leader/membership.py, core/trainer/turns.py)."""
    given = seats((0, 1, 0, 1, 1), unseated=(0, 3))
    assert given.seated == [2, 1, 4, 0, 3] and seats((0, 1, 0, 1, 1)).seated == [0, 2, 1, 3, 4]
    played = Play(given, lines(5), np.random.default_rng(0))
    played.run(24, 0.0)
    first = {bar.microbatch: bar.device for bar in reversed(played.bars) if bar.forward and bar.stage == 0}
    assert [first[index] for index in range(4)] == [0, 2, 0, 2]


def test_a_step_that_a_leader_begins_runs_its_oldest_hops_first_once_all_have_applied() -> None:
    """Requests come while the optimizer works. Whichever came first began before, and a step's whole order followed from it."""
    given = seats((0, 0, 1, 1), leader=0, applied_s=0.5, microbatches=8, boundary_bytes=8e3)
    play = Play(given, lines(4), np.random.default_rng(0), spread=0.01)
    end_s = play.run(8, 0.0)
    for device in (0, 1):
        own = sorted((bar for bar in play.bars if bar.device == device), key=lambda bar: bar.start_s)
        assert own[0].start_s == pytest.approx(0.5 + 0.05 * device, abs=0.002)
        forwards = [bar.microbatch for bar in own if bar.forward]
        assert forwards == sorted(forwards) and len(forwards) == 4
    assert play.view_s == pytest.approx(0.5 + 2 * 0.05)
    known_s = [bar.end_s + 0.05 * (bar.device != 0) for bar in play.bars]
    assert end_s == pytest.approx(max(known_s)), "a booking at the leader is known at once"


def test_what_goes_first_on_a_line_is_what_core_says() -> None:
    sent = {
        play.TOKENS: Forward(0, 0, 0, 0, 1, 0),
        play.GRADIENT: BoundaryTensor(0, 0, 0, 0, gradient=True),
        play.OUTPUT: BoundaryTensor(0, 0, 0, 0, gradient=False),
    }
    assert {tensor: rank(message) for tensor, message in sent.items()} | {play.EMPTY: 0} == play.RANK_OF


@pytest.mark.parametrize("leader", [0, 1])
def test_a_leader_begins_a_round_a_delay_before_the_others_and_knows_of_its_own_end_at_once(leader: int) -> None:
    """One line of two is narrow. Whoever has it begins sooner, or whoever waits for it is the leader: either way a delay less."""
    cluster = lines(2, delay_s=0.5)
    narrow = msgspec.structs.replace(cluster.devices[0], up_Bps=1e6)
    cluster = msgspec.structs.replace(cluster, devices=(narrow, cluster.devices[1]))
    given = seats((0, 0), gradient_bytes=(4e6,))
    led = msgspec.structs.replace(given, leader=leader)
    assert averaging.averaging(led, cluster)[0] == pytest.approx(averaging.averaging(given, cluster)[0] - 0.5)


def test_a_rate_counts_as_far_as_its_replica_books() -> None:
    """The quick replica waits for most of a step: the leader is not shown that it could do more (leader/rules/lines.py)."""
    given = seats((0, 0, 0, 1), forward_s=(0.2, 0.2, 0.05, 0.2), backward_s=(0.4, 0.4, 0.1, 0.4))
    rates = (250_000,) * 4
    assert paced(given, rates).turns == (TURNS // 4, TURNS // 4, TURNS, TURNS)
    assert paced(given, rates, microbatches_s=4.0).turns == paced(given, rates).turns
    idle = paced(given, rates, microbatches_s=40.0).turns
    assert idle == (TURNS,) * 4
