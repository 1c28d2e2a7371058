"""Which bulk goes next: the highest rank, and a tenth of the line for the others, so that nothing stands still; half of it for what is
urgent to a joiner."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.core.messages import (
    PASSED,
    RANKS,
    URGENT,
    BoundaryTensor,
    Chunk,
    GatherChunk,
    Message,
    ReduceChunk,
    Withdraw,
    rank,
)
from shoal.slots import RankTurns
from shoal.transport.base import Blob, Limits
from shoal.transport.streams.send_queue import QueuedBytes, SendQueue
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
    turns = PASSED[rank(Chunk(0, 1, 0, 0))]
    assert sent_of(queue, turns) == {rank(BoundaryTensor(0, 1, 0, 0, True)): turns}


@pytest.mark.parametrize(
    "urgent", [Chunk(0, 1, 0, 0, urgent=True), GatherChunk(0, 1, 0, 0, to_joiner=True, urgent=True)]
)
def test_what_is_urgent_to_a_joiner_has_two_thirds_of_a_line_full_of_hops(urgent: Message) -> None:
    queue = SendQueue("p", "bulk", 1 << 30, QueuedBytes(1 << 30))
    gradient, activation = BoundaryTensor(0, 1, 0, 0, True), BoundaryTensor(0, 1, 0, 1, False)
    for message in (urgent, gradient, activation):
        queue.put(encode(message, BLOBS, Limits()))
    sent = sent_of(queue, 60)
    assert 38 <= sent[URGENT] <= 42 and sent[rank(gradient)] >= 12 and sent[rank(activation)] >= 5


def test_a_rank_has_its_turns() -> None:
    assert len(PASSED) == RANKS


def test_each_of_several_lower_ranks_has_its_part_and_no_turn_is_left_out() -> None:
    turns, counts = RankTurns(), Counter[int]()
    for _ in range(1000):
        turn = turns.next((1, 4, 5))
        turns.took(turn, (1, 4, 5))
        counts[turn] += 1
    assert counts[4] >= 90 and counts[5] >= 90 and counts[1] >= 800


def test_a_rank_that_waits_alone_goes_at_once() -> None:
    assert RankTurns().next((4,)) == 4


def test_what_is_void_does_not_go_but_for_what_has_begun() -> None:
    total = QueuedBytes(1 << 30)
    queue, void = SendQueue("p", "bulk", 1 << 30, total), Withdraw(0, 1, 7)
    for message in (ReduceChunk(0, 1, 7, 0), GatherChunk(0, 1, 7, 1), ReduceChunk(0, 1, 8, 2), ReduceChunk(0, 1, 7, 3)):
        queue.put(encode(message, BLOBS, Limits()))
    begun = queue.take(FRAGMENT_BYTES)
    assert begun is not None
    queue.sent(begun)
    queue.withdraw(void.voids)
    kept, went = [], begun
    while went is not None:
        if went.start + went.nbytes == went.frame.nbytes:
            kept.append(went.frame.message)
        if (taken := queue.take(FRAGMENT_BYTES)) is not None:
            queue.sent(taken)
        went = taken
    assert kept == [ReduceChunk(0, 1, 7, 0), ReduceChunk(0, 1, 8, 2)]
    assert not queue.pending and total.nbytes == 0
