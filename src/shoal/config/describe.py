"""Every setting as it describes itself: its type with bounds, the sentence beside it, its default; and types in words.

For reading.py, which says what would do instead, and for printing.py and docs/configuration.py, which print the descriptions.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from shoal import units
from shoal.config.tree import Config

Number = inspect.IntType | inspect.FloatType


class Key(msgspec.Struct, frozen=True):
    """One setting."""

    section: str
    name: str
    annotation: Any  # as the section declares it: what msgspec converts to
    kind: inspect.Type  # the same for who looks into it, bounds included
    description: str
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Of a setting that takes one of a few words, in the order of its declaration."""
        return _choices(typing.get_args(self.annotation)[0])

    @property
    def is_text(self) -> bool:
        return bool(self.choices) or isinstance(self.kind, inspect.StrType)


def _choices(annotation: Any) -> tuple[str, ...]:
    """msgspec sorts them, and the declaration begins with what is usual."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


@functools.cache
def keys() -> dict[str, Key]:
    """Every setting by its path, in the order of the tree."""
    keys_by_path = {}
    for section, kind in sections().items():
        defaults = kind()
        for field in msgspec.structs.fields(kind):
            described = inspect.type_info(field.type)
            assert isinstance(described, inspect.Metadata), f"{section}.{field.name} is not described"
            words = (described.extra_json_schema or {}).get("description", "")
            key = Key(section, field.name, field.type, described.type, words, getattr(defaults, field.name))
            keys_by_path[key.path] = key
    return keys_by_path


@functools.cache
def sections() -> dict[str, type[msgspec.Struct]]:
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


# ------------------------------------------------------------------------------------------------------------- bounds


def numbers(kind: inspect.Type) -> Iterator[Number]:
    """The types of all numbers in values of a type."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield kind
        case inspect.Metadata():
            yield from numbers(kind.type)
        case inspect.VarTupleType():
            yield from numbers(kind.item_type)
        case inspect.TupleType():
            for item in kind.item_types:
                yield from numbers(item)
        case inspect.DictType():
            yield from numbers(kind.value_type)
        case inspect.UnionType():
            for choice in kind.types:
                yield from numbers(choice)


def out_of_bounds(kind: inspect.Type, value: Any, where: str) -> Iterator[tuple[str, Any, Number]]:
    """The numbers in a value that are outside of the bounds of its type, and where they stand. NaN and infinity are in none."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        if isinstance(value, int | float) and not isinstance(value, bool) and not _within(kind, value):
            yield where, value, kind
        return
    for part in _parts(kind, value, where):
        yield from out_of_bounds(*part)


def _parts(kind: inspect.Type, value: Any, where: str) -> Iterator[tuple[inspect.Type, Any, str]]:
    match kind:
        case inspect.Metadata():
            yield kind.type, value, where
        case inspect.VarTupleType() if isinstance(value, Sequence):
            for place, item in enumerate(value):
                yield kind.item_type, item, f"{where}[{place}]"
        case inspect.TupleType() if isinstance(value, Sequence):
            for place, (item_kind, item) in enumerate(zip(kind.item_types, value, strict=False)):
                yield item_kind, item, f"{where}[{place}]"
        case inspect.DictType() if isinstance(value, Mapping):
            for key, item in value.items():
                yield kind.value_type, item, f"{where}.{key}"
        case inspect.UnionType():
            wanted = inspect.IntType if isinstance(value, int) else inspect.FloatType
            for choice in kind.types:
                inner = choice.type if isinstance(choice, inspect.Metadata) else choice
                if isinstance(inner, wanted):
                    yield inner, value, where


def finite(value: float) -> bool:
    """False also of a whole number that no float can be."""
    return abs(value) <= sys.float_info.max


def _within(kind: Number, value: float) -> bool:
    return (
        finite(value)
        and (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def bounds(kind: Number, name: str) -> str:
    """The bounds in words, of a setting whose name says its unit: '1 to 4_096', 'above 0 to 3_600', '1 KiB to 1024 TiB'."""
    low = _number(kind.ge, name) if kind.ge is not None else f"above {_number(kind.gt, name)}"
    high = _number(kind.le, name) if kind.le is not None else f"below {_number(kind.lt, name)}"
    return f"{low} to {high}"


def _number(bound: float | None, name: str) -> str:
    assert bound is not None, f"{name} lacks a bound"
    if isinstance(bound, int) and units.suffix(name) == "_bytes":
        return units.exact_size(bound)
    return f"{bound:_}" if isinstance(bound, int) else f"{bound:g}"


# -------------------------------------------------------------------------------------------------------------- words


def span(key: Key) -> str:
    """What values a setting takes, for the end of its line: bounds, or choices; '' where any value of its type will do."""
    if key.choices:
        return " | ".join(key.choices)
    if isinstance(key.kind, inspect.IntType | inspect.FloatType):
        return bounds(key.kind, key.name)
    if isinstance(key.kind, inspect.UnionType):  # a word in place of a number
        return " | ".join([*_words(key.kind), *(bounds(kind, key.name) for kind in numbers(key.kind))])
    spans = {bounds(kind, key.name) for kind in numbers(key.kind)}
    return f"each {spans.pop()}" if len(spans) == 1 else ""


def wanted(key: Key) -> str:
    """What would do: 'a whole number', 'a list of numbers', with the default as an example where that is not empty."""
    if key.choices:
        return " or ".join(map(repr, key.choices))
    match key.kind:
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)} {_many(items[0])}, such as {list(key.default)}"
        case inspect.VarTupleType(item_type=inspect.LiteralType()):
            item_annotation = typing.get_args(typing.get_args(key.annotation)[0])[0]
            return f"a list of {', '.join(map(repr, _choices(item_annotation)))}"
        case inspect.VarTupleType(item_type=item):
            return f"a list of {_many(item)}"
        case inspect.DictType(value_type=item):
            return f"a table of {_many(item)}"
        case inspect.UnionType():
            return " or ".join([*map(repr, _words(key.kind)), *(_ONE[type(kind)] for kind in numbers(key.kind))])
    return _ONE[type(key.kind)]


_ONE: dict[type, str] = {
    inspect.StrType: "text",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
}
_MANY: dict[type, str] = {
    inspect.StrType: "texts",
    inspect.IntType: "whole numbers",
    inspect.FloatType: "numbers",
    inspect.BoolType: "truth values",
    inspect.UnionType: "plain values",
}


def _words(kind: inspect.UnionType) -> list[str]:
    return [str(word) for choice in kind.types if isinstance(choice, inspect.LiteralType) for word in choice.values]


def _many(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _many(kind.type)
        case inspect.VarTupleType():
            return f"lists of {_many(kind.item_type)}"
        case inspect.TupleType():
            return f"lists of {len(kind.item_types)} {_many(kind.item_types[0])}"
    return _MANY[type(kind)]
