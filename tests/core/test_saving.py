"""The leader's part in a checkpoint: copies in as many places as wanted, whatever becomes of a place; a reason where there are fewer."""

from __future__ import annotations

from typing import TypeVar

import pytest

from shoal.core.leader.saving import Saving
from shoal.core.messages import (
    Command,
    CopyRequest,
    Member,
    Note,
    Phase,
    Published,
    PublishRequest,
    Saved,
    SaveRequest,
    Send,
    Settings,
    View,
)

T = TypeVar("T")
MEMBERS = (Member("a", 0), Member("b", 1), Member("c", 1), Member("d", 0))
PLACES = {"a": "A", "b": "B", "c": "C", "d": "B"}


class Rig:
    def __init__(self, copies: int = 2, places: dict[str, str] = PLACES, members: tuple[Member, ...] = MEMBERS) -> None:
        self.saving = Saving(Settings(stages=2, microbatches=4, steps=9, heartbeat_s=0.5, copies=copies))
        self.places, self.now = dict(places), 0.0
        self.view = View(number=3, step=4, members=members, phase=Phase.TRAINING)
        self.saving.on_view(self.view)
        self.saving.begin(self.view)
        self.said: list[Command] = []
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.said = self.saving.tick(self.view, self.places, self.now)

    def hear(self, peer: str, message: Saved | Published) -> None:
        self.saving.on_message(peer, message, self.places)
        self.tick()

    def saved(self, peer: str, stage: int, failed: str = "", shard: str = "") -> None:
        self.hear(peer, Saved(0, 4, stage, f"record {stage}", failed, shard or f"shard {stage}"))

    def published(self, peer: str, path: str = "", failed: str = "") -> None:
        """In answer to what was asked last."""
        self.hear(peer, Published(0, 4, path, failed, self.saving.edition))

    def sent(self, kind: type[T]) -> list[tuple[str, T]]:
        return [(c.peer, c.message) for c in self.said if isinstance(c, Send) and isinstance(c.message, kind)]

    def asked(self) -> list[tuple[str, int]]:
        return [(peer, request.stage) for peer, request in self.sent(CopyRequest)]

    def notes(self) -> list[str]:
        return [command.text for command in self.said if isinstance(command, Note)]

    def without(self, *peers: str) -> None:
        members = tuple(member for member in self.view.members if member.peer not in peers)
        self.view = View(number=self.view.number + 1, step=4, members=members, phase=Phase.TRAINING)
        self.saving.on_view(self.view)
        self.tick()


def both_written() -> Rig:
    rig = Rig()
    assert [peer for peer, _ in rig.sent(SaveRequest)] == ["a", "b"]
    rig.saved("a", 0)
    assert rig.asked() == [("b", 0)]
    assert rig.sent(CopyRequest)[0][1].holders == ("a",)
    rig.saved("b", 1)
    assert rig.asked() == [("a", 1)]
    assert rig.sent(CopyRequest)[0][1].holders == ("b", "d")
    return rig


def test_the_first_members_places_hold_everything_and_each_makes_it_visible() -> None:
    rig = both_written()
    rig.saved("b", 0)
    assert not rig.sent(PublishRequest)
    rig.saved("a", 1)
    requests = dict(rig.sent(PublishRequest))
    assert set(requests) == {"a", "b"} and {request.copies for request in requests.values()} == {
        (("A", "B"), ("B", "A"))
    }
    rig.published("a", "at A")
    assert not rig.saving.idle
    rig.published("b", "at B")
    assert rig.saving.idle and rig.notes() == ["step 4 saved at at A in 2 copies"]


def test_one_place_that_all_share_needs_no_copies() -> None:
    rig = Rig(places=dict.fromkeys("abcd", "A"))
    rig.saved("a", 0)
    rig.saved("b", 1)
    assert [(peer, request.copies) for peer, request in rig.sent(PublishRequest)] == [("a", ())]


def test_nothing_is_asked_before_every_members_place_is_known() -> None:
    rig = Rig(places={"a": "A", "b": "B", "c": "C"})
    assert not rig.said
    rig.places["d"] = "B"
    rig.tick()
    assert len(rig.sent(SaveRequest)) == 2


