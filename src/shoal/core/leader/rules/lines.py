"""What peers pass and their lines carry, by their own reports: the pace of stages, who owns how much of a round, whose line is too narrow.

A round ends when the narrowest line of a group has carried its part, and every peer waits for it: who sends its sum and receives the
group's cannot be spared the gradient once each way (allreduce/layout.py). So one narrow line can make everybody's steps many times as
long. A run asks for `peers` peers and takes them as they are. Whoever is beyond that number is left out, in words, while a step with it is
expected to take `join_slowdown` times as long as without it, and as with a peer whose line is as wide as the others': what it computes is
counted for it. It may ask again after the pause of an evicted peer, which grows, as each try costs the others a download.

A peer can lie of its own line only: one that says less than is true owns less, or is left out itself, and its stage counts as thinner; one
that says more is believed up to FAR times the median, and is what the others wait for (leader/progress.py).
docs/design/2026-11-24-narrow-lines.md
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low

import msgspec

from shoal.core.allreduce.layout import busy_times
from shoal.core.consensus.phases import ended
from shoal.core.leader.facts import Facts
from shoal.core.leader.rebalance import boundaries, measure, power
from shoal.core.messages import TURNS, Member, Peer, Settings, View

CLOSE = 1.5  # of the median: measured rates of equal lines differ by as much on busy machines, so these count as equal
ALIKE = 1.1  # the same of what replicas of one stage compute
FAR = 4.0  # times the median, that a peer is believed at most
SHOWN = 1.8  # times what it has booked, that a peer's rate is believed at most where it is above its stage's usual one
NARROW = 0.5  # of the median: only such a line is looked at; between it and the others' the owners' shares even out most of the difference
YOUNG = 0.25  # of a step's books: a member is left out only before more is booked, since what it has booked is computed again
SLOW_kBps = 1250.0  # 10 Mbit/s
# Of a joiner's download, after which what its line carries is known; or when it has all of its state
KNOWN_BEATS = 40.0


def line_rates(members: Iterable[Member], facts: Facts, settings: Settings) -> dict[Peer, int]:
    """By peer, kB/s: as planned, else as measured. Measured rates near their median are that, so that noise changes nothing; peers that
    are not measured count as usual. Empty while no line is known."""
    if settings.line_rates:
        rates = settings.line_rates
        return {one.peer: rates[one.seat] if 0 <= one.seat < len(rates) else 0 for one in members}
    reported = {one.peer: _line(one.peer, facts) for one in members}
    believable = believed(list(reported.values()))
    return dict(zip(reported, believable, strict=True)) if believable else {}


def believed(rates: Sequence[int]) -> list[int]:
    """What measured rates count as, kB/s; 0: not measured. Empty if none is. The forecaster asks, too."""
    known = [rate for rate in rates if rate]
    if not known:
        return []
    usual = round(median(known))
    return [
        usual if not rate or usual / CLOSE <= rate <= usual * CLOSE else min(rate, round(FAR * usual)) for rate in rates
    ]


def _line(peer: Peer, facts: Facts) -> int:
    """The narrower direction of its line; the one that is known; 0: none is."""
    heartbeat = facts.heartbeats.get(peer)
    if heartbeat is None:
        return 0
    rates = [rate for rate in (heartbeat.up_kBps, heartbeat.down_kBps) if rate]
    return min(rates, default=0)


def measured(
    members: tuple[Member, ...], facts: Facts, settings: Settings
) -> tuple[tuple[float, ...], dict[Peer, float], dict[Peer, float]]:
    """Seconds per microbatch at each stage, the peers' relative speeds, and the boundary tensors per second that their lines carry: from
    the members' rates, else as planned."""
    heartbeats = {one.peer: heartbeat for one in members if (heartbeat := facts.heartbeats.get(one.peer))}
    rates, booked = dict[Peer, float](), _booked(facts)
    for stage in range(settings.stages):
        group = [one.peer for one in members if one.stage == stage and one.peer in heartbeats]
        rates |= shown({peer: heartbeats[peer].rate for peer in group if heartbeats[peer].stage == stage}, booked)
    seconds, speeds = measure(members, rates, settings.stages, settings.stage_seconds)
    tensor_kB = _median(each.tensor_bytes for each in heartbeats.values()) / 1000
    if not speeds or not tensor_kB:  # seconds as planned are no measure beside lines
        return seconds, speeds, {}
    lines = line_rates(members, facts, settings)
    return seconds, speeds, {peer: rate / tensor_kB for peer, rate in lines.items() if rate}


