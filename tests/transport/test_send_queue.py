"""Which bulk goes next: the highest rank, and a tenth of the line for the others, so that nothing stands still."""

from __future__ import annotations

from collections import Counter

from shoal.core.messages import BoundaryTensor, Chunk, ReduceChunk
from shoal.transport.base import Blob, Limits
from shoal.transport.streams.send_queue import PASSED, QueuedBytes, RankTurns, SendQueue
from shoal.transport.wire import FRAGMENT_BYTES, encode

DATA = bytes(40 * FRAGMENT_BYTES)
BLOBS = (Blob("uint8", (len(DATA),), DATA),)


def sent_of(queue: SendQueue, fragments: int) -> Counter[int]:
    ranks: Counter[int] = Counter()
    for _ in range(fragments):
        taken = queue.take(FRAGMENT_BYTES)
        assert taken is not None and taken.number == ranks[taken.frame.rank]
        queue.sent(taken)
        ranks[taken.frame.rank] += 1
    return ranks


def test_state_for_a_joiner_moves_while_averaging_fills_the_line() -> None:
    queue = SendQueue("p", "bulk", 1 << 30, QueuedBytes(1 << 30))
    for message in (Chunk(0, 1, 0, 0), ReduceChunk(0, 1, 0, 0)):
        queue.put(encode(message, BLOBS, Limits()))
    averaging, state = sorted(sent_of(queue, 40).values(), reverse=True)
    assert averaging == 36 and state == 4


def test_the_highest_rank_goes_first() -> None:
    queue = SendQueue("p", "bulk", 1 << 30, QueuedBytes(1 << 30))
    for message in (Chunk(0, 1, 0, 0), BoundaryTensor(0, 1, 0, 0, True)):
        queue.put(encode(message, BLOBS, Limits()))
    assert sent_of(queue, PASSED) == {0: PASSED}


def test_each_of_several_lower_ranks_has_its_part_and_no_turn_is_left_out() -> None:
    turns, counts = RankTurns(), Counter[int]()
    for _ in range(1000):
        turn = turns.next((1, 3, 4))
        turns.took(turn, (1, 3, 4))
        counts[turn] += 1
    assert counts[3] >= 90 and counts[4] >= 90 and counts[1] >= 800


def test_a_rank_that_waits_alone_goes_at_once() -> None:
    assert RankTurns().next((4,)) == 4
