"""How a stage's replicas add up their gradients: who owns which chunk of it, and whether a round may be taken part in.

For rounds.py, which exchanges the chunks, and for the coordinator, which may ask the same questions before it opens a round.
Pure arithmetic on what the round lists. A stage's flat gradient is averaged piece by piece, so that memory for it has a bound;
most are one piece. A group of n replicas cuts a piece into n chunks, one owner each (reduce-scatter, then all-gather), and
every owner adds in group order, so that all replicas get the same bits, whatever the pieces.

A group of more than 16 stands in rows, so that nobody needs a connection to everybody
(docs/design/2026-11-22-large-groups.md). Each row cuts the piece by itself, one chunk for each of its replicas, who add up the row's
sum of it. Between two neighbouring cuts of whatever rows lies a segment: one replica of each row has the row's sum of it. Those are
a column; they cut the segment once more, one chunk each, and add the rows' sums in row order. Every replica receives each of those
sums from the replica of its own row that stands in the column. One row is the same with nothing to be done between rows.

A large piece of one row is cut into SLICES first, and every slice among the owners: the sums of one slice are sent while the parts of
the next arrive. Otherwise every line is idle in the middle of a round, from its last part until the slowest part of another has come.

Where it is known how wide the replicas' lines are, by a plan or measured, and they differ, a group of one row owns in proportion: who
owns the share w of the gradient sends and receives 1 + (n - 2) w of it, and between 1 and 2 (n - 1) / n lies what a narrow line can be
spared. It is spared only if parts and sums are on their way at the same time: sums go first (docs/design/2026-11-22-weighted-owners.md).

A replica that has booked nothing, as a newcomer in its first round, would send zeros, over connections that have never carried bulk. In a
group of one row and one piece it owns nothing, sends nothing and receives the sums (`Layout.listeners`), unless few are left to own them,
whose lines would be busy for longer. In several pieces it takes part: otherwise the others could be pieces ahead of it
(docs/design/2026-11-27-listeners.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import isqrt

import msgspec

from shoal.core.messages import Peer, Round, Settings, Share, View

MOST_CHUNKS = 1 << 19  # in all pieces together: half of what a message can name
ONE_ROW = 16  # replicas that all exchange with all, over 15 connections each; 17 in three rows need 8
SLICES = 8  # of a piece: one is gathered while the next is reduced, the last is gathered alone
SLICE_VALUES = 1 << 16  # of a chunk, at least, where owners are even: one fragment of the transport
SPARED = 0.9  # of the time that even owners take must be enough, or they stay even
LISTENING = 1.5  # times as long may the busiest line be busy where those that bring nothing own nothing: new connections are slow
# In which one replica stands at most, and with one other: a row cuts a chunk of a row of nearly its length once
COLUMNS = 2


class Role(msgspec.Struct, frozen=True):
    """What one replica does with a piece. Chunks go by their numbers."""

    cuts: tuple[int, ...]  # bounds of what its own sum is cut into
    sends: dict[int, Peer]  # that, and who adds it up, in the order in which it is sent
    seams: tuple[int, ...]  # bounds of what its row's sum is cut into; none in a group of one row
    forwards: dict[int, Peer]  # that, and who adds it up, likewise
    adds: dict[int, tuple[Peer, ...]]  # what it adds up itself, and who sends it, in the order of the additions
    receives: dict[int, Peer]  # every chunk of the group's sum, in order, and from whom: from itself what it adds up
    broadcasts: dict[int, tuple[Peer, ...]]  # those that it sends to others


class Layout(msgspec.Struct, frozen=True):
    """Of one piece: chunk number `first` + c of the group's sum is values bounds[c] to bounds[c + 1] of the gradient; owners[c] adds
    it up. Of several rows each cuts the piece at its own cuts[row], and numbers these chunks from `inner` on."""

    rows: tuple[tuple[Peer, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    bounds: tuple[int, ...]
    columns: tuple[tuple[Peer, ...], ...]  # of chunk c, by row: who adds up the row's sum of it
    owners: tuple[Peer, ...]
    first: int = 0
    inner: int = 0
    last: bool = True  # no piece comes after this one
    slices: int = 1  # of a group of one row, of which each owner has a chunk
    weighted: bool = False  # owners are as unlike as their lines
    listeners: tuple[Peer, ...] = ()  # of the group, in no row: they bring nothing

    @property
    def stride(self) -> int:
        """Numbers of one piece."""
        return stride(sum(map(len, self.rows))) * self.slices

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.owners))

    def row_of(self, peer: Peer) -> int:
        """Also of one that only listens: it receives the sums from one row."""
        for number, row in enumerate(self.rows):
            if peer in row:
                return number
        return bisect_left(sorted(one for row in self.rows for one in row), peer) % len(self.rows)

    def values(self, number: int) -> int:
        """Of the chunk of that number, about; exactly of one of the group's sum."""
        if number in self.numbers:
            return self.bounds[number - self.first + 1] - self.bounds[number - self.first]
        return (self.bounds[-1] - self.bounds[0]) // min(map(len, self.rows))

    def receives(self, peer: Peer) -> dict[int, Peer]:
        """Every chunk of the group's sum, in order, and from whom that replica or listener receives it."""
        at, chunks = self.row_of(peer), zip(self.numbers, self.owners, self.columns, strict=True)
        return {number: owner if column[at] == peer else column[at] for number, owner, column in chunks}

    def role(self, peer: Peer) -> Role:
        """Of a replica of the group. What all send at once goes to those after the sender first: when all begin with the first,
        its line is the bound and the others' lines wait (8 replicas on shaped lines: 10.1 s against 7.1 s in the planner's model)."""
        if peer in self.listeners:
            return Role((), {}, (), {}, {}, self.receives(peer), {})
        at = self.row_of(peer)
        row, cuts = self.rows[at], self.cuts[at]
        inner = {self.inner + chunk: owner for chunk, owner in enumerate(self._adders(at))}
        sends = {number: inner[number] for number in _turned(inner, row, row.index(peer))}
        mine = {self.first + c: c for c, column in enumerate(self.columns) if column[at] == peer}
        owned = {number: self.columns[c] for number, c in mine.items() if self.owners[c] == peer}
        broadcasts = {
            number: _others(owned.get(number, (peer,)), peer) + _others(row, peer) + self.listeners for number in mine
        }
        if len(self.rows) == 1:
            return Role(cuts, sends, (), {}, dict.fromkeys(owned, row), self.receives(peer), broadcasts)
        adds = {number: row for number, owner in inner.items() if owner == peer} | owned
        seams = tuple(sorted({bound for c in mine.values() for bound in self.bounds[c : c + 2]}))
        by_row = sorted(mine, key=lambda number: (self._rows_down(at, mine[number]), number))
        forwards = {number: self.owners[mine[number]] for number in by_row}
        return Role(cuts, sends, seams, forwards, adds, self.receives(peer), broadcasts)

    def _adders(self, row: int) -> tuple[Peer, ...]:
        """Of a row's chunks, in their order."""
        return self.owners if len(self.rows) == 1 else self.rows[row][: len(self.cuts[row]) - 1]

    def _rows_down(self, row: int, chunk: int) -> int:
        """How many rows after that one the owner of the chunk stands."""
        return (self.columns[chunk].index(self.owners[chunk]) - row - 1) % len(self.rows)


