"""How a peer gets its stage's state: from several replicas at once, whatever becomes of them, and never a wrong byte."""

from __future__ import annotations

import random
from typing import TypeVar

import msgspec
import pytest

from shoal.core.messages import (
    BlobRef,
    CheckChunk,
    Chunk,
    ChunkRequest,
    Command,
    Committed,
    Continued,
    Do,
    Done,
    Drop,
    Export,
    Failed,
    Import,
    Init,
    Manifest,
    Member,
    Note,
    Offer,
    Phase,
    ReadChunk,
    Rebuilt,
    Result,
    Send,
    Settings,
    Share,
    StateRequest,
    Task,
    View,
    Wire,
    WithdrawState,
)
from shoal.core.replica_state import HURRY_STEPS
from shoal.core.server.server import Server
from shoal.core.transfer.catch_up import LATEST
from shoal.core.transfer.donor import ASKS
from shoal.core.transfer.download import COLD_BYTES, COLD_Bps
from shoal.core.transfer.given import WAITED
from shoal.core.transfer.transfer import StateTransfer

SETTINGS = Settings(stages=2, microbatches=4, steps=99, heartbeat_s=0.5)
MEMBERS = (Member("a", 0), Member("b", 1), Member("c", 1), Member("d", 1))
MANIFEST = Manifest(hashes=tuple(f"h{chunk}" for chunk in range(8)), sizes=(100,) * 8)
T = TypeVar("T")


def a_view(number: int = 1, step: int = 5, **changes: object) -> View:
    view = View(number=number, step=step, members=MEMBERS, joining=(Member("me", 1),), phase=Phase.TRAINING)
    return msgspec.structs.replace(view, **changes)


class Play:
    """`me` joins stage 1; or, with `joining` false, gives its state to others."""

    def __init__(self, view: View | None = None, name: str = "me", settings: Settings = SETTINGS) -> None:
        self.server = Server(name, settings)
        self.transfer = StateTransfer(name, settings, random.Random(1), self.server)
        self.now = 0.0
        self.said: list[Command] = []
        self.view(view or a_view())

    def take(self, commands: list[Command]) -> None:
        self.said = commands

    def view(self, view: View) -> None:
        self.take(self.server.on_view(view, self.now) + self.transfer.on_view(view, self.now))

    def hear(self, peer: str, message: Wire, blobs: tuple[BlobRef, ...] = (), fault: str = "") -> None:
        self.take(self.transfer.on_message(peer, message, blobs, fault, self.now))

    def offer(self, peer: str, step: int = 5, manifest: Manifest = MANIFEST) -> None:
        self.hear(peer, Offer(epoch=0, step=step, stage=1, manifest=manifest))

    def chunk(self, peer: str, chunk: int, step: int = 5, *, missing: bool = False) -> None:
        blobs = () if missing else (BlobRef(f"blob {chunk}", 100),)
        self.hear(peer, Chunk(epoch=0, step=step, stage=1, chunk=chunk, gone=missing), blobs)

    def whole(self, peer: str, chunk: int) -> None:
        """That chunk comes and is right."""
        self.chunk(peer, chunk)
        self.done(self.task(CheckChunk))

    def done(self, task: Task, **result: object) -> None:
        self.take(self.transfer.on_done(Done(task.id, Result(**result)), self.now))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.transfer.tick(self.now))

    def task(self, kind: type[T]) -> T:
        (tasks,) = [c.task for c in self.said if isinstance(c, Do) and isinstance(c.task, kind)]
        return tasks

    def sent(self, kind: type[T]) -> list[tuple[str, T]]:
        return [(c.peer, c.message) for c in self.said if isinstance(c, Send) and isinstance(c.message, kind)]

    def asked(self) -> list[tuple[str, int]]:
        return [(peer, ask.chunk) for peer, ask in self.sent(ChunkRequest)]


