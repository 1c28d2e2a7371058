"""Shards of checkpoints between peers: copies that the leader wants, and repairs of what cannot be loaded."""

from __future__ import annotations

import random
from typing import TypeVar

import msgspec
import pytest

from shoal.core.messages import (
    ABOUT,
    FROZEN,
    RANKS,
    BlobRef,
    Chunk,
    ChunkRequest,
    Command,
    CopyRequest,
    Do,
    Done,
    Failed,
    Init,
    Lack,
    Manifest,
    Member,
    Note,
    Offer,
    OfferShard,
    Phase,
    ReadShard,
    Result,
    RunCopy,
    Saved,
    Send,
    Settings,
    StateRequest,
    Task,
    View,
    Wire,
    WriteChunk,
    rank,
)
from shoal.core.server.server import Server
from shoal.core.transfer.copies import PATIENCE_BEATS, READS_AT_ONCE, REFUSALS
from shoal.core.transfer.given import WAITED
from shoal.core.transfer.transfer import StateTransfer

SETTINGS = Settings(stages=2, microbatches=4, steps=99, heartbeat_s=0.5)
MANIFEST = Manifest(hashes=("h0", "h1", "h2"), sizes=(100, 100, 50))
MEMBERS = (Member("a", 0), Member("b", 1), Member("me", 1))
GATHERING = View(number=1, step=5, members=MEMBERS, phase=Phase.GATHERING)
TRAINING = View(number=1, step=5, members=MEMBERS, phase=Phase.TRAINING)
COPY = CopyRequest(0, 5, 0, "record", "shard", ("a", "b"))
T = TypeVar("T")


class Play:
    def __init__(self, view: View = TRAINING, settings: Settings = SETTINGS) -> None:
        self.transfer = StateTransfer("me", settings, random.Random(1), Server("me", settings))
        self.now, self.said = 0.0, list[Command]()
        self.view(view)

    def view(self, view: View) -> None:
        self.said = self.transfer.on_view(view, self.now)

    def hear(self, peer: str, message: Wire, blobs: tuple[BlobRef, ...] = ()) -> None:
        self.said = self.transfer.on_message(peer, message, blobs, "", self.now)

    def done(self, task: Task, **result: object) -> None:
        self.said = self.transfer.on_done(Done(task.id, Result(**result)), self.now)  # type: ignore[arg-type]

    def failed(self, task: Task, reason: str = "not here", **more: object) -> None:
        self.said = self.transfer.on_failed(Failed(task.id, reason, **more), self.now)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.said = self.transfer.tick(self.now)

    def offer(self, peer: str, manifest: Manifest = MANIFEST, stage: int = 0, shard: str = "shard") -> None:
        self.hear(peer, Offer(0, 5, stage, manifest, shard))

    def chunk(self, peer: str, chunk: int, size: int = 100) -> WriteChunk:
        self.hear(peer, Chunk(0, 5, 0, chunk, shard="shard"), (BlobRef(f"blob {chunk}", size),))
        return self.task(WriteChunk)

    def task(self, kind: type[T]) -> T:
        (task,) = [c.task for c in self.said if isinstance(c, Do) and isinstance(c.task, kind)]
        return task

    def sent(self, kind: type[T]) -> list[tuple[str, T]]:
        return [(c.peer, c.message) for c in self.said if isinstance(c, Send) and isinstance(c.message, kind)]


def copying() -> Play:
    play = Play()
    play.hear("a", COPY)
    play.failed(play.task(RunCopy))  # it is not here yet
    assert {peer for peer, request in play.sent(StateRequest) if request.shard == "shard"} == {"a", "b"}
    play.offer("a")
    assert [(peer, request.chunk) for peer, request in play.sent(ChunkRequest)] == [("a", 0), ("a", 1)]
    return play


def test_a_copy_is_downloaded_written_and_answered() -> None:
    play = copying()
    task = play.chunk("a", 1)
    assert (task.start, task.size_bytes, task.record, task.digest) == (100, 250, "record", "h1")
    play.done(task, nbytes=100)
    play.done(play.chunk("a", 0), nbytes=100)
    play.done(play.chunk("a", 2, 50), nbytes=50)
    play.done(play.task(RunCopy), record="record")
    assert play.sent(Saved) == [("a", Saved(0, 5, 0, "record", shard="shard"))]
    play.hear("b", COPY)
    assert play.sent(Saved) == [("b", Saved(0, 5, 0, "record", shard="shard"))], "a new leader is answered from memory"


