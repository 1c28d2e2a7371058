"""What the answers of an audit say of each other: who has used what, who has made it, and what another makes of the same. For audits.py.

Pure functions of a case and of answers, none of which is believed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from shoal.core.messages import (
    AuditAnswer,
    AuditedHop,
    Booking,
    Index,
    Peer,
    Recomputed,
    RecomputedHop,
    Reduced,
    Round,
    Sketch,
    Stage,
    TensorRecord,
)

Tensor = tuple[Index, Stage, bool]  # as BoundaryTensor names it
Unlike = tuple[Peer, Peer, str]  # two of whom one says something else of a tensor than the other, and of which

PRODUCTS = 4  # of a sketch
LOSSES = 2.0  # times what encoding should have lost that it may have lost


class Participant(msgspec.Struct, frozen=True):
    """Of the round, at `stage`, where it is number `place`; `indices`: what it booked."""

    stage: Stage
    place: int
    indices: tuple[Index, ...]


class Case(msgspec.Struct, frozen=True):
    """What is known of a step when its sums are made. `gone`: who has left in it; `norms`: of each stage's sum in the step before,
    squared; `rates`: microbatches per second, as
    the peers say; `longest`: to which norm a replica has to shorten its part, if it has to."""

    round: Round
    stages: int
    reduced: Mapping[Peer, Reduced]
    books: Mapping[Peer, tuple[Booking, ...]]
    serving: Mapping[Peer, Stage]
    gone: frozenset[Peer]
    norms: tuple[float, ...]
    rates: Mapping[Peer, float]
    longest: Mapping[Peer, float] = {}

    @property
    def who(self) -> dict[Peer, Participant]:
        return {
            share.peer: Participant(stage, place, share.indices)
            for stage, group in enumerate(self.round.groups)
            for place, share in enumerate(group)
        }

    @property
    def last(self) -> Stage:
        return self.stages - 1


class Inputs(msgspec.Struct):
    """Of all hops of one replica. `hops`: those of which it is agreed what came in, and from whom, `agree`
    with it; `whole`: that is all of them.
    `evades`: it does not say of all of them what it has used, or names nobody who could have sent it."""

    hops: list[AuditedHop] = []
    unlike: list[Unlike] = []
    agree: dict[Peer, None] = {}
    whole: bool = True
    evades: bool = False


class Listed:
    """What everybody says to have used and made."""

    def __init__(self, answers: Mapping[Peer, AuditAnswer]) -> None:
        self.answered = frozenset(answers)
        self.used: dict[Peer, dict[Tensor, TensorRecord]] = {}
        self.made: dict[Peer, dict[Tensor, TensorRecord]] = {}
        for peer, answer in answers.items():
            for record in answer.records:
                table = self.used if record.source else self.made
                table.setdefault(peer, {})[record.index, record.stage, record.gradient] = record

    def inputs(self, peer: Peer, one: Participant, case: Case) -> Inputs:
        """Of the hops that it has booked."""
        found, used = Inputs(), self.used.get(peer, {})
        for index in one.indices:
            sources: dict[bool, Peer] = {}
            for gradient in (False, True):
                if one.stage == (case.last if gradient else 0):
                    continue
                got = used.get((index, one.stage, gradient))
                said = self._said(got, one.stage, gradient, case)
                if said == "same":
                    assert got is not None
                    sources[gradient] = got.source
                    found.agree[got.source] = None
                elif said == "unlike":
                    assert got is not None
                    what = "gradient of the output" if gradient else "input"
                    found.unlike.append((peer, got.source, f"the {what} of microbatch {index} at stage {one.stage}"))
                found.whole &= said == "same"
                found.evades |= said == "evades"
            if set(tokens_at(one.stage, case.last)) - {key[2] for key in used if key[:2] == (index, one.stage)}:
                found.evades, found.whole = True, False
            found.hops.append(AuditedHop(index, sources.get(False, ""), sources.get(True, "")))
        return found

    def _said(self, got: TensorRecord | None, stage: Stage, gradient: bool, case: Case) -> str:
        """What its maker says of a tensor that a replica of that stage says to have used."""
        if got is None:
            return "evades"
        if got.source not in self.answered:
            left = got.source in case.gone or got.source in case.serving
            return "unknown" if left else "evades"
        made = self.made.get(got.source, {}).get((got.index, stage, gradient))
        # It is back, maybe at another stage, and holds nothing of what it made before
        if made is None and got.source in case.gone:
            return "unknown"
        if case.who[got.source].stage != (stage + 1 if gradient else stage - 1):
            return "evades"
        return "same" if made is not None and _same(made, got) else "unlike"

    def sketch(self, peer: Peer, tensor: Tensor) -> Sketch | None:
        """Of a tensor that it says to have made, or another to have got from it; None: it is held nowhere any more."""
        records = [self.made.get(peer, {}).get(tensor)]
        records += [table[tensor] for table in self.used.values() if tensor in table and table[tensor].source == peer]
        return next((one.sketch for one in records if one is not None and _sketched(one)), None)


def _same(one: TensorRecord, other: TensorRecord) -> bool:
    """Of a tensor that was let go of before the audit there is a digest alone."""
    return one.digest == other.digest and (one.sketch == other.sketch or not (_sketched(one) and _sketched(other)))


def _sketched(record: TensorRecord) -> bool:
    return record.sketch != Sketch()


def tokens_at(stage: Stage, last: Stage) -> tuple[bool, ...]:
    """How the record of a hop's tokens names them: as its input at the first stage, as the gradient of its output at the last."""
    return (False,) if stage == 0 else (True,) if stage == last else ()


