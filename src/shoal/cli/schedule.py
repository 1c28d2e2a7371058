"""What `shoal chaos` does to a run's peers and when: from a file, drawn from a seed, or as a record of spot instances has it.

Pure functions. `choose` says who is meant, and keeps a run able to go on: a majority of its members stays, without which it would
rightly wait for ever, and every stage keeps a replica unless losing it is what was asked for. cli/chaos.py carries it out.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from shoal import units
from shoal.cli.rundir import Local, Locals
from shoal.sim.preemption import Change, most, some

Kind = Literal["kill", "remove", "add", "stop", "slow"]
STOP_S = 8.0  # twice the silence after which a member is removed, so that a stop is seen
SLOW_S = 20.0
SLOW_BY = 10.0
EXAMPLE = '[[act]] at = "30 s", kind = "kill", who = "stage 1"'


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to be done `at_s` after the schedule began.

    kill: SIGKILL, and the launcher starts another peer in its place. remove: SIGKILL, and one peer fewer from then on. add: one peer
    more. stop: SIGSTOP, and SIGCONT after `length_s`. slow: stopped for all but 1/`by` of the time, for `length_s`."""

    at_s: float
    kind: Kind
    who: str = "anyone"  # a label such as p3, "stage 1", "leader" or "anyone"
    every: bool = False  # all that `who` names, not one of them
    length_s: float = 0.0
    by: float = SLOW_BY
    why: str = ""

    def __str__(self) -> str:
        whom = "" if self.kind == "add" else f" {'every peer of ' if self.every else ''}{self.who}"
        lasting = f" for {units.duration(self.length_s)}" if self.kind in ("stop", "slow") else ""
        by = f" {self.by:g}x" if self.kind == "slow" else ""
        return f"{clock(self.at_s)}  {self.kind}{whom}{by}{lasting}: {self.why}"


def clock(at_s: float) -> str:
    minutes, seconds = divmod(at_s, 60)
    return f"{int(minutes):3d}:{seconds:04.1f}"


# --------------------------------------------------------------------------------------------------------- from a file


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"length": "for"}):
    """One [[act]] of a schedule file."""

    at: str | float
    kind: Kind
    who: str = "anyone"
    every: bool = False
    length: str | float | None = None
    by: float = SLOW_BY


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    act: list[_Written]


def read(path: str | Path) -> tuple[Act, ...]:
    """A TOML file of [[act]] tables, by time."""
    try:
        found = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), _File)
        acts = [_act(written, f"{Path(path).name} says so") for written in found.act]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a schedule: {error}; wanted tables such as {EXAMPLE}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(sorted(acts, key=lambda act: act.at_s))


def _act(written: _Written, why: str) -> Act:
    usual = {"stop": STOP_S, "slow": SLOW_S}.get(written.kind, 0.0)
    act = Act(
        at_s=_seconds(written.at),
        kind=written.kind,
        who=written.who,
        every=written.every,
        length_s=usual if written.length is None else _seconds(written.length),
        by=written.by,
        why=why,
    )
    if act.at_s < 0 or act.length_s < 0 or not act.by > 1:
        raise ValueError(f"at {written.at}, {act.kind}: times are 0 or more, and `by` is above 1")
    return act


def _seconds(value: str | float) -> float:
    return units.parse(value, "_s") if isinstance(value, str) else float(value)