def test_what_is_here_already_is_not_downloaded() -> None:
    play = Play()
    play.hear("a", COPY)
    play.done(play.task(RunCopy), record="record")
    assert play.sent(Saved)


def test_a_wrong_chunk_comes_from_another_holder() -> None:
    play = copying()
    play.offer("b")
    play.done(play.chunk("a", 0), nbytes=0)
    assert [(peer, request.chunk) for peer, request in play.sent(ChunkRequest)] == [("b", 0)]


@pytest.mark.parametrize("how", ["no room", "last step", "nobody has it", "silence", "holders gone"])
def test_a_copy_that_cannot_be_made_is_said_to_the_leader(how: str) -> None:
    play = copying()
    match how:
        case "no room":
            play.failed(play.chunk("a", 0), "no room")
        case "last step":
            for chunk in range(3):
                play.done(play.chunk("a", chunk), nbytes=1)
            play.failed(play.task(RunCopy), "it came with another hash")
        case "nobody has it":
            play.offer("a", Manifest((), ()))
            play.offer("b", Manifest((), ()))
        case "silence":
            while not play.sent(Saved):
                assert play.now < 10 * PATIENCE_BEATS
                play.wait(0.5)
        case "holders gone":
            play.view(msgspec.structs.replace(TRAINING, number=2, members=(Member("me", 1), Member("c", 0))))
    ((leader, answer),) = play.sent(Saved)
    assert leader == "a" and answer.failed and answer.shard == "shard"


def test_what_an_older_epoch_wanted_is_dropped() -> None:
    play = copying()
    play.view(msgspec.structs.replace(GATHERING, number=2, epoch=1))
    play.hear("a", Chunk(0, 5, 0, 0, shard="shard"), (BlobRef("blob", 100),))
    assert not [c for c in play.said if isinstance(c, Do)]


def loading() -> Play:
    play = Play(GATHERING)
    play.failed(play.task(Init), "step-5: damaged: model-00002", older=3, lacks=(Lack(1, "mine"),))
    play.failed(play.task(RunCopy))
    assert {peer for peer, request in play.sent(StateRequest) if request.since == 5} == {"a", "b"}
    return play


def test_what_cannot_be_loaded_is_downloaded_and_loaded() -> None:
    play = loading()
    play.hear("a", Offer(0, 5, 1, Manifest(("h",), (9,)), "mine"))
    play.hear("a", Chunk(0, 5, 1, 0, shard="mine"), (BlobRef("blob", 9),))
    play.done(play.task(WriteChunk), nbytes=9)
    play.done(play.task(RunCopy))
    assert play.task(Init).step == 5
    assert play.transfer.load_failed is None


def test_what_nobody_has_is_told_with_its_name_and_how_many_were_asked() -> None:
    play = loading()
    for peer in "ab":
        play.offer(peer, Manifest((), ()), 1, "mine")
    report = play.transfer.load_failed
    assert report is not None and (report.older, report.asked, report.stage) == (3, 2, 1)
    assert "model-00002" in report.reason and "no other peer has it" in report.reason


def test_a_peer_that_is_alone_asks_nobody_and_says_so() -> None:
    play = Play(msgspec.structs.replace(GATHERING, members=(Member("me", 1),)))
    play.failed(play.task(Init), "gone", older=0, lacks=(Lack(0, ABOUT),))
    play.failed(play.task(RunCopy))
    assert play.transfer.load_failed is not None and play.transfer.load_failed.asked == 0


def test_shards_are_given_to_the_view_alone_and_reads_are_bounded() -> None:
    play = Play()
    play.hear("stranger", StateRequest(0, 0, 5, "shard"))
    assert not play.said
    play.hear("a", StateRequest(0, 0, 5, "shard"))
    task = play.task(OfferShard)
    play.hear("b", StateRequest(0, 0, 5, "shard"))
    assert not play.said, "it is read once for both"
    play.done(task, manifest=Manifest(tuple(map(str, range(40))), (1,) * 40))
    assert {peer for peer, _ in play.sent(Offer)} == {"a", "b"}
    reads = 0
    for chunk in range(40):
        play.hear("a", ChunkRequest(0, 5, 0, chunk, "shard"))
        reads += len([c for c in play.said if isinstance(c, Do) and isinstance(c.task, ReadShard)])
    assert reads == READS_AT_ONCE
    play.hear("b", ChunkRequest(0, 5, 0, 40, "shard"))
    assert play.sent(Chunk)[0][1].gone


