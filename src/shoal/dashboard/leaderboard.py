"""Who contributed what to a run, as text, CSV or JSON: for `shoal leaderboard`, `shoal status` and the page.

Fed with credits of agreed commits; decides nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal import units
from shoal.escaping import escaped
from shoal.runtime.records.account import Credit

NAMED = 5  # in a line
KEY_CHARS = 8  # of a key's id: enough to tell some hundred apart


class Eviction(msgspec.Struct, frozen=True):
    """That peer was evicted for what it did, while `step` was trained."""

    step: int
    epoch: int
    peer: str
    reason: str


class Contributor(msgspec.Struct, frozen=True, kw_only=True):
    """One key, or all keys of one person. `tokens` is its share of what was trained: a microbatch's tokens are shared by the stages."""

    rank: int
    person: str  # whom the invite is for; its id where that is not known
    keys: tuple[str, ...]  # ids
    microbatches: int  # added at some stage: one that passes four stages counts four times in all
    share: float  # of all that are credited
    tokens: int
    stages: dict[str, int]  # microbatches by stage
    steps: int
    seconds: float  # that those took
    evictions: tuple[Eviction, ...] = ()


class Leaderboard(msgspec.Struct, frozen=True, kw_only=True):
    """`credited`: steps of which is known who contributed; the others were committed while nobody here was there, or are too old."""

    run: str
    steps: int
    credited: int
    contributors: tuple[Contributor, ...]


def leaderboard(
    run: str,
    credits: Sequence[Credit],
    steps: tuple[int, int],
    titles: Mapping[str, str],
    tokens: tuple[int, int],
    evictions: Iterable[Eviction] = (),
    *,
    by_person: bool = True,
) -> Leaderboard:
    """`steps`: all, and those that are credited. `titles`: whom each invite is for. `tokens`: of a microbatch, and the number of stages."""
    groups: dict[str, list[Credit]] = {}
    for one in credits:
        key, _, invite = one.who.partition(".")
        groups.setdefault((titles.get(invite) or invite) if by_person else key, []).append(one)
    evicted = list(evictions)
    total = sum(one.microbatches for one in credits)
    order = sorted(groups, key=lambda name: (-sum(one.microbatches for one in groups[name]), name))
    return Leaderboard(
        run=run,
        steps=steps[0],
        credited=steps[1],
        contributors=tuple(
            _contributor(rank, groups[name], total, titles, tokens, evicted) for rank, name in enumerate(order, 1)
        ),
    )


def _contributor(
    rank: int,
    credits: Sequence[Credit],
    total: int,
    titles: Mapping[str, str],
    tokens: tuple[int, int],
    evictions: Sequence[Eviction],
) -> Contributor:
    keys = tuple(dict.fromkeys(one.who.partition(".")[0] for one in credits))
    invite = credits[0].who.partition(".")[2]
    microbatches = sum(one.microbatches for one in credits)
    stages: dict[str, int] = {}
    for one in credits:
        stages[str(one.stage)] = stages.get(str(one.stage), 0) + one.microbatches
    return Contributor(
        rank=rank,
        person=titles.get(invite) or invite,
        keys=keys,
        microbatches=microbatches,
        share=microbatches / total if total else 0.0,
        tokens=round(microbatches * tokens[0] / max(1, tokens[1])),
        stages=dict(sorted(stages.items(), key=lambda item: int(item[0]))),
        steps=sum(one.steps for one in credits),
        seconds=sum(one.seconds for one in credits),
        evictions=tuple(one for one in evictions if one.peer.partition(".")[0] in keys),
    )


def text(board: Leaderboard) -> str:
    rows = [("", "who", "keys", "microbatches", "share", "tokens", "by stage", "time", "evicted")]
    rows += [
        (
            str(one.rank),
            escaped(one.person),
            ", ".join(key[:KEY_CHARS] for key in one.keys[:3]) + (" ..." if len(one.keys) > 3 else ""),
            f"{one.microbatches:,}",
            f"{one.share:.1%}",
            f"{one.tokens:,}",
            " ".join(f"{stage}:{count:,}" for stage, count in one.stages.items()),
            units.duration(one.seconds) if one.seconds else "",
            f"{len(one.evictions)}x" if one.evictions else "",
        )
        for one in board.contributors
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(
        f"{escaped(board.run)}: {board.credited:,} of {board.steps:,} committed steps are credited; undone ones are not"
    )
    evicted = {one for contributor in board.contributors for one in contributor.evictions}
    for one in sorted(evicted, key=lambda each: (each.epoch, each.step, each.peer)):
        lines.append(escaped(f"{one.peer[:KEY_CHARS]} was evicted in step {one.step:,}: {one.reason}"))
    return "\n".join(lines)


def line(board: Leaderboard) -> str:
    """Those that contributed most."""
    most = [f"{escaped(one.person)} {one.share:.1%}" for one in board.contributors[:NAMED]]
    others = len(board.contributors) - len(most)
    return f"contributed: {', '.join(most)}{f' and {others} others' if others else ''} (all of it: shoal leaderboard)"


def as_csv(board: Leaderboard) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["rank", "person", "keys", "microbatches", "share", "tokens", "stages", "steps", "seconds", "evictions"]
    )
    for one in board.contributors:
        stages = " ".join(f"{stage}:{count}" for stage, count in one.stages.items())
        seconds, evictions = round(one.seconds, 1), len(one.evictions)
        person = f"'{one.person}" if one.person[:1] in "=+-@" else one.person  # a spreadsheet would compute it
        writer.writerow(
            [
                one.rank,
                person,
                " ".join(one.keys),
                one.microbatches,
                one.share,
                one.tokens,
                stages,
                one.steps,
                seconds,
                evictions,
            ]
        )
    return out.getvalue()