def layout_of(
    length: int, shares: Sequence[Share], settings: Settings, piece: int = 0, most: int | None = None
) -> Layout:
    """Of that piece of a stage's gradient of `length` values, for the replicas that a round lists with these shares. `most`: values of a
    piece; None: as the settings say. Where sums are encoded everybody takes part: what an encoding has left of its sum may be brought by
    one that has booked nothing."""
    most = settings.piece_values if most is None else most
    group = tuple(share.peer for share in shares)
    bringing = tuple(share for share in shares if share.indices)
    if not settings.averaging_error and 0 < len(bringing) < len(group) <= ONE_ROW:
        layout = _with_listeners(length, shares, bringing, most)
        if layout.last and _quick_enough(shares, bringing):
            return layout
    return split(length, group, most, piece, tuple(share.line_rate for share in shares))


def _with_listeners(length: int, shares: Sequence[Share], bringing: Sequence[Share], most: int) -> Layout:
    peers, line_rates = zip(*((share.peer, share.line_rate) for share in bringing), strict=True)
    listeners = tuple(share.peer for share in shares if not share.indices)
    layout = split(length, peers, most, 0, line_rates, len(listeners))
    return msgspec.structs.replace(layout, listeners=listeners)


def _quick_enough(shares: Sequence[Share], bringing: Sequence[Share]) -> bool:
    """Whether those that bring something may own everything. Few of them send every sum to all the others."""
    narrowest = min((share.line_rate for share in shares if share.line_rate), default=1)
    all_rates, rates = ([share.line_rate or narrowest for share in each] for each in (shares, bringing))
    return min(busy_times(rates, len(shares) - len(bringing))) <= LISTENING * min(busy_times(all_rates))