def test_all_replicas_are_asked_and_each_gives_some_chunks() -> None:
    play = Play()
    asked = play.sent(StateRequest)
    assert sorted(peer for peer, _ in asked) == ["b", "c", "d"] and {ask.since for _, ask in asked} == {5}
    taken: list[tuple[str, int]] = []
    for donor in "bcd":
        play.offer(donor)
        taken += play.asked()
    assert taken == [("b", 0), ("b", 1), ("c", 2), ("c", 3), ("d", 4), ("d", 5)]
    play.whole("c", 2)
    assert play.asked() == [("c", 6)]


def test_the_state_is_taken_when_every_chunk_is_here_and_right() -> None:
    play = Play()
    play.offer("b")
    for chunk in range(8):
        play.whole("b", chunk)
    task = play.task(Import)
    assert (task.stage, task.step, task.chunks) == (1, 5, 8)
    play.done(task, digest="d", length=10)
    assert play.server.ready and (play.server.stage, play.server.step) == (1, 5)


def test_a_silent_donors_chunks_are_asked_of_the_others_and_the_rest_stays() -> None:
    play = Play()
    play.offer("b")
    play.offer("c")
    play.whole("b", 0)
    play.wait(0.5)
    play.whole("c", 2)
    play.whole("c", 3)
    play.wait(3.5)  # b has been silent for four seconds, c has not
    assert [c.text for c in play.said if isinstance(c, Note)] == [
        "no more of version 5 from b: it does not answer; 3 of 8 chunks are here"
    ]
    play.whole("c", 5)
    assert play.asked() == [("c", 1)], "and not chunk 0, which is here"


def alone() -> Play:
    """One replica has the state, and has offered it."""
    play = Play(a_view(members=MEMBERS[:2]))
    play.offer("b")
    assert play.asked() == [("b", 0), ("b", 1)]
    return play


def test_chunks_that_always_come_late_are_taken_and_teach_patience() -> None:
    """Found by simulation (fleet 6429): each chunk took a moment longer than a donor is waited for, and none was ever taken."""
    play = alone()
    play.wait(4.5)
    assert [command for command in play.said if isinstance(command, Note)], "given up"
    play.whole("b", 0)
    play.chunk("b", 1)
    check = play.task(CheckChunk)
    play.wait(0.5)
    assert play.sent(StateRequest), "it is asked again"
    play.offer("b")
    assert play.asked() == [("b", 2), ("b", 3)], "not for what is here or being checked"
    play.done(check)
    play.wait(17.0)
    assert not play.said, "4.5 s are usual now, so 18 are waited for"
    play.wait(1.5)
    assert [command for command in play.said if isinstance(command, Note)]


def test_a_late_chunk_is_taken_once_and_from_whom_it_was_asked() -> None:
    play = alone()
    play.wait(4.5)
    play.wait(0.5)
    play.offer("b")
    assert play.asked() == [("b", 0), ("b", 1)]
    play.chunk("c", 0)
    assert not [c for c in play.said if isinstance(c, Do)], "c was never asked"
    play.whole("b", 0)
    play.chunk("b", 0)
    assert not [c for c in play.said if isinstance(c, Do)], "it is here"


def test_what_is_asked_for_again_says_so_and_its_time_counts_from_the_first_request() -> None:
    """Measured from the last request, chunks that took 16 s of a line seemed to take 3, and were asked for after 12 again."""
    play = alone()
    assert [ask.again for _, ask in play.sent(ChunkRequest)] == [False, False]
    for _ in range(2):
        play.wait((play.transfer.deadline or 0.0) - play.now)
        play.wait((play.transfer.deadline or 0.0) - play.now)
        play.offer("b")
        assert [ask.again for _, ask in play.sent(ChunkRequest)] == [True, True]
    assert play.now == 13.0  # 4 and 8 s, and half a second each until an offer is asked for
    play.whole("b", 0)
    play.whole("b", 1)
    assert [ask.again for _, ask in play.sent(ChunkRequest)] == [False]
    play.wait(51.0)
    assert not play.said, "13 s are usual now"
    play.wait(1.5)
    assert [command for command in play.said if isinstance(command, Note)]


def two_donors(chunks: int) -> Play:
    play = Play()
    manifest = Manifest(hashes=MANIFEST.hashes[:chunks], sizes=MANIFEST.sizes[:chunks])
    for donor in "bc":
        play.offer(donor, manifest=manifest)
    return play


