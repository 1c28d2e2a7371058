"""Real tensors of groups that stand in rows: the sum in its recorded order bit for bit, and with codes what is left out is fed back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests import reference
from tests.rounds import Group
from tests.tensors import STEP, Tensors

from shoal import codec
from shoal.config import Config, Device, Network, Run, Train
from shoal.core import messages as m
from shoal.core.allreduce.checked import wrong_sums
from shoal.core.allreduce.layout import rows_of

LENGTH = 5003
UNLIKE = (100, 400, 50, 1000, 400)  # line_rates of lines; the third owns nothing


@pytest.fixture
def groups_of_tensors() -> Iterator[list[Tensors]]:
    gradients: list[Tensors] = []
    yield gradients
    for one in gradients:
        one.runner.close()


def a_group(
    groups_of_tensors: list[Tensors],
    replicas: int,
    how: str = "none",
    piece_values: int = 0,
    line_rates: tuple[int, ...] = (),
) -> Group:
    config = Config(
        run=Run(name="large", stages=1),
        train=Train(batch=replicas, microbatch=1),
        network=Network(averaging=how),
        device=Device(executor="emulated", emulated_s=0.0, emulated_gradient=LENGTH, threads=1),
    )

    def runner(name: m.Peer, length: int) -> Tensors:
        groups_of_tensors.append(Tensors(config))
        return groups_of_tensors[-1]

    group = tuple(f"p{number:02}" for number in range(replicas))
    return Group(group, LENGTH, piece_values, runner=runner, seed=replicas, line_rates=line_rates)


def inputs_of(group: Group, groups_of_tensors: list[Tensors], seed: int) -> list[torch.Tensor]:
    """What each replica has added up, of sizes so different that the order of additions shows."""
    chance = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(LENGTH, generator=chance) * 10.0 ** (number % 7) for number in range(len(group.names))]
    for one, values in zip(groups_of_tensors, gradients, strict=True):
        one.executor.sum.copy_(values)
    return gradients


@pytest.mark.parametrize("piece_values", [0, 2100])
@pytest.mark.parametrize("replicas", [16, 17, 20, pytest.param(24, marks=pytest.mark.slow)])
def test_a_round_is_the_sum_in_its_recorded_order_bit_for_bit(
    groups_of_tensors: list[Tensors], replicas: int, piece_values: int
) -> None:
    group = a_group(groups_of_tensors, replicas, piece_values=piece_values)
    values = inputs_of(group, groups_of_tensors, seed=replicas)
    group.begin()
    group.run()
    assert len(group.reduced) == replicas and not group.failures
    wanted = reference.added(values)
    assert all(torch.equal(one.reduced(7), wanted) for one in groups_of_tensors)
    flat = values[0].clone()
    for part in values[1:]:
        flat += part
    assert torch.equal(flat, wanted) is (replicas == 16), "rows are another order of additions"


@pytest.mark.parametrize("piece_values", [0, 2100])
def test_owners_that_follow_unlike_lines_add_in_the_listed_order_bit_for_bit(
    groups_of_tensors: list[Tensors], piece_values: int
) -> None:
    group = a_group(groups_of_tensors, len(UNLIKE), piece_values=piece_values, line_rates=UNLIKE)
    values = inputs_of(group, groups_of_tensors, seed=1)
    group.begin()
    group.run()
    wanted = values[0].clone()
    for part in values[1:]:
        wanted += part
    assert len(group.reduced) == len(UNLIKE) and not group.failures
    assert wrong_sums(group.names, group.reduced, 0.0) is None and all(one.sums for one in group.reduced.values())
    assert all(torch.equal(one.reduced(7), wanted) for one in groups_of_tensors)


@pytest.mark.parametrize(
    ("how", "replicas", "piece_values", "line_rates"),
    [
        ("bf16", 18, 0, ()),
        ("int8", 18, 0, ()),
        ("bf16", 5, 0, UNLIKE),
        ("int8", 5, 0, UNLIKE),
        pytest.param("bf16", 5, 2100, UNLIKE, marks=pytest.mark.slow),
        pytest.param("int8", 5, 2100, UNLIKE, marks=pytest.mark.slow),
        pytest.param("bf16", 24, 2100, (), marks=pytest.mark.slow),
        pytest.param("int8", 24, 2100, (), marks=pytest.mark.slow),
    ],
)
def test_replicas_agree_on_codes_and_feed_back_what_all_of_them_left_out(
    groups_of_tensors: list[Tensors], how: str, replicas: int, piece_values: int, line_rates: tuple[int, ...]
) -> None:
    """What two rounds have applied, and what all have left to send, is together all that was ever brought."""
    group = a_group(groups_of_tensors, replicas, how, piece_values, line_rates)
    total, applied = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    for number in (7, 8):
        values = inputs_of(group, groups_of_tensors, seed=number)
        total += torch.stack(values).double().sum(0)
        group.reduced.clear()
        group.begin(number=number)
        group.run()
        digests = {one.digest for one in group.reduced.values()}
        assert len(group.reduced) == replicas and len(digests) == 1
        assert wrong_sums(group.names, group.reduced, codec.LOST[how]) is None
        for name, one in zip(group.names, groups_of_tensors, strict=True):
            gathered = one.runner._sums.reduced[STEP, number]
            one.runner._sums.averaging.applied(gathered.left)
            group.carry(name, group.rounds[name].end("committed"))
        applied += groups_of_tensors[0].reduced(number).double()
    left = sum(
        one.runner._sums.averaging._residual.double()
        for one in groups_of_tensors
        if one.runner._sums.averaging._residual is not None
    )
    assert float((applied + left - total).norm() / total.norm()) < 1e-6
    assert float((applied - total).norm() / total.norm()) > 1e-4, "the codes do leave something out"


@pytest.mark.parametrize("how", list(codec.LOST))
@pytest.mark.parametrize(("replicas", "piece_values"), [(2, 0), (3, 2100)])
def test_who_sends_all_the_same_wrong_sum_is_named_however_little_it_is_wrong(
    groups_of_tensors: list[Tensors], how: str, replicas: int, piece_values: int
) -> None:
    """By 1 % of it."""
    group = a_group(groups_of_tensors, replicas, how, piece_values)
    for one in groups_of_tensors:
        one.executor.sum.copy_(torch.randn(LENGTH, generator=torch.Generator().manual_seed(1)))
    averaging = groups_of_tensors[1].runner._sums.averaging
    really = averaging.sum

    def wrong(total: torch.Tensor, parts: tuple[str, ...]) -> Any:
        return really(total.add_(torch.randn(len(total)), alpha=0.01 * replicas), parts)

    averaging.sum = wrong  # type: ignore[method-assign]
    group.begin()
    group.run()
    finding = wrong_sums(group.names, group.reduced, codec.LOST[how])
    assert len({one.digest for one in group.reduced.values()}) == 1, "nobody would notice"
    assert finding is not None and [peer for peer, _ in finding.guilty] == ["p01"] and not finding.words


def test_rows_of_the_reference_are_those_of_the_rounds() -> None:
    for replicas in range(1, 101):
        assert reference.rows(replicas) == [len(row) for row in rows_of([str(n) for n in range(replicas)])]
