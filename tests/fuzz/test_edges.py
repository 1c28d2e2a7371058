"""The attacks are messages that every transport lets in, cover every field of every message, and are the same in every process."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect as types

from shoal.core import messages as m
from shoal.sim.faults import edges
from shoal.transport.base import MAX_CONTROL_BYTES

VIEW = m.View(
    number=7,
    step=3,
    members=(m.Member("p0.0", 0), m.Member("p1.0", 1)),
    owners=(0, 1, 0, 1),
    phase=m.Phase.TRAINING,
    last=m.Committed(2, 5, 1.0, 2.0, ("a", "b"), ((m.Share("p0.0", (0, 1)),), (m.Share("p1.0", (0, 1)),))),
)
FACTS = edges.Facts(name="p9.0", peer="p0.0", view=VIEW, term=3, round=5)


@pytest.mark.parametrize("kind", edges.KINDS, ids=lambda kind: kind.__name__)
def test_every_attack_is_let_in_and_comes_once(kind: type[m.Message]) -> None:
    attacks = list(edges.attacks(kind, FACTS))
    assert len({label for label, _ in attacks}) == len(attacks)
    assert attacks == list(edges.attacks(kind, FACTS))
    for label, message in attacks:
        data = msgspec.msgpack.encode(message)
        assert len(data) < MAX_CONTROL_BYTES, label
        assert msgspec.msgpack.decode(data, type=m.Message) == message, label


@pytest.mark.parametrize("kind", edges.KINDS, ids=lambda kind: kind.__name__)
def test_every_field_takes_its_lowest_and_its_highest_value(kind: type[m.Message]) -> None:
    sent = [message for _, message in edges.attacks(kind, FACTS)]
    fields = types.type_info(kind)
    assert isinstance(fields, types.StructType)
    for field in fields.fields:
        values = [getattr(message, field.name) for message in sent]
        assert len({repr(value) for value in values}) > 1, field.name
        match field.type:
            case types.IntType(ge=low, le=high, lt=below):
                assert low in values and (high if high is not None else below - 1) in values, field.name
            case types.StrType(max_length=most) if most is not None:
                assert max(map(len, values)) == most, field.name
            case types.BoolType():
                assert set(values) == {False, True}, field.name


def test_the_attacks_that_once_ended_runs_are_among_them() -> None:
    def has(kind: type[m.Message], **wanted: object) -> bool:
        return any(
            all(getattr(message, name) == value for name, value in wanted.items())
            for _, message in edges.attacks(kind, FACTS)
        )

    assert has(m.Vote, term=2**32) and has(m.Accept, term=2**32) and has(m.Lead, term=2**32)
    assert has(m.Dismissed, number=2**53) and has(m.Saved, stage=4095)
    assert has(m.RoundFailed, culprit="p0.0") and has(m.Reduced, norm_sq=1e150)
    views = [message.entry.view for _, message in edges.attacks(m.Propose, FACTS) if message.proof]
    assert any(view.finished for view in views) and any(view.members == () for view in views)
    assert any([one.peer for one in view.members] == ["p9.0"] for view in views)
