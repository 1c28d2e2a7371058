"""The summary of a run: `Summary` is runs/NAME/summary.json, `text` its form on the terminal.

For `shoal run` and `shoal status`. runtime/records/account.py computes the numbers and whether they balance.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from shoal import units
from shoal.core import messages
from shoal.escaping import UNDECODABLE, escaped_json, escaped_lines
from shoal.traffic import KINDS, StoredBytes, Traffic


class PeerTraffic(msgspec.Struct, frozen=True):
    """Bytes of one peer in the whole session."""

    sent: Traffic
    received: Traffic
    kept: StoredBytes = StoredBytes()  # peak


class HeldOut(msgspec.Struct, frozen=True):
    """The newest measurement of the held-out loss, with the parameters of version `step`, and the best so far."""

    step: int
    loss: float  # mean over the counted held-out tokens, in nats
    best_step: int
    best_loss: float
    misses: int = 0  # measurements since the best one

    @classmethod
    def of(cls, agreed: messages.HeldOut | None) -> HeldOut | None:
        return None if agreed is None else cls(**msgspec.structs.asdict(agreed))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished or interrupted run. Samples are counted in microbatches. Times, speed and bytes are of the session that began at
    `first_step`; all other numbers are of the whole run."""

    name: str
    steps: int
    losses: tuple[float, ...]
    final_loss: float | None
    heldout: HeldOut | None = None  # the loss as last measured, and the best; None: nothing is held out
    reward_accuracy: float | None = None  # of the last step's preference pairs; None: samples are none
    reward_margin: float | None = None
    issued: int
    committed: int
    redone: int  # (microbatch, stage) bookings that were computed again because a peer was lost
    lost: int
    begun: int = 0  # of a step that had begun when the run was ended before its last step
    counted_twice: int
    # Committed, given up by going back to a checkpoint, and issued and committed again; in no other count
    undone: int = 0
    recovered: int = (
        0  # times the run went back to a checkpoint, because a stage had lost every replica or to undo what is undone:
    )
    evictions_undone: int = (
        0  # of these times, in this session, since a peer was evicted for false values that it had contributed,
    )
    evictions_undone_steps: int = 0  # and the committed steps that were given up for it
    gone_back_s: float = (
        0.0  # seconds of this session between a commit and the next one that is good, where the run went back between
    )
    skipped: int = 0  # of those committed, the ones of steps that changed nothing
    adopted_steps: int = 0  # first steps, committed by another run whose checkpoint this one adopted
    away: int = 0  # steps committed while no peer of this machine took part: how they were committed, only the members' count says
    first_step: int = 0  # where this session began
    killed: int  # peers ended by --kill-every or `shoal chaos`
    removed: int = 0  # members that were removed from the run, those that were killed among them
    joined: int  # peers that joined while it ran
    tokens_per_s: float
    first_step_s: float | None  # from the command to the first commit; None: no commit
    seconds: float
    checkpoint: str  # path or URL; '' when none was written
    balanced: bool
    sent: Traffic = Traffic()  # bytes by kind, all peers together, as last reported
    traffic: dict[str, PeerTraffic] = {}  # by peer
    staleness: int = 0  # train.staleness
    overlapped_steps: int = 0  # steps of this session that overlapped with the next step's compute
    reason: str = ""  # why the account does not balance, or why the run ended early
    early: str = ""  # why the run ended before its last step
    saved: int = 0  # the step of the newest checkpoint
    unsaved: str = ""  # the checkpoint that was not saved, and why


def encode(summary: Summary) -> bytes:
    """summary.json."""
    return escaped_json(msgspec.json.format(msgspec.json.encode(summary), indent=2)) + b"\n"


def read(path: str | Path) -> Summary:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Summary)
    except UNDECODABLE as error:
        raise ValueError(f"{path} is not the summary of a run: {error}") from None


def text(summary: Summary, peers: bool = False) -> str:
    """The account in a few lines of plain text. `peers`: with the bytes of each peer."""
    rows = [
        ("issued", f"{summary.issued:,} microbatches"),
        ("committed", f"{summary.committed:,}"),
        ("redone", f"{summary.redone:,}"),
        ("lost", f"{summary.lost:,}"),
        ("counted twice", f"{summary.counted_twice:,}"),
        *_adopted(summary),
        *_away(summary),
        *_skipped(summary),
        *_rewards(summary),
        *_heldout(summary),
        *_undone(summary),
        *_overlap(summary),
        *_peers(summary),
        ("checkpoint", summary.checkpoint or "none was written"),
        *_traffic(summary, peers),
    ]
    width = max(len(name) for name, _ in rows)
    if summary.balanced:
        verdict = "Every sample counted once."
    elif summary.early and summary.reason == summary.early:
        verdict = f"It ended early: {summary.early}."
        verdict += f" Every sample of its {summary.steps:,} steps counted once." if summary.steps else ""
        verdict += (
            f" Step {summary.steps:,} had begun: its {summary.begun:,} microbatches are not in them."
            if summary.begun
            else ""
        )
    else:
        verdict = f"THE ACCOUNT DOES NOT BALANCE: {summary.reason}"
    lines = [_headline(summary), *(f"  {name:<{width}}  {value}" for name, value in rows), verdict]
    if summary.balanced and summary.reason:
        lines.append(summary.reason)
    if summary.unsaved:
        lines.append(f"{summary.unsaved}. What was trained since is lost.")
    return escaped_lines("\n".join(lines))


