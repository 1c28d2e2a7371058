"""Draws the Case of a seed from a Scenario's ranges.

Each kind of fault is absent in about half of the seeds and otherwise drawn up to its limit: runs with few kinds of faults reach states
that runs with all of them never do.
"""

from __future__ import annotations

from random import Random
from typing import TypeVar

import msgspec

from shoal.codec import bytes_per_value
from shoal.core.messages import Settings
from shoal.sim import lines
from shoal.sim.faults import hostile
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario, Strikes

JOIN_SLOWDOWN = 1.1  # as a run has by default
TIGHT = 2.0  # patience where servers keep six microbatches of a step and pass them nearly one by one
HELDOUT_TOKENS = 4  # of a held-out microbatch
BLOB_BYTES = 100  # of any tensor, as the machines see it; links count the scenario's own
Limits = TypeVar("Limits", Messages, Happenings, Strikes)


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
    late = late if scenario.staleness < 0 else scenario.staleness
    # of delayed updates no step can be audited
    audited = 0.0 if late else Random(f"{scenario.name}/{seed}/spots").choice(scenario.spot_checks)
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
        heartbeat_timeout_s=scenario.heartbeat_timeout_s,
        heartbeat_s=scenario.heartbeat_s,
        min_request_timeout_s=rng.choice((0.3, 1.0, 2.0)),
        ready_timeout_s=rng.choice((5.0, 30.0)),
        lost_stage=rng.choice(("checkpoint", "neighbours")),
        lost_stage_wait_s=rng.choice((0.0, 3.0, 15.0)),
        staleness=late,
        activation_store_bytes=store.choice((1 << 32, 40 * BLOB_BYTES, 20 * BLOB_BYTES, 12 * BLOB_BYTES)),
        piece_values=pieces.choice((0, 0, values // 2, values // 7)),
        tokens=scenario.tokens,
        undo="checkpoint",
        probation=scenario.probation,
        spot_checks=audited,
        robust=Random(f"{scenario.name}/{seed}/robust").choice(("none", "clip")),
    )
    disks = Random(f"{scenario.name}/{seed}/places")
    places = disks.randint(*scenario.places)
    settings = msgspec.structs.replace(settings, copies=disks.choice((1, 2, 2, 3)) if places else 1)
    if scenario.heldout:
        measured = Random(f"{scenario.name}/{seed}/heldout")
        settings = msgspec.structs.replace(
            settings,
            heldout=measured.randint(1, 12),
            heldout_every=measured.randint(1, 3),
            heldout_tokens=HELDOUT_TOKENS,
            patience=measured.choice((0, 0, 1, 2)),
        )
    if scenario.planned:
        settings = _with_plan(settings, peers, Random(f"{scenario.name}/{seed}/plan"))
        settings = msgspec.structs.replace(
            settings, line_rates=_widths(wire, peers, Random(f"{scenario.name}/{seed}/line_rates"))
        )
    if wire is not None:
        sent = bytes_per_value(wire.travel.averaging, lines.FP32)
        settings = msgspec.structs.replace(settings, averaging_bytes=sent, join_slowdown=JOIN_SLOWDOWN)
    return Case(
        scenario=scenario,
        seed=seed,
        settings=settings,
        peers=peers,
        speeds=speeds,
        forward_s=forward_s,
        wire=wire,
        kept=Random(f"{scenario.name}/{seed}/kept").choice((0, 2, 16)),
        rounds=rng.choice((1.0, 1.0, 10.0, 30.0)),
        states=rng.choice((1.0, 5.0, 15.0, 50.0)),
        messages=_some(scenario.messages, rng, whole=False),
        happenings=_some(scenario.happenings, rng, whole=True, sure=scenario.sure),
        strikes=_some(scenario.strikes, aimed, whole=True, sure=True),
        hostile=hostile.draw(scenario.strangers, scenario.acts, peers, Random(f"{scenario.name}/{seed}/strangers")),
        nonfinite=_nonfinite(scenario, settings, Random(f"{scenario.name}/{seed}/nonfinite")),
        regions=aimed.randint(*scenario.regions),
        places=places,
        patience=TIGHT if settings.activation_store_bytes <= 12 * BLOB_BYTES else 1.0,
    )


def _nonfinite(scenario: Scenario, settings: Settings, rng: Random) -> frozenset[tuple[int, int, int]]:
    count = min(rng.randint(*scenario.nonfinite), settings.steps)
    steps = rng.sample(range(settings.steps), count)
    return frozenset((step, rng.randrange(settings.microbatches), rng.randrange(settings.stages)) for step in steps)


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
