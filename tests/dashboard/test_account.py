"""The account at the end of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.traffic import StoredBytes, Traffic


def a_summary(**changes: object) -> Summary:
    summary = Summary(
        name="quickstart",
        steps=80,
        losses=(5.5, 3.0, 2.1),
        final_loss=2.1,
        issued=1280,
        committed=1280,
        redone=14,
        lost=0,
        counted_twice=0,
        killed=3,
        joined=3,
        tokens_per_s=5200.0,
        first_step_s=12.5,
        seconds=125.0,
        checkpoint="runs/quickstart/checkpoints/step-80",
        balanced=True,
    )
    return msgspec.structs.replace(summary, **changes)


def test_the_account_tells_every_count_and_the_checkpoint() -> None:
    text = account.text(a_summary())
    for words in (
        "80 steps in 2 min 05 s",
        "loss 5.500 -> 2.100",
        "issued         1,280",
        "committed      1,280",
        "redone         14",
        "lost           0",
        "counted twice  0",
        "3 killed, 3 joined",
        "runs/quickstart/checkpoints/step-80",
        "Every sample counted once.",
    ):
        assert words in text


def test_peers_that_nobody_asked_to_be_killed_are_told_too() -> None:
    """A process that was killed by a person or for its memory was on no line: 0 killed, 1 joined."""
    assert "3 killed, 3 joined on the way" in account.text(a_summary(removed=3))
    assert "3 killed, 2 gone otherwise, 3 joined on the way" in account.text(a_summary(removed=5))
    assert "0 killed, 1 gone otherwise, 0 joined on the way" in account.text(a_summary(killed=0, removed=1, joined=0))


def test_what_was_undone_is_told_only_when_the_run_went_back() -> None:
    assert "undone" not in account.text(a_summary())
    text = account.text(a_summary(undone=32, recovered=2))
    assert "undone         32 and trained again: the run went back 2 times to a checkpoint" in text
    assert "Every sample counted once." in text


def test_staleness_is_told_only_where_gradients_are_late() -> None:
    assert "staleness" not in account.text(a_summary())
    assert "1 step; 198 steps were applied beside the next one's compute" in account.text(
        a_summary(staleness=1, overlapped_steps=198)
    )


def test_a_run_that_ended_early_says_why_and_that_what_it_trained_is_in_order() -> None:
    text = account.text(a_summary(balanced=False, early="interrupted", reason="interrupted"))
    assert "It ended early: interrupted. Every sample of its 80 steps counted once." in text
    assert "BALANCE" not in text
    begun = account.text(a_summary(balanced=False, begun=8, early="interrupted", reason="interrupted"))
    assert "counted once. Step 80 had begun: its 8 microbatches are not in them." in begun
    lost = account.text(a_summary(balanced=False, lost=2, early="interrupted", reason="interrupted; step 3: 2 missing"))
    assert "DOES NOT BALANCE: interrupted; step 3: 2 missing" in lost


def test_a_machine_alone_has_no_peers_to_tell_of() -> None:
    assert "on the way" not in account.text(a_summary(killed=0, joined=0))


def test_an_account_that_does_not_balance_says_so_loudly() -> None:
    text = account.text(a_summary(balanced=False, lost=2, reason="step 3: 2 microbatches missing"))
    assert "DOES NOT BALANCE: step 3: 2 microbatches missing" in text
    assert "counted once" not in text


def test_a_run_without_a_single_step_has_an_account_too() -> None:
    text = account.text(
        a_summary(steps=0, losses=(), final_loss=None, first_step_s=None, tokens_per_s=0.0, checkpoint="")
    )
    assert "none was written" in text


def test_bytes_are_told_by_kind_and_by_peer() -> None:
    assert "sent" not in account.text(a_summary())
    sent = Traffic(3 << 20, 2 << 20, 1 << 20, 0, 2048)
    p1 = account.PeerTraffic(sent, Traffic(state=5 << 20), StoredBytes(store=7 << 20, memory=9 << 20, disk=1 << 30))
    short = account.text(a_summary(sent=sent, traffic={"p1": p1}))
    assert "sent           6.0 MiB" in short and "p1" not in short
    text = account.text(a_summary(sent=sent, traffic={"p1": p1}), peers=True)
    assert "sent           6.0 MiB: activations 3.0 MiB, gradients 2.0 MiB, averaging 1.0 MiB, control 2.0 KiB" in text
    assert "p1             sent 6.0 MiB: activations" in text
    assert "received 5.0 MiB: state 5.0 MiB\n" in text
    assert (
        "kept at most 7.0 MiB of boundary tensors for a step; of all tensors 9.0 MiB in memory, 1.0 GiB on disk" in text
    )


def test_a_summary_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(account.encode(a_summary()))
    assert account.read(path) == a_summary()


def test_what_is_no_summary_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text('{"name": 3}')
    with pytest.raises(ValueError, match=r"summary\.json is not the summary of a run"):
        account.read(path)


def test_the_account_of_a_resumed_run_says_which_figures_are_of_this_session() -> None:
    text = account.text(a_summary(first_step=60, adopted_steps=40, sent=Traffic(control=2048)))
    assert "80 steps, 20 of them in this session of 2 min 05 s, loss 5.500 -> 2.100, now 5,200 tokens/s" in text
    assert "its first step after" in text and "since step 60: 2.0 KiB" in text
    assert "40 steps that another run committed" in text
    assert "session" not in account.text(a_summary()) and "since" not in account.text(a_summary())


def test_what_was_not_saved_stands_beside_the_count() -> None:
    text = account.text(
        a_summary(checkpoint="", unsaved="NOTHING SAVED YET: a checkpoint was due at step 80: no space")
    )
    assert (
        "Every sample counted once.\nNOTHING SAVED YET: a checkpoint was due at step 80: no space. What was trained"
        in text
    )


def test_what_was_undone_for_evictions_is_told_with_its_cost() -> None:
    text = account.text(
        a_summary(undone=48, recovered=3, evictions_undone=1, evictions_undone_steps=2, gone_back_s=75.0)
    )
    assert (
        "the run went back 3 times to a checkpoint, 2 times a stage had no replica left and once an evicted peer"
        in text
    )
    assert "had contributed false values (2 steps); this session lost 1 min 15 s by it" in text
