"""The modelled line: what passes when, whatever the times at which anybody looks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.messages import BoundaryTensor
from shoal.transport.base import Blob, Lost
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.emulated.shaped import AccessLink, DownlinkQueue, LineQueue, PairLink, Shaped, UplinkQueue

sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


def passed(line: LineQueue | DownlinkQueue) -> list[tuple[float, object]]:
    """Everything that is on the line, with the time at which it arrives."""
    got = []
    while (deadline := line.deadline) is not None:
        got += [(deadline, item) for item in line.take(deadline)]
    return got


@settings(deadline=None)
@given(sizes)
def test_a_busy_line_carries_exactly_its_bandwidth(nbytes: list[int]) -> None:
    line = LineQueue(100.0, delay_s=5.0)
    for serial, size in enumerate(nbytes):
        line.push(serial, "p", size, bulk=True, now=0.0)
    got = passed(line)
    assert [item for _, item in got] == [*range(len(nbytes))]
    assert got[-1][0] == pytest.approx(sum(nbytes) / 100.0 + 5.0)


@settings(deadline=None)
@given(sizes, st.floats(0.0, 30.0))
def test_looking_late_does_not_make_the_line_idle(nbytes: list[int], lateness_s: float) -> None:
    line = LineQueue(100.0)
    for serial, size in enumerate(nbytes):
        line.push(serial, "p", size, bulk=True, now=0.0)
    late = []
    while (deadline := line.deadline) is not None:
        late += line.take(deadline + lateness_s)
        assert deadline <= sum(nbytes) / 100.0 + 1e-6
    assert late == [*range(len(nbytes))]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500), st.booleans()), max_size=20))
def test_no_line_is_faster_than_its_bandwidth_and_order_is_kept(pushes: list[tuple[float, int, bool]]) -> None:
    line, now = LineQueue(100.0, delay_s=1.0), 0.0
    pushed: list[float] = []
    arrived: dict[int, float] = {}  # in order of arrival
    for serial, (pause_s, nbytes, bulk) in enumerate(pushes):
        until = now + pause_s
        while (deadline := line.deadline) is not None and deadline <= until:
            arrived |= dict.fromkeys(line.take(deadline), deadline)
        now = until
        pushed.append(now)
        line.push(serial, "p", nbytes, bulk, now)
    arrived |= {item: at for at, item in passed(line)}  # type: ignore[misc]
    assert sorted(arrived) == [*range(len(pushes))]
    for kind in (False, True):
        serials = [serial for serial in arrived if pushes[serial][2] == kind]
        assert serials == sorted(serials)
    for start in pushed:  # whatever was pushed since and has arrived took its time
        for end in arrived.values():
            inside = [i for i, at in arrived.items() if pushed[i] >= start and at <= end]
            assert sum(pushes[i][1] for i in inside) <= (end - 1.0 - start) * 100.0 + 1e-6 or not inside
    total = sum(nbytes for _, nbytes, _ in pushes)
    assert max(arrived.values(), default=0.0) <= now + total / 100.0 + 1.0 + 1e-6


def test_control_goes_first_and_pushes_bulk_back_by_its_own_time() -> None:
    line = LineQueue(100.0)
    line.push("bulk", "p", 1000, bulk=True, now=0.0)
    line.push("next", "p", 100, bulk=True, now=0.0)
    line.push("control", "p", 50, bulk=False, now=2.0)
    assert passed(line) == [(2.5, "control"), (10.5, "bulk"), (11.5, "next")]


def test_bulk_of_a_higher_rank_goes_first_and_takes_its_time_from_the_lower() -> None:
    line = LineQueue(100.0)
    line.push("state", "p", 1000, bulk=True, now=0.0, rank=3)
    line.push("more state", "p", 100, bulk=True, now=0.0, rank=3)
    line.push("part", "p", 200, bulk=True, now=1.0, rank=2)
    line.push("backward", "q", 300, bulk=True, now=2.0, rank=0)
    line.push("forward", "q", 100, bulk=True, now=2.5, rank=1)
    assert passed(line) == [
        (5.0, "backward"),
        (6.0, "forward"),
        (7.0, "part"),
        (16.0, "state"),
        (17.0, "more state"),
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500), st.integers(-1, 3)), min_size=1, max_size=20))
def test_with_ranks_too_the_line_is_never_idle_nor_too_fast(pushes: list[tuple[float, int, int]]) -> None:
    """Any lane's last message is through when a line that served nothing lower would be, and no lower one earlier."""
    line, now = LineQueue(100.0), 0.0
    arrived: dict[int, float] = {}
    busy = [0.0] * 5  # until when a line that carried only this lane and the higher ones would be busy
    for serial, (pause_s, nbytes, rank) in enumerate(pushes):
        now += pause_s
        while (deadline := line.deadline) is not None and deadline <= now:
            arrived |= dict.fromkeys(line.take(deadline), deadline)
        line.push(serial, "p", nbytes, rank >= 0, now, rank=max(rank, 0))
        for lane in range(rank + 1, 5):
            busy[lane] = max(busy[lane], now) + nbytes / 100.0
    arrived |= {item: at for at, item in passed(line)}  # type: ignore[misc]
    assert sorted(arrived) == [*range(len(pushes))]
    for lane in range(5):
        mine = [arrived[i] for i, (_, _, rank) in enumerate(pushes) if rank + 1 <= lane]
        assert not mine or max(mine) == pytest.approx(busy[lane])


