"""What is simulated: how many peers, which links, which faults until when, and what is demanded after healing.

A scenario gives ranges; `draw` makes of it and a seed one Case. Each kind of fault is absent in about half of the seeds
and otherwise drawn up to its limit: runs with few kinds of faults reach states that runs with all of them never do.
Scenarios are TOML files of these fields, or one of the built-in names.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import msgspec

from shoal.core.messages import Settings
from shoal.sim import lines
from shoal.sim.faults import strangers
from shoal.sim.lines import Ranges, Wire

TIGHT = 2.0  # servers that keep six microbatches of a step pass them nearly one by one
BLOB_BYTES = 100  # of any tensor, as the machines are told; links count the scenario's own
MOST_FORWARD_S = 0.6  # times 2.5 (backward), 10 (a slow peer) and the spread: well below the bounds on progress


class Messages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may happen to one message: probabilities."""

    drop: float = 0.0
    delay: float = 0.0  # held back for up to 3 s, and with it what follows on its link and class
    duplicate: float = 0.0  # breaks the transport's contract
    reorder: float = 0.0  # breaks the transport's contract: overtaken within its class
    stranger: float = 0.0  # a copy arrives from a peer that is in no view
    fail: float = 0.0  # probability that a task which can fail does


class Happenings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of each may happen before healing."""

    kills: int = 0  # for good
    restarts: int = 0  # killed, and back under a new name
    leaves: int = 0
    losses: int = 0  # all replicas of one stage killed at once
    absences: int = 0  # all replicas of one stage stopped, or cut off, at once; they come back
    joiners: int = 0
    pauses: int = 0  # stopped for up to 12 s, then continued
    halves: int = 0  # the network parts in two
    one_ways: int = 0  # one peer is not heard (or hears nothing) by some others
    slows: int = 0  # one peer computes 10 times slower
    jumps: int = 0  # one peer's clock jumps ahead
    full_disks: int = 0
    liars: int = 0  # peers that send faulty blobs and garbled messages


class Strikes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often somebody dies in the middle of what is named, and other things that are aimed (strikes.py). If not 0, at least once."""

    averaging: int = 0
    applying: int = 0
    saving: int = 0
    downloading: int = 0
    uploading: int = 0
    leading: int = 0
    training: int = 0
    pairs: int = 0  # two replicas of one stage at once
    regions: int = 0  # everybody in one region
    region_cuts: int = 0  # a region is cut off from the others
    cuts: int = 0  # one peer is cut off, both ways
    ways: int = 0  # one peer is cut off, one way
    wipes: int = 0  # everybody; the same command is started again
    rows: int = 0  # in the exchanges of an averaging: what a row adds up (or a group of one row),
    columns: int = 0  # what the rows' sums add up to,
    tellings: int = 0  # that every replica is told


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pairs are ranges, both ends included."""

    name: str = "chaos"
    peers: tuple[int, int] = (6, 14)
    many: bool = True  # any number of peers is as likely; else small swarms are drawn more often (log-uniform)
    planned: bool = False  # the peers of the beginning have seats in a plan, drawn at random
    stages: tuple[int, int] = (1, 4)
    steps: tuple[int, int] = (4, 8)
    microbatches: tuple[int, int] = (4, 16)
    step_s: float = 4.0  # seconds of an undisturbed step, about; the compute per microbatch follows from it
    spread: float = 3.0  # fastest over slowest peer
    delay_s: tuple[float, float] = (0.002, 0.12)
    bandwidth_Bps: tuple[float, float] = (2e6, 1e8)
    boundary_bytes: int = 200_000
    values: int = 20_000  # in one stage's gradient
    lines: Ranges | None = None  # every peer has an uplink and a downlink, and what travels its own size (lines.py)
    backward: float = 2.5  # seconds of a backward over those of a forward
    save_every: tuple[int, int] = (0, 3)
    silence_s: float = 4.0
    staleness: Literal[0, 1, -1] = -1  # of gradients; -1: drawn
    messages: Messages = Messages()
    happenings: Happenings = Happenings()
    sure: bool = False  # every kind of fault that may happen does
    strikes: Strikes = Strikes()
    strangers: tuple[int, int] = (0, 0)  # hostile peers (strangers.py)
    acts: tuple[str, ...] = ()  # what those do, as place/act; nothing: anything
    regions: tuple[int, int] = (1, 1)  # links within one are fast, between two slow
    faults_s: float = 25.0  # counted from the start of training; then everything heals
    start_s: float = 90.0  # the run must have started by then
    progress_s: float = 90.0  # after healing no commit may take longer
    finish_s: float = 400.0  # after healing the run must end within
    beat_s: float = 0.5
    most_forward_s: float = MOST_FORWARD_S
    record: str = ""  # of spot instances: peers come and go as in it
    copies: int = 1  # of the record, at different times
    life_s: float = 0.0  # mean life of a peer; as many come as go
    one_of: int = 1  # in a suite: only every so many-th seed
    events: int = 3_000_000  # a run that needs more is called stuck: usual ones need some 10,000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn scenario. `speeds[i]` multiplies the compute of peer i."""

    scenario: Scenario
    seed: int
    settings: Settings
    peers: int
    speeds: tuple[float, ...]
    forward_s: float
    rounds: float = 1.0  # how much longer than usual averaging takes, so that faults meet it
    states: float = 1.0  # the same of downloads and checkpoints
    messages: Messages
    happenings: Happenings
    strikes: Strikes = Strikes()
    hostile: tuple[strangers.Hostile, ...] = ()
    regions: int = 1
    patience: float = 1.0  # times the scenario's bounds on progress
    wire: Wire | None = None  # with `lines`

    def rng(self, purpose: str) -> Random:
        """A stream of its own for each purpose, so that one more draw in one place moves nothing elsewhere."""
        return Random(self.stream(purpose))

    def settings_of(self, key: int) -> Settings:
        """Of the peer with that number: its own seat, if it has one. A restarted process asks for the seat it had."""
        seat = key if key < len(self.settings.seats) else -1
        return msgspec.structs.replace(self.settings, seat=seat)

    def stream(self, purpose: str) -> str:
        """What seeds that stream; a peer's name is the purpose of its machine's."""
        return f"{self.scenario.name}/{self.seed}/{purpose}"


