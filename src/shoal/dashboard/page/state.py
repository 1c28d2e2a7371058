"""What the page shows of a run at one moment, made from the snapshot of its launcher (dashboard/terminal.py) as the browser needs it.

Peers are arrays in the order of PeerRow, so that hundreds of them are a small message. Text is sent as it is: the page only ever
sets it as text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from shoal.config import Config, microbatches, tokens_per_step
from shoal.config.regions import place, title
from shoal.dashboard.leaderboard import Leaderboard
from shoal.dashboard.page.world import projected
from shoal.dashboard.terminal import Happening, PeerLine, Snapshot
from shoal.traffic import KINDS, Traffic

CONTRIBUTORS = 20  # that the page shows
RATE_S = 10.0  # over which bytes per second are measured


class Forecast(msgspec.Struct, frozen=True):
    """What the run's plan predicts; `text`: beside what was measured, '' while there is nothing to compare."""

    step_s: float
    tokens_per_s: float
    bottleneck: str
    text: str


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its directory holds it (launcher/watching/reader.py)."""

    config: Config
    snapshot: Snapshot
    running: bool  # its launcher lives
    written_s: float  # when the snapshot was written, since 1970
    summary: str  # the account of a run that has ended, in lines; '' before
    balanced: bool | None  # that account; None before the end
    forecast: Forecast | None
    board: Leaderboard | None = None


class PeerRow(msgspec.Struct, frozen=True, array_like=True):
    """A peer. `state`: serving, loading, slow, waiting (it has no stage yet), gone (it died), or left."""

    label: str
    stage: int | None
    state: str
    leading: bool
    reason: str  # why it is slow
    rate: float | None  # microbatches per second; None: not known here
    queue_s: float
    sent: int
    received: int
    send_Bps: float
    receive_Bps: float
    memory: int
    join_s: float
    machine: str
    silent_s: float
    region: str  # '': not known


class Spot(msgspec.Struct, frozen=True):
    """A region on the page's map (world.py), in its units from the upper left."""

    title: str
    x: float
    y: float


class StageRow(msgspec.Struct, frozen=True):
    """A stage, and what its peers send a second: activations to the next stage, gradients to the one before."""

    rate: float
    activations_Bps: float
    gradients_Bps: float
    averaging_Bps: float
    state_Bps: float


class ContributorRow(msgspec.Struct, frozen=True):
    """One of those that contributed most, as `shoal leaderboard` ranks them."""

    rank: int
    person: str
    keys: int
    share: float
    microbatches: int
    tokens: int
    seconds: float
    evictions: int


class PageState(msgspec.Struct, frozen=True, kw_only=True):
    """One message to the browser, without the figures by step."""

    name: str
    phase: str  # starting, running, stopped, finished, ended or dead
    words: str  # the run's own: what it waits for, or why nothing is trained
    advice: str
    unsaved: str
    survives: str
    elapsed_s: float
    age_s: float  # of this snapshot
    remaining_s: float | None
    step: int
    steps: int
    tokens_per_step: int
    microbatches: int  # per step
    tokens_per_s: float
    account: dict[str, int]
    summary: str
    balanced: bool | None
    sent: Traffic
    stages: list[StageRow]
    bottleneck: int | None
    forecast: Forecast | None
    peers: list[PeerRow]
    spots: dict[str, Spot]  # by region, of the peers whose region is known
    contributors: list[ContributorRow]  # the first CONTRIBUTORS
    contributor_count: int
    credited: int  # steps of which is known who contributed
    events: Sequence[Happening]