def test_a_full_disk_sends_the_copy_to_the_next_place() -> None:
    rig = both_written()
    rig.saved("b", 0, failed="no room")
    assert rig.asked() == [("c", 0)]


def test_where_no_other_place_takes_it_there_are_fewer_copies_and_that_is_said() -> None:
    rig = both_written()
    rig.saved("b", 0, failed="no room")
    rig.saved("c", 0, failed="no room either")
    rig.saved("a", 1)
    for peer, _ in rig.sent(PublishRequest):
        rig.published(peer, f"at {peer}")
    assert rig.notes() == [
        "step 4 saved at at a",
        "step 4 is saved in 1 of 2 copies: b: no room; c: no room either",
    ]


@pytest.mark.parametrize("when", ["copying", "copied", "published"])
def test_a_machine_that_dies_is_replaced_by_another(when: str) -> None:
    rig = both_written()
    if when != "copying":
        rig.saved("b", 0)
        rig.saved("a", 1)
    if when == "published":
        rig.published("b", "at B")
    rig.without("b", "d")
    rig.tick(60.0)
    if when != "copying":
        assert rig.asked() == [("c", 0), ("c", 1)]
        rig.saved("c", 0)
        rig.saved("c", 1)
    else:
        assert [peer for peer, _ in rig.sent(SaveRequest)] == ["c"], "stage 1 is written anew: its one copy is gone"
        rig.saved("c", 1)
        rig.saved("c", 0)
        rig.saved("a", 1)
    assert {peer for peer, _ in rig.sent(PublishRequest)} == {"a", "c"}
    for peer in "ac":
        rig.published(peer, f"at {peer}")
    assert rig.saving.idle and rig.notes() == ["step 4 saved at at a in 2 copies"]


def test_a_place_that_was_made_visible_before_a_shard_came_there_is_asked_again() -> None:
    rig = Rig(copies=1, members=(Member("a", 0), Member("b", 1)), places={"a": "A", "b": "B", "c": "A"})
    rig.saved("a", 0)
    rig.saved("b", 1)
    first = dict(rig.sent(PublishRequest))
    assert {peer: request.copies for peer, request in first.items()} == dict.fromkeys("ab", (("A",), ("B",)))
    rig.published("a", "at A")
    rig.view = View(number=4, step=4, members=(Member("a", 0), Member("c", 1)), phase=Phase.TRAINING)
    rig.saving.on_view(rig.view)
    rig.tick(60.0)
    assert [peer for peer, _ in rig.sent(SaveRequest)] == ["c"], "stage 1 is written anew"
    rig.saved("c", 1)
    ((peer, again),) = rig.sent(PublishRequest)
    assert (peer, again.copies) == ("a", ()) and again.edition != first["a"].edition
    rig.hear("a", Published(0, 4, "at A", edition=first["a"].edition))
    assert not rig.saving.idle, "an answer to the request before"
    rig.published("a", "at A")
    assert rig.notes() == ["step 4 saved at at A"]


def test_a_place_whose_peer_dies_is_asked_through_another_peer_there() -> None:
    rig = Rig(members=(Member("a", 0), Member("b", 1), Member("d", 0), Member("c", 1)))
    rig.saved("a", 0)
    assert rig.asked() == [("b", 0)]
    rig.without("b")
    assert rig.asked() == [("d", 0)]


def test_a_copy_of_something_else_does_not_count() -> None:
    rig = both_written()
    rig.saved("b", 0, shard="another")
    rig.saved("c", 0)
    rig.saved("a", 1)
    assert not rig.sent(PublishRequest)


def test_a_place_that_cannot_make_it_visible_is_replaced() -> None:
    rig = both_written()
    rig.saved("b", 0)
    rig.saved("a", 1)
    for peer in "bd":
        rig.published(peer, failed="disk full")
    rig.tick()
    assert rig.asked() == [("c", 0), ("c", 1)]


def test_requests_are_repeated_more_and_more_seldom() -> None:
    rig = both_written()
    times = []
    for _ in range(200):
        rig.tick(0.5)
        times += [rig.now] if ("a", 1) in rig.asked() else []
    assert times[:4] == [2.0, 6.0, 14.0, 30.0] and times[4] - times[3] == 32.0