Limits = TypeVar("Limits", Messages, Happenings, Strikes)

_HARSH = Happenings(
    kills=4, restarts=4, leaves=2, losses=1, absences=1, joiners=4, pauses=4, halves=3, one_ways=4, slows=2, jumps=3, full_disks=2,
    liars=2,
)  # fmt: skip
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="calm"),
        Scenario(name="churn", happenings=Happenings(kills=4, restarts=4, leaves=3, joiners=4)),
        Scenario(
            name="network",
            messages=Messages(drop=0.05, delay=0.02),
            happenings=Happenings(halves=3, one_ways=4, slows=2, pauses=3),
        ),
        Scenario(name="chaos", messages=Messages(drop=0.05, delay=0.02, stranger=0.02, fail=0.02), happenings=_HARSH),
        Scenario(
            name="wild",
            messages=Messages(drop=0.1, delay=0.05, stranger=0.05, fail=0.03, duplicate=0.1, reorder=0.1),
            happenings=_HARSH,
        ),
        Scenario(
            name="lost",
            peers=(8, 16),
            stages=(2, 4),
            steps=(6, 10),
            save_every=(0, 2),
            faults_s=60.0,
            messages=Messages(drop=0.03, delay=0.02, fail=0.02),
            happenings=Happenings(
                losses=3, absences=2, kills=2, restarts=2, joiners=3, pauses=2, halves=2, full_disks=1, jumps=1
            ),
        ),
        Scenario(
            name="fleet",
            peers=(8, 40),
            many=False,
            stages=(1, 6),
            steps=(4, 7),
            microbatches=(8, 40),
            messages=Messages(drop=0.05, delay=0.02, stranger=0.02, fail=0.02),
            happenings=msgspec.structs.replace(_HARSH, kills=6, restarts=6, joiners=6),
        ),
        Scenario(
            name="planned",
            planned=True,
            messages=Messages(drop=0.05, delay=0.02, stranger=0.02, fail=0.02),
            happenings=_HARSH,
        ),
        Scenario(
            name="lines",
            lines=Ranges(),
            messages=Messages(drop=0.03, delay=0.01, stranger=0.01, fail=0.01),
            happenings=_HARSH,
        ),
        Scenario(
            name="large_group",
            peers=(17, 40),
            many=False,
            stages=(1, 2),
            steps=(3, 5),
            microbatches=(18, 30),
            messages=Messages(drop=0.03, delay=0.01, stranger=0.01, fail=0.01),
            happenings=Happenings(kills=3, restarts=3, leaves=2, joiners=4, pauses=2, one_ways=2, halves=1, liars=1),
            strikes=Strikes(rows=2, columns=2, tellings=2),
        ),
        Scenario(
            name="unlike_lines",  # who owns what of a round follows the widths of the lines
            planned=True,
            lines=Ranges(gradient_s=(0.3, 3.0)),
            peers=(4, 16),
            stages=(1, 2),
            messages=Messages(drop=0.03, delay=0.01, stranger=0.01, fail=0.01),
            happenings=Happenings(kills=2, restarts=3, leaves=2, joiners=3, pauses=2, one_ways=2, halves=1, liars=1),
            strikes=Strikes(rows=2, tellings=2),
        ),
        Scenario(
            name="strangers",
            strangers=(1, 3),
            peers=(7, 14),
            stages=(1, 3),
            messages=Messages(drop=0.01, delay=0.01, fail=0.01),
            happenings=Happenings(joiners=1, restarts=1),
            # Three hostile peers one after the other, each found out within 30 s and back after its ban.
            progress_s=180.0,
            finish_s=900.0,
        ),
        Scenario(
            name="large",
            peers=(24, 40),
            stages=(3, 6),
            microbatches=(24, 48),
            messages=Messages(drop=0.03, delay=0.01, stranger=0.01, fail=0.01),
            happenings=msgspec.structs.replace(_HARSH, kills=8, restarts=8, joiners=6),
        ),
    )
}


