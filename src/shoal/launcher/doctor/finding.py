"""One line of `shoal doctor`: what was looked at, whether it is fit, what was found, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import msgspec

from shoal.escaping import escaped

_MOST = 600  # characters of a text, some of which other machines choose


class Verdict(StrEnum):
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


class Finding(msgspec.Struct, frozen=True):
    """Fit to be shown, whoever wrote the texts. `advice`: what to do, where something is to be done."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "detail", "advice"):
            msgspec.structs.force_setattr(self, field, escaped(" ".join(getattr(self, field).split()))[:_MOST])

    def text(self) -> str:
        """In columns."""
        return f"{self.verdict:<8} {self.name:<22} {self.detail}" + (f"; {self.advice}" if self.advice else "")


Show = Callable[[Finding], None]


def good(name: str, detail: str) -> Finding:
    return Finding(name, Verdict.GOOD, detail)


def warning(name: str, detail: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARNING, detail, advice)


def bad(name: str, detail: str, advice: str = "") -> Finding:
    return Finding(name, Verdict.BAD, detail, advice)


def skipped(name: str, reason: str) -> Finding:
    return Finding(name, Verdict.SKIPPED, reason)


def judged(name: str, faults: Iterable[str], detail: str) -> Iterator[Finding]:
    """All faults, each of which says what would do; without any the detail is good."""
    lines = list(dict.fromkeys(faults))
    yield from (bad(name, line) for line in lines)
    if not lines:
        yield good(name, detail)


def graded(name: str, amount: float, limits: tuple[float, float], detail: str, advice: str) -> Finding:
    """Bad below the first limit, a warning below the second."""
    if amount >= limits[1]:
        return good(name, detail)
    return bad(name, detail, advice) if amount < limits[0] else warning(name, detail, advice)