def test_who_has_sent_its_chunks_is_asked_for_the_last_ones_of_a_slower_donor() -> None:
    """The last chunks of a line that is ten times as narrow as the others took as long as all the rest."""
    play = two_donors(4)
    play.wait(1.0)
    play.whole("c", 2)
    assert not play.asked(), "it still has one to send"
    play.wait(1.0)
    play.whole("c", 3)
    assert play.asked() == [("c", 1)], "which b begins with last"
    play.wait(1.0)
    play.whole("c", 1)
    assert play.asked() == [("c", 0)]
    play.wait(0.5)
    play.chunk("b", 0)
    play.done(play.task(CheckChunk))
    assert play.task(Import).chunks == 4, "whoever comes first counts"
    play.chunk("c", 0)
    assert not [c for c in play.said if isinstance(c, Do)]


def test_a_donor_that_is_about_as_quick_is_waited_for() -> None:
    play = two_donors(3)
    play.wait(1.0)
    play.whole("b", 0)
    play.whole("c", 2)
    assert not play.asked() and play.transfer.deadline == 2.0, "b has had twice what c takes for one"
    play.wait(1.0)
    assert play.asked() == [("c", 1)]
    deadline = play.transfer.deadline
    play.wait(1.0)
    assert not play.asked() and deadline is not None and deadline > 5.0, (
        "b has sent nothing since that c could be measured by"
    )


def test_a_chunk_is_asked_once_of_each_donor_and_of_none_that_has_sent_nothing() -> None:
    play = two_donors(3)
    play.offer("d", manifest=Manifest(hashes=MANIFEST.hashes[:3], sizes=MANIFEST.sizes[:3]))
    play.wait(1.0)
    play.whole("c", 2)
    asked: list[tuple[str, int]] = []
    while play.now < 3.9:
        play.wait(0.1)
        asked += play.asked()
    assert asked == [("c", 1)], "d has not shown what it takes, and c has that one to send"


def test_a_silent_donor_is_waited_for_twice_as_long_each_time() -> None:
    play = alone()
    waited = []
    for _ in range(6):
        began = play.now
        while play.transfer.downloader.current is not None and play.transfer.downloader.current.donors:
            play.wait((play.transfer.deadline or 0.0) - play.now)
        waited.append(play.now - began)
        play.wait((play.transfer.deadline or 0.0) - play.now)
        play.offer("b")
    assert waited == [4.0, 8.0, 16.0, 32.0, 64.0, 64.0]


@pytest.mark.parametrize("size_bytes", [COLD_BYTES, 1 << 40])
def test_the_first_chunk_is_waited_for_as_long_as_its_size_takes_on_a_slow_line(size_bytes: int) -> None:
    """16 MiB over 20 Mbit/s were requested three times over, of donors that were sending them; an offer of more gets no longer."""
    play = Play(a_view(members=MEMBERS[:2]))
    large = Manifest(hashes=("h0",), sizes=(size_bytes,))
    play.hear("b", Offer(epoch=0, step=5, stage=1, manifest=large))
    assert play.asked() == [("b", 0)]
    play.wait(4 * COLD_BYTES / COLD_Bps - 0.1)
    assert not play.said
    play.wait(0.2)
    assert [command for command in play.said if isinstance(command, Note)]


def test_a_download_without_donors_goes_on_with_the_next_that_has_the_same_version() -> None:
    play = Play()
    play.offer("b")
    play.whole("b", 0)
    play.chunk("b", 1, missing=True)
    assert play.asked() == []
    play.wait(0.5)
    assert "b" not in [peer for peer, _ in play.sent(StateRequest)]
    play.offer("c", step=6, manifest=Manifest(hashes=("x",), sizes=(1,)))
    assert play.asked() == [("c", 0)], "nobody has version 5 any more: begin anew with 6"

    play = Play()
    play.offer("b")
    play.whole("b", 0)
    play.chunk("b", 1, missing=True)
    play.wait(0.5)
    play.offer("c")
    assert play.asked() == [("c", 1), ("c", 2)]