def expected_pace(members: tuple[Member, ...], facts: Facts, settings: Settings) -> float:
    """Microbatches per second that the thinnest stage passes in a first step, whose turns are even: its narrowest line has as many as the
    others. 0: nothing is known. A line that is not measured is taken for a slow one. Compute is a usual peer's, and no line counts for less
    than a part of the usual one, so that nobody alone says how long the others may take."""
    heartbeats = [heartbeat for one in members if (heartbeat := facts.heartbeats.get(one.peer))]
    tensor_kB = _median(each.tensor_bytes for each in heartbeats) / 1000
    if not tensor_kB:
        return 0.0
    computed = _median(each.rate for each in heartbeats) or math.inf
    lines = line_rates(members, facts, settings)
    usual_kBps = _median(lines.values()) or SLOW_kBps
    paces = []
    for stage in range(settings.stages):
        group = [max(lines.get(one.peer, 0) or usual_kBps, usual_kBps / FAR) for one in members if one.stage == stage]
        crossed_kB = tensor_kB * max(1, boundaries(stage, settings.stages))
        paces.append(len(group) * min(computed, min(group, default=usual_kBps) / crossed_kB))
    return min(paces)


def too_narrow(view: View, facts: Facts, settings: Settings, now: float) -> dict[Peer, str]:
    """Peers to leave out of the run, and why: the narrowest line of those that may be."""
    if not settings.join_slowdown or not view.started or view.ahead or ended(view, settings):
        return {}
    if facts.rounds.open is not None or len(view.members) < settings.peers:
        return {}
    rated = [(rate, one.peer, one) for one in _spare(view, facts, settings, now) if (rate := _line(one.peer, facts))]
    for rate, peer, one in sorted(rated):
        if reason := _slows(one, rate, view, facts, settings):
            return {peer: reason}
    return {}


def _spare(view: View, facts: Facts, settings: Settings, now: float) -> list[Member]:
    """Joiners whose lines are known, and at a step's beginning the members that are more than the run asked for: none that a plan has
    a seat for, none that its stage has alone, and not the leader, which does not judge in its own case."""
    spare = [one for one in view.joining if not one.back and _is_known(one, facts, settings, now)]
    if len(view.members) > settings.peers and facts.share(view) < YOUNG:
        replicas = Counter(member.stage for member in view.members)
        spare += [one for one in view.members if replicas[one.stage] > 1]
    return [one for one in spare if one.seat < 0 and one.peer != facts.name]


def _is_known(joiner: Member, facts: Facts, settings: Settings, now: float) -> bool:
    heartbeat = facts.heartbeats.get(joiner.peer)
    if heartbeat is None or not facts.confirmed(joiner.peer):
        return False
    return (
        bool(heartbeat.digest) or facts.evidence.progress.here_s(joiner.peer, now) >= KNOWN_BEATS * settings.heartbeat_s
    )


def _slows(one: Member, rate: int, view: View, facts: Facts, settings: Settings) -> str:
    """Why the run is better off without that peer, whose line carries `rate` kB/s; '' if it is not."""
    others = tuple(other for other in view.members if other.peer != one.peer)
    known = [line for other in others if (line := _line(other.peer, facts))]
    step_s = facts.history.step_s
    if not known or step_s == math.inf or rate > NARROW * median(known):
        return ""
    usual = round(median(known))
    lines = {other.peer: _line(other.peer, facts) or usual for other in others}
    narrow_s, even_s = (
        _averaging_s((*others, one), lines | {one.peer: line}, facts, settings) for line in (rate, usual)
    )
    without_s = _averaging_s(others, lines, facts, settings)
    serves = one.peer in facts.serving
    hops_s, share = max(0.0, step_s - (narrow_s if serves else without_s)), _hops_share(one, others, facts, settings)
    hops_with_s, hops_without_s = (hops_s, hops_s / share) if serves else (hops_s * share, hops_s)
    with_s, alone_s = hops_with_s + narrow_s, hops_without_s + without_s
    if with_s <= settings.join_slowdown * max(hops_with_s + even_s, alone_s):
        return ""
    return (
        f"is not needed: its line carries {rate / 1000:.2g} MB/s, the others' {usual / 1000:.2g}, and a step with it takes {with_s:.1f} s,"
        f" without it {alone_s:.1f} s"
    )


