"""What people are told of a changed view: who is gone is called removed, whether or not it had its state yet."""

from __future__ import annotations

import pytest

from shoal.core.member.notes import change_note
from shoal.core.messages import Member, Note, View


@pytest.mark.parametrize(
    ("members", "joining", "kind"),
    [
        ("ab", "c", "joined"),  # c asked to join
        ("abc", "", "joined"),  # it has its state
        ("ab", "", "joined"),
        ("a", "c", "removed"),
        ("ac", "", "removed"),  # c takes b's place
        ("a", "bc", "removed"),  # b serves another stage, and has no state of that
    ],
)
def test_a_view_without_a_member_says_removed(members: str, joining: str, kind: str) -> None:
    before = a_view("ab", "c" if "c" in members + joining and members != "ab" else "")
    assert change_note(before, a_view(members, joining)) == [Note(kind, "why")]


@pytest.mark.parametrize("members", ["ab", "a"])
def test_a_view_without_a_joiner_says_removed_too(members: str) -> None:
    assert change_note(a_view("ab", "c"), a_view(members, "")) == [Note("removed", "why")]


def a_view(members: str, joining: str) -> View:
    each = [tuple(Member(peer, 0) for peer in peers) for peers in (members, joining)]
    return View(number=2, step=3, members=each[0], joining=each[1], reason="why")
