"""What is simulated: how many peers, which links, which faults until when, and what is demanded after healing.

A Scenario gives ranges; drawing.py makes one Case of it for each seed. Scenarios are TOML files of these fields, or one of the
built-in names (catalogue.py).
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from shoal.core.messages import Settings
from shoal.sim.faults.hostile import Hostile
from shoal.sim.lines import Ranges, Wire

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
    one_ways: int = 0  # messages from (or to) one peer do not reach some others
    slows: int = 0  # one peer computes 10 times slower
    jumps: int = 0  # one peer's clock jumps ahead
    full_disks: int = 0
    liars: int = 0  # peers that send faulty blobs and garbled messages
    unlikes: int = 0  # peers whose optimizer has other bits
    closures: int = 0  # all replicas of one stage are asked to leave at once
    freezes: int = 0  # stopped for minutes, then continued
    drifts: int = 0  # one peer's clock runs up to 10 % too fast or too slowly
    fillings: int = 0  # a disk that is full from when a peer begins to write part of a checkpoint
    twins: int = 0  # two processes of one key start at once, in its process's place or beside it


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
    halves: int = 0  # half of the voters, without the casting one
    wipes: int = 0  # everybody; the same command is started again
    copying: int = 0  # a shard of a checkpoint, to another machine
    machines: int = 0  # everybody on one machine, which loses its disk
    rows: int = 0  # in the exchanges of an averaging: what a row adds up (or a group of one row),
    columns: int = 0  # what the rows' sums add up to,
    tellings: int = 0  # the sums that every replica receives


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pairs are ranges, both ends included."""

    name: str = "chaos"
    peers: tuple[int, int] = (6, 14)
    many: bool = True  # any number of peers is as likely; else small swarms are drawn more often (log-uniform)
    planned: bool = False  # the peers of the beginning have seats in a plan, drawn at random
    stages: tuple[int, int] = (1, 4)
    texts: int = 0  # clients that have the swarm continue a text all the while
    steps: tuple[int, int] = (4, 8)
    microbatches: tuple[int, int] = (4, 16)
    step_s: float = 4.0  # seconds of an undisturbed step, about; the compute per microbatch follows from it
    spread: float = 3.0  # fastest over slowest peer
    delay_s: tuple[float, float] = (0.002, 0.12)
    bandwidth_Bps: tuple[float, float] = (2e6, 1e8)
    boundary_bytes: int = 200_000
    values: int = 20_000  # in one stage's gradient
    lines: Ranges | None = None  # every peer has an uplink and a downlink, and what travels its own size (lines.py)
    backward: float = 2.5  # seconds of a backward that recomputes over those of a forward
    save_every: tuple[int, int] = (0, 3)
    heartbeat_timeout_s: float = 4.0
    staleness: Literal[0, 1, -1] = -1  # of gradients; -1: drawn
    messages: Messages = Messages()
    happenings: Happenings = Happenings()
    damages: bool = False  # when a stage loses every replica, the newest checkpoint is damaged too
    saves: int = 0  # times that a launcher asks for a checkpoint now
    sure: bool = False  # every kind of fault that may happen does
    strikes: Strikes = Strikes()
    # Share of the steps in which a new peer is audited, drawn from these
    spot_checks: tuple[float, ...] = (1.0, 0.1, 0.0, 0.0)
    probation: int = 0  # steps in which new keys get a third of a stage's microbatches at most
    tokens: int = 0  # of a microbatch, where the loss of some does not count; 0: where every token's does
    heldout: bool = False  # some steps measure held-out microbatches
    nonfinite: tuple[int, int] = (0, 0)  # steps with a microbatch whose result is not finite, whoever computes it
    strangers: tuple[int, int] = (0, 0)  # hostile peers (faults/strangers.py)
    acts: tuple[str, ...] = ()  # what those do, as role/act; empty: anything
    places: tuple[int, int] = (0, 0)  # machines with a disk of their own for checkpoints; 0: all peers share one
    regions: tuple[int, int] = (1, 1)  # links within one are fast, between two slow
    faults_s: float = 25.0  # counted from the start of training; then everything heals
    start_s: float = 90.0  # the run must have started by then
    progress_s: float = 90.0  # after healing no commit may take longer
    finish_s: float = 400.0  # after healing the run must end within
    heartbeat_s: float = 0.5
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
    kept: int = 0  # forwards whose activations a replica keeps; its backwards of them do not recompute
    rounds: float = 1.0  # how much longer than usual averaging takes, so that faults meet it
    states: float = 1.0  # the same of downloads and checkpoints
    messages: Messages
    happenings: Happenings
    strikes: Strikes = Strikes()
    hostile: tuple[Hostile, ...] = ()
    nonfinite: frozenset[tuple[int, int, int]] = frozenset()  # (step, microbatch, stage)
    regions: int = 1
    places: int = 0
    patience: float = 1.0  # times the scenario's bounds on progress
    wire: Wire | None = None  # with `lines`

    def rng(self, purpose: str) -> Random:
        """A stream of its own for each purpose, so that one more draw in one place moves nothing elsewhere."""
        return Random(self.stream(purpose))

    @property
    def undisturbed(self) -> bool:
        """Peers join and leave, and nothing fails."""
        own = {"leaves": 0, "closures": 0, "joiners": 0}
        quiet = (self.messages, self.strikes, msgspec.structs.replace(self.happenings, **own))
        return quiet == (Messages(), Strikes(), Happenings()) and not (self.hostile or self.nonfinite)

    def settings_of(self, key: int) -> Settings:
        """Of the peer with that number: its own seat, if it has one. A restarted process asks for the seat it had."""
        seat = key if key < len(self.settings.seats) else -1
        return msgspec.structs.replace(self.settings, seat=seat, place=place_of(key, self.places))

    def stream(self, purpose: str) -> str:
        """What seeds that stream; a peer's name is the purpose of its machine's."""
        return f"{self.scenario.name}/{self.seed}/{purpose}"


def place_of(key: int, places: int) -> str:
    """Where the process with that key writes checkpoints."""
    return f"machine{key % places}" if places else ""
