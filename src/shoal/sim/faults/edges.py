"""Every message with every field at its edges: what an attacker with a valid pass may send to break a run.

The attacks follow from the types alone (msgspec.Meta) and from what a member sees: a message is first made plausible, then one field, at
any depth, takes each of its extreme values. Nothing is random and nothing is sent here: strangers.py and the fuzzers of real processes
(tests/fuzz, benchmarks/strangers.py) send them. The type of a field added to core/messages.py is enough to cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from shoal.core import messages as m

KINDS: tuple[type[m.Message], ...] = tuple(sorted(get_args(m.Message), key=lambda kind: kind.__name__))
LONG = 3000  # items of a long tuple that its type does not bound
WIDE = 1 << 16  # characters of a long text that its type does not bound
CONTROL = "\x00\x1b[2J\r\n\u202e'\"\\"  # what a terminal, a log, or a page would take for something else
INTS = (0, 1, 4095, 2**20 - 1, 2**20, 2**31, 2**32, 2**53)
FLOATS = (0.0, -1.0, 1e-300, 3e38, 1e150, 1e308)  # what is not finite no driver lets in
NOBODY = "nobody.0"
EMPTY = ("closed", "input_from", "grad_from", "records", "proof")  # tuples that are plausible only when empty
DEEP = 5  # structs within structs that are looked into: Propose, Entry, View, Committed, Share

Edges = Iterator[tuple[str, Any]]  # label, value


class Facts(msgspec.Struct, frozen=True):
    """What the attacker knows when it sends: its own name, whom it sends to, and the newest view, term and round."""

    name: m.Peer
    peer: m.Peer
    view: m.View
    term: int = 1
    round: int = 1


def plausible(kind: type[m.Message], facts: Facts) -> m.Message:
    """A message of that kind as a member could send it now."""
    message: m.Message = _made(kind, facts)
    return message


def bases(kind: type[m.Message], facts: Facts) -> Iterator[tuple[str, m.Message]]:
    """The plausible message, and others beside it that a receiver treats in a way of their own."""
    base = plausible(kind, facts)
    yield "", base
    if isinstance(base, m.Propose):
        base = msgspec.structs.replace(base, proof=None)
        proof = m.Proof(facts.name, tuple(m.Signed(peer) for peer in (facts.name, *facts.view.voters)))
        yield "proposed", base
        yield "agreed", msgspec.structs.replace(base, proof=proof)
        yield "agreed, next term", msgspec.structs.replace(_risen(base), proof=proof)
    elif isinstance(base, m.Heartbeat):
        yield "ready", msgspec.structs.replace(base, ready=True)
    elif isinstance(base, m.RoundFailed):
        yield "culprit", msgspec.structs.replace(base, culprit=facts.peer)


def attacks(kind: type[m.Message], facts: Facts) -> Iterator[tuple[str, m.Message]]:
    """(label, message): the bases themselves, then each of them with each field at each of its edges, once."""
    for name, base in bases(kind, facts):
        word = kind.__name__ + (f" [{name}]" if name else "")
        yield word, base
        yield from _altered(word, base, facts, DEEP)


# ------------------------------------------------------------------------------------------------------- plausible


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[types.Field, ...]:
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return info.fields


def _risen(base: m.Propose) -> m.Propose:
    entry = msgspec.structs.replace(base.entry, term=base.term + 1)
    return msgspec.structs.replace(base, term=base.term + 1, entry=entry)


def _made(kind: type[msgspec.Struct], facts: Facts) -> Any:
    if kind is m.View:
        return msgspec.structs.replace(facts.view, number=facts.view.number + 1)
    return kind(**{field.name: _value(field.name, field.type, facts) for field in _fields(kind)})


def _value(name: str, of: types.Type, facts: Facts) -> Any:
    """A plausible value of that type for a field of that name."""
    if isinstance(of, types.UnionType):  # of something and None
        of = _something(of)
    by_name = _values_by_name(facts)
    if name in by_name and not isinstance(of, types.StructType):
        return by_name[name]
    match of:
        case types.BoolType():
            return name == "granted"
        case types.IntType():
            return max(0, of.ge or 0)
        case types.FloatType():
            return 0.0
        case types.BytesType():
            return b""
        case types.StrType():
            return facts.peer if of.min_length or name in ("leader", "about", "peer") else ""
        case types.LiteralType():
            return of.values[0]
        case types.EnumType():
            return next(iter(of.cls))
    return _composed(name, of, facts)


def _composed(name: str, of: types.Type, facts: Facts) -> Any:
    """A plausible value of a type that has others in it."""
    match of:
        case types.VarTupleType():
            return () if name in EMPTY else (_value(name, of.item_type, facts),)
        case types.StructType():
            return _made(of.cls, facts)
        case types.TupleType():
            return tuple(_value(name, item, facts) for item in of.item_types)
    raise TypeError(f"{name}: edges.py knows nothing of {of}")


def _values_by_name(facts: Facts) -> dict[str, Any]:
    """Fields whose plausible value follows from their name."""
    view = facts.view
    return {
        "view": view.number,
        "epoch": view.epoch,
        "step": view.step,
        "work": view.work,
        "term": facts.term,
        "number": view.number,
        "decided_term": facts.term,
        "last_term": facts.term,
        "last_number": view.number,
        "round": facts.round,
        "attempt": 1,
        "since": view.step,
        "stage": next((one.stage for one in view.members if one.peer == facts.peer), 0),
        "seat": -1,
        "width": 0,
        "trial": False,
        "norm": 1.0,
        "norm_sq": 1.0,
        "loss": 1.0,
        "below": 0.5,
        "before": view.voters,
        "culprit": "",
        "most_bytes": 1,
        "answer_bytes": 0,
        "to": facts.name,
    }


def _something(of: types.UnionType) -> types.Type:
    """The type in a union with None."""
    return next(one for one in of.types if not isinstance(one, types.NoneType))


# ----------------------------------------------------------------------------------------------------------- edges


def _altered(word: str, base: msgspec.Struct, facts: Facts, depth: int) -> Edges:
    for field in _fields(type(base)):
        for label, value in _edges(field.name, field.type, getattr(base, field.name), facts, depth):
            yield f"{word}.{field.name}{label}", msgspec.structs.replace(base, **{field.name: value})


def _edges(name: str, of: types.Type, value: Any, facts: Facts, depth: int) -> Edges:
    """Other values of that type than `value`."""
    if isinstance(of, types.UnionType):
        yield from _optional(name, of, value, facts, depth)
    elif isinstance(of, types.VarTupleType):
        yield from _tuples(name, of, value, facts, depth)
    elif isinstance(of, types.StructType):
        yield from _structs(of, value, facts, depth)
    elif type(of) in _SCALARS:
        yield from _SCALARS[type(of)](of, value, facts)


def _optional(name: str, of: types.UnionType, value: Any, facts: Facts, depth: int) -> Edges:
    inner = _something(of)
    if value is None:
        value = _value(name, inner, facts)
        yield " given", value
    else:
        yield " = None", None
    yield from _edges(name, inner, value, facts, depth)


def _structs(of: types.StructType, value: Any, facts: Facts, depth: int) -> Edges:
    if not depth:
        return
    yield from _altered("", value, facts, depth - 1)
    if of.cls is m.View:
        yield from _views(value, facts)


def _booleans(of: types.BoolType, value: bool, facts: Facts) -> Edges:
    yield f" = {not value}", not value


def _integers(of: types.IntType, value: int, facts: Facts) -> Edges:
    low = of.ge if of.ge is not None else (of.gt + 1 if of.gt is not None else -(2**63))
    high = of.le if of.le is not None else (of.lt - 1 if of.lt is not None else 2**63 - 1)
    near = (value - 1, value + 1, facts.view.number + 1, facts.term + 1)
    for number in dict.fromkeys((low, high, *near, *INTS)):
        if low <= number <= high and number != value:
            yield f" = {number}", number


def _reals(of: types.FloatType, value: float, facts: Facts) -> Edges:
    low = of.ge if of.ge is not None else float("-inf")
    high = of.le if of.le is not None else float("inf")
    for real in FLOATS:
        if low <= real <= high and real != value:
            yield f" = {real:g}", real


def _texts(of: types.StrType, value: str, facts: Facts) -> Edges:
    most = of.max_length if of.max_length is not None else WIDE
    texts = {
        "empty": "" if not of.min_length else value,
        "the sender": facts.name,
        "the receiver": facts.peer,
        "nobody": NOBODY,
        "control characters": CONTROL,
        "longest": "x" * most,
        "longest of control characters": "\x1b" * most,
    }
    seen = {value}
    for label, text in texts.items():
        if text not in seen and len(text) <= most:
            seen.add(text)
            yield f" = {label}", text


def _bytes(of: types.BytesType, value: bytes, facts: Facts) -> Edges:
    most = of.max_length if of.max_length is not None else WIDE
    for data in (b"", b"\0", b"\xff" * most):
        if data != value:
            yield f" = {len(data)} bytes", data


def _literals(of: types.LiteralType, value: Any, facts: Facts) -> Edges:
    for other in of.values:
        if other != value:
            yield f" = {other!r}", other


def _enums(of: types.EnumType, value: Any, facts: Facts) -> Edges:
    for case in of.cls:
        if case is not value:
            yield f" = {case.name}", case


_SCALARS: dict[type[types.Type], Callable[[Any, Any, Facts], Edges]] = {
    types.BoolType: _booleans,
    types.IntType: _integers,
    types.FloatType: _reals,
    types.StrType: _texts,
    types.BytesType: _bytes,
    types.LiteralType: _literals,
    types.EnumType: _enums,
}


def _tuples(name: str, of: types.VarTupleType, value: Any, facts: Facts, depth: int) -> Edges:
    most = of.max_length if of.max_length is not None else LONG
    item = value[0] if value else _value(name, of.item_type, facts)
    if value and not of.min_length:
        yield " = ()", ()
    elif not value:
        yield " of one", (item,)
    if most > 1:
        yield " twice the same", (item, item)
        yield " longest", (item,) * min(most, LONG)
        if isinstance(of.item_type, types.IntType):
            first = of.item_type.ge or 0
            yield " one after the other", tuple(range(first, first + min(most, LONG)))
    for label, other in _edges(name, of.item_type, item, facts, depth):
        if isinstance(other, str) and len(other) > 2**16:
            other = other[: 2**16]
        yield f"[0]{label}", (other, *value[1:])


def _views(view: m.View, facts: Facts) -> Iterator[tuple[str, m.View]]:
    """Successors that no leader proposes: what one field alone does not say."""
    replace = msgspec.structs.replace
    alone = (m.Member(peer=facts.name, stage=0),)
    yield " whose only member is the sender", replace(view, members=alone, joining=(), owners=(0,) * len(view.owners))
    others = tuple(one for one in view.members if one.peer != facts.peer)
    yield " without the receiver", replace(view, members=others, owners=(0,) * len(view.owners))
    yield " owned by nobody", replace(view, owners=(len(view.members),) * max(1, len(view.owners)))
    yield " finished far ahead", replace(view, phase=m.Phase.FINISHED, number=2**53, step=2**53)
    yield " of another epoch, far ahead", replace(view, epoch=view.epoch + 1, number=view.number + 1000, step=0)
    yield " with the sender as another member", replace(view, members=(*view.members, *alone))