_BOTH = {"messages": Messages(drop=0.02, delay=0.01), "sure": True}


def _fault(name: str, **changes: Any) -> Scenario:
    return Scenario(**{"name": name, **_BOTH, **changes})


_SOME_COME = Happenings(joiners=3, restarts=2)
FAULTS = (  # one for each way of failing that a run must survive
    _fault("killed", happenings=Happenings(kills=3, restarts=3, joiners=2)),
    _fault("stopped", happenings=Happenings(pauses=4)),
    _fault("cut_one_way", strikes=Strikes(ways=4)),
    _fault("cut_off", strikes=Strikes(cuts=4)),
    _fault("slowed", happenings=Happenings(slows=4)),
    _fault("clock_jumps", happenings=Happenings(jumps=4)),
    _fault("disk_full", happenings=Happenings(full_disks=3, restarts=1), save_every=(1, 2)),
    _fault("dies_averaging", strikes=Strikes(averaging=3)),
    _fault("dies_applying", strikes=Strikes(applying=3)),
    _fault("dies_saving", strikes=Strikes(saving=3), save_every=(1, 2)),
    _fault("dies_downloading", strikes=Strikes(downloading=2, uploading=2), happenings=_SOME_COME),
    _fault("leader_dies", strikes=Strikes(leading=3), save_every=(1, 2)),
    _fault("trainer_dies", strikes=Strikes(training=3)),
    _fault("two_replicas", peers=(8, 16), stages=(1, 3), strikes=Strikes(pairs=2)),
    _fault("region_dies", peers=(9, 16), regions=(3, 4), strikes=Strikes(regions=1), save_every=(1, 2)),
    _fault("region_cut", peers=(9, 16), regions=(3, 4), strikes=Strikes(region_cuts=2), save_every=(1, 2)),
    _fault("split", happenings=Happenings(halves=3)),
    _fault("last_replica", peers=(8, 16), stages=(2, 4), happenings=Happenings(losses=2), save_every=(0, 2)),
    _fault("wiped", steps=(6, 10), strikes=Strikes(wipes=1), save_every=(1, 3)),
)
_LONG = Scenario(
    sure=True,
    stages=(4, 8),
    steps=(80, 100),
    step_s=500.0,
    most_forward_s=120.0,
    delay_s=(0.002, 0.12),
    save_every=(2, 6),
    beat_s=10.0,
    silence_s=80.0,
    faults_s=36_000.0,
    start_s=1800.0,
    progress_s=8000.0,  # one owner may have several microbatches left, which take 500 s each and go one after another
    finish_s=300_000.0,
)
LONG = (  # hours of machines that come and go: what only shows after hundreds of steps
    msgspec.structs.replace(
        _LONG, name="spot", peers=(60, 68), microbatches=(64, 96),
        record="aws-g4dn-spot.csv", copies=5, one_of=10,
        happenings=Happenings(pauses=6, one_ways=4, slows=4, halves=3, jumps=4, full_disks=3), events=30_000_000,
    ),
    msgspec.structs.replace(
        _LONG, name="crowd", peers=(400, 400), stages=(32, 32), steps=(12, 16), microbatches=(400, 400), life_s=28_800.0,
        faults_s=7200.0, one_of=100, happenings=Happenings(pauses=6, one_ways=4, slows=4, jumps=4, full_disks=3), events=200_000_000,
    ),
)  # fmt: skip
SCENARIOS |= {scenario.name: scenario for scenario in (*FAULTS, *LONG)}
HOSTILE = tuple(  # strangers/member/mute: one hostile peer that does only that
    msgspec.structs.replace(
        SCENARIOS["strangers"], name=f"strangers/{place}/{act}", strangers=(1, 1), acts=(f"{place}/{act}",)
    )
    for place, acts in strangers.ACTS.items()
    for act in acts
)
SCENARIOS |= {scenario.name: scenario for scenario in HOSTILE}