def _skipped(summary: Summary) -> list[tuple[str, str]]:
    if not summary.skipped:
        return []
    return [
        ("skipped", f"{summary.skipped:,} of these, in steps that changed nothing: a loss or gradient was not finite")
    ]


def _heldout(summary: Summary) -> list[tuple[str, str]]:
    if (held := summary.heldout) is None:
        return []
    best = (
        "the best" if held.best_step == held.step else f"the best was {held.best_loss:.4f} at step {held.best_step:,}"
    )
    loss = f"loss {held.loss:.4f} at step {held.step:,}"
    if summary.reward_accuracy is None:  # else the loss is not one of tokens
        loss += f", perplexity {perplexity(held.loss):.4g}"
    return [("held out", f"{loss}; {best}")]


def _rewards(summary: Summary) -> list[tuple[str, str]]:
    if summary.reward_accuracy is None:
        return []
    accuracy, margin = summary.reward_accuracy, summary.reward_margin
    return [("rewards", f"{accuracy:.1%} of the last step's pairs are in their order, margin {margin:.4g}")]


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _peers(summary: Summary) -> list[tuple[str, str]]:
    """The row of peers; none of a machine alone."""
    if not (summary.sent.total or summary.killed or summary.joined or summary.removed):
        return []
    others = max(0, summary.removed - summary.killed)
    rest = f"{others:,} gone otherwise, " if others else ""
    return [("peers", f"{summary.killed:,} killed, {rest}{summary.joined:,} joined on the way")]


def _traffic(summary: Summary, peers: bool) -> list[tuple[str, str]]:
    """A row of all peers together; with `peers`, then of each."""
    if not summary.sent.total:
        return []
    rows = [("sent", f"{_session(summary)}{_bytes(summary.sent)}")]
    for label, carried in summary.traffic.items() if peers else ():
        rows += [
            (label, f"sent {_bytes(carried.sent)}"),
            ("", f"received {_bytes(carried.received)}"),
            ("", f"kept at most {_stored(carried.kept)}"),
        ]
    return rows


def _stored(kept: StoredBytes) -> str:
    disk = f", {units.size(kept.disk)} on disk" if kept.disk else ""
    return f"{units.size(kept.store)} of boundary tensors for a step; of all tensors {units.size(kept.memory)} in memory{disk}"


def _bytes(sent: Traffic) -> str:
    kinds = ", ".join(f"{kind} {units.size(getattr(sent, kind))}" for kind in KINDS if getattr(sent, kind))
    return f"{units.size(sent.total)}: {kinds}" if kinds else "nothing"


def _overlap(summary: Summary) -> list[tuple[str, str]]:
    if not summary.staleness:
        return []
    return [
        (
            "staleness",
            f"{summary.staleness} step; {_session(summary)}{summary.overlapped_steps:,} steps were applied beside the next one's compute",
        )
    ]


def _session(summary: Summary) -> str:
    """Prefix of a figure that is not of the whole run."""
    return f"since step {summary.first_step:,}: " if summary.first_step else ""


def _away(summary: Summary) -> list[tuple[str, str]]:
    if not summary.away:
        return []
    return [("away", f"{summary.away:,} steps that the others committed while this machine was away: by their count")]


def _adopted(summary: Summary) -> list[tuple[str, str]]:
    if not summary.adopted_steps:
        return []
    return [
        ("adopted", f"{summary.adopted_steps:,} steps that another run committed, by --adopt: as its checkpoint says")
    ]


def _undone(summary: Summary) -> list[tuple[str, str]]:
    if not summary.recovered:
        return []
    evictions, steps = summary.evictions_undone, summary.evictions_undone_steps
    lost = summary.recovered - evictions
    reasons = [f"{_times(lost)} a stage had no replica left"] if lost else []
    if evictions:
        reasons.append(f"{_times(evictions)} an evicted peer had contributed false values ({steps:,} steps)")
    words = f"{summary.undone:,} and trained again: the run went back {_times(summary.recovered)} to a checkpoint, " + (
        " and ".join(reasons) if evictions else "a stage had no replica left"
    )
    if not summary.undone:
        words = f"0: {' and '.join(reasons)}, and the run went on without going back"
    elif summary.gone_back_s > 0:
        words += f"; this session lost {units.duration(summary.gone_back_s)} by it"
    return [("undone", words)]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _headline(summary: Summary) -> str:
    """The first line; of a resumed run it separates figures of the whole run from those of this session."""
    resumed = bool(summary.first_step)
    words = f"{summary.name}: {summary.steps:,} steps"
    if resumed:
        words += f", {max(summary.steps - summary.first_step, 0):,} of them in this session of {units.duration(summary.seconds)}"
    else:
        words += f" in {units.duration(summary.seconds)}"
    if summary.losses and summary.final_loss is not None:
        words += f", loss {summary.losses[0]:.3f} -> {summary.final_loss:.3f}"
    if summary.tokens_per_s > 0:
        words += f", {'now ' if resumed else ''}{summary.tokens_per_s:,.0f} tokens/s"
    if summary.first_step_s is not None:
        words += f", {'its ' if resumed else ''}first step after {units.duration(summary.first_step_s)}"
    return words