@pytest.mark.parametrize(("chunks", "since"), [(0, 7), (1, 5)])
def test_a_download_that_has_chunks_asks_for_its_version_again(chunks: int, since: int) -> None:
    """Its only donor was late, and was asked for a newer version: what had come was thrown away, and that came late, too."""
    play = alone()
    for step in (5, 6, 7):
        groups = ((Share("a", (0, 1, 2, 3)),), (Share("b", (0, 1, 2, 3)),))
        last = Committed(step, 9, 2.0, 1.0, ("g0", "g1"), groups, joiners=("me",))
        play.view(a_view(step, step=step + 1, members=MEMBERS[:2], last=last))
    for chunk in range(chunks):
        play.whole("b", chunk)
    asked: list[tuple[str, StateRequest]] = []
    while not (asked := play.sent(StateRequest)):
        play.wait(1.0)
    assert [ask.since for _, ask in asked] == [since] and play.server.since == 5


def test_a_chunk_with_another_digest_is_asked_of_somebody_else() -> None:
    play = Play()
    play.offer("b")
    play.offer("c")
    play.chunk("b", 0)
    play.take(play.transfer.on_failed(Failed(play.task(CheckChunk).id, "its digest differs"), play.now))
    play.whole("c", 2)
    assert ("c", 0) in play.asked() and "b" not in [peer for peer, _ in play.asked()]


def test_other_replicas_with_another_manifest_are_not_mixed_in() -> None:
    play = Play()
    play.offer("b")
    play.offer("c", step=6)
    assert play.asked() == []
    play.offer("d", manifest=msgspec.structs.replace(MANIFEST, hashes=("other",) * 8))
    assert play.asked() == []


def test_commits_do_not_disturb_a_download_until_they_cannot_be_heard() -> None:
    play = Play()
    play.offer("b")
    play.whole("b", 0)
    assert play.server.since == 5
    play.view(a_view(2, step=7))  # how 5 and 6 were committed is not known
    assert play.server.since == 7 and sorted(peer for peer, _ in play.sent(StateRequest)) == ["b", "c", "d"]
    play.offer("b", step=5)
    assert play.asked() == []
    play.offer("b", step=7)
    assert play.asked() == [("b", 0), ("b", 1)]


def test_a_first_stage_that_cannot_be_built_is_tried_again() -> None:
    play = Play(a_view(step=0, phase=Phase.GATHERING))
    play.take(play.transfer.on_failed(Failed(play.task(Init).id, "no memory"), play.now))
    play.wait(4.0)
    assert play.task(Init).step == 0


# ---------------------------------------------------------------------------------------------------------- giving


def a_donor(joiners: str = "xy", step: int = 5) -> Play:
    joining = tuple(Member(peer, 1) for peer in joiners)
    play = Play(a_view(step=step, joining=joining), name="b")
    play.take(play.server.load_state(1, step, 0, 10, "d", 0.0))
    return play


def ask(play: Play, peer: str, since: int = 5) -> None:
    play.hear(peer, StateRequest(epoch=0, stage=1, since=since))


def exported(play: Play) -> None:
    play.done(play.task(Export), manifest=MANIFEST)


@pytest.mark.parametrize("ends", [Done, Failed])
def test_of_all_that_was_wanted_during_a_build_only_the_newest_is_built(ends: type[Done] | type[Failed]) -> None:
    """Found by simulation (fleet 1598): five rollbacks in 20 s, and a peer that built five stages one after the other for 90 s."""
    view = a_view(step=0, phase=Phase.GATHERING, members=MEMBERS, joining=(Member("me", 1),))
    play = Play(view)
    first = play.task(Init)
    for epoch, stage in ((1, 0), (2, 1), (3, 0)):
        joining = (Member("me", stage),)
        play.view(msgspec.structs.replace(view, number=view.number + epoch, epoch=epoch, joining=joining))
        assert not [c for c in play.said if isinstance(c, Do)], "one is under way, and cannot be called off"
    over = Done(first.id, Result(digest="old", length=1)) if ends is Done else Failed(first.id, "no room")
    play.take(
        play.transfer.on_done(over, play.now) if isinstance(over, Done) else play.transfer.on_failed(over, play.now)
    )
    last = play.task(Init)
    assert last.stage == 0 and not play.server.has_state
    play.done(last, digest="new", length=2)
    assert (play.server.stage, play.server.epoch, play.server.digest) == (0, 3, "new")
    play.view(msgspec.structs.replace(view, number=view.number + 4, epoch=4, joining=(Member("me", 1),)))
    assert play.task(Init).stage == 1, "nothing is under way any more"


