"""Whose turn a microbatch is at each stage, by its index, so that the choices of all trainers together are even; and which peers it may
not go to, since their keys are new. For routing.py. docs/design/2026-11-23-turns.md, docs/design/2026-11-24-probation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import cycle
from math import gcd

from shoal.core.messages import Index, Member, Peer, Stage
from shoal.core.names import THIRD, key_of

NOBODY: frozenset[Peer] = frozenset()


class Turns:
    def __init__(self, stages: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._owners = 0
        self._turns: Sequence[Sequence[Peer]] = [
            [] for _ in range(stages)
        ]  # by stage, in the same order at every trainer
        self._new = [NOBODY] * stages  # peers with new keys, at stages where others serve, too
        self._shifts: Sequence[int] = [
            0
        ] * stages  # of the turns, with every round of the owners: so each meets all replicas

    def on_view(self, members: tuple[Member, ...], new_keys: Collection[str], begins: bool) -> None:
        """`begins`: a step, or the same once more. Else those who stay keep their turns of it, and the turns of those who have gone are
        theirs in proportion: what they have done already is as much as these turns say."""
        stages, turns, shifts = _of(members, len(self._turns))
        if begins or not self._owners:
            self._owners, self._turns, self._shifts = len(members), turns, shifts
        else:
            most = [self._at(self._microbatches - 1, stage) + 1 for stage in range(len(stages))]
            self._turns = [
                _handed_on(tuple(old), new, longest) for old, new, longest in zip(self._turns, turns, most, strict=True)
            ]
        self._new = [self._newcomers(replicas, new_keys) for replicas in stages]

    def _at(self, index: Index, stage: Stage) -> int:
        """Which of the stage's turns, counted from the first."""
        return index + self._shifts[stage] * (index // self._owners)

    def _newcomers(self, replicas: Sequence[Peer], new_keys: Collection[str]) -> frozenset[Peer]:
        new = frozenset(peer for peer in replicas if key_of(peer) in new_keys) if new_keys else NOBODY
        return new if len(new) < len(replicas) else NOBODY

    def barred(self, stage: Stage, index: Index | None) -> frozenset[Peer]:
        """Who does not get that microbatch while another replica does not fail."""
        return self._new[stage] if index is not None and index % THIRD else NOBODY

    def turn(self, stage: Stage, index: Index) -> Peer | None:
        """None: nobody serves that stage."""
        turns, new = self._turns[stage], self._new[stage]
        if not turns:
            return None
        at = self._at(index, stage)
        if new:  # those have their even share of all, as far as it is a third
            count = sum(peer in new for peer in turns)
            theirs = index % THIRD == 0 and at // THIRD % len(turns) < THIRD * count
            turns = [peer for peer in turns if (peer in new) == theirs] or turns
            at = at // THIRD if theirs else at
        return turns[at % len(turns)]


@lru_cache(maxsize=4)
def _of(
    members: tuple[Member, ...], stages: int
) -> tuple[tuple[tuple[Peer, ...], ...], tuple[tuple[Peer, ...], ...], tuple[int, ...]]:
    """By stage: its replicas, turns and shift. The same for all trainers with that view, of which a simulation has hundreds."""
    in_order = sorted(members, key=lambda member: (member.seat, member.peer))  # with a plan as it was played
    replicas = [[one for one in in_order if one.stage == stage] for stage in range(stages)]
    turns = tuple(tuple(turns_of(each)) for each in replicas)
    shifts = tuple(shift(len(members), len(each)) for each in turns)
    return tuple(tuple(one.peer for one in each) for each in replicas), turns, shifts


@lru_cache(maxsize=64)
def _handed_on(old: tuple[Peer, ...], new: tuple[Peer, ...], longest: int) -> tuple[Peer, ...]:
    """So many turns as `longest`: the `old` ones, those of who is gone given to the `new` ones, which are repeated. If somebody has come,
    the new ones alone."""
    stay, there = set(new), set(old)
    if not stay <= there or not stay:
        return new
    if stay == there:
        return old
    given = cycle(new)
    return tuple(peer if peer in stay else next(given) for peer in (old[at % len(old)] for at in range(longest)))


def turns_of(members: list[Member]) -> list[Peer]:
    """Of one stage's replicas in their order, so that each has as many as its line allows, spread evenly; all alike: one each.
    A replica without any is still chosen when it is expected to answer much sooner than the one whose turn it is."""
    wanted = [member.turns for member in members]
    whole = sum(wanted)
    if not whole:
        return [member.peer for member in members]
    turns, credit = list[Peer](), [0] * len(members)
    for _ in range(whole // gcd(*wanted)):  # smooth weighted round robin
        credit = [held + each for held, each in zip(credit, wanted, strict=True)]
        at = max(range(len(members)), key=lambda place: (credit[place], -place))
        credit[at] -= whole
        turns.append(members[at].peer)
    return turns


def shift(owners: int, replicas: int) -> int:
    """By how much turns are shifted with every round of the owners: the least that lets each owner meet all replicas, since then its next
    turn is at as many as have no divisor in common with them. Without a shift the turns are exactly even."""
    return next(each for each in range(max(1, replicas)) if gcd(owners + each, max(1, replicas)) == 1)
