"""What the sections of the configuration share: their base class, and helpers of the checks that stand beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

DAY_S = 86_400
MOST_BYTES = 2**50
MOST_Bps = 1e15


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the tree. Each field is annotated with its bounds and a sentence that says what it decides."""


def without_effect(section: Section, name: str, fields: Iterable[str], why: str) -> Iterator[str]:
    """A complaint about each of these fields of [name] that is not at its default: it would be ignored, for the reason `why`."""
    defaults = type(section)()
    for field in fields:
        value = getattr(section, field)
        if value != getattr(defaults, field):
            yield f"{name}.{field} = {value!r} has no effect: {why}; leave {name}.{field} out"


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of `whole` that is nearest to `wanted`, for a suggestion."""
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - wanted), d))