def test_what_is_forgotten_leaves_the_line_as_fast_as_it_is() -> None:
    line = LineQueue(100.0)
    line.push("gone", "gone", 500, bulk=True, now=0.0, rank=3)
    line.push("kept", "p", 100, bulk=True, now=0.0, rank=3)
    line.push("first", "p", 1000, bulk=True, now=2.0, rank=0)
    line.drop("gone", now=4.0)  # of its 5 s, 2 had passed before it was overtaken
    assert passed(line) == [(12.0, "first"), (13.0, "kept")]


def test_what_is_forgotten_gives_its_time_to_others() -> None:
    line = LineQueue(100.0)
    line.push("theirs", "gone", 1000, bulk=True, now=0.0)
    line.push("ours", "p", 100, bulk=True, now=0.0)
    line.push("theirs again", "gone", 500, bulk=True, now=0.0)
    line.push("ours again", "p", 100, bulk=True, now=0.0)
    line.drop("gone", now=4.0)
    assert passed(line) == [(5.0, "ours"), (6.0, "ours again")]


def test_what_is_void_does_not_go_but_for_what_has_begun() -> None:
    line = LineQueue(100.0)
    for item in ("void, begun", "void", "kept", "void", "kept, too"):
        line.push(item, "p", 100, bulk=True, now=0.0)
    line.withdraw(lambda _, item: item.startswith("void"), now=0.5)
    assert passed(line) == [(1.0, "void, begun"), (2.0, "kept"), (3.0, "kept, too")]


def test_a_downlink_holds_nothing_that_came_alone() -> None:
    line = DownlinkQueue(100.0)
    line.push("alone", "p", 1000, bulk=True, now=10.0)
    assert line.deadline == 10.0


def test_a_downlink_is_shared_by_what_comes_at_once() -> None:
    line = DownlinkQueue(100.0)
    line.push("one", "p", 1000, bulk=True, now=10.0)
    line.push("other", "q", 1000, bulk=True, now=10.0)
    assert [at for at, _ in passed(line)] == [10.0, 20.0]


def test_a_small_message_costs_a_tensor_on_its_way_no_more_than_its_own_time() -> None:
    line = DownlinkQueue(100.0)
    line.push("tokens", "q", 10, bulk=True, now=5.0, rank=1)
    line.push("tensor", "p", 1000, bulk=True, now=10.0, rank=1)
    assert [at for at, _ in passed(line)] == [5.0, pytest.approx(10.1)]


def test_what_one_peer_sends_keeps_its_order_within_a_rank() -> None:
    line = DownlinkQueue(100.0)
    line.push("theirs", "q", 1000, bulk=True, now=30.0)
    line.push("first", "p", 100, bulk=True, now=30.0, rank=1)
    line.push("second", "p", 2000, bulk=True, now=30.5, rank=1)  # most of it came before theirs began
    order = [item for _, item in passed(line)]
    assert order.index("first") < order.index("second")