def test_shards_travel_below_everything_that_trains() -> None:
    assert rank(Chunk(0, 5, 0, 0, shard="shard")) == RANKS - 1 > rank(Chunk(0, 5, 0, 0))


def test_what_is_not_whole_after_it_was_brought_is_not_tried_at_once_again() -> None:
    play = loading()
    play.hear("a", Offer(0, 5, 1, Manifest(("h",), (9,)), "mine"))
    play.hear("a", Chunk(0, 5, 1, 0, shard="mine"), (BlobRef("blob", 9),))
    play.done(play.task(WriteChunk), nbytes=9)
    play.done(play.task(RunCopy))
    play.failed(play.task(Init), "step-5: damaged: model-00002", older=3, lacks=(Lack(1, "mine"),))
    assert not [c for c in play.said if isinstance(c, Do)] and play.transfer.load_failed is not None


# ------------------------------------------------------------------------------------------------------ frozen weights

BORROWER = msgspec.structs.replace(SETTINGS, borrows=True)
MORE = (Member("a", 0), Member("b", 1), Member("c", 1))
JOINING = View(number=1, step=5, members=MORE, joining=(Member("me", 1),), phase=Phase.TRAINING)


def borrowing(held: tuple[str, ...] = ()) -> Play:
    """`me` joins stage 1 without the model; chunks with these hashes are here from before."""
    play = Play(JOINING, BORROWER)
    task = play.task(RunCopy)
    assert (task.step, task.stage, task.shard) == (0, 1, FROZEN)
    assert not play.sent(StateRequest), "first it looks whether they are here"
    play.failed(task, held=held)
    assert play.sent(StateRequest) == [(peer, StateRequest(0, 1, 0, FROZEN)) for peer in ("b", "c")], "its stage alone"
    return play


def frozen_chunk(play: Play, peer: str, chunk: int) -> WriteChunk:
    play.hear(peer, Chunk(0, 0, 1, chunk, shard=FROZEN), (BlobRef(f"blob {chunk}", MANIFEST.sizes[chunk]),))
    return play.task(WriteChunk)


def lend(play: Play, peer: str, manifest: Manifest = MANIFEST) -> None:
    play.hear(peer, Offer(0, 0, 1, manifest, FROZEN))


def test_a_machine_without_the_model_first_gets_its_stages_frozen_weights_then_the_state() -> None:
    play = borrowing()
    lend(play, "b")
    lend(play, "c")
    for chunk in range(3):
        assert play.transfer.loaded == chunk, "the leader sees that it goes on"
        play.done(frozen_chunk(play, "bbc"[chunk], chunk), nbytes=1)
    play.done(play.task(RunCopy))
    requests = [request for _, request in play.sent(StateRequest)]
    assert requests and all(request == StateRequest(0, 1, request.since) for request in requests)


def test_frozen_weights_that_are_here_are_not_downloaded() -> None:
    play = Play(JOINING, BORROWER)
    play.done(play.task(RunCopy))
    assert {request.shard for _, request in play.sent(StateRequest)} == {""}


def test_chunks_of_frozen_weights_that_are_here_are_not_requested_again() -> None:
    play = borrowing(held=("h0", "h1"))
    lend(play, "b")
    assert [(peer, request.chunk) for peer, request in play.sent(ChunkRequest)] == [("b", 2)]
    play.done(frozen_chunk(play, "b", 2), nbytes=50)
    assert play.task(RunCopy)


def test_a_last_chunk_that_is_here_is_not_requested_again_either() -> None:
    play = borrowing(held=("h1", "h2"))
    lend(play, "b")
    assert [request.chunk for _, request in play.sent(ChunkRequest)] == [0]


def test_with_every_chunk_here_the_last_one_is_requested_all_the_same() -> None:
    play = borrowing(held=MANIFEST.hashes)
    lend(play, "b")
    assert [request.chunk for _, request in play.sent(ChunkRequest)] == [2]


