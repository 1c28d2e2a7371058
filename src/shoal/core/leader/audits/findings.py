"""Who is wrong, where two say something else of the same tensor. For evictions.py.

A difference is a fact about two: who says to have got something else, and who says to have made it, or has computed it again. At least
one of them is wrong. So whoever is in several findings that share nobody else is: while one peer lies it is in all of them, and no honest
one can be convicted. Where the findings share both, the word of the one counts as any word of one peer against another's does
(evictions.py). With several liars the findings about one may look like those of an honest peer between two of them: nobody is
convicted while another of its findings is in as many beside.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

LEAST = 3  # findings that convict
KEPT = 256  # the newest


class Finding(msgspec.Struct, frozen=True):
    """By keys: `accuser` says something else of a tensor than `accused`."""

    accuser: str
    accused: str

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset((self.accuser, self.accused))


class Findings:
    def __init__(self) -> None:
        self._kept: list[Finding] = []

    def forget(self) -> None:
        self._kept.clear()

    def keep(self, present: Collection[str]) -> None:
        """Findings with a peer that has left are explained by it, as far as anybody can tell."""
        self._kept = [one for one in self._kept if one.suspects <= set(present)]

    def add(self, finding: Finding) -> tuple[str, str] | None:
        """The key of whom this convicts, and of the only one whose word that is; '' where several findings agree."""
        self._kept = [*self._kept, finding][-KEPT:]
        for key in (finding.accused, finding.accuser):
            if self._common(key) == {key}:
                return key, ""
        accused, accuser = finding.accused, finding.accuser
        return (accused, accuser) if self._common(accused) == {accused, accuser} else None

    def _common(self, key: str) -> frozenset[str]:
        """Who is in all findings with that peer; nobody, while they are too few or are explained by others as well."""
        its = [one for one in self._kept if key in one.suspects]
        if len(its) < LEAST:
            return frozenset()
        beside = [one for one in self._kept if key not in one.suspects]
        common = its[0].suspects.intersection(*(one.suspects for one in its[1:]))
        rivals = frozenset().union(*(one.suspects for one in its)) - {key}
        if any(sum(rival in one.suspects for one in beside) >= len(its) for rival in rivals):
            return frozenset()
        return common