# -------------------------------------------------------------------------------------------------------- from a seed


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two of a kind, on average; None: never."""

    kill_every_s: float | None = None
    stop_every_s: float | None = None
    slow_every_s: float | None = None
    stop_s: float = STOP_S
    slow_s: float = SLOW_S
    slow_by: float = SLOW_BY


def drawn(rates: Rates, seed: int, for_s: float) -> tuple[Act, ...]:
    """At random moments, each kind in a stream of its own: one more kind moves none of the others."""
    kinds: tuple[tuple[Kind, float | None, float], ...] = (
        ("kill", rates.kill_every_s, 0.0),
        ("stop", rates.stop_every_s, rates.stop_s),
        ("slow", rates.slow_every_s, rates.slow_s),
    )
    acts = []
    for kind, every_s, length_s in kinds:
        rng, at_s = Random(f"{seed}/{kind}"), 0.0
        while every_s is not None and (at_s := at_s + every_s * rng.uniform(0.5, 1.5)) < for_s:
            why = f"drawn from seed {seed}, every {units.duration(every_s)} on average"
            acts.append(Act(at_s=at_s, kind=kind, length_s=length_s, by=rates.slow_by, why=why))
    return tuple(sorted(acts, key=lambda act: act.at_s))


# ------------------------------------------------------------------------------------------------------ from a record


def from_trace(changes: Iterable[Change], peers: int, compress: float, one_of: int = 1) -> tuple[Act, ...]:
    """From the moment on at which the record has as many nodes as the run has peers, `compress` times faster."""
    kept = some(changes, one_of)
    present, entry_s = 0, None
    acts: list[Act] = []
    for change in kept:
        if entry_s is None:
            present += 1 if change.joins else -1
            entry_s = change.at_s if present == peers else None
            continue
        words = f"{change.node} {'came' if change.joins else 'was taken away'} after {units.duration(change.at_s)}"
        at_s = (change.at_s - entry_s) / compress
        acts.append(Act(at_s=at_s, kind="add" if change.joins else "remove", why=words))
    if entry_s is None:
        raise ValueError(
            f"the trace never has {peers} nodes at once, at most {most(kept)}: try a smaller run.peers or --one-of"
        )
    return tuple(acts)


# ------------------------------------------------------------------------------------------------------------- who


class Choice(msgspec.Struct, frozen=True):
    """Whom an act hits. None at all: `why_not`, and `later` says whether trying again may help."""

    labels: tuple[str, ...] = ()
    why_not: str = ""
    later: bool = False


def choose(act: Act, run: Locals, away: frozenset[str], rng: Random, lose_stages: bool = False) -> Choice:
    """`away`: labels that were killed or stopped and of which the run may not know yet."""
    here = [peer for peer in run.peers if peer.label not in away]
    meant = _meant(act.who, here)
    if not meant:
        return Choice(why_not=f"nobody here is {act.who}", later=act.who in ("anyone", "leader"))
    if act.kind == "slow":  # it goes on working
        return Choice(labels=tuple(peer.label for peer in (meant if act.every else [rng.choice(meant)])))
    if act.every:
        labels = tuple(peer.label for peer in meant)
        why_not = _majority(run, away | set(labels))
        return Choice(why_not=why_not, later=True) if why_not else Choice(labels=labels)
    why_not = ""
    for peer in rng.sample(meant, len(meant)):
        gone = away | {peer.label}
        why_not = _majority(run, gone) or ("" if lose_stages else _last(run, peer, gone))
        if not why_not:
            return Choice(labels=(peer.label,))
    return Choice(why_not=why_not, later=True)


def _meant(who: str, here: list[Local]) -> list[Local]:
    if who == "anyone":
        return here
    if who == "leader":
        return [peer for peer in here if peer.leads]
    if who.startswith("stage "):
        return [peer for peer in here if str(peer.stage) == who.removeprefix("stage ").strip()]
    return [peer for peer in here if peer.label == who]


def _majority(run: Locals, gone: frozenset[str] | set[str]) -> str:
    left = sum(seat.label not in gone for seat in run.members)
    if 2 * left > len(run.members):
        return ""
    return f"of {len(run.members)} members {left} would be left, and the run can do nothing without a majority"


def _last(run: Locals, peer: Local, gone: frozenset[str] | set[str]) -> str:
    held = Counter(seat.stage for seat in run.members if seat.label not in gone)
    seat = next((seat for seat in run.members if seat.label == peer.label), None)
    if seat is None or held[seat.stage]:
        return ""
    return f"{peer.label} is the last replica of stage {seat.stage} (--lose-stages would allow it)"
