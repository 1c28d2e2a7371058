"""What `shoal chaos` does to a run's peers and links, and when: from a file, drawn from a seed, or as a record of spot instances has it.

Pure functions. `choose` says who is meant, and keeps a run able to go on: a majority of its members stays, without which it would
rightly wait for ever, and every stage keeps a replica unless losing it is what was asked for. chaos.py carries it out.
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
from shoal.escaping import UNDECODABLE
from shoal.launcher.chaos.injection_points import INJECTION_POINTS
from shoal.launcher.files.rundir import LocalPeer, PeersFile
from shoal.sim.faults.preemption import Change, most, some
from shoal.transport.emulated.faulty import Direction
from shoal.transport.emulated.shaped import AccessLink

Kind = Literal["kill", "remove", "add", "stop", "slow", "cut", "hole", "lag"]
LASTING: tuple[Kind, ...] = ("stop", "slow", "cut", "hole", "lag")
LINKS: tuple[Kind, ...] = ("cut", "hole", "lag")  # need a run with network.fault_injection
STOP_S = 8.0  # twice the silence after which a member is removed, so that a stop is seen
SLOW_S = 20.0
SLOW_BY = 10.0
CUT_S = 12.0  # long enough to be removed, then back
HOLE_S = 120.0  # found out by what does not come, so it takes longer than a cut
LAG_S = 20.0
# A bad mobile line: ten times the delay and a tenth of the bandwidth of a usual one
LAG = AccessLink(delay_s=0.3, up_Bps=1e6)
EXAMPLE = '[[act]] at = "30 s", kind = "kill", who = "stage 1"'


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to be done `at_s` after the schedule began.

    kill: SIGKILL, and the launcher starts another peer in its place. remove: SIGKILL, and one peer fewer from then on. add: one peer
    more. stop: SIGSTOP, and SIGCONT after `length_s`. slow: stopped for all but 1/`by` of the time, for `length_s`. cut: nothing passes
    between it and `off` for `length_s`. hole: small messages pass, those with tensors vanish (an MTU black hole), for `length_s`. lag:
    what it sends to `off` takes as long as over `link`, for `length_s`."""

    at_s: float
    kind: Kind
    # A label such as p3, "stage 1", "leader", "member" (it trains) or "anyone" (it may still be starting)
    who: str = "anyone"
    every: bool = False  # all that `who` names, not one of them
    length_s: float = 0.0
    by: float = SLOW_BY
    off: str = ""  # the far ends of the links, named as in `who`; "" = all others
    direction: Direction = "both"  # seen from `who`
    link: AccessLink = LAG
    # Not before such a moment (injection_points.py) is seen in the trace of one of `who`, and then to that one
    on: str = ""
    why: str = ""

    def __str__(self) -> str:
        whom = "" if self.kind == "add" else f" {'every peer of ' if self.every else ''}{self.who}"
        on = f" when it begins {INJECTION_POINTS[self.on].words}" if self.on else ""
        return f"{clock(self.at_s)}  {self.kind}{whom}{self.how()}{on}: {self.why}"

    def how(self) -> str:
        """What the kind leaves open, in words."""
        words = f" {self.by:g}x" if self.kind == "slow" else ""
        if self.kind in LINKS:
            direction = {"both": "", "out": ", outwards only", "in": ", inwards only"}[self.direction]
            words = f" from {self.off or 'all others'}{direction}"
        if self.kind == "lag":
            words += f" by {units.duration(self.link.delay_s)}"
            words += f" and {units.size(self.link.up_Bps)}/s" if self.link.up_Bps else ""
        return words + (f" for {units.duration(self.length_s)}" if self.kind in LASTING else "")


def clock(at_s: float) -> str:
    minutes, seconds = divmod(at_s, 60)
    return f"{int(minutes):3d}:{seconds:04.1f}"


# --------------------------------------------------------------------------------------------------------- from a file


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"length": "for", "off": "from"}):
    """One [[act]] of a schedule file."""

    kind: Kind
    at: str | float = 0.0
    who: str = "anyone"
    every: bool = False
    length: str | float | None = None
    by: float = SLOW_BY
    off: str = ""
    direction: Direction = "both"
    delay: str | float = LAG.delay_s
    bandwidth: str | float = LAG.up_Bps
    on: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    act: list[_Written]


