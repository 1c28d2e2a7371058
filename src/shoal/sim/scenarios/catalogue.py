"""The built-in scenarios by name: single faults, all of them together, long histories, hostile peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shoal.sim.faults.hostile import ACTS, MADE_UP
from shoal.sim.lines import Ranges
from shoal.sim.scenarios.scenario import Happenings, Messages, Scenario, Strikes

_HARSH = Happenings(
    kills=4, restarts=4, leaves=2, losses=1, absences=1, joiners=4, pauses=4, halves=3, one_ways=4, slows=2, jumps=3, full_disks=2,
    liars=2,
)  # fmt: skip
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="calm"),
        Scenario(name="churn", happenings=Happenings(kills=4, restarts=4, leaves=3, joiners=4)),
        *(
            Scenario(
                name=f"leaving_{step_s}s",  # of a step; nothing else happens, so that the time to leave is bounded
                peers=(5, 12),
                stages=(1, 4),
                steps=(8, 16) if step_s < 60 else (4, 6),
                step_s=step_s,
                microbatches=(4, 16) if step_s < 60 else (16, 24),  # hops are shorter than any deadline
                most_forward_s=3.0,
                faults_s=4.0 * step_s + 10.0,
                sure=True,
                happenings=Happenings(leaves=3, closures=1, joiners=2),
                finish_s=3000.0,
                progress_s=900.0,
            )
            for step_s in (1, 10, 60)
        ),
        Scenario(
            name="network",
            messages=Messages(drop=0.05, delay=0.02),
            happenings=Happenings(halves=3, one_ways=4, slows=2, pauses=3),
        ),
        *(
            Scenario(
                name=name,
                messages=Messages(drop=0.05, delay=0.02, stranger=0.02, fail=0.02),
                happenings=_HARSH,
                tokens=tokens,
            )
            for name, tokens in (("chaos", 0), ("counted", 512))
        ),
        Scenario(
            name="texts",
            texts=3,
            messages=Messages(drop=0.05, delay=0.02, stranger=0.02, fail=0.02),
            happenings=_HARSH,
        ),
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
            name="damaged",
            peers=(9, 14),
            stages=(2, 3),
            steps=(14, 20),
            save_every=(1, 1),
            step_s=2.0,
            faults_s=60.0,
            sure=True,
            damages=True,
            saves=4,
            messages=Messages(drop=0.03, delay=0.02, fail=0.02),
            happenings=Happenings(losses=4, restarts=1, joiners=4, pauses=1),
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
            name="unlike_lines",  # who owns what of a round follows the line_rates of the lines
            planned=True,
            lines=Ranges(gradient_s=(0.3, 3.0)),
            peers=(4, 16),
            stages=(1, 2),
            messages=Messages(drop=0.03, delay=0.01, stranger=0.01, fail=0.01),
            happenings=Happenings(kills=2, restarts=3, leaves=2, joiners=3, pauses=2, one_ways=2, halves=1, liars=1),
            strikes=Strikes(rows=2, tellings=2),
        ),
        Scenario(  # three that come by one invite want to serve a stage
            name="sybils",
            peers=(3, 6),
            stages=(1, 2),
            steps=(14, 18),
            step_s=2.0,
            microbatches=(12, 24),
            probation=8,
            staleness=0,
            happenings=Happenings(joiners=3),
            sure=True,
        ),
        Scenario(  # a liar is evicted, what it contributed undone, and others fail meanwhile
            name="undone",
            strangers=(1, 2),
            acts=("member/wrong",),
            spot_checks=(0.1,),
            peers=(7, 12),
            stages=(1, 3),
            steps=(12, 20),
            step_s=1.5,
            save_every=(1, 5),
            messages=Messages(drop=0.01, delay=0.01),
            happenings=Happenings(kills=1, restarts=1, joiners=2, losses=1),
            damages=True,
            strikes=Strikes(leading=2, saving=1, downloading=1),
            progress_s=180.0,
            finish_s=900.0,
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
    _fault(
        "frozen", steps=(40, 60), step_s=6.0, faults_s=240.0, finish_s=1500.0, happenings=Happenings(freezes=3, restarts=1, joiners=1),
    ),
    _fault("clock_drifts", steps=(20, 30), finish_s=900.0, happenings=Happenings(drifts=4, joiners=1, restarts=1)),
    _fault("twins", steps=(10, 16), finish_s=900.0, happenings=Happenings(twins=3, joiners=1, kills=1)),
    _fault("disk_full", happenings=Happenings(full_disks=2, fillings=4, restarts=1), save_every=(1, 2), faults_s=60.0),
    _fault(
        "unlike",
        peers=(5, 8),
        stages=(1, 1),
        steps=(24, 32),
        step_s=1.0,
        faults_s=120.0,
        progress_s=180.0,
        happenings=Happenings(unlikes=2, restarts=1),
    ),
    _fault("dies_averaging", strikes=Strikes(averaging=3)),
    _fault(
        "dies_in_long_rounds",  # of several stages, so that the exchanges of others go on
        peers=(8, 14),
        stages=(2, 4),
        lines=Ranges(up_Bps=(1e7, 3e7), gradient_s=(1.0, 6.0)),
        strikes=Strikes(averaging=4),
        happenings=Happenings(restarts=2, joiners=2),
        faults_s=60.0,
        finish_s=900.0,
        progress_s=240.0,
    ),
    _fault("dies_applying", strikes=Strikes(applying=3)),
    _fault("dies_saving", strikes=Strikes(saving=3), save_every=(1, 2)),
    _fault("dies_copying", places=(2, 4), strikes=Strikes(copying=4, saving=3, leading=1), save_every=(1, 1)),
    _fault(
        "copies", places=(2, 4), save_every=(1, 2), strikes=Strikes(cuts=2, ways=1, copying=1),
        happenings=Happenings(full_disks=3, fillings=3, joiners=1, restarts=2, losses=1),
    ),
    _fault("machine_dies", peers=(8, 14), places=(3, 5), strikes=Strikes(machines=2, copying=1), save_every=(1, 2)),
    _fault("wiped_apart", places=(2, 3), steps=(6, 10), strikes=Strikes(wipes=1, copying=3), save_every=(1, 1)),
    _fault("dies_downloading", strikes=Strikes(downloading=2, uploading=2), happenings=_SOME_COME),
    _fault("leader_dies", strikes=Strikes(leading=3), save_every=(1, 2)),
    _fault("trainer_dies", strikes=Strikes(training=3)),
    _fault("two_replicas", peers=(8, 16), stages=(1, 3), strikes=Strikes(pairs=2)),
    _fault("region_dies", peers=(9, 16), regions=(3, 4), strikes=Strikes(regions=1), save_every=(1, 2)),
    _fault("region_cut", peers=(9, 16), regions=(3, 4), strikes=Strikes(region_cuts=2), save_every=(1, 2)),
    _fault("split", happenings=Happenings(halves=3)),
    _fault(
        "casting_vote", peers=(2, 8), stages=(1, 2), strikes=Strikes(halves=3), save_every=(1, 2),
        happenings=Happenings(halves=2, joiners=2),
    ),
    _fault("last_replica", peers=(8, 16), stages=(2, 4), happenings=Happenings(losses=2), save_every=(0, 2)),
    _fault("nonfinite", nonfinite=(1, 4), happenings=Happenings(kills=2, restarts=2, joiners=2), save_every=(0, 2)),
    _fault(
        "measured", heldout=True, staleness=0, happenings=Happenings(kills=3, restarts=2, joiners=2, pauses=1), save_every=(0, 2),
    ),
    _fault("wiped", steps=(6, 10), strikes=Strikes(wipes=1), save_every=(1, 3)),
)  # fmt: skip
_LONG = Scenario(
    sure=True,
    stages=(4, 8),
    steps=(80, 100),
    step_s=500.0,
    most_forward_s=120.0,
    delay_s=(0.002, 0.12),
    save_every=(2, 6),
    heartbeat_s=10.0,
    heartbeat_timeout_s=80.0,
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
CHECKED: dict[str, Any] = {
    "stages": (2, 3),
    "steps": (50, 60),
    "spot_checks": (0.1,),
    "staleness": 0,
    "finish_s": 1500.0,
}  # else it is not found out
HOSTILE = tuple(  # strangers/member/mute: one hostile peer that does only that
    msgspec.structs.replace(
        SCENARIOS["strangers"],
        name=f"strangers/{place}/{act}",
        strangers=(1, 1),
        acts=(f"{place}/{act}",),
        **(CHECKED if act in MADE_UP else {}),
    )
    for place, acts in ACTS.items()
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
                "leaving_1s",
                "leaving_10s",
                "leaving_60s",
                "network",
                "chaos",
                "counted",
                "wild",
                "lost",
                "damaged",
                "fleet",
                "lines",
                "large_group",
                "unlike_lines",
                "strangers",
                "undone",
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