def reads(play: Play, chunk: int, *, again: bool, peer: str = "x") -> bool:
    """Whether the donor reads that chunk for it; then it is sent."""
    play.hear(peer, ChunkRequest(epoch=0, step=5, stage=1, chunk=chunk, again=again))
    asked = any(isinstance(one, Do) for one in play.said)
    if asked:
        play.done(play.task(ReadChunk))
        assert [to for to, _ in play.sent(Chunk)] == [peer]
    return asked


def test_a_chunk_that_may_still_wait_for_a_line_is_not_sent_twice() -> None:
    """14 were sent where 3 were needed, on the only donor's line of 3 MB/s, behind which the run's tensors stood."""
    play = a_donor()
    ask(play, "x")
    exported(play)
    ask(play, "y")
    assert reads(play, 0, again=True), "as when the first request was lost"
    assert not any(reads(play, 0, again=True) for _ in range(WAITED))
    assert reads(play, 1, again=False) and reads(play, 1, again=False, peer="y")
    assert reads(play, 0, again=True), "it has waited for long: it may be lost after all"
    assert not reads(play, 0, again=True)
    assert reads(play, 1, again=True), "the first copy was withdrawn with that of the other chunk"
    assert not reads(play, 1, again=True, peer="y"), "what goes to others is not"
    assert reads(play, 0, again=False), "it was here, and was no use"
    play.transfer.on_unreachable("x")
    assert reads(play, 1, again=True) and not reads(play, 1, again=True, peer="y")


def test_what_may_be_lost_is_withdrawn_before_it_is_sent_again() -> None:
    """A joiner on a full line got 300 MB of state as 500 MB (tests/sim/test_far.py)."""
    play = a_donor()
    ask(play, "x")
    exported(play)
    assert reads(play, 0, again=False)
    for _ in range(WAITED):
        reads(play, 0, again=True)
    play.hear("x", ChunkRequest(epoch=0, step=5, stage=1, chunk=0, again=True))
    assert [type(one) for one in play.said] == [WithdrawState, Do]
    play.done(play.task(ReadChunk))
    play.hear("x", ChunkRequest(epoch=0, step=5, stage=1, chunk=0))
    assert [type(one) for one in play.said] == [Do], "the first copy came"


def test_a_donor_that_was_moved_offers_its_new_stage_and_not_its_copy_of_the_old_one() -> None:
    """Found by simulation (spot 2): a stage's only replica, moved there in the same step, offered its old stage to twelve joiners."""
    play = a_donor()
    ask(play, "x")
    exported(play)
    play.view(a_view(2, step=5, members=(Member("a", 1), Member("b", 0)), joining=(Member("x", 0),)))
    play.take(play.server.load_state(0, 5, 0, 10, "d0", 0.0))
    play.hear("x", StateRequest(epoch=0, stage=0, since=5))
    assert play.sent(Offer) == [] and play.task(Export).step == 5, "nobody can use the copy of stage 1 any more"
    exported(play)
    assert [(offer.stage, offer.manifest) for _, offer in play.sent(Offer)] == [(0, MANIFEST)]
    play.hear("x", ChunkRequest(epoch=0, step=5, stage=0, chunk=0))
    assert play.task(ReadChunk).step == 5


def test_a_donor_that_built_its_stage_anew_offers_a_new_copy() -> None:
    """Found by simulation (stopped 7): its copy was dropped with the seat, and a joiner asked for a chunk of it for ever."""
    play = a_donor()
    ask(play, "x")
    exported(play)
    play.take(play.transfer._start(Import("again", 1, 5, 1)))
    play.take(play.server.load_state(1, 5, 0, 10, "d", 0.0))
    ask(play, "x")
    assert play.sent(Offer) == [] and play.task(Export).step == 5


