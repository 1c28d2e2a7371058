"""Links cut and slowed as a file says: what arrives, in which direction, in which order, and that nothing else changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from shoal.core.messages import BoundaryTensor, Cancelled, Peer
from shoal.transport.base import Blob, Incoming
from shoal.transport.emulated.faulty import FAULTS, Direction, Fault, Faulty, read
from shoal.transport.emulated.memory import Hub, MemoryTransport
from shoal.transport.emulated.shaped import AccessLink

LONG_S = 3600.0


def fault(
    direction: Direction = "both",
    others: tuple[Peer, ...] = (),
    link: AccessLink | None = None,
    lasting_s: float = LONG_S,
) -> Fault:
    return Fault(side=("a",), others=others, direction=direction, link=link, until_s=time.monotonic() + lasting_s)


def write(path: Path, *faults: Fault) -> None:
    path.write_bytes(msgspec.json.encode(faults))


def control(index: int) -> Cancelled:
    return Cancelled(0, 1, index, 0, 0)


def among(path: Path, story: Callable[[dict[str, Faulty]], Awaitable[None]]) -> None:
    """Peers a, b and c of one network, all of whom read that file."""

    async def run() -> None:
        hub = Hub()
        peers = {name: Faulty(MemoryTransport(hub, name), path) for name in "abc"}
        for peer in peers.values():
            await peer.start()
        try:
            await story(peers)
        finally:
            for peer in peers.values():
                await peer.close()

    asyncio.run(run())


async def next_of(peer: Faulty) -> int:
    """The index of the next message that arrives; a minute is for machines that are very busy."""
    item = await asyncio.wait_for(peer.receive(), 60)
    assert isinstance(item, Incoming) and isinstance(item.message, Cancelled | BoundaryTensor)
    return item.message.index


# ------------------------------------------------------------------------------------------------------------- meaning


@pytest.mark.parametrize(
    ("direction", "out", "back"), [("both", True, True), ("out", True, False), ("in", False, True)]
)
def test_a_way_is_seen_from_the_side(direction: Direction, out: bool, back: bool) -> None:
    assert fault(direction).meets("a", "b") is out
    assert fault(direction).meets("b", "a") is back


def test_a_side_keeps_its_links_among_itself_and_others_keep_theirs() -> None:
    split = Fault(side=("a", "b"), until_s=LONG_S)
    assert not split.meets("a", "b") and not split.meets("c", "d")
    assert split.meets("a", "c") and split.meets("d", "b")
    near = Fault(side=("a",), others=("b",), until_s=LONG_S)
    assert near.meets("a", "b") and near.meets("b", "a") and not near.meets("a", "c")


def test_a_file_that_is_torn_or_not_there_cuts_nothing(tmp_path: Path) -> None:
    path = tmp_path / FAULTS
    assert read(path) == ()
    write(path, fault())
    assert len(read(path)) == 1
    path.write_bytes(path.read_bytes()[:-5])
    assert read(path) == ()


# ------------------------------------------------------------------------------------------------------------- passing


@pytest.mark.parametrize(("direction", "arrives"), [("both", []), ("out", ["a"]), ("in", ["b"])])
def test_what_is_cut_vanishes_in_that_direction_only(tmp_path: Path, direction: Direction, arrives: list[str]) -> None:
    path = tmp_path / FAULTS
    write(path, fault(direction, others=("b",)))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b, c = peers["a"], peers["b"], peers["c"]
        a.send("b", control(1))
        b.send("a", control(1))
        for sender, receiver in ((a, b), (b, a)):  # through c: what it says after them arrives after them
            sender.send("c", control(2))
            assert await next_of(c) == 2
            c.send(receiver.name, control(3))
        got = {}
        for peer in (a, b):
            got[peer.name] = []
            while (index := await next_of(peer)) != 3:
                got[peer.name].append(index)
        assert [name for name in "ab" if got[name] == [1]] == arrives

    among(path, story)


def test_a_cut_holds_where_only_one_end_knows_of_it(tmp_path: Path) -> None:
    """The other has not read the file yet, or cannot."""
    path = tmp_path / FAULTS
    write(path, fault(others=("b",)))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b, c = peers["a"], peers["b"], peers["c"]
        for sender, receiver in ((a, b), (b, a)):
            sender._path = tmp_path / "none"
            sender.look()
            sender.send(receiver.name, control(1))
            sender.send("c", control(2))
            assert await next_of(c) == 2
            c.send(receiver.name, control(3))
            assert await next_of(receiver) == 3
            sender._path = path
            sender.look()

    among(path, story)


def test_a_cut_ends_at_its_moment_or_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / FAULTS
    write(path, fault(lasting_s=-1.0))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b = peers["a"], peers["b"]
        a.send("b", control(1))  # over already
        assert await next_of(b) == 1
        write(path, fault())
        for peer in peers.values():
            peer.look()
        a.send("b", control(2))
        path.unlink()
        for peer in peers.values():
            peer.look()
        a.send("b", control(3))
        assert await next_of(b) == 3

    among(path, story)


def test_a_hole_takes_messages_with_blobs_and_lets_small_ones_pass(tmp_path: Path) -> None:
    path = tmp_path / FAULTS
    write(path, msgspec.structs.replace(fault("out", others=("b",)), large=True))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b = peers["a"], peers["b"]
        blob = Blob("uint8", (1,), b"x")
        for index, blobs in ((1, (blob,)), (2, ()), (3, (blob,)), (4, ())):
            a.send("b", BoundaryTensor(0, 1, index, 1, False) if blobs else control(index), blobs)
        assert [await next_of(b), await next_of(b)] == [2, 4]
        b.send("a", BoundaryTensor(0, 1, 5, 1, False), (blob,))
        assert await next_of(a) == 5, "the other direction is whole"

    among(path, story)


def test_peers_find_a_new_file_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / FAULTS

    async def story(peers: dict[str, Faulty]) -> None:
        a, b = peers["a"], peers["b"]
        write(path, fault("out", others=("b",)))
        async with asyncio.timeout(60):
            sent = 0
            while not a._cut("a", "b", ()):
                a.send("b", control(sent))
                sent += 1
                await asyncio.sleep(0.01)
        b.send("a", control(9))  # the other direction stays
        assert await next_of(a) == 9

    among(path, story)


def test_a_slow_link_keeps_its_order_and_gives_up_what_it_holds_when_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / FAULTS
    write(path, fault(link=AccessLink(delay_s=LONG_S), others=("b",)))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b, c = peers["a"], peers["b"], peers["c"]
        a.send("b", control(0))
        a.send("b", BoundaryTensor(0, 1, 1, 1, False), (Blob("uint8", (3,), b"abc"),))
        a.send("b", control(2))
        a.send("c", control(7))  # another link
        assert await next_of(c) == 7
        c.send("b", control(8))
        assert await next_of(b) == 8, "what lags has not arrived"
        write(path)
        a.look()
        a.send("b", control(3))
        got = [await next_of(b) for _ in range(4)]
        assert [index for index in got if index != 1] == [0, 2, 3] and 1 in got

    among(path, story)


def test_a_slow_link_carries_no_more_than_its_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / FAULTS
    write(path, fault(link=AccessLink(delay_s=0.05, up_Bps=1e6)))

    async def story(peers: dict[str, Faulty]) -> None:
        a, b = peers["a"], peers["b"]
        began_s = time.monotonic()
        for index in range(3):
            a.send("b", BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (100_000,), bytes(100_000)),))
        assert [await next_of(b) for _ in range(3)] == [0, 1, 2]
        assert time.monotonic() - began_s >= 0.35  # 300 kB over 1 MB/s, and the delay

    among(path, story)
