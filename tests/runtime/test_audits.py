"""Audits of real tensors: whose part of a round is not the sum of its hops' gradients is named, and nobody else is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
import torch
from tests.rounds import Group
from tests.runtime.test_large_groups import STEP, Tensors

from shoal.config import Config, Data, Device, Model, Network, Run, Train
from shoal.config.derived import part_tolerance, spot_tolerance
from shoal.core import messages as m
from shoal.core.leader.audits.comparing import Case, Listed, difference
from shoal.runtime.tasks import auditing

STAGE, HOPS, POISON = 1, 3, 0.05
SEED = f"{12345:015x}"


class Replicas:
    """Of the middle stage of three; each has its own microbatches, and tensors that its neighbours have groups."""

    def __init__(self, replicas: int, how: str, dtype: str = "float32") -> None:
        self.config = Config(
            model=Model(hidden_size=32, layers=3, heads=4, kv_heads=2, intermediate_size=48),
            run=Run(name="audits", stages=3, peers=3 * replicas),
            data=Data(sequence=16),
            train=Train(batch=4 * HOPS * replicas, microbatch=4, dtype=dtype),  # type: ignore[arg-type]
            network=Network(averaging=how, activations=how if how == "int8" else "none"),
            device=Device(kind="cpu", threads=1),
        )
        self.names = tuple(f"p{number:02}" for number in range(replicas))
        self.by_name: dict[m.Peer, Tensors] = {}
        length = Tensors(self.config, STAGE).executor.length
        self.group = Group(self.names, length, runner=self.runner, seed=replicas)
        self.hops = {name: range(HOPS * at, HOPS * (at + 1)) for at, name in enumerate(self.names)}
        self.serial, self.norms = count(), tuple[float, ...]()
        chance = torch.Generator().manual_seed(1)
        self.x = {index: torch.randn(4, 16, 32, generator=chance) for hops in self.hops.values() for index in hops}
        self.grad = {index: torch.randn(4, 16, 32, generator=chance) * 1e-3 for index in self.x}

    def runner(self, name: m.Peer, length: int) -> Tensors:
        self.by_name[name] = Tensors(self.config, STAGE)
        return self.by_name[name]

    def close(self) -> None:
        for one in self.by_name.values():
            one.runner.close()

    def give(self, tensors: Tensors, index: int) -> tuple[str, str]:
        names = f"x{next(self.serial)}", f"g{next(self.serial)}"
        dtype = getattr(torch, self.config.train.dtype)
        for name, value in zip(names, (self.x[index], self.grad[index]), strict=True):
            tensors.runner.put(name, value.to(dtype))
        return names

    def step(self, number: int, poisoned: m.Peer = "") -> Case:
        """All hops, then a round; `poisoned` adds noise to its sum."""
        for name, one in self.by_name.items():
            one.executor.zero(STEP)
            for index in self.hops[name]:
                x, grad = self.give(one, index)
                one.do(m.RunBackward(f"s/{next(self.serial)}", STEP, index, STAGE, x, grad, f"out{number}/{index}"))
            if name == poisoned:
                noise = torch.randn(len(one.executor.sum), generator=torch.Generator().manual_seed(7))
                one.executor.sum.add_(noise * (POISON * one.executor.sum.norm() / noise.norm()))
        self.group.reduced.clear()
        self.group.begin(number=number)
        self.group.run()
        shares = tuple(m.Share(name, tuple(self.hops[name])) for name in self.names)
        message = m.Round(0, STEP, number, 1, ((), shares, ()))
        serving = dict.fromkeys(self.names, STAGE)
        return Case(message, 3, dict(self.group.reduced), {}, serving, frozenset(), (0.0, *self.norms), {})

    def committed(self, number: int) -> None:
        self.norms = (self.group.reduced[self.names[0]].norm_sq,)
        for name, one in self.by_name.items():
            one.runner._sums.averaging.applied(one.runner._sums.reduced[STEP, number].left)
            self.group.carry(name, self.group.rounds[name].end("committed"))

    def recomputed(self, of: m.Peer, by: m.Peer, number: int) -> m.Recomputed:
        """As core/server/audits.py does."""
        one, hops = self.by_name[by], []
        before = one.executor.sum.clone()
        for index in self.hops[of]:
            x, grad = self.give(one, index)
            task = m.RunAudit(f"s/{next(self.serial)}", STEP, index, STAGE, x, grad, SEED, not hops)
            result = one.do(task).result  # type: ignore[union-attr]
            hops.append(m.RecomputedHop(index, *result.digests, *result.sketches, result.loss))
        chunks = self.group.rounds[by].summed(number)
        bounds = (*(chunk.start for chunk in chunks), chunks[-1].stop)
        sketches = one.do(m.EndAudit("s/end", bounds, tuple(c.digest for c in chunks))).result.sketches  # type: ignore[union-attr]
        assert torch.equal(one.executor.sum, before), "an audit changes no sum"
        assert [chunk.owner for chunk in chunks] == list(range(len(self.names)))
        return m.Recomputed(0, STEP, number, of, tuple(hops), sketches)

    def differs(self, of: m.Peer, case: Case) -> list[str]:
        """What each other replica finds."""
        tolerances = spot_tolerance(self.config), part_tolerance(self.config)
        others = [name for name in self.names if name != of]
        return [
            difference(of, self.recomputed(of, by, case.round.round), case, Listed({}), *tolerances) for by in others
        ]


@pytest.fixture
def groups() -> Iterator[list[Replicas]]:
    groups: list[Replicas] = []
    yield groups
    for one in groups:
        one.close()


@pytest.mark.parametrize("how", ["none", "int8"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_part_that_is_not_its_hops_gradient_is_named_by_each_other_replica(
    groups: list[Replicas], replicas: int, how: str
) -> None:
    """By 5 % of its norm, in the first step and in one whose parts hold what encoding has left of the step before."""
    groups.append(group := Replicas(replicas, how))
    honest = group.step(7)
    assert not any(why for name in group.names for why in group.differs(name, honest))
    group.committed(7)
    case = group.step(8, poisoned="p01")
    assert not any(group.differs("p00", case))
    whys = group.differs("p01", case)
    assert len(whys) == replicas - 1 and all("brought into the round" in why for why in whys)


def test_bfloat16_is_rounding(groups: list[Replicas]) -> None:
    groups.append(group := Replicas(2, "none", "bfloat16"))
    case = group.step(7)
    assert not any(why for name in group.names for why in group.differs(name, case))


def test_an_output_is_compared_as_it_was_sent(groups: list[Replicas]) -> None:
    """Encoded, with the signs of the audit; a tenth of noise in it is found."""
    groups.append(group := Replicas(2, "int8"))
    case, index = group.step(7), 0
    one = group.by_name["p00"]
    x, _ = group.give(one, index)
    one.do(m.RunForward("s/y", STEP, index, STAGE, x, "y"))
    for noise, seen in ((0.0, False), (0.1, True)):
        y = auditing.coding.plain(one.runner.get("y"))
        wrong = (
            y + noise * y.norm() * torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) / y.numel() ** 0.5
        )
        record = m.TensorRecord(index, STAGE + 1, False, "d", sketch=auditing.sketch_of(wrong, SEED))
        listed = Listed({"p00": m.AuditAnswer(0, STEP, 7, (record,))})
        why = difference("p00", group.recomputed("p00", "p01", 7), case, listed, 0.02, 0.01)
        assert ("its output of stage 1" in why) is seen


def test_both_ends_of_a_boundary_describe_it_alike(groups: list[Replicas]) -> None:
    groups.append(group := Replicas(2, "int8"))
    one, other = group.by_name.values()
    x, _ = group.give(one, 0)
    one.do(m.RunForward("s/y", STEP, 0, STAGE, x, "y"))
    arrived = msgspec.structs.replace(one.get("y"), data=bytearray(one.get("y").data))
    other.runner.put("came", arrived)
    results = [each.do(m.Describe("s/d", (name,), SEED)).result for each, name in ((one, "y"), (other, "came"))]  # type: ignore[union-attr]
    assert results[0].digests == results[1].digests and results[0].sketches == results[1].sketches
    assert results[0].sketches[0].norm_sq > 0.0