class StateBuilder:
    """Makes each PageState; remembers snapshots of the last RATE_S for bytes per second."""

    def __init__(self) -> None:
        self._before: deque[Snapshot] = deque()

    def state(self, reading: Reading, now_s: float | None = None) -> PageState:
        """`now_s`: since 1970."""
        snapshot, config = reading.snapshot, reading.config
        passed_s, earlier = self._earlier(snapshot)
        rates = {line.label: _rates(line, earlier.get(line.label), passed_s) for line in snapshot.peers}
        phase = _phase(reading)
        here = config.network.region
        alive = [_row(line, *rates[line.label], peer_state(line, phase), here) for line in snapshot.peers]
        ended = [_row(line, Traffic(), 0.0, line.ended, here) for line in snapshot.ended]
        peers = alive + ended
        return PageState(
            name=snapshot.name,
            phase=phase,
            words=snapshot.stopped or snapshot.state,
            advice=snapshot.advice,
            unsaved=snapshot.unsaved,
            survives=snapshot.survives,
            elapsed_s=snapshot.elapsed_s,
            age_s=max(0.0, (time.time() if now_s is None else now_s) - reading.written_s),
            remaining_s=snapshot.remaining_s if phase == "running" else None,
            step=snapshot.step,
            steps=snapshot.steps,
            tokens_per_step=tokens_per_step(config),
            microbatches=microbatches(config.train),
            tokens_per_s=snapshot.tokens_per_s,
            account=account(snapshot),
            summary=reading.summary,
            balanced=reading.balanced,
            sent=snapshot.sent,
            stages=_stages(snapshot, rates),
            bottleneck=snapshot.bottleneck if phase == "running" else None,
            forecast=reading.forecast,
            peers=peers,
            spots=_spots(peers),
            contributors=_contributors(reading.board),
            contributor_count=len(reading.board.contributors) if reading.board is not None else 0,
            credited=reading.board.credited if reading.board is not None else 0,
            events=snapshot.happenings,
        )

    def _earlier(self, snapshot: Snapshot) -> tuple[float, dict[str, PeerLine]]:
        """Seconds since the oldest snapshot of the last RATE_S, and its peers."""
        newest_s = self._before[-1].elapsed_s if self._before else 0.0
        if snapshot.elapsed_s < newest_s:  # another session
            self._before.clear()
        if not self._before or snapshot.elapsed_s > newest_s:
            self._before.append(snapshot)
        while len(self._before) > 2 and self._before[1].elapsed_s <= snapshot.elapsed_s - RATE_S:
            self._before.popleft()
        first = self._before[0]
        return snapshot.elapsed_s - first.elapsed_s, {line.label: line for line in first.peers}


def account(snapshot: Snapshot) -> dict[str, int]:
    """Microbatches of the run so far, by what became of them."""
    return {
        "issued": snapshot.issued,
        "committed": snapshot.committed,
        "redone": snapshot.redone,
        "lost": snapshot.lost,
        "counted twice": snapshot.counted_twice,
        "undone": snapshot.undone,
        "skipped": snapshot.skipped,
    }


def peer_state(line: PeerLine, phase: str) -> str:
    if phase == "dead" and not line.machine:  # they end with their launcher
        return "gone"
    if line.slow:
        return "slow"
    if line.stage is None:
        return "waiting"
    return "serving" if line.ready else "loading"


def _phase(reading: Reading) -> str:
    snapshot = reading.snapshot
    if reading.balanced is not None:
        return "finished" if reading.balanced else "ended"
    if not reading.running:
        return "dead"
    if snapshot.stopped:
        return "stopped"
    return "starting" if snapshot.state and snapshot.stages else "running"


def _rates(line: PeerLine, before: PeerLine | None, passed_s: float) -> tuple[Traffic, float]:
    """Bytes a second: sent by kind, received in all."""
    if before is None or passed_s <= 0:
        return Traffic(), 0.0
    sent = {kind: max(0, getattr(line.sent, kind) - getattr(before.sent, kind)) / passed_s for kind in KINDS}
    received = max(0, line.received.total - before.received.total) / passed_s
    return Traffic(**{kind: round(value) for kind, value in sent.items()}), received


def _spots(peers: Sequence[PeerRow]) -> dict[str, Spot]:
    regions = sorted({peer.region for peer in peers if peer.region})
    known = {region: at for region in regions if (at := place(region)) is not None}
    return {region: Spot(title(region), *projected(at)) for region, at in known.items()}


def _contributors(board: Leaderboard | None) -> list[ContributorRow]:
    return [
        ContributorRow(
            rank=one.rank,
            person=one.person,
            keys=len(one.keys),
            share=round(one.share, 6),
            microbatches=one.microbatches,
            tokens=one.tokens,
            seconds=round(one.seconds, 1),
            evictions=len(one.evictions),
        )
        for one in (board.contributors[:CONTRIBUTORS] if board is not None else ())
    ]


def _row(line: PeerLine, sent: Traffic, received_Bps: float, state: str, here: str) -> PeerRow:
    """`here`: this machine's region."""
    return PeerRow(
        label=line.label,
        stage=line.stage,
        state=state,
        leading=line.leading,
        reason=line.slow,
        rate=None if line.machine else round(line.rate, 3),
        queue_s=round(line.queue_s, 2),
        sent=line.sent.total,
        received=line.received.total,
        send_Bps=sent.total,
        receive_Bps=round(received_Bps),
        memory=line.kept.memory,
        join_s=round(line.join_s, 1),
        machine=line.machine,
        silent_s=round(line.silent_s, 1),
        region=line.region if line.machine else here,
    )


def _stages(snapshot: Snapshot, rates: dict[str, tuple[Traffic, float]]) -> list[StageRow]:
    sent = [Traffic()] * snapshot.stages
    for line in snapshot.peers:
        if line.stage is not None and line.stage < snapshot.stages:
            sent[line.stage] = sent[line.stage] + rates[line.label][0]
    return [
        StageRow(round(rate, 3), each.activations, each.gradients, each.averaging, each.state)
        for rate, each in zip(snapshot.stage_rates, sent, strict=True)
    ]