def split(
    length: int,
    group: Sequence[Peer],
    most: int = 0,
    piece: int = 0,
    line_rates: Sequence[int] = (),
    listeners: int = 0,
) -> Layout:
    """Cut `length` values into the fewest even pieces of at most `most` (0: one), and piece number `piece` into chunks: as evenly
    as whole values allow, or as `owned` says of the `line_rates` of the replicas' lines and of so many `listeners`. Later replicas own
    nothing when a piece has fewer values than the group has replicas. Unevenly owned pieces are shorter, so that no owner holds more
    parts at once than an even one."""
    assert group, "a group has at least one replica"
    rows, shares = rows_of(group), owned(line_rates, listeners)
    pieces, slices = _counts(length, len(group), most, shares)
    start, stop = _cut(length, pieces, piece), _cut(length, pieces, piece + 1)
    first, last = piece * slices * stride(len(group)), piece + 1 == pieces
    if slices > 1:
        bounds, owners = _sliced(start, stop, group, shares or (1,) * len(group), slices)
        columns_of_one = tuple((one,) for one in owners)
        return Layout(rows, (bounds,), bounds, columns_of_one, owners, first, first, last, slices, bool(shares))
    cuts = tuple(_bounds(start, stop, len(row)) for row in rows)
    edges, columns, owned_by = [start], list[tuple[Peer, ...]](), list[Peer]()
    segments = sorted({bound for cut in cuts for bound in cut})
    for low, high in pairwise(segments) if len(segments) > 1 else [(start, stop)]:
        column = tuple(row[min(bisect_right(cut, low), len(cut) - 1) - 1] for row, cut in zip(rows, cuts, strict=True))
        inside = _bounds(low, high, len(rows))[1:]
        edges += inside
        columns += [column] * len(inside)
        owned_by += column[: len(inside)]
    inner = first if len(rows) == 1 else first + _most_owned(len(group))
    return Layout(rows, cuts, tuple(edges), tuple(columns), tuple(owned_by), first, inner, last)


def owned(line_rates: Sequence[int], listeners: int = 0) -> tuple[int, ...]:
    """In what proportion replicas with lines of these line_rates (any unit; 0: not known, so as narrow as the narrowest) own the
    gradient, so that the busiest line is as little busy as can be; () when evenly is as good. `listeners`: others that receive the sums.

    Of n replicas and listeners, who owns w of L values sends and receives (1 + (n - 2) w) L. Filling all lines to the same time T gives
    T = (n - 2 + k) / (b_1 + ... + b_k) for the k widest lines, which own (T b - 1) / (n - 2) each; the others own nothing and need
    1 / b."""
    known = [width for width in line_rates if width > 0]
    if not known or not 3 <= len(line_rates) + listeners <= ONE_ROW:
        return ()
    lines = [width or min(known) for width in line_rates]
    even_s, own_s = busy_times(lines, listeners)
    if own_s > SPARED * even_s:
        return ()
    full, together = _filled(lines, listeners)
    return tuple(max(0, full * line - together) for line in lines)