def test_a_downlink_forgets_a_peer() -> None:
    line = DownlinkQueue(100.0)
    line.push("theirs", "gone", 1000, bulk=True, now=10.0)
    line.push("ours", "p", 1000, bulk=True, now=10.0)
    assert line.waiting_bytes("gone") == 1000
    line.drop("gone")
    assert [item for _, item in passed(line)] == ["ours"] and line.waiting_bytes("gone") == 0


def test_without_a_bandwidth_there_is_only_delay() -> None:
    line = LineQueue(0.0, delay_s=0.5)
    line.push("x", "p", 10**9, bulk=True, now=1.0)
    assert line.deadline == 1.5


# ------------------------------------------------------------------------------------------------------- links of pairs


def an_uplink(up_Bps: float = 1000.0, **pairs: PairLink) -> UplinkQueue:
    uplink = UplinkQueue(AccessLink(delay_s=0.5, up_Bps=up_Bps, pairs=pairs))
    uplink.hosts = {host.upper(): host for host in pairs}
    return uplink


def left(uplink: UplinkQueue) -> dict[object, float]:
    got: dict[object, float] = {}
    while (deadline := uplink.deadline) is not None:
        got |= dict.fromkeys(uplink.take(deadline), deadline)
    return got


def test_links_of_pairs_are_filled_side_by_side_behind_a_wide_uplink() -> None:
    """1,000 bytes a second leave; each link takes 100. One after the other they would take 10 s each."""
    uplink = an_uplink(a=PairLink(0.0, 100.0), b=PairLink(2.0, 100.0))
    uplink.push("one", "A", 1000, bulk=True, now=0.0)
    uplink.push("two", "B", 1000, bulk=True, now=0.0)
    assert left(uplink) == {"one": pytest.approx(10.0), "two": pytest.approx(1.0 + 10.0 + 2.0)}


def test_a_narrow_uplink_is_the_limit_of_all_pairs_together() -> None:
    uplink = an_uplink(50.0, a=PairLink(0.0, 100.0), b=PairLink(0.0, 100.0))
    uplink.push("one", "A", 1000, bulk=True, now=0.0)
    uplink.push("two", "B", 1000, bulk=True, now=0.0)
    assert left(uplink) == {"one": pytest.approx(20.0), "two": pytest.approx(40.0)}


def test_messages_of_one_pair_follow_one_another_and_others_are_not_held() -> None:
    uplink = an_uplink(a=PairLink(0.0, 100.0))
    uplink.push("one", "A", 500, bulk=True, now=0.0)
    uplink.push("two", "A", 500, bulk=True, now=0.0)
    uplink.push("other", "stranger", 100, bulk=True, now=0.0)
    assert uplink.waiting_bytes("A") == 1000
    assert left(uplink) == {"one": pytest.approx(5.0), "two": pytest.approx(10.0), "other": pytest.approx(1.1 + 0.5)}


def test_what_is_forgotten_leaves_the_link_of_its_pair_too() -> None:
    uplink = an_uplink(a=PairLink(0.0, 100.0), b=PairLink(0.0, 100.0))
    uplink.push("gone", "A", 1000, bulk=True, now=0.0)
    uplink.push("kept", "B", 1000, bulk=True, now=0.0)
    assert uplink.take(1.5) == []
    uplink.drop("A", now=1.5)
    assert list(left(uplink)) == ["kept"]


def test_what_waits_for_a_peer_that_is_not_there_does_not_fill_the_line() -> None:
    async def story() -> None:
        inner: Any = MemoryTransport(Hub(), "a")
        line = Shaped(inner, AccessLink(0.0, 1e6, 1e6))
        await line.start()
        for index in range(3):
            line.send("gone", BoundaryTensor(0, 0, index, 1, False), (Blob("uint8", (100_000,), bytes(100_000)),))
        assert await line.receive() == Lost("gone", "there is no such peer")  # when the first has left
        assert line._up.waiting_bytes("gone") == 0
        await line.close()

    asyncio.run(story())