def suite(name: str) -> tuple[Scenario, ...]:
    """`all`: a scenario for every fault, all of them together, and the long ones. Else one scenario (`load`)."""
    if name != "all":
        return (load(name),)
    return (
        *FAULTS,
        *(
            SCENARIOS[one]
            for one in (
                "churn",
                "network",
                "chaos",
                "wild",
                "lost",
                "fleet",
                "lines",
                "large_group",
                "unlike_lines",
                "strangers",
            )
        ),
        *LONG,
    )


def load(name: str) -> Scenario:
    """A built-in scenario by name, or one from a TOML file."""
    if name in SCENARIOS:
        return SCENARIOS[name]
    path = Path(name)
    if not path.is_file():
        known = [one for one in SCENARIOS if "/" not in one]
        raise ValueError(f"scenario {name!r}: neither a file nor one of {', '.join(known)}")
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Scenario)
    except msgspec.DecodeError as error:
        raise ValueError(f"scenario {name}: {error}") from error


def draw(scenario: Scenario, seed: int) -> Case:
    rng = Random(f"{scenario.name}/{seed}/case")
    aimed = Random(f"{scenario.name}/{seed}/aimed")  # apart, so that what is drawn besides stays as it was
    stages = rng.randint(*scenario.stages)
    fewest, most = (max(bound, stages) for bound in scenario.peers)
    peers = rng.randint(fewest, most) if scenario.many else round(fewest * (most / fewest) ** rng.random())
    microbatches = rng.randint(*scenario.microbatches)
    speeds = tuple(scenario.spread ** rng.uniform(-0.5, 0.5) for _ in range(peers))
    store = Random(f"{scenario.name}/{seed}/store")
    late = Random(f"{scenario.name}/{seed}/staleness").choice((0, 1))
    forward_s = min(scenario.most_forward_s, scenario.step_s * peers / (microbatches * stages * 3.5))
    wired = Random(f"{scenario.name}/{seed}/lines")
    wire = lines.draw(scenario.lines, peers, forward_s, wired) if scenario.lines is not None else None
    pieces = Random(f"{scenario.name}/{seed}/pieces")
    values = wire.gradient_values if wire is not None else scenario.values
    settings = Settings(
        stages=stages,
        microbatches=microbatches,
        steps=rng.randint(*scenario.steps),
        peers=rng.randint(max(stages, peers - 2), peers),
        inflight=rng.choice((1, 2, 4)),
        queue_limit=rng.choice((2, 4, 16)),
        save_every=rng.randint(*scenario.save_every),
        silence_s=scenario.silence_s,
        beat_s=scenario.beat_s,
        hop_floor_s=rng.choice((0.3, 1.0, 2.0)),
        hold_s=rng.choice((5.0, 30.0)),
        lost=rng.choice(("checkpoint", "neighbours")),
        lost_wait_s=rng.choice((0.0, 3.0, 15.0)),
        staleness=late if scenario.staleness < 0 else scenario.staleness,
        keep_bytes=store.choice((1 << 32, 40 * BLOB_BYTES, 20 * BLOB_BYTES, 12 * BLOB_BYTES)),
        piece_values=pieces.choice((0, 0, values // 2, values // 7)),
    )
    if scenario.planned:
        settings = _with_plan(settings, peers, Random(f"{scenario.name}/{seed}/plan"))
        settings = msgspec.structs.replace(
            settings, widths=_widths(wire, peers, Random(f"{scenario.name}/{seed}/widths"))
        )
    return Case(
        scenario=scenario,
        seed=seed,
        settings=settings,
        peers=peers,
        speeds=speeds,
        forward_s=forward_s,
        wire=wire,
        rounds=rng.choice((1.0, 1.0, 10.0, 30.0)),
        states=rng.choice((1.0, 5.0, 15.0, 50.0)),
        messages=_some(scenario.messages, rng, whole=False),
        happenings=_some(scenario.happenings, rng, whole=True, sure=scenario.sure),
        strikes=_some(scenario.strikes, aimed, whole=True, sure=True),
        hostile=strangers.draw(scenario.strangers, scenario.acts, peers, Random(f"{scenario.name}/{seed}/strangers")),
        regions=aimed.randint(*scenario.regions),
        patience=TIGHT if settings.keep_bytes <= 12 * BLOB_BYTES else 1.0,
    )


def _with_plan(settings: Settings, peers: int, rng: Random) -> Settings:
    """Every stage has a seat; each owner's microbatches take one to three seats of a stage in turn."""
    seats = [*range(settings.stages), *(rng.randrange(settings.stages) for _ in range(peers - settings.stages))]
    rng.shuffle(seats)
    at = [[seat for seat, own in enumerate(seats) if own == stage] for stage in range(settings.stages)]
    routes = tuple(tuple(tuple(rng.choices(group, k=rng.randint(1, 3))) for group in at) for _ in range(peers))
    return msgspec.structs.replace(settings, seats=tuple(seats), routes=routes)


def _widths(wire: lines.Wire | None, peers: int, rng: Random) -> tuple[int, ...]:
    """As wide as the lines are. Without lines of their own in half of the cases as wide as any could be, or not known."""
    if wire is not None:
        return tuple(round(min(line.up_Bps, line.down_Bps) / 1000) for line in wire.lines)
    return rng.choice(((), tuple(rng.choice((0, 100, 400, 1000)) for _ in range(peers))))


def _some(limits: Limits, rng: Random, whole: bool, sure: bool = False) -> Limits:
    """Each kind in about half of the cases (`sure`: in all), up to its limit."""
    drawn: dict[str, float] = {}
    for field in limits.__struct_fields__:
        limit = getattr(limits, field)
        amount = rng.randint(min(1, limit), limit) if whole else rng.uniform(0.0, limit)
        drawn[field] = amount if rng.random() < 0.5 or sure else 0
    return msgspec.convert(drawn, type(limits))