def read(path: str | Path) -> tuple[Act, ...]:
    """A TOML file of [[act]] tables, by time."""
    try:
        file = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), _File)
        acts = [_act(written, f"{Path(path).name} says so") for written in file.act]
    except (tomllib.TOMLDecodeError, *UNDECODABLE) as error:
        raise ValueError(f"{path} is not a schedule: {error}; wanted tables such as {EXAMPLE}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(sorted(acts, key=lambda act: act.at_s))


def _act(written: _Written, why: str) -> Act:
    usual = {"stop": STOP_S, "slow": SLOW_S, "cut": CUT_S, "hole": HOLE_S, "lag": LAG_S}.get(written.kind, 0.0)
    bandwidth_Bps = written.bandwidth
    if isinstance(bandwidth_Bps, str):
        bandwidth_Bps = units.parse(bandwidth_Bps, "_Bps")
    if written.on and written.on not in INJECTION_POINTS:
        raise ValueError(f"on = {written.on!r} is no moment; there are {', '.join(INJECTION_POINTS)}")
    act = Act(
        at_s=_seconds(written.at),
        kind=written.kind,
        who=written.who,
        every=written.every,
        length_s=usual if written.length is None else _seconds(written.length),
        by=written.by,
        off=written.off,
        direction=written.direction,
        link=AccessLink(delay_s=_seconds(written.delay), up_Bps=bandwidth_Bps),
        on=written.on,
        why=why,
    )
    if min(act.at_s, act.length_s, act.link.delay_s, act.link.up_Bps) < 0 or not act.by > 1:
        raise ValueError(f"at {written.at}, {act.kind}: times are 0 or more, as are bandwidths, and `by` is above 1")
    return act


def _seconds(value: str | float) -> float:
    return units.parse(value, "_s") if isinstance(value, str) else float(value)


# -------------------------------------------------------------------------------------------------------- from a seed


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two of a kind, on average; None: never."""

    kill_every_s: float | None = None
    stop_every_s: float | None = None
    slow_every_s: float | None = None
    cut_every_s: float | None = None
    hole_every_s: float | None = None
    lag_every_s: float | None = None
    stop_s: float = STOP_S
    slow_s: float = SLOW_S
    cut_s: float = CUT_S
    hole_s: float = HOLE_S
    lag_s: float = LAG_S
    slow_by: float = SLOW_BY
    cut_direction: Direction | Literal["any"] = "any"  # drawn anew for each


def drawn(rates: Rates, seed: int, for_s: float) -> tuple[Act, ...]:
    """At random moments, each kind in a stream of its own: one more kind moves none of the others."""
    kinds: tuple[tuple[Kind, float | None, float], ...] = (
        ("kill", rates.kill_every_s, 0.0),
        ("stop", rates.stop_every_s, rates.stop_s),
        ("slow", rates.slow_every_s, rates.slow_s),
        ("cut", rates.cut_every_s, rates.cut_s),
        ("hole", rates.hole_every_s, rates.hole_s),
        ("lag", rates.lag_every_s, rates.lag_s),
    )
    acts = []
    for kind, every_s, length_s in kinds:
        rng, at_s = Random(f"{seed}/{kind}"), 0.0
        while every_s is not None and (at_s := at_s + every_s * rng.uniform(0.5, 1.5)) < for_s:
            why = f"drawn from seed {seed}, every {units.duration(every_s)} on average"
            act = Act(at_s=at_s, kind=kind, length_s=length_s, by=rates.slow_by, why=why)
            if kind in ("cut", "hole"):
                directions: tuple[Direction, ...] = (
                    ("both", "out", "in") if rates.cut_direction == "any" else (rates.cut_direction,)
                )
                act = msgspec.structs.replace(act, direction=rng.choice(directions))
            acts.append(act)
    return tuple(sorted(acts, key=lambda act: act.at_s))


# ------------------------------------------------------------------------------------------------------ from a record


def from_trace(
    changes: Iterable[Change], peers: int, compress: float, one_of: int = 1, cut: bool = False
) -> tuple[Act, ...]:
    """From the moment on at which the record has as many nodes as the run has peers, `compress` times faster. With `cut` a node
    that is taken away is a peer cut off, until a node comes again."""
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
    return _as_cuts(acts) if cut else tuple(acts)


def _as_cuts(acts: list[Act]) -> tuple[Act, ...]:
    """The peer that has been cut off longest comes back with the next node; whoever does not stays cut off to the end."""
    cuts: list[Act] = []
    off: list[int] = []
    for act in acts:
        if act.kind == "remove":
            off.append(len(cuts))
            cuts.append(msgspec.structs.replace(act, kind="cut", length_s=acts[-1].at_s - act.at_s))
        elif off:
            first = off.pop(0)
            cuts[first] = msgspec.structs.replace(cuts[first], length_s=act.at_s - cuts[first].at_s)
        else:
            cuts.append(act)
    return tuple(cuts)


# ------------------------------------------------------------------------------------------------------------- who


class DisturbanceChoice(msgspec.Struct, frozen=True):
    """Whom an act hits. None at all: `why_not`, and `later` says whether trying again may help."""

    labels: tuple[str, ...] = ()
    why_not: str = ""
    later: bool = False


def choose(act: Act, run: PeersFile, away: frozenset[str], rng: Random, lose_stages: bool = False) -> DisturbanceChoice:
    """`away`: labels of peers that were killed or stopped; the run may not know of it yet."""
    here = [peer for peer in run.peers if peer.label not in away and (peer.peer or act.kind not in LINKS)]
    meant = _meant(act.who, here, run)
    if not meant:
        return DisturbanceChoice(why_not=f"nobody here is {act.who}", later=act.who in ("anyone", "member", "leader"))
    if act.kind in ("slow", "lag"):  # it goes on working
        return DisturbanceChoice(labels=tuple(peer.label for peer in (meant if act.every else [rng.choice(meant)])))
    if act.every:
        labels = tuple(peer.label for peer in meant)
        why_not = _majority(run, away | set(labels))
        return DisturbanceChoice(why_not=why_not, later=True) if why_not else DisturbanceChoice(labels=labels)
    return _choose_one(meant, run, away, rng, lose_stages)


def _choose_one(
    candidates: list[LocalPeer], run: PeersFile, away: frozenset[str], rng: Random, lose_stages: bool
) -> DisturbanceChoice:
    """One that leaves the run a majority and, unless `lose_stages`, a replica of every stage."""
    why_not = ""
    for peer in rng.sample(candidates, len(candidates)):
        removed = away | {peer.label}
        why_not = _majority(run, removed) or ("" if lose_stages else _last(run, peer, removed))
        if not why_not:
            return DisturbanceChoice(labels=(peer.label,))
    return DisturbanceChoice(why_not=why_not, later=True)


def named(who: str, run: PeersFile) -> tuple[LocalPeer, ...]:
    """All that `who` names."""
    return tuple(_meant(who, list(run.peers), run))


def _meant(who: str, here: list[LocalPeer], run: PeersFile) -> list[LocalPeer]:
    if who == "anyone":
        return here
    if who == "member":
        seated = {seat.label for seat in run.members}
        return [peer for peer in here if peer.label in seated]
    if who == "leader":
        return [peer for peer in here if peer.leads]
    if who.startswith("stage "):
        return [peer for peer in here if str(peer.stage) == who.removeprefix("stage ").strip()]
    return [peer for peer in here if peer.label == who]


def _majority(run: PeersFile, removed: frozenset[str] | set[str]) -> str:
    voters = run.voters or tuple(seat.label for seat in run.members)
    left = sum(label not in removed for label in voters)
    if 2 * left > len(voters) or (2 * left == len(voters) and run.casting_voter not in {"", *removed}):
        return ""
    return f"of {len(voters)} members {left} would be left, and the run can do nothing without a majority"


def _last(run: PeersFile, peer: LocalPeer, removed: frozenset[str] | set[str]) -> str:
    held = Counter(seat.stage for seat in run.members if seat.label not in removed)
    seat = next((seat for seat in run.members if seat.label == peer.label), None)
    if seat is None or held[seat.stage]:
        return ""
    return f"{peer.label} is the last replica of stage {seat.stage} (--lose-stages would allow it)"