def busy_times(lines: Sequence[int], listeners: int = 0) -> tuple[float, float]:
    """How long a round keeps the busiest of a group's lines, in the seconds in which a line of rate 1 carries the gradient once: of
    even owners, and of owners by line rate with their last slice, which is gathered alone. All rates are known."""
    everybody = len(lines) + listeners
    even_s = (1 + (everybody - 2) / len(lines)) / min(lines) if everybody > 1 else 0.0
    if not 3 <= everybody <= ONE_ROW:
        return even_s, even_s
    full, together = _filled(lines, listeners)
    return even_s, max(1 / min(lines), full / together) * (1 + 1 / SLICES)


def _filled(lines: Sequence[int], listeners: int) -> tuple[int, int]:
    """n - 2 + k, and the rates of the k widest lines together."""
    others, widest = len(lines) + listeners - 2, sorted(lines, reverse=True)
    owners = max(k for k in range(1, len(lines) + 1) if (others + k) * widest[k - 1] > sum(widest[:k]))
    return others + owners, sum(widest[:owners])


def _counts(length: int, replicas: int, most: int, shares: Sequence[int]) -> tuple[int, int]:
    """Pieces of a gradient, and slices of each: even owners of one row have as many as leave chunks of SLICE_VALUES."""
    if shares and most:
        most = max(1, most * sum(shares) // (replicas * max(shares)))
    pieces = max(1, -(-length // max(most, replicas)) if most else 1)
    slices = SLICES if shares else 1
    if not shares and 1 < replicas <= ONE_ROW:
        slices = max(1, min(SLICES, length // pieces // (replicas * SLICE_VALUES)))
    return max(1, min(pieces, MOST_CHUNKS // (slices * stride(replicas)))), slices


def _sliced(
    start: int, stop: int, group: Sequence[Peer], shares: Sequence[int], slices: int
) -> tuple[tuple[int, ...], tuple[Peer, ...]]:
    """Bounds and owners of the chunks: of every slice one for each replica that owns, as far as there are values."""
    bounds, owners, upto, whole = [start], list[Peer](), list(accumulate(shares)), sum(shares)
    for slice_ in range(slices):
        low, high = (start + _cut(stop - start, slices, place) for place in (slice_, slice_ + 1))
        for peer, share in zip(group, upto, strict=True):
            bound = low + (high - low) * share // whole
            if bound > bounds[-1]:
                bounds.append(bound)
                owners.append(peer)
    return (tuple(bounds), tuple(owners)) if owners else ((start, stop), (group[0],))


def rows_of(group: Sequence[Peer]) -> tuple[tuple[Peer, ...], ...]:
    """In the listed order, which is the order of additions: within a row, then of the rows. The first ones may be longer by one."""
    bounds = _bounds(0, len(group), _rows(len(group)))
    return tuple(tuple(group[low:high]) for low, high in pairwise(bounds))


def row_lengths(replicas: int) -> tuple[int, ...]:
    return tuple(high - low for low, high in pairwise(_bounds(0, replicas, _rows(replicas))))


def stride(replicas: int) -> int:
    """The numbers of one piece's chunks: those of the group's sum, then one row's."""
    return replicas if replicas <= ONE_ROW else _most_owned(replicas) + _longest(replicas, _rows(replicas))


def of_row(number: int, replicas: int) -> bool:
    """Whether a part of that number goes into the sum of a row, and not of the rows."""
    return replicas <= ONE_ROW or number % stride(replicas) >= _most_owned(replicas)


def early_parts(replicas: int) -> int:
    """How many parts of a piece one replica may send another before that begins with the piece."""
    return COLUMNS if replicas > ONE_ROW else SLICES


def connections(replicas: int) -> int:
    """How many others one of the group exchanges parts and sums with at most."""
    return replicas - 1 if replicas <= ONE_ROW else _connections(replicas, _rows(replicas))


def _rows(replicas: int) -> int:
    return 1 if replicas <= ONE_ROW else _several(replicas)


@cache  # asked for with every part and sum
def _several(replicas: int) -> int:
    """So many rows that nobody needs more connections than it must."""
    return min(range(2, isqrt(replicas) + 1), key=lambda rows: _connections(replicas, rows))


def _connections(replicas: int, rows: int) -> int:
    """To all of one's own row, to one of each row as long, and to one or two of each row that is longer or shorter."""
    longest, longer = _longest(replicas, rows), replicas % rows
    if not longer:
        return longest - 1 + rows - 1
    shorter = rows - longer
    return max(longest - 1 + longer - 1 + COLUMNS * shorter, longest - 2 + shorter - 1 + COLUMNS * longer)


def _longest(replicas: int, rows: int) -> int:
    return -(-replicas // rows)


def _most_owned(replicas: int) -> int:
    """Chunks of the group's sum: the cuts of rows of two lengths make as many segments as both together, less one."""
    rows = _rows(replicas)
    return rows * COLUMNS * _longest(replicas, rows)


def _bounds(start: int, stop: int, count: int) -> tuple[int, ...]:
    count = max(1, min(stop - start, count))
    return tuple(start + _cut(stop - start, count, chunk) for chunk in range(count + 1))


def _cut(length: int, count: int, place: int) -> int:
    """Where part `place` of `count` even ones begins."""
    each, over = divmod(length, count)
    return each * place + min(place, over)


def _turned(chunks: dict[int, Peer], row: Sequence[Peer], at: int) -> list[int]:
    """Slice by slice, within each beginning after place `at` of the row."""
    place, slice_, order = {peer: number for number, peer in enumerate(row)}, 0, list[tuple[int, int, int]]()
    last = -1
    for number, owner in chunks.items():
        slice_, last = slice_ + (place[owner] <= last), place[owner]
        order.append((slice_, (last - at - 1) % len(row), number))
    return [number for _, _, number in sorted(order)]


def _others(peers: tuple[Peer, ...], peer: Peer) -> tuple[Peer, ...]:
    """All but that one, beginning after it."""
    at = peers.index(peer)
    return peers[at + 1 :] + peers[:at]


def fenced(message: Round, view: View, stages: Container[int] | None = None) -> Peer | None:
    """A peer the round lists, at one of `stages` if they are given, although the agreed view has put it out, or has made it a joiner whose
    books are void."""
    serving = {(member.peer, member.stage) for member in view.members}
    joining = {(member.peer, member.stage) for member in view.joining}
    for stage, group in enumerate(message.groups):
        for share in group if stages is None or stage in stages else ():
            seat = share.peer, stage
            if seat not in serving and (seat not in joining or share.indices):
                return share.peer
    return None


def objection(message: Round, view: View, me: Share, microbatches: int) -> str:
    """Why `me` cannot take part in that round, of `microbatches` that are trained on, in words; '' when nothing speaks against it.

    Refused here and not only by the leader: what enters an average cannot be taken out again. A peer that the agreed view does
    not know is fenced, whatever an older leader lists, and an index that two replicas bring would be counted twice."""
    outside = fenced(message, view)
    if outside is not None:
        return f"{outside} is listed, but view {view.number} has it not in that stage, or only joining"
    for stage, group in enumerate(message.groups):
        reason = _coverage(group, microbatches)
        if reason:
            return f"stage {stage}: {reason}"
        for share in group:
            if share.peer == me.peer and share.indices != me.indices:
                return f"the round lists {_few(share.indices)} for me, I booked {_few(me.indices)}"
    return ""


def _coverage(group: Sequence[Share], microbatches: int) -> str:
    """Every index exactly once, every replica once; else what is wrong."""
    peers = [share.peer for share in group]
    if len(set(peers)) != len(peers):
        return "a replica is listed twice"
    indices_listed = [index for share in group for index in share.indices]
    if len(indices_listed) == microbatches and set(indices_listed) == set(range(microbatches)):
        return ""
    listed = sorted(indices_listed)
    twice = [index for index, after in pairwise(listed) if index == after]
    if twice:
        return f"microbatches {_few(twice)} are brought twice"
    if listed != list(range(microbatches)):
        lacking = sorted(set(range(microbatches)) - set(listed))
        return (
            f"microbatches {_few(lacking)} are brought by nobody"
            if lacking
            else f"only {microbatches} microbatches exist"
        )
    return ""


def _few(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return f"[{shown}{', ...' if len(indices) > 8 else ''}]"