def test_a_copy_in_use_is_offered_to_whom_it_suits_and_kept_from_whom_it_does_not() -> None:
    play = a_donor()
    ask(play, "x")
    exported(play)
    assert play.sent(Offer)[0][1].step == 5
    play.take(play.server.load_state(1, 7, 0, 10, "d7", 0.0))
    ask(play, "y", since=5)
    assert play.sent(Offer)[0][1].step == 5
    ask(play, "y", since=7)
    assert play.sent(Offer)[0][1].manifest.sizes == (), "x still reads version 5"
    play.view(a_view(2, step=7, joining=(Member("y", 1),)))
    ask(play, "y", since=7)
    exported(play)
    assert play.sent(Offer)[0][1].step == 7


def test_chunks_for_a_joiner_that_has_waited_for_steps_are_urgent() -> None:
    play = a_donor()
    ask(play, "x")
    exported(play)
    for later, urgent in ((HURRY_STEPS - 1, False), (HURRY_STEPS, True)):
        play.view(a_view(2 + later, step=5 + later, joining=(Member("x", 1),)))
        play.hear("x", ChunkRequest(epoch=0, step=5, stage=1, chunk=0))
        play.done(play.task(ReadChunk))
        assert [chunk for _, chunk in play.sent(Chunk)] == [Chunk(0, 5, 1, 0, urgent=urgent)]


def test_two_joiners_for_whom_a_copy_is_too_old_do_not_wait_for_one_another() -> None:
    """Found by simulation (unlike 40): each was told for ever that the other still read it, and both were evicted."""
    play = a_donor()
    ask(play, "x")
    exported(play)
    ask(play, "y")
    play.take(play.server.load_state(1, 7, 0, 10, "d7", 0.0))
    ask(play, "x", since=7)
    assert play.sent(Offer)[0][1].manifest.sizes == (), "y still reads version 5"
    ask(play, "y", since=7)
    exported(play)
    assert play.sent(Offer)[0][1].step == 7


def test_what_waits_for_a_joiner_that_has_the_state_or_wants_a_newer_one_is_withdrawn() -> None:
    """Fleet 209 of benchmarks/forecast_check.py: chunks that a joiner had had of others held up twelve rounds on a line of 2 MB/s."""
    play = a_donor()
    for peer in "xy":
        ask(play, peer)
        if peer == "x":
            exported(play)
        assert reads(play, 0, again=False, peer=peer)
    play.view(a_view(2, joining=(Member("x", 1), Member("y", 1))))
    assert WithdrawState("x") not in play.said, "it is not over"
    play.hear("x", ChunkRequest(epoch=0, step=5, stage=1, chunk=1))
    late = play.task(ReadChunk)
    play.view(a_view(3, members=(*MEMBERS, Member("x", 1)), joining=(Member("y", 1),)))
    assert [one for one in play.said if isinstance(one, WithdrawState)] == [WithdrawState("x")]
    play.done(late)
    assert play.said == [Drop((late.id,))], "it was being read when the joiner became a member"
    ask(play, "y", since=7)
    assert WithdrawState("y") in play.said and not play.transfer._donor.given.comes(
        "y", ChunkRequest(0, 5, 1, 0, again=True)
    )
    (command,) = (one for one in play.said if isinstance(one, WithdrawState))
    assert command.voids("y", Chunk(0, 5, 1, 0)) and not command.voids("x", Chunk(0, 5, 1, 0))
    assert not command.voids("y", Chunk(0, 5, 1, 0, shard="s")), "of a checkpoint"


def offers(play: Play, peer: str) -> bool:
    """Whether the donor gives that joiner its state."""
    ask(play, peer)
    if any(isinstance(one, Do) for one in play.said):
        exported(play)
    ((to, offer),) = play.sent(Offer)
    assert to == peer
    return bool(offer.manifest.sizes)


