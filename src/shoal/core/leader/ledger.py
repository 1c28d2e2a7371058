"""The leader's ledger of one step: which replica has booked which microbatch at every stage.

A step can be averaged when, at every stage, the books of the members are disjoint and together hold every index (ARCHITECTURE.md,
"Exactly once", rule 4). A new leader builds it again from the members' heartbeats. For facts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter
from statistics import median

import msgspec

from shoal.core.consensus.validity import wrong_rewards
from shoal.core.messages import Booking, Index, Member, Peer, Rewards, Settings, Share, Stage

MOST_LOSS = 1e6  # of a microbatch, in nats per token: a vocabulary of 2^20 has 14 untrained, and a diverging model's logits some 1e3
FAR_LOSS = (
    16.0  # times the median of a step's microbatches: with 4, an honest step of four was 15 % too low once in 150
)


_INDEX = attrgetter("index")


class Doubled(msgspec.Struct, frozen=True):
    """A microbatch in the books of two replicas of a stage. One of them is wrong: the protocol adds it once."""

    index: Index
    stage: Stage
    one: Peer
    two: Peer


class Ledger:
    """Books of the members of one (epoch, step), by peer."""

    def __init__(
        self,
        stages: int,
        microbatches: int,
        tokens: int = 0,
        heldout: int = 0,
        heldout_tokens: int = 0,
        trains: bool = True,
    ) -> None:
        """`heldout` microbatches follow those that are trained on; the last stage alone books them. Without `trains`, after the last
        step, there are no others."""
        self.stages, self.microbatches, self.tokens = stages, microbatches, tokens
        self.heldout, self.heldout_tokens = heldout, heldout_tokens
        self.books: dict[Peer, tuple[Booking, ...]] = {}
        self.booked = 0  # entries in all books
        self._indexed: dict[Peer, set[Index]] = {}  # what is in each book
        self.trains = trains
        self.needed = stages * microbatches * trains + heldout  # when the step is done

    @classmethod
    def of(cls, settings: Settings, step: int, over: bool) -> Ledger:
        """An empty one of that step. `over`: it is after the last one."""
        return cls(
            settings.stages,
            settings.microbatches,
            settings.tokens,
            settings.heldout_at(step),
            settings.heldout_tokens,
            trains=not over,
        )

    @property
    def whole(self) -> bool:
        """As many are booked as there are to be."""
        return self.booked >= self.needed

    def report(self, peer: Peer, books: tuple[Booking, ...], stage: Stage = 0) -> str:
        """Take the whole book of that peer, at `stage`. Returns what is wrong with it, or ''. Books only grow within a step: a shorter
        report is an older one, and is ignored."""
        held = self.books.get(peer, ())
        if len(books) <= len(held):
            return ""
        if books[: len(held)] != held:
            return "has changed what it booked"
        indices = set(map(_INDEX, books))
        if len(indices) < len(books):
            return "has booked a microbatch twice"
        count = self._count(stage)
        if max(indices) >= count:
            return f"has booked microbatch {max(indices)} of {count}"
        for booking in books[len(held) :]:
            most = self.tokens if booking.index < self.microbatches else self.heldout_tokens
            if booking.counted > most:
                return f"has counted {booking.counted} tokens in a microbatch of {most}"
            if wrong := wrong_rewards(booking.rewards):
                return f"reports {wrong}"
        losses = [booking.loss for booking in books if booking.loss is not None]
        if losses and not (min(losses) >= 0.0 and max(losses) <= MOST_LOSS):
            return f"reports losses from {min(losses):g} to {max(losses):g}"
        self.books[peer], self._indexed[peer] = books, indices
        self.booked += len(books) - len(held)
        return ""

    def forget(self, peer: Peer) -> int:
        """Void that peer's books: it left the view. Returns how many bookings must be computed again."""
        lost = len(self.books.pop(peer, ()))
        self._indexed.pop(peer, None)
        self.booked -= lost
        return lost

    def complete(self, members: tuple[Member, ...]) -> bool:
        """Every index is booked exactly once at every stage, by members."""
        if self.booked != self.needed:
            return False
        return not self.faults(members)

    def _indices(self, members: tuple[Member, ...]) -> list[set[Index]]:
        """What is booked, by stage. Of all books a leader asks for it once a beat and more, hence no loop over their entries."""
        seen: list[set[Index]] = [set() for _ in range(self.stages)]
        for member in members:
            seen[member.stage] |= self._indexed.get(member.peer, set())
        return seen

    def faults(self, members: tuple[Member, ...]) -> list[str]:
        """Missing and doubly booked indices, in words."""
        seen, faults = self._indices(members), []
        if sum(map(len, seen)) < sum(len(self.books.get(member.peer, ())) for member in members):
            faults = [f"microbatch {two.index} is booked by {two.one} and {two.two}" for two in self.doubled(members)]
        for stage, indices in enumerate(seen):
            due = self._count(stage) - self.microbatches * (not self.trains)
            if len(indices) < due:
                faults.append(f"stage {stage} has {len(indices)} of {due} microbatches")
        return faults

    def open_indices(self, members: tuple[Member, ...]) -> list[Index]:
        """Microbatches that are not booked at every stage, the oldest first."""
        booked, first = self._indices(members), self.microbatches
        missing = set(range(first, first + self.heldout)) - booked[-1]
        if self.trains:
            everywhere = set.intersection(*booked)
            missing |= set(range(first)) - everywhere
        return sorted(missing)

    def open_at(self, members: tuple[Member, ...]) -> list[tuple[Index, Stage]]:
        """Microbatches that are not booked at every stage, with the highest stage that lacks each: backward passes go down from it."""
        booked, missing = self._indices(members), []
        everywhere = set.intersection(*booked)
        for index in range(self.microbatches + self.heldout):
            if index in everywhere:
                continue
            for stage in reversed(self._stages(index)):
                if index not in booked[stage]:
                    missing.append((index, stage))
                    break
        return missing

    def open(self, members: tuple[Member, ...]) -> set[int]:
        """Microbatches that one of these members has yet to book."""
        times = Counter(booking.index for member in members for booking in self.books.get(member.peer, ()))
        return {i for i in range(self.microbatches + self.heldout) if times[i] < len(self._stages(i))}

    def _count(self, stage: Stage) -> int:
        """Microbatches that the stage books."""
        return self.microbatches + (self.heldout if stage == self.stages - 1 else 0)

    def _stages(self, index: Index) -> range:
        """The stages that book it."""
        if index < self.microbatches:
            return range(self.stages * self.trains)
        return range(self.stages - 1, self.stages)

    def doubled(self, members: tuple[Member, ...]) -> list[Doubled]:
        """Microbatches that two members of a stage report as booked."""
        seen: dict[tuple[int, int], Peer] = {}
        doubled = []
        for member in members:
            for booking in self.books.get(member.peer, ()):
                other = seen.setdefault((member.stage, booking.index), member.peer)
                if other != member.peer:
                    doubled.append(Doubled(booking.index, member.stage, other, member.peer))
        return doubled

    def groups(
        self, members: tuple[Member, ...], ready: tuple[Member, ...], line_rates: Mapping[Peer, int] = {}
    ) -> tuple[tuple[Share, ...], ...]:
        """Shares per stage: members first, then joiners that hold the step's parameters and add no gradient. `line_rates`: kB/s."""
        groups: list[list[Share]] = [[] for _ in range(self.stages)]
        for member in members:
            indices = trained(self.books.get(member.peer, ()), self.microbatches)
            groups[member.stage].append(Share(member.peer, indices, line_rates.get(member.peer, 0)))
        for joiner in ready:
            groups[joiner.stage].append(Share(joiner.peer, (), line_rates.get(joiner.peer, 0)))
        return tuple(tuple(group) for group in groups)

    def loss(self, last: tuple[Share, ...]) -> float:
        """Mean loss over the step's microbatches, added in index order, each counted as at most FAR_LOSS times their median: one replica
        alone cannot move it far. `last`: the last stage's replicas."""
        losses = {b.index: b.loss for b in self._bookings(last) if b.loss is not None and b.index < self.microbatches}
        most = MOST_LOSS if self.tokens else FAR_LOSS * median(losses.values()) if losses else 0.0
        return sum(min(losses[i], most) for i in sorted(losses)) / len(losses) if losses else float("nan")

    def counted(self, last: tuple[Share, ...]) -> int:
        """Tokens of the step whose loss counts, as the last stage's replicas have counted them."""
        return sum(booking.counted for booking in self._bookings(last) if booking.index < self.microbatches)

    def heldout_loss(self, last: tuple[Share, ...]) -> float | None:
        """Mean over the counted held-out tokens, added in index order: the same whoever computed which microbatch. None: there are none."""
        held = sorted((b for b in self._bookings(last) if b.index >= self.microbatches), key=lambda b: b.index)
        counted = sum(booking.counted for booking in held)
        return sum((booking.loss or 0.0) * booking.counted for booking in held) / counted if counted else None

    def rewards(self, last: tuple[Share, ...], *, heldout: bool = False) -> Rewards | None:
        """Mean over the step's preference pairs, added in index order; `heldout`: over the held-out ones. None: samples are no pairs."""
        held = sorted(self._bookings(last), key=lambda booking: booking.index)
        return mean_rewards((b.rewards, b.counted) for b in held if (b.index >= self.microbatches) == heldout)

    def _bookings(self, shares: tuple[Share, ...]) -> list[Booking]:
        return [booking for share in shares for booking in self.books.get(share.peer, ())]


def mean_rewards(parts: Iterable[tuple[Rewards | None, int]]) -> Rewards | None:
    """Of several microbatches, with the pairs that count in each. None: there are none."""
    counted = [(part, pairs) for part, pairs in parts if part is not None and pairs]
    total = sum(pairs for _, pairs in counted)
    if not total:
        return None
    accuracy, margin = (
        sum(value * pairs for value, pairs in values) / total
        for values in (
            [(part.accuracy, pairs) for part, pairs in counted],
            [(part.margin, pairs) for part, pairs in counted],
        )
    )
    return Rewards(min(1.0, accuracy), margin)


def trained(books: Iterable[Booking], microbatches: int) -> tuple[Index, ...]:
    """The indices whose gradients are in a replica's sum, in the order in which it added them."""
    return tuple(booking.index for booking in books if booking.index < microbatches)


def counted_twice(groups: tuple[tuple[Share, ...], ...]) -> int:
    """How many (stage, index) pairs a commit holds more than once."""
    twice = 0
    for group in groups:
        indices = [index for share in group for index in share.indices]
        twice += len(indices) - len(set(indices))
    return twice
