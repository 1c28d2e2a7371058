"""Whose microbatches all others wait for at the end of a step, again and again: who rests, and who does not."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.leader.books.tails import AGE, TAIL_BEATS, TIMES, Tails
from shoal.core.leader.ledger import Ledger
from shoal.core.messages import Booking, Member, Phase, Settings, View

SETTINGS = Settings(stages=1, microbatches=6, steps=9)
BEAT_S = SETTINGS.heartbeat_s
VIEW = View(
    number=5, step=3, members=tuple(Member(peer, 0) for peer in "abcdef"), owners=tuple(range(6)),
    phase=Phase.TRAINING, since=4,
)  # fmt: skip
ALL = "abcdef"


class Steps:
    def __init__(self) -> None:
        self.tails, self.now, self.view = Tails(SETTINGS), 0.0, VIEW

    def begin(self) -> None:
        self.view = msgspec.structs.replace(self.view, step=self.view.step + 1)
        self.tails.begin(self.view, self.now)

    def play(self, *parts: tuple[float, str], begin: bool = True) -> list[str]:
        """A step, or the rest of one in which the owners have changed: after so many seconds the microbatches of these owners are booked.
        Whoever is to rest then."""
        if begin:
            self.begin()
        else:
            self.tails.begin(self.view, self.now)
        view = self.view
        ledger, rest = Ledger(1, 6), list[str]()
        books: tuple[Booking, ...] = ()
        for seconds, owners in parts:
            until = self.now + seconds
            while self.now < until:
                rest += self.tails.look(view, ledger, self.now)
                self.now += BEAT_S / 2
            books += tuple(Booking(ALL.index(owner)) for owner in owners)
            assert not ledger.report("a", books)
            rest += self.tails.look(view, ledger, self.now)
        return rest


def test_an_owner_that_keeps_all_waiting_again_rests_and_from_then_on_at_once() -> None:
    steps = Steps()
    late = (0.5 * BEAT_S, "abcde"), (3 * BEAT_S, "f")
    assert [steps.play(*late) for _ in range(TIMES)] == [[]] * (TIMES - 1) + [["f"]]
    for _ in range(5):
        assert steps.play((BEAT_S, ALL)) == []
    assert steps.play(*late) == ["f"]


@pytest.mark.parametrize("parts", [
    ((4 * BEAT_S, "abcde"), (3 * BEAT_S, "f")),  # less than all others took
    ((0.5 * BEAT_S, "abcde"), ((TAIL_BEATS - 1) * BEAT_S, "f")),  # short
    ((0.5 * BEAT_S, "abc"), (3 * BEAT_S, "def")),  # several: it is not their fault
    ((0.5 * BEAT_S, "abcde"), (BEAT_S, ""), (0.5 * BEAT_S, "f")),
])  # fmt: skip
def test_nobody_rests_for_a_step_that_ends_as_it_went_or_for_which_several_are_late(
    parts: tuple[tuple[float, str], ...],
) -> None:
    steps = Steps()
    assert [steps.play(*parts) for _ in range(2 * AGE)] == [[]] * 2 * AGE


def test_two_at_once_rest_and_what_was_long_ago_is_forgotten() -> None:
    steps = Steps()
    late = (0.5 * BEAT_S, "abcd"), (3 * BEAT_S, "ef")
    assert steps.play(*late) == []
    for _ in range(AGE):
        steps.play((BEAT_S, ALL))
    assert steps.play(*late) == [] and sorted(steps.play(*late)) == ["e", "f"]


def test_the_time_begins_anew_with_other_owners_and_ends_with_a_stop() -> None:
    steps, ledger = Steps(), Ledger(1, 6)
    for _ in range(TIMES + 1):
        steps.begin()
        ledger = Ledger(1, 6)
        ledger.report("a", tuple(map(Booking, range(5))))
        assert steps.tails.look(steps.view, ledger, steps.now) == []
        steps.now += 9.0
        steps.tails.clear()
        ledger.report("a", tuple(map(Booking, range(6))))
        assert steps.tails.look(steps.view, ledger, steps.now) == [], "this process was stopped"
    absent = msgspec.structs.replace(VIEW, members=VIEW.members[:5])
    steps.tails.keep([member.peer for member in absent.members])
    assert steps.play((0.5 * BEAT_S, "abcde"), (3 * BEAT_S, "f")) == []


def test_a_step_in_which_the_owners_change_is_one_step_and_keeps_others_waiting_once() -> None:
    """Round failed, a participant evicted: its books are void, others own what it owned, and f is the last one again."""
    steps = Steps()
    late = (0.5 * BEAT_S, "abcde"), (3 * BEAT_S, "f")
    assert steps.play(*late) == [] and steps.play(*late, begin=False) == []
    for _ in range(AGE - 2):
        for _ in range(3):
            steps.tails.begin(steps.view, steps.now)
        assert steps.play((BEAT_S, ALL)) == []
    assert steps.play(*late) == ["f"], f"not {AGE} steps ago"