@pytest.mark.parametrize(
    ("rates", "gives"),
    [
        ((1000, 2000, 2000), False),
        ((1001, 2000, 2000), True),  # not so much narrower
        ((1000, 2000, 1999), True),  # one other is not enough
        ((0, 2000, 2000), True),  # nobody knows
        ((), True),  # there was no round yet
    ],
)
def test_whose_line_is_narrow_sends_joiners_to_others_for_a_while(rates: tuple[int, ...], gives: bool) -> None:
    play = a_donor()
    play.server.line_rates.update(zip("bcd", rates, strict=False))
    assert offers(play, "x") == gives
    if not gives:
        play.view(a_view(2, joining=(Member("x", 1), Member("y", 1))))
        assert [offers(play, "x") for _ in range(ASKS)] == [False] * (ASKS - 1) + [True], "it has nobody else"
        assert not offers(play, "y")
        play.view(a_view(3, joining=(Member("y", 1),)))
        play.view(a_view(4, joining=(Member("x", 1), Member("y", 1))))
        assert not offers(play, "x"), "it joins once more"
        play.view(a_view(5, members=MEMBERS[:3], joining=(Member("x", 1),)))
        assert offers(play, "x"), "of the others one is left"


def test_sums_are_waited_for_as_long_as_the_state_took() -> None:
    """Fleet 146: a joiner held a state, and the sums of the step after it came in one message, behind the last chunk on a line of which it
    had half. After 30 s they were taken for lost, and the state was loaded once more."""
    play = Play(settings=msgspec.structs.replace(SETTINGS, ready_timeout_s=3.0))
    play.offer("b")
    for chunk in range(7):
        play.wait(1.0)
        play.whole("b", chunk)
    groups = ((Share("a", (0,)),), (Share("b", (1,)),))
    last = Committed(5, 9, 1.0, 1.0, groups=groups, digests=("d", "d"), joiners=("me",))
    play.view(a_view(2, step=6, last=last))
    deadline = play.server.deadline
    play.wait(1.0)
    play.chunk("c", 7)
    assert play.server.deadline == deadline, "nobody asked for that"
    play.whole("b", 7)
    later = play.server.deadline
    assert deadline is not None and later is not None
    assert deadline - (play.now - 1.0) == pytest.approx(8.0, abs=1.0), (
        "two chunks at once, each a second after the other"
    )
    assert later == pytest.approx(deadline + 1.0, abs=0.1), "the line still carries what is for me"
    play.server.hears(1e9, play.now)
    assert play.server.deadline == play.now + LATEST * 3.0, "but not for ever"
    play.server.hears(0.1, play.now)
    assert play.server.deadline == play.now + 3.0
    play.server.hears(1e9, play.now)
    play.view(a_view(3, step=6, joining=(Member("me", 0),)))
    play.view(a_view(4, step=7, joining=(Member("me", 0),), last=msgspec.structs.replace(last, step=6)))
    assert play.server.deadline == play.now + 3.0, "of another stage's lines nothing is known"


def test_whose_line_has_become_narrow_keeps_no_copy_for_whom_it_sends_to_others() -> None:
    play = a_donor()
    assert offers(play, "x") and reads(play, 0, again=False)
    play.server.line_rates.update(b=1000, c=2000, d=2000)
    ask(play, "x", since=7)
    assert [type(one) for one in play.said] == [WithdrawState, Send]
    play.take(play.server.load_state(1, 7, 0, 10, "d7", 0.0))
    for _ in range(ASKS):
        ask(play, "y", since=7)
    ask(play, "y", since=7)
    assert play.task(Export).step == 7, "nobody reads version 5 any more"


def test_in_the_place_of_a_replica_that_has_nothing_to_give_another_is_asked() -> None:
    members = (*MEMBERS, *(Member(peer, 1) for peer in "efgh"))
    play = Play(a_view(members=members))
    first = {peer for peer, _ in play.sent(StateRequest)}
    assert len(first) == 3
    asked = set(first)
    for peer in sorted(first):
        play.offer(peer, manifest=Manifest(hashes=(), sizes=()))
        ((other, _),) = play.sent(StateRequest)
        assert other not in asked
        asked.add(other)
        play.offer(peer, manifest=Manifest(hashes=(), sizes=()))
        assert play.sent(StateRequest) == [], "one for each, however often it says so"
    play.offer(sorted(asked - first)[0])
    for peer in sorted(asked - first)[1:]:
        play.offer(peer, manifest=Manifest(hashes=(), sizes=()))
        asked |= {other for other, _ in play.sent(StateRequest)}
    assert asked == set("bcdefgh"), "all have been asked"
    assert play.sent(StateRequest) == []