def _hops_share(one: Member, others: tuple[Member, ...], facts: Facts, settings: Settings) -> float:
    """What a step's hops take with that peer, of what they take without it: the thinnest stage decides."""
    everybody = (*others, one)
    pace = measured(everybody, facts, settings)
    return min(power(others, settings.stages, *pace)) / min(power(everybody, settings.stages, *pace))


def _averaging_s(members: tuple[Member, ...], lines: Mapping[Peer, int], facts: Facts, settings: Settings) -> float:
    """Seconds that the slowest stage's round takes, by its lines alone."""
    slowest_s = 0.0
    for stage in range(settings.stages):
        group = [member.peer for member in members if member.stage == stage]
        values = max((heartbeat.gradient for peer in group if (heartbeat := facts.heartbeats.get(peer))), default=0)
        even, by_line = busy_times([lines[peer] for peer in group])
        slowest_s = max(slowest_s, min(even, by_line) * values * settings.averaging_bytes / 1000)
    return slowest_s


def by_pace(members: tuple[Member, ...], facts: Facts, settings: Settings) -> tuple[Member, ...]:
    """The members with as many turns as they pass microbatches beside the quickest of their stage (trainer/routing.py).

    A replica passes min(what it computes, what its line carries) microbatches a second. Trainers do not see that: a line that all of them
    fill looks to each of them as wide as what it alone sends there, and of a slow replica each knows the queue of its own hops alone."""
    lines, booked = line_rates(members, facts, settings), _booked(facts)
    turns: dict[Peer, int] = {}
    for stage in range(settings.stages):
        group = [one.peer for one in members if one.stage == stage]
        heartbeats = {peer: heartbeat for peer in group if (heartbeat := facts.heartbeats.get(peer))}
        tensor_kB = (
            boundaries(stage, settings.stages) * _median([each.tensor_bytes for each in heartbeats.values()]) / 1000
        )
        rates = {peer: each.rate for peer, each in heartbeats.items() if each.stage == stage}
        turns |= turns_of({peer: lines.get(peer, 0) for peer in group}, tensor_kB, shown(rates, booked))
    return tuple(msgspec.structs.replace(one, turns=turns[one.peer]) for one in members)


def turns_of(lines: Mapping[Peer, int], tensor_kB: float, rates: Mapping[Peer, float]) -> dict[Peer, int]:
    """Of one stage: its lines, kB/s, what each carries of a microbatch, and what replicas compute per second. 0: not known. The forecaster
    and the planner ask, too."""
    usual = _usual(rates)
    passed = {
        peer: min(_computed(rates.get(peer, 0.0), usual), line / tensor_kB if line and tensor_kB else math.inf)
        for peer, line in lines.items()
    }
    most = max((each for each in passed.values() if each < math.inf), default=math.inf)
    return {peer: round(TURNS * min(1.0, each / most)) if each < math.inf else TURNS for peer, each in passed.items()}


def _computed(rate: float, usual: float) -> float:
    """What a rate counts as: rates near the usual one are that, and nobody is believed to be far from it."""
    if not usual:
        return math.inf
    if not rate or usual / ALIKE <= rate <= usual * ALIKE:
        return usual
    return min(max(rate, usual / FAR), usual * FAR)


def _booked(facts: Facts) -> Mapping[Peer, float]:
    return facts.history.booked_paces(facts.ledger(facts.view.step)) if facts.view is not None else {}


def shown(rates: Mapping[Peer, float], booked: Mapping[Peer, float]) -> dict[Peer, float]:
    """What the rates of one stage's replicas count as: above the usual one so far beyond what each has booked per second. Else one that
    says too much gets more than it can do, and others are moved away from its stage. All are believed where no step is known."""
    usual = _usual(rates)
    return {
        peer: min(rate, max(usual, SHOWN * booked.get(peer, 0.0))) if booked else rate for peer, rate in rates.items()
    }


def _usual(rates: Mapping[Peer, float]) -> float:
    """The lower median, which one peer alone of two cannot raise; 0: none is known."""
    return median_low([rate for rate in rates.values() if rate > 0.0] or [0.0])


def _median(values: Iterable[float]) -> float:
    """Of those that are known; 0: none is."""
    return median([value for value in values if value > 0.0] or [0.0])
