"""A machine whose known answers are not the leader's is refused in words, and tells its people so."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from shoal.core.leader.requests import unfit
from shoal.core.messages import Found, Join, JoinRefused, KnownAnswers, Note, Received, Send, Settings, Tick
from shoal.core.peer import PeerMachine

OURS = KnownAnswers("float32", "aa", "cc", (0.5, -1.25, 3.0))
OTHERS = {
    "dtype": (msgspec.structs.replace(OURS, dtype="bfloat16"), "it computes in bfloat16, this run in float32"),
    "update": (msgspec.structs.replace(OURS, update="ab"), "optimizer step"),
    "codes": (msgspec.structs.replace(OURS, codes="cd"), "decodes"),
    "forward": (msgspec.structs.replace(OURS, forward=(0.5, -1.25, 3.1)), "forward pass"),
    "fewer": (msgspec.structs.replace(OURS, forward=(0.5, -1.25)), "forward pass"),
    "nan": (msgspec.structs.replace(OURS, forward=(0.5, float("nan"), 3.0)), "forward pass"),
    "none": (KnownAnswers(), "it computes in nothing"),
}


@pytest.mark.parametrize(("theirs", "words"), OTHERS.values(), ids=list(OTHERS))
def test_another_answer_is_refused_with_what_differs(theirs: KnownAnswers, words: str) -> None:
    assert words in unfit(OURS, theirs)
    leader = PeerMachine("a", Settings(1, 4, 10, answers=OURS), Random(0), found=True)
    leader.handle(Tick(), 0.0)
    refusals = [
        command
        for command in leader.handle(Received(peer="b", message=Join(answers=theirs)), 0.1)
        if isinstance(command, Send) and isinstance(command.message, JoinRefused)
    ]
    assert [(one.peer, words in one.message.reason) for one in refusals] == [("b", True)]  # type: ignore[union-attr]
    for now in range(1, 20):
        leader.handle(Tick(), 0.5 * now)
    assert leader.view is not None and {one.peer for one in leader.view.members + leader.view.joining} == {"a"}


def test_the_last_bits_of_a_forward_pass_may_differ() -> None:
    assert not unfit(OURS, OURS) and not unfit(OURS, msgspec.structs.replace(OURS, forward=(0.50001, -1.24999, 3.0001)))


def test_who_is_refused_says_so_once_and_asks_again_after_a_pause() -> None:
    settings = Settings(1, 4, 10, ban_s=10.0)
    joiner = PeerMachine("b", settings, Random(0), found=False)
    joiner.handle(Tick(), 0.0)
    joiner.handle(Found(("a", "c")), 0.1)
    refused = Received(peer="a", message=JoinRefused("its optimizer differs"))
    assert joiner.handle(Received(peer="x", message=JoinRefused("who asked?")), 0.2) == []
    (note,) = (one for one in joiner.handle(refused, 0.3) if isinstance(one, Note))
    assert (note.kind, note.text) == ("refused", "a refuses this peer: its optimizer differs")
    assert not [one for one in joiner.handle(refused, 0.4) if isinstance(one, Note)]
    joins = []
    for beat in range(1, 40):
        now = 0.5 * beat
        commands = joiner.handle(Tick(), now)
        joins += [now for one in commands if isinstance(one, Send) and isinstance(one.message, Join)]
    assert joins and min(joins) >= 10.0
