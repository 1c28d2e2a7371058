"""The memory plan as arithmetic, and the watch that finds what a plan missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal.executor.swap import memory
from shoal.executor.swap.memory import UnitSizes, plan

UNITS = (("embedding",), ("a",), ("b",), ("c",), ("d",), ("norm", "head"))
VALUES = {"embedding": 640, "a": 1280, "b": 1280, "c": 1280, "d": 1280, "norm": 64, "head": 640}
SIZES = UnitSizes(UNITS, VALUES, 4)


def live(start: int, stop: int) -> int:
    return 1000 * (stop - start)


def test_without_a_limit_a_stage_is_one_group_in_one_slot() -> None:
    layout = plan(SIZES, live, limit=0)
    assert [(group.start, group.stop) for group in layout.groups] == [(0, 6)]
    assert layout.slot_bytes == (4 * sum(VALUES.values()),)
    assert layout.device_bytes == layout.slot_bytes[0] + layout.slab_bytes[0] + 6000
    assert (len(layout.slot_bytes), len(layout.slab_bytes)) == (1, 1)


def test_groups_are_the_fewest_that_fit_as_even_as_can_be() -> None:
    three = plan(SIZES, live, limit=41_000)
    assert [(group.start, group.stop) for group in three.groups] == [(0, 2), (2, 4), (4, 6)]
    assert three.slot_bytes == (10_240 - 2_560 + 256, 10_240)
    assert three.device_bytes <= 41_000
    assert plan(SIZES, live, limit=three.device_bytes).count == 3
    assert plan(SIZES, live, limit=three.device_bytes - 1).count > 3


def test_every_limit_is_kept_or_refused_with_one_that_is_enough() -> None:
    for limit in range(10_000, 60_000, 777):
        try:
            layout = plan(SIZES, live, limit=limit, fixed_bytes=100)
        except ValueError as error:
            enough = int(str(error).split("try device.memory_bytes=")[1].split()[0])
            assert enough > limit
            assert plan(SIZES, live, limit=enough, fixed_bytes=100).device_bytes <= enough
        else:
            assert layout.device_bytes <= limit
            assert [group.start for group in layout.groups[1:]] == [group.stop for group in layout.groups[:-1]]
            assert (layout.groups[0].start, layout.groups[-1].stop) == (0, len(UNITS))


def test_where_activations_are_most_the_least_memory_is_that_of_a_coarser_cut_that_is_more_even() -> None:
    """Frozen blocks are small beside the vocabulary: the finest cut, which loads least, keeps the activations of all."""
    units = (("embedding",), ("a",), ("b",), ("c",), ("d",), ("head",))
    sizes = UnitSizes(units, dict.fromkeys("abcd", 8), 4, frozen={"embedding": 4096, "head": 4096})

    def live(start: int, stop: int) -> int:
        return 10_000 * (stop - start)

    with pytest.raises(ValueError, match=r"try device\.memory_bytes=") as refused:
        plan(sizes, live, limit=1000)
    least = int(str(refused.value).split("try device.memory_bytes=")[1].split()[0])
    layout = plan(sizes, live, limit=least)
    assert [(group.start, group.stop) for group in layout.groups] == [(0, 3), (3, 6)] and layout.device_bytes == least
    memory.refuse(sizes, live, limit=least)
    with pytest.raises(ValueError, match=f"try device.memory_bytes={least} or more"):
        memory.refuse(sizes, live, limit=least - 1)


def test_groups_whose_trial_runs_out_of_memory_are_passed_over_for_finer_ones() -> None:
    """Another program may have taken what the limit allows, or there is no limit."""

    def short(start: int, stop: int) -> int:
        if stop - start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return live(start, stop)

    layout = plan(SIZES, short, limit=0)
    assert [(group.start, group.stop) for group in layout.groups] == [(0, 2), (2, 4), (4, 6)]


def test_a_device_too_small_for_the_finest_groups_and_other_failures_are_reported() -> None:
    def fails(error: Exception) -> Callable[[int, int], int]:
        def live(start: int, stop: int) -> int:
            raise error

        return live

    with pytest.raises(torch.OutOfMemoryError):
        plan(SIZES, fails(torch.OutOfMemoryError("CUDA out of memory")), limit=0)
    with pytest.raises(ZeroDivisionError):
        plan(SIZES, fails(ZeroDivisionError()), limit=0)


def test_a_shared_parameter_lies_in_both_groups_and_is_summed_in_the_first() -> None:
    tied = UnitSizes((("embedding",), ("a",), ("norm", "embedding")), {"embedding": 640, "a": 1280, "norm": 64}, 2)
    assert tied.own(2, 3) == ("norm",) and tied.own(0, 1) == ("embedding",)
    assert tied.slot_bytes(0, 3) == 2 * (640 + 1280) + 256
    assert tied.slot_bytes(2, 3) == 2 * 640 + 256


def test_the_host_holds_parameters_moments_two_sums_and_rounded_copies() -> None:
    values = sum(VALUES.values())
    assert plan(SIZES, live, limit=0).host_bytes == 20 * values
    assert plan(UnitSizes(UNITS, VALUES, 2), live, limit=0).host_bytes == 22 * values
    assert sum(group.optimizer_bytes for group in plan(SIZES, live, limit=41_000).groups) == 12 * values


def test_the_watch_sees_memory_come_and_go_and_not_views_or_the_hosts() -> None:
    with memory.MemoryMeter("cpu") as watch:
        kept = torch.zeros(1000)
        assert watch.now == 4000
        (kept * 2 + 1).sum()
        assert (watch.now, watch.peak >= 12_000) == (4000, True)
        kept[:10].add_(1)
        with memory.host():
            away = kept.clone()
        assert watch.now == 4000
        away.mul_(2)
        del kept
        assert watch.now == 0


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257])
def test_what_lies_in_a_slot_begins_where_an_allocator_would_put_it(nbytes: int) -> None:
    assert memory.padded(nbytes) % memory.ALIGN == 0
    assert 0 <= memory.padded(nbytes) - nbytes < memory.ALIGN
