"""One piece of the gradient on its way through a round. For rounds.py."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.core.allreduce.checked import SummedChunk
from shoal.core.allreduce.layout import Layout, Role
from shoal.core.messages import Add, AddRow, Cut, Gather, Peer

Work = Cut | AddRow | Add | Gather


class Piece(msgspec.Struct):
    """One piece of the gradient on its way through a round; most rounds have only one."""

    layout: Layout
    role: Role  # mine in it
    number: int = 0
    cut: dict[int, str] = msgspec.field(default_factory=dict)  # my, or my row's, part of each chunk, once cut
    parts: dict[int, dict[Peer, str]] = msgspec.field(default_factory=dict)  # of each chunk that I add up
    sums: dict[int, str] = msgspec.field(default_factory=dict)  # of the piece's chunks
    before: dict[int, str] = msgspec.field(default_factory=dict)  # sums of the piece before this one, that I tell
    adding: dict[str, int] = msgspec.field(default_factory=dict)  # by task, also past ones of the piece: which chunk
    gathering: bool = False


def missing_from(piece: Piece, name: Peer) -> list[tuple[Peer, int, bool]]:
    """Whose part, or (True) sum, of which chunk is not here yet: parts first."""
    missing = list[tuple[Peer, int, bool]]()
    for number, peers in piece.role.adds.items():
        if number not in piece.adding.values():
            held = piece.parts.get(number, {})
            missing += [(peer, number, False) for peer in peers if peer != name and peer not in held]
    receives = piece.role.receives.items()
    return missing + [(peer, number, True) for number, peer in receives if peer != name and number not in piece.sums]


def sums_for_others(piece: Piece) -> dict[int, str]:
    """Sums that others may ask me for again."""
    return {number: piece.sums[number] for number, peers in piece.role.broadcasts.items() if peers}


def is_checked(layout: Layout) -> bool:
    """Sums of one row, of several replicas, are compared with their parts."""
    return len(layout.rows) == 1 < len(layout.rows[0])


def own_parts(piece: Piece) -> tuple[str, ...]:
    """What I have sent to the owner of each chunk; '' of chunks that I have added up, and where I bring nothing; () where sums are not
    checked."""
    if not is_checked(piece.layout):
        return ()
    return tuple("" if number in piece.role.adds else piece.cut.get(number, "") for number in piece.role.receives)


def summed(layout: Layout, group: Sequence[Peer], digests: Sequence[str]) -> list[SummedChunk]:
    """The chunks of a piece that is gathered; `digests` are empty where sums are not checked."""
    bounds = zip(layout.bounds[:-1], layout.bounds[1:], layout.owners, digests, strict=False)
    return [SummedChunk(start, stop, group.index(owner), digest) for start, stop, owner, digest in bounds]