def test_a_donor_of_frozen_weights_that_leaves_costs_what_was_requested_of_it() -> None:
    play = borrowing()
    lend(play, "b")
    lend(play, "c")
    play.done(frozen_chunk(play, "b", 0), nbytes=100)
    play.view(msgspec.structs.replace(JOINING, number=2, members=(Member("a", 0), Member("c", 1))))
    play.wait(60.0)
    asked = {request.chunk for peer, request in play.sent(ChunkRequest) if peer == "c"}
    assert 0 not in asked


def test_a_slow_line_is_waited_for_and_nobody_to_ask_is_said_and_tried_again() -> None:
    play = borrowing()
    lend(play, "b")
    lend(play, "c")
    play.wait(10 * PATIENCE_BEATS * SETTINGS.heartbeat_s)
    assert any(request.shard == FROZEN for _, request in play.sent(ChunkRequest) + play.sent(StateRequest))

    play = borrowing()
    lend(play, "b", Manifest((), ()))
    lend(play, "c", Manifest((), ()))
    notes = [command.text for command in play.said if isinstance(command, Note)]
    assert any("no other peer has it" in text for text in notes)
    assert not any(isinstance(command, Do) for command in play.said)
    play.wait(60.0)
    assert play.task(RunCopy).shard == FROZEN
    assert play.transfer.load_failed is None, "no checkpoint is at fault"


def test_frozen_weights_are_given_to_peers_of_the_view_with_the_rank_of_a_state() -> None:
    play = Play()
    play.hear("stranger", StateRequest(0, 1, 0, FROZEN))
    assert not play.said
    play.hear("b", StateRequest(0, 1, 0, FROZEN))
    play.done(play.task(OfferShard), manifest=MANIFEST)
    play.hear("b", ChunkRequest(0, 0, 1, 2, FROZEN))
    play.done(play.task(ReadShard))
    ((_, chunk),) = play.sent(Chunk)
    assert (chunk.chunk, chunk.gone) == (2, False)
    assert rank(chunk) == rank(Chunk(0, 0, 1, 2)) < rank(Chunk(0, 5, 1, 2, shard="shard"))
    play.hear("b", StateRequest(0, 0, 0, FROZEN))
    assert play.task(OfferShard).stage == 0, "each stage has its own"


def test_a_stage_whose_replicas_have_no_frozen_weights_to_give_is_asked_of_one_other_peer_at_a_time() -> None:
    play = borrowing()
    for _ in range(REFUSALS):
        lend(play, "b", Manifest((), ()))
        lend(play, "c", Manifest((), ()))
        play.wait(60.0)
        play.failed(play.task(RunCopy))
    asked = [peer for peer, request in play.sent(StateRequest) if request.shard == FROZEN]
    assert len(asked) == 1
    play.wait(PATIENCE_BEATS * SETTINGS.heartbeat_s - 1)
    assert not play.sent(StateRequest), "it reads the model, which takes a while"
    play.wait(2.0)
    again = [peer for peer, request in play.sent(StateRequest) if request.shard == FROZEN]
    assert len(again) == 1
    lend(play, "a")
    play.done(frozen_chunk(play, "a", 0), nbytes=1)
    assert play.transfer.loaded == 1


def test_a_stage_without_replicas_is_asked_of_the_others_at_once() -> None:
    play = Play(msgspec.structs.replace(JOINING, members=(Member("a", 0), Member("z", 0))), BORROWER)
    play.failed(play.task(RunCopy))
    assert {peer for peer, request in play.sent(StateRequest) if request.shard == FROZEN} == {"a", "z"}


def test_a_shards_chunk_that_may_still_wait_for_a_line_is_not_sent_twice() -> None:
    play = Play()
    play.hear("a", StateRequest(0, 0, 5, "shard"))
    play.done(play.task(OfferShard), manifest=MANIFEST)
    for again, read in ((False, True), *((True, False),) * WAITED, (True, True), (False, True)):
        play.hear("a", ChunkRequest(0, 5, 0, 1, "shard", again))
        assert any(isinstance(one, Do) for one in play.said) is read
        if read:
            play.done(play.task(ReadShard))
    play.transfer.on_unreachable("a")
    play.hear("a", ChunkRequest(0, 5, 0, 1, "shard", True))
    assert play.task(ReadShard).chunk == 1
    play.hear("a", ChunkRequest(0, 5, 0, 1, "shard", False))
    assert not play.said, "it is being read"
