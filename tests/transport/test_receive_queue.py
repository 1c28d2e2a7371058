"""What waits for the node: control first, room for so much."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.core.messages import BoundaryTensor, Cancelled
from shoal.transport.base import Blob, Incoming, Lost
from shoal.transport.streams import receive_queue
from shoal.transport.streams.receive_queue import ReceiveQueue

CONTROL = [Incoming("a", Cancelled(0, 1, index, 0, 0)) for index in range(3)]
BULK = [Incoming("b", BoundaryTensor(0, 1, index, 1, False), (Blob("uint8", (1,), b"x"),)) for index in range(3)]


async def taken(queue: ReceiveQueue, count: int) -> list[Incoming | Lost]:
    return [await asyncio.wait_for(queue.take(), 60) for _ in range(count)]


def test_control_and_losses_come_before_bulk_and_each_in_order() -> None:
    async def story() -> None:
        queue = ReceiveQueue()
        for item in (BULK[0], CONTROL[0], BULK[1], Lost("c"), BULK[2], CONTROL[1]):
            queue.put(item)
        assert await taken(queue, 6) == [CONTROL[0], Lost("c"), CONTROL[1], *BULK]

    asyncio.run(story())


def test_a_full_inbox_says_so_for_its_kind_only_and_tells_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "BULK_LIMIT_BYTES", 10)

    async def story() -> None:
        calls: list[bool] = []
        queue = ReceiveQueue(on_space=lambda: calls.append(queue.full(bulk=True)))
        queue.put(BULK[0], 6)
        assert not queue.full(bulk=True)
        queue.put(BULK[1], 6)
        assert queue.full(bulk=True) and not queue.full(bulk=False) and not calls
        await taken(queue, 1)
        assert calls == [False]
        queue.put(BULK[2], 6)
        queue.drop(lambda item: item.peer == "b")
        assert calls == [False, False]

    asyncio.run(story())


def test_other_threads_put_while_the_node_waits() -> None:
    async def story() -> None:
        queue = ReceiveQueue()

        def put() -> None:
            for _ in range(500):
                queue.put(CONTROL[0])

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert len(await taken(queue, 2000)) == 2000
        for thread in threads:
            thread.join()

    asyncio.run(story())


def test_senders_take_turns_and_one_that_floods_has_its_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "CONTROL_LIMIT_BYTES", 8000)

    async def story() -> None:
        calls: list[int] = []
        queue = ReceiveQueue(on_space=lambda: calls.append(1))
        flood = [Incoming(f"rogue.{index % 7}", Cancelled(0, 1, index, 0, 0)) for index in range(20)]
        sent = 0
        for item in flood:
            if not queue.full(False, item.peer):
                queue.put(item, 100)
                sent += 1
        assert sent == 10, "an eighth of the room, whatever names the key takes"
        assert not queue.full(False, "honest.1") and not queue.full(False)
        queue.put(Incoming("honest.1", Cancelled(0, 1, 99, 0, 0)), 100)
        items = await taken(queue, 2)
        assert "honest.1" in {item.peer for item in items}, "it waited for all of the flood"
        assert not calls
        rest = await taken(queue, 9)
        assert (
            [item.message for item in (*items, *rest) if item.peer != "honest.1"]
            == [  # type: ignore[union-attr]
                item.message for item in flood[:10]
            ]
        ), "each sender's own are in order"
        assert calls == [1], "its readers go on when half is taken"
        assert queue._bytes == (0, 0)

    asyncio.run(story())


def test_the_number_of_small_messages_of_one_sender_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_queue, "LIMIT_ITEMS", 80)
    queue = ReceiveQueue()
    for _ in range(100):
        if not queue.full(False, "rogue.1"):
            queue.put(CONTROL[0], 0)
            queue.put(Incoming("rogue.1", Cancelled(0, 1, 0, 0, 0)), 1)
    assert queue._bytes[0] == 10
