"""Whether the sums of a round are those of its parts: what a replica tells the leader, and whom the leader finds lying.

Every replica makes sketches of each sum that it receives and of its own part of it, with signs that follow from the bits of that sum, so
that its owner could not choose it to fit. Sketches add up as the vectors do. The owner, who has seen all parts, adds a sketch of each. For
rounds.py and rules/commit.py; docs/design/2026-11-23-checked-sums.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import msgspec

from shoal.core.messages import OwnedSums, Peer, Reduced, Result, Sketch
from shoal.core.names import key_of

ROUNDING = 2.0**-24  # of fp32, relative
SIGMAS = 8.0  # that a product with random signs may be off, in norms of the largest error
SAME = 1e-9  # by which two sketches of the same bits may differ, of the norm


class SummedChunk(msgspec.Struct, frozen=True):
    """Values `start` to `stop` of the gradient, whose sum has that digest; `owner`: the place in the group of who added it up."""

    start: int
    stop: int
    owner: int
    digest: str


class SumChecks:
    """What one replica knows of each owner's sums, of all pieces of a round together."""

    def __init__(self) -> None:
        self._sums: dict[Peer, OwnedSums] = {}
        self.chunks: list[SummedChunk] = []  # gathered so far

    def on_added(self, me: Peer, result: Result, row: Sequence[Peer], group: Sequence[Peer]) -> None:
        """I have added up a chunk: sketches of the parts of that row, and of what encoding has lost. Others of the group bring nothing."""
        if result.sketches:
            known, (*of_row, lost) = self._of(me), result.sketches
            by_peer = dict(zip(row, of_row, strict=True))
            parts = [by_peer.get(peer, Sketch()) for peer in group]
            before = known.parts or (Sketch(),) * len(parts)
            both = tuple(plus(pair) for pair in zip(before, parts, strict=True))
            self._sums[me] = msgspec.structs.replace(known, parts=both, lost=plus((known.lost, lost)))

    def on_gathered(self, owners: Sequence[Peer], result: Result) -> None:
        """A piece is gathered: of each chunk the sum's digest, its sketch, and that of my part."""
        of_sums, of_parts = result.sketches[::2], result.sketches[1::2]
        for owner, digest, of_sum, of_part in zip(owners, result.digests, of_sums, of_parts, strict=False):
            known = self._of(owner)
            self._sums[owner] = msgspec.structs.replace(
                known,
                digest=hashlib.sha256(f"{known.digest} {digest}".encode()).hexdigest(),
                sum=plus((known.sum, of_sum)),
                part=plus((known.part, of_part)),
            )

    def of(self, group: Sequence[Peer]) -> tuple[OwnedSums, ...]:
        return tuple(self._of(peer) for peer in group) if self._sums else ()

    def _of(self, owner: Peer) -> OwnedSums:
        return self._sums.get(owner, OwnedSums("", Sketch()))


class WrongSums(msgspec.Struct, frozen=True):
    """Owners whose sums are not those of the parts. `words`: who says that of whom, alone."""

    guilty: tuple[tuple[Peer, str], ...] = ()
    words: tuple[tuple[Peer, Peer, str], ...] = ()


def wrong_sums(group: Sequence[Peer], reduced: dict[Peer, Reduced], most_lost: float) -> WrongSums | None:
    """What the replicas of a stage say of each other's sums. An owner that contradicts itself, or two others, has lied; so has whoever
    contradicts two owners alone. Of one word against another the leader keeps count. `most_lost`: Settings.averaging_error."""
    sums = {peer: reduced[peer].sums for peer in group}
    if not any(sums.values()):
        return None
    silent = [peer for peer in group if len(sums[peer]) != len(group)]
    if silent:
        return WrongSums(tuple((peer, "does not say what its sums are made of") for peer in silent))
    return _compared(group, sums, most_lost)


def _compared(group: Sequence[Peer], sums: dict[Peer, tuple[OwnedSums, ...]], most_lost: float) -> WrongSums | None:
    """Every owner's words with its own parts, and with those of the others."""
    guilty, words = dict[Peer, str](), list[tuple[Peer, Peer]]()
    for at, owner in enumerate(group):
        said, others = sums[owner][at], [(place, peer) for place, peer in enumerate(group) if peer != owner]
        accusers = [peer for place, peer in others if _differ(said, sums[peer][at], place)]
        if _contradictory(said, most_lost):
            guilty[owner] = "its sums are not those of the parts that it lists"
        elif len({key_of(peer) for peer in accusers}) > 1:
            guilty[owner] = f"its sums are not those of the parts of {' and '.join(accusers)}"
        else:
            words += [(by, owner) for by in accusers]
    return _judged(guilty, [(by, owner) for by, owner in words if by not in guilty])


def _judged(guilty: dict[Peer, str], words: list[tuple[Peer, Peer]]) -> WrongSums | None:
    """`words`: who alone finds fault with whom; who does so with several is guilty, too."""
    accused: dict[Peer, list[Peer]] = {}
    for by, owner in words:
        accused.setdefault(by, []).append(owner)
    several = {by: owners for by, owners in accused.items() if len(owners) > 1}
    guilty |= {by: f"is the only one to find fault with the sums of {' and '.join(of)}" for by, of in several.items()}
    left = tuple((by, owner, f"sums that are not those of {by}'s parts") for by, owner in words if by not in several)
    return WrongSums(tuple(guilty.items()), left) if guilty or left else None


def _contradictory(said: OwnedSums, most_lost: float) -> bool:
    """Its own parts do not make its sum, as exactly as fp32 adds."""
    made = plus(said.parts)
    norms = math.fsum(math.sqrt(max(0.0, part.norm_sq)) for part in said.parts)
    lost, most = max(0.0, said.lost.norm_sq), most_lost**2 * max(0.0, said.sum.norm_sq)
    tolerance = SIGMAS * (len(said.parts) + 1) * ROUNDING * norms
    return not lost <= most or _far(made, plus((said.sum, said.lost)), tolerance)


def _differ(said: OwnedSums, known: OwnedSums, place: int) -> bool:
    """The owner says another thing of its sums than the replica at that place of the group."""
    part = said.parts[place] if place < len(said.parts) else Sketch()
    pairs = ((said.sum, known.sum), (part, known.part))
    return said.digest != known.digest or any(_unlike(one, other) for one, other in pairs)


def _unlike(one: Sketch, other: Sketch) -> bool:
    tolerance = SAME * math.sqrt(max(0.0, one.norm_sq))
    return _far(one, other, tolerance) or abs(one.norm_sq - other.norm_sq) > SAME * abs(one.norm_sq)


def _far(one: Sketch, other: Sketch, tolerance: float) -> bool:
    return not all(abs(a - b) <= tolerance for a, b in zip(one.products, other.products, strict=True))


def plus(sketches: Iterable[Sketch]) -> Sketch:
    """Norms add up where the vectors stand side by side, as chunks do."""
    a, b, c, d, squares = 0.0, 0.0, 0.0, 0.0, 0.0
    for one in sketches:
        a, b, c, d = a + one.products[0], b + one.products[1], c + one.products[2], d + one.products[3]
        squares += one.norm_sq
    return Sketch((a, b, c, d), squares)
