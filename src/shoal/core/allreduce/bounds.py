"""How long a replica's part of a round may be, where run.robust = "clip": so many times as long as its stage's parts usually are.

Everybody computes it from the agreed view alone: the reference is the median part of the last commit. A replica shortens its own part
before it cuts it, so that the sum stays the sum of what was sent, and checked.py finds a wrong one as before. The owners of chunks list
how long each part was that they received; whoever sent a longer one than it knew was allowed is found before the commit. For rounds.py,
rules/commit.py and validity.py; docs/design/2026-11-25-bounded-parts.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.core.allreduce.layout import ONE_ROW
from shoal.core.messages import Peer, Reduced, Round, Settings, Share, Sketch, View

FACTOR = 1.5  # of the reference, that a part may be long; measured: benchmarks/robust.py
FEWEST = 3  # replicas whose parts have a median that one of them cannot choose
SPREAD = 64.0  # of a norm squared: four products of random signs have together more with a probability of 1e-12
SLACK = 1e-3  # of a norm, for rounding


def longest(
    references: Sequence[float], stage: int, group: Sequence[Share], me: Share, settings: Settings
) -> float | None:
    """The norm that `me` may bring into the round of its stage's `group`; None: any. The noise of n microbatches together is sqrt(n)
    times that of one, what they have in common n times: whoever has more than its even share is allowed the larger."""
    reference = references[stage] if stage < len(references) else 0.0
    if settings.robust != "clip" or not reference > 0.0 or not 2 <= len(group) <= ONE_ROW:
        return None
    count, even = len(me.indices), settings.microbatches / len(group)
    if settings.averaging_error:
        count = max(1, count)  # who has computed none may still bring what an encoding has left out
    return FACTOR * reference * math.sqrt(count * max(1.0, count / even))


def allowed(view: View | None, stage: int, message: Round, me: Peer, settings: Settings) -> float | None:
    """The norm of what `me` may bring into that round of its stage."""
    assert view is not None, "a round has a view"
    group = message.groups[stage]
    mine = next(share for share in group if share.peer == me)
    return longest(view.part_norms, stage, group, mine, settings)


def lengths(group: Sequence[Share], reduced: Mapping[Peer, Reduced]) -> tuple[float, ...]:
    """The norm of what each replica brought, as the owners of chunks list it; () where they do not. An owner's word of its own part is
    held against the products of the same sketch."""
    sums = [reduced[share.peer].sums for share in group]
    if any(len(known) != len(group) for known in sums):
        return ()
    # One that brings nothing may own nothing: the others know the digests of all sums that it has made
    owned = [known[at] for at, known in enumerate(sums) if group[at].indices or known[at].digest]
    if any(len(each.parts) != len(group) for each in owned):
        return ()
    return tuple(math.sqrt(math.fsum(_norm_sq(each.parts[at]) for each in owned)) for at in range(len(group)))


def _norm_sq(part: Sketch) -> float:
    """Whatever a peer says: infinite where that is not a number."""
    norm_sq = max(part.norm_sq, sum(product * product for product in part.products) / SPREAD)
    return norm_sq if norm_sq < math.inf else math.inf


def too_long(
    references: Sequence[float], stage: int, group: Sequence[Share], reduced: Mapping[Peer, Reduced], settings: Settings
) -> tuple[tuple[Peer, str], ...]:
    """Who has brought more than it was allowed, and knew."""
    found = list[tuple[Peer, str]]()
    for share, length in zip(group, lengths(group, reduced), strict=False):
        most = longest(references, stage, group, share, settings)
        if most is not None and not length <= most * (1.0 + SLACK) * (1.0 + settings.averaging_error):
            times = f"{length / most:.3g} times" if most else "though it computed nothing,"
            found.append((share.peer, f"brought a part into the round that is {times} as long as run.robust allows"))
    return tuple(found)


def following(
    before: Sequence[float], groups: Sequence[Sequence[Share]], reduced: Mapping[Peer, Reduced], settings: Settings
) -> tuple[float, ...]:
    """The references after a commit of these groups: of each stage the lower median part of a microbatch, 0.0 while it is not known."""
    if settings.robust != "clip":
        return ()
    old = (*before, *(0.0,) * (len(groups) - len(before)))
    return tuple(_reference(was, group, lengths(group, reduced)) for was, group in zip(old, groups, strict=True))


def _reference(before: float, group: Sequence[Share], known: Sequence[float]) -> float:
    """It follows slowly: otherwise one step could take it anywhere."""
    parts = sorted(
        length / math.sqrt(len(share.indices)) for share, length in zip(group, known, strict=False) if share.indices
    )
    median = parts[(len(parts) - 1) // 2] if len(parts) >= FEWEST else math.inf
    if median == math.inf:
        return before
    return min(max(median, before / FACTOR), before * FACTOR) if before > 0.0 else median


def flaw(before: Sequence[float], after: Sequence[float], commits: bool, settings: Settings) -> str:
    """What is wrong with the references of a view that follows one with those of `before`; '' if nothing is. For every voter."""
    if tuple(after) == tuple(before):
        return ""
    if not commits or settings.robust != "clip" or len(after) != settings.stages:
        return f"the norms of parts {after} after {before}"
    old = (*before, *(0.0,) * (len(after) - len(before)))
    for was, now in zip(old, after, strict=True):
        if not 0.0 <= now < math.inf or (
            was > 0.0 and not was / FACTOR * (1.0 - SLACK) <= now <= was * FACTOR * (1.0 + SLACK)
        ):
            return f"the norm {now:g} of a stage's parts after {was:g}"
    return ""