def test_strangers_get_nothing_and_nobody_reads_without_end() -> None:
    play = a_donor()
    ask(play, "stranger")
    assert play.said == []
    ask(play, "x")
    exported(play)
    reads = 0
    for chunk in [*range(8), *range(8)]:
        play.hear("x", ChunkRequest(epoch=0, step=5, stage=1, chunk=chunk))
        reads += sum(isinstance(c, Do) and isinstance(c.task, ReadChunk) for c in play.said)
    assert reads == 8
    play.hear("stranger", ChunkRequest(epoch=0, step=5, stage=1, chunk=0))
    assert play.said == []


@pytest.mark.parametrize("peer", ["a", "x", "j"])
def test_an_offer_counts_only_from_a_replica_of_the_stage(peer: str) -> None:
    """a serves another stage, x is in no view, j joins as I do."""
    view = a_view()
    play = Play(msgspec.structs.replace(view, joining=(*view.joining, Member("j", 1))))
    play.offer(peer)
    assert play.asked() == [] and play.transfer.downloader.current is None
    play.offer("b")
    assert play.asked() == [("b", 0), ("b", 1)]
    play.offer(peer)
    assert play.transfer.downloader.current is not None and list(play.transfer.downloader.current.donors) == ["b"]


def test_a_replica_that_left_or_moved_offers_nothing_any_more() -> None:
    play = Play()
    play.view(a_view(number=2, members=(*MEMBERS[:2], Member("c", 0))))
    for peer in "cd":
        play.offer(peer)
    assert play.asked() == []
    play.offer("b")
    assert play.asked() == [("b", 0), ("b", 1)]


def test_an_offer_of_nothing_or_of_too_old_a_version_is_not_taken() -> None:
    play = Play()
    play.offer("b", manifest=Manifest(hashes=(), sizes=()))
    play.offer("b", manifest=Manifest(hashes=("h",), sizes=(1, 2)))
    play.offer("b", step=4)
    assert play.asked() == [] and play.transfer.downloader.current is None


def test_chunks_that_are_here_and_right_are_counted_for_the_leader() -> None:
    play = alone()
    assert play.transfer.loaded == 0
    for chunk in range(3):
        play.whole("b", chunk)
        assert play.transfer.loaded == chunk + 1
    play.chunk("b", 3)
    assert play.transfer.loaded == 3, "not before it is compared"
    play.wait(4.5)
    play.wait(30.0)
    assert play.transfer.loaded == 3, "nor does it shrink when a donor is given up"


def test_of_a_stage_made_from_two_neighbours_the_chunks_of_both_are_counted() -> None:
    members = (Member("a", 0), Member("c", 2), Member("me", 1))
    rebuilt = (Rebuilt(stage=1),)
    settings = msgspec.structs.replace(SETTINGS, stages=3)
    server = Server("me", settings)
    transfer = StateTransfer("me", settings, random.Random(1), server)
    view = View(number=2, step=5, members=members, epoch=1, continued=Continued(rebuilt))
    server.on_view(view, 0.0)
    transfer.on_view(view, 0.0)
    for number, (peer, stage) in enumerate((("a", 0), ("c", 2))):
        transfer.on_message(peer, Offer(1, 5, stage, Manifest(hashes=("h",), sizes=(9,))), (), "", 0.0)
        check = next(
            command.task
            for command in transfer.on_message(peer, Chunk(1, 5, stage, 0), (BlobRef("blob", 9),), "", 0.0)
            if isinstance(command, Do)
        )
        assert transfer.loaded == number
        transfer.on_done(Done(check.id, Result()), 0.0)
        assert transfer.loaded == number + 1