def unlike_inputs(of: Peer, by: Peer, result: Recomputed, case: Case, listed: Listed) -> list[Unlike]:
    """Where `by` has been given other tensors for the hops of `of` than `of` says to have used."""
    stage, used = case.who[of].stage, listed.used.get(of, {})
    found = []
    for hop in result.hops:
        for gradient, digest in ((False, hop.input), (True, hop.grad)):
            record = used.get((hop.index, stage, gradient))
            if stage != (case.last if gradient else 0) and record is not None and record.digest != digest:
                found.append((by, record.source, f"a tensor of microbatch {hop.index} that it has sent to others"))
        for gradient in tokens_at(stage, case.last):
            record = used.get((hop.index, stage, gradient))
            if record is not None and record.digest != hop.tokens and record.source in case.serving:
                found.append((of, record.source, f"the tokens of microbatch {hop.index}"))
    return found


def difference(
    of: Peer, result: Recomputed, case: Case, listed: Listed, tolerance: float, part_tolerance: float
) -> str:
    """What of the hops of `of` differs from `result`, which was computed from the same inputs; '': nothing does."""
    one = case.who[of]
    losses = {booking.index: booking.loss for booking in case.books.get(of, ())}
    for hop in result.hops:
        for what, key, sketch in (
            ("output", (hop.index, one.stage + 1, False), hop.output),
            ("input gradient", (hop.index, one.stage - 1, True), hop.gradient),
        ):
            theirs = listed.sketch(of, key)
            apart = distance([sketch], [theirs]) if theirs is not None else 0.0
            if not apart <= tolerance:
                return f"its {what} of stage {one.stage} for microbatch {hop.index} differs by {apart:.2g} of its norm"
        if one.stage == case.last and not _near(hop, losses.get(hop.index), tolerance):
            return f"its loss of microbatch {hop.index} is {losses.get(hop.index)}, not {hop.loss}"
    parts = parts_of(of, case)
    own = shortened(result.parts, case.longest.get(of))
    apart = distance(own, parts) if parts and own else 0.0
    if apart <= part_tolerance + encoded(of, parts, case):
        return ""
    return f"what it has brought into the round differs by {apart:.2g} of its norm from the gradients of its hops"


def _near(hop: RecomputedHop, booked: float | None, tolerance: float) -> bool:
    return booked is not None and hop.loss is not None and abs(booked - hop.loss) <= tolerance * max(1.0, abs(hop.loss))


def parts_of(peer: Peer, case: Case) -> list[Sketch]:
    """Of what it has brought, as each owner of chunks has listed it; checked.py has compared that with its own words."""
    one = case.who[peer]
    parts = []
    for place, share in enumerate(case.round.groups[one.stage]):
        sums = case.reduced[share.peer].sums
        if place >= len(sums) or one.place >= len(sums[place].parts):
            return []
        parts.append(sums[place].parts[one.place])
    return parts


def shortened(parts: Sequence[Sketch], longest: float | None) -> Sequence[Sketch]:
    """As a replica whose gradient that is has to bring them."""
    norm = math.sqrt(sum(max(0.0, one.norm_sq) for one in parts))
    if longest is None or not norm > longest:
        return parts
    scale = longest / norm
    return [scaled(one, scale) for one in parts]


def scaled(one: Sketch, scale: float) -> Sketch:
    a, b, c, d = one.products
    return Sketch((a * scale, b * scale, c * scale, d * scale), one.norm_sq * scale**2)


def encoded(peer: Peer, parts: Sequence[Sketch], case: Case) -> float:
    """How far a part may be from its gradient, as a share of its norm, because of what encoding loses: of this part, of the part of the
    step before and of the sums that its replica owned then, both of which were added to it. Sums show how much the code loses."""
    one, lost = case.who[peer], 0.0
    sums = [case.reduced[share.peer].sums[at] for at, share in enumerate(case.round.groups[one.stage])] if parts else []
    for owned in sums:
        if owned.sum.norm_sq > 0.0:
            lost = max(lost, math.sqrt(max(0.0, owned.lost.norm_sq) / owned.sum.norm_sq))
    now, part = (math.fsum(one.norm_sq for one in sketches) for sketches in ([owned.sum for owned in sums], parts))
    if not (lost > 0.0 and now > 0.0 and part > 0.0):
        return 0.0
    before = case.norms[one.stage] / now if one.stage < len(case.norms) else 0.0
    return LOSSES * lost * math.sqrt(1.0 + before * (1.0 + sums[one.place].sum.norm_sq / part))


def distance(own: Sequence[Sketch], theirs: Sequence[Sketch]) -> float:
    """Estimate of the norm of the difference, as a share of the norm of `own`; infinite where that is 0 and `theirs` is not."""
    if len(own) != len(theirs):
        return math.inf
    norm_sq = math.fsum(one.norm_sq for one in own)
    pairs = zip(own, theirs, strict=True)
    apart = math.fsum((a - b) ** 2 for mine, other in pairs for a, b in zip(mine.products, other.products, strict=True))
    if not norm_sq > 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return math.sqrt(apart / PRODUCTS / norm_sq)
