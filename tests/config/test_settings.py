"""Every setting describes itself: a sentence, bounds where it is a number, a default that passes; and bounds are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from shoal import config
from shoal.config import Config
from shoal.config.describe import Key, Number, keys, numbers, sections, span

KEYS = list(keys().values())
NUMERIC = [key for key in KEYS if next(numbers(key.kind), None) is not None]


def refusal(key: Key, value: Any) -> str:
    with pytest.raises(ValueError) as caught:
        config.from_tree({key.section: {key.name: value}})
    return str(caught.value)


def outside(kind: Number) -> Iterator[float]:
    """The nearest values beyond either bound."""
    whole = isinstance(kind, inspect.IntType)
    if kind.gt is not None or kind.lt is not None:
        yield from (bound for bound in (kind.gt, kind.lt) if bound is not None)
    if kind.ge is not None:
        yield kind.ge - 1 if whole else math.nextafter(kind.ge, -math.inf)
    if kind.le is not None:
        yield kind.le + 1 if whole else math.nextafter(kind.le, math.inf)


def holding(kind: inspect.Type, number: float, at: Number) -> Any:
    """A value of that type in which `number` stands wherever a number of type `at` does."""
    match kind:
        case inspect.Metadata():
            return holding(kind.type, number, at)
        case inspect.VarTupleType():
            return [holding(kind.item_type, number, at)]
        case inspect.TupleType():
            return [holding(item, number, at) for item in kind.item_types]
        case inspect.DictType():
            return {"a": holding(kind.value_type, number, at)}
        case inspect.IntType() | inspect.FloatType():
            return number if kind == at else kind.ge
    return number


def test_every_setting_of_the_tree_is_a_key() -> None:
    tree = config.to_tree(Config())
    assert [key.path for key in KEYS] == [f"{section}.{field}" for section in tree for field in tree[section]]
    assert list(sections()) == list(tree)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_setting_is_described_in_one_full_sentence(key: Key) -> None:
    words = key.description.split()
    assert len(words) >= 5
    assert re.match(r"[A-Z`]", key.description)
    assert key.description.endswith(".")
    assert ". " not in key.description, "one sentence"
    assert len(key.description) <= 150, "a comment's line, and a table's cell"


@pytest.mark.parametrize("name", list(sections()))
def test_a_section_says_what_it_is(name: str) -> None:
    assert (sections()[name].__doc__ or "").endswith(".")


@pytest.mark.parametrize("key", NUMERIC, ids=lambda key: key.path)
def test_a_number_has_bounds_and_no_value_beyond_them_is_taken(key: Key) -> None:
    for kind in numbers(key.kind):
        assert kind.ge is not None or kind.gt is not None, "a lower bound"
        assert kind.le is not None or kind.lt is not None, "an upper bound"
        for number in outside(kind):
            said = refusal(key, holding(key.kind, number, kind))
            assert said.startswith(key.path)
            assert f" = {number} is out of range; try " in said
    if isinstance(key.kind, inspect.IntType | inspect.FloatType):
        assert span(key), "printed beside it"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_default_passes_and_another_type_does_not(key: Key) -> None:
    assert config.from_tree({key.section: {key.name: key.default}}) == Config()
    for wrong in (None, [[[["x"]]]], {"a": {"b": {"c": {"d": 0}}}}):
        assert refusal(key, wrong).startswith(f"{key.path} = {wrong!r} must be ")


@pytest.mark.parametrize("key", NUMERIC, ids=lambda key: key.path)
def test_no_number_is_infinite(key: Key) -> None:
    for kind in numbers(key.kind):
        if isinstance(kind, inspect.FloatType):
            for number in (math.nan, math.inf):
                assert "is not a finite number" in refusal(key, holding(key.kind, number, kind))


def test_bounds_are_written_so_that_they_read_back() -> None:
    assert span(keys()["run.trace_bytes"]) == "0 B to 1024 TiB"
    assert config.load(None, ["run.trace_bytes=1024 TiB"]).run.trace_bytes == 2**50
    assert span(keys()["run.heartbeat_s"]) == "above 0 to 3_600"
    assert span(keys()["network.port"]) == "0 to 65_535"
