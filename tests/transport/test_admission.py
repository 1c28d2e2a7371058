"""Who may come, and who gives way: silence and free names lock nobody out."""

from __future__ import annotations

import socket

import pytest

from shoal.transport.streams import admission
from shoal.transport.streams.admission import Admission, PartialMessages
from shoal.transport.streams.engine import Connection


@pytest.fixture
def links() -> object:
    connections = []

    def make() -> Connection:
        connections.append(Connection(socket.socket(), lambda error: None))
        return connections[-1]

    yield make
    for link in connections:
        link.sock.close()


def test_the_oldest_silent_caller_of_the_crowded_address_gives_way(links: object) -> None:
    held = Admission()
    honest = links()
    held.add_pending(honest, "10.0.0.1")
    silent = [links() for _ in range(admission.MAX_PENDING + 50)]
    closed = [held.add_pending(link, "10.0.0.66") for link in silent]
    assert [link for link in closed if link is not None] == silent[:51], "never the honest one"
    assert held.counts == (admission.MAX_PENDING, 0)
    assert held.admit(honest, "a" * 32, "a.1", "control") == []


def test_a_hundred_peers_behind_one_address_come_in_while_others_are_silent_there(links: object) -> None:
    held = Admission()
    for number in range(200):
        assert held.may_connect("10.0.0.1")
        held.add_pending(links(), "10.0.0.1")
        if number % 2:
            peer = links()
            assert held.may_connect("10.0.0.1")
            held.add_pending(peer, "10.0.0.1")
            for kind in ("control", "bulk"):
                assert held.admit(peer if kind == "control" else links(), f"k{number}", f"k{number}.1", kind) == []
    assert held.counts[1] == 200


def test_a_key_has_few_names_at_a_time_the_newest(links: object) -> None:
    held = Admission()
    closed = []
    for number in range(10):
        for kind in ("control", "bulk"):
            closed += held.admit(links(), "key", f"key.{number}", kind)
    assert {caller.peer for caller in closed} == {f"key.{number}" for number in range(10 - admission.NAMES)}
    assert held.counts == (0, 2 * admission.NAMES)


def test_when_all_room_is_taken_the_address_that_took_it_gets_no_more(links: object) -> None:
    held = Admission(max_admitted=20)
    for number in range(4):
        link = links()
        held.add_pending(link, "10.0.0.1")
        held.admit(link, f"honest{number}", f"honest{number}.1", "control")
    taken = []
    for number in range(30):
        link = links()
        held.add_pending(link, "10.0.0.66")
        try:
            held.admit(link, f"free{number}", f"free{number}.1", "control")
            taken.append(f"free{number}.1")
        except ValueError as error:
            assert "your address" in str(error)
    assert len(taken) == 16
    link = links()
    held.add_pending(link, "10.0.0.2")
    (closed_one,) = held.admit(link, "late", "late.1", "control")
    assert closed_one.peer == taken[-1] and held.counts == (0, 20)


def test_what_has_come_in_part_is_bounded_and_the_greediest_goes() -> None:
    parts = PartialMessages(100)
    assert parts.add("a", "bulk", 40) is None
    assert parts.add("b", "bulk", 50) is None
    assert parts.add("a", "bulk", 5) is None
    assert parts.add("c", "bulk", 6) == ("b", "bulk")
    parts.remove("b", "bulk")
    assert parts.nbytes == 51
    parts.remove("a", "bulk", 40)
    assert parts.nbytes == 11
    parts.remove("nobody", "bulk")
    assert parts.nbytes == 11
