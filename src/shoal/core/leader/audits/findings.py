"""Who is wrong, where two say something else of the same tensor. For evictions.py.

A difference is a fact about two: who says to have got something else, and who says to have made it, or has computed it again. One of them
is wrong. So while one peer lies it is in all findings, and each of the others has one opponent, the liar. Whoever has more opponents than
any of these has is convicted, and its findings explain nothing more; where they have as many, whoever agrees with fewer others. Of two
that have only each other the word of the one that received counts as any word of one peer against another's does (evictions.py). Where
nothing tells liars from honest peers, nobody is convicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

LEAST = 3  # findings that convict
KEPT = 256  # the newest


class Finding(msgspec.Struct, frozen=True):
    """By keys: `accuser` says something else of a tensor than `accused`."""

    accuser: str
    accused: str


class Findings:
    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._agree: dict[str, set[str]] = {}  # with whom each has agreed

    def forget(self) -> None:
        self._kept.clear()
        self._agree.clear()

    def keep(self, present: Collection[str]) -> None:
        """Findings with a peer that has left are explained by it, as far as anybody can tell."""
        self._kept = [one for one in self._kept if one.accuser in present and one.accused in present]

    def add(self, findings: list[Finding], agree: Iterable[tuple[str, str]]) -> None:
        """`agree`: those who say the same of all tensors that they have exchanged."""
        self._kept = [*self._kept, *findings][-KEPT:]
        for one, other in agree:
            self._agree.setdefault(one, set()).add(other)
            self._agree.setdefault(other, set()).add(one)

    def convicted(self) -> list[tuple[str, str]]:
        """Keys of those that the findings convict, each with the only one whose word that is; "" where several agree."""
        verdicts, left = list[tuple[str, str]](), self._kept
        while (verdict := _next(left, self._agree)) is not None:
            verdicts.append(verdict)
            left = [one for one in left if verdict[0] not in (one.accuser, one.accused)]
        return verdicts


def _next(findings: list[Finding], agree: Mapping[str, set[str]]) -> tuple[str, str] | None:
    opponents: dict[str, set[str]] = {}
    times = Counter[str]()
    for one in findings:
        for peer, other in ((one.accuser, one.accused), (one.accused, one.accuser)):
            opponents.setdefault(peer, set()).add(other)
            times[peer] += 1
    doubt = {peer: (len(of), -len(agree.get(peer, set()) - of)) for peer, of in opponents.items()}
    for peer in sorted(opponents, key=lambda one: (doubt[one], one), reverse=True):
        of = opponents[peer]
        if times[peer] >= LEAST and len(of) > 1 and doubt[peer] > max(doubt[other] for other in of):
            return peer, ""
    for one in findings:
        alone = opponents[one.accused] == {one.accuser} and opponents[one.accuser] == {one.accused}
        if alone and times[one.accused] >= LEAST:
            return one.accused, one.accuser
    return None
