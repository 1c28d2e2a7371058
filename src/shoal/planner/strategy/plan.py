"""The Plan: who serves which stage, why, and what that is predicted to give; its file, and what is wrong with a bad one.

Made by strategy.py or written by hand, read by `shoal plan --check` and by whoever starts a run. Predicted numbers carry their
basis in words; a plan is JSON. What decides: `layers` and `stages` (with blocks, peers and executor), `routes` (none: stochastic
wiring), `microbatch`, `inflight`, `local_steps` and how tensors travel (0 or "": as the configuration says). A plan's seats are its
peers in the order of its stages.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from shoal import units
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.inputs.memory import Need, lacking, resident, swapping
from shoal.planner.inputs.profile import Profile


class StagePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage: blocks `first` up to, not including, `end`, and the devices that serve it."""

    first: int
    end: int
    peers: tuple[str, ...]
    executor: str = "resident"  # or swapping: some of its devices cannot hold it
    checkpointing: bool = False  # device.checkpointing: its activations do not fit otherwise
    memory_bytes: float = 0.0  # predicted, on the device where it is most
    microbatch_s: float = 0.0  # predicted compute of one microbatch on its slowest device, forward and backward
    gradient_bytes: float = 0.0  # that its replicas average
    # Of boundary tensors that each of its peers keeps in memory until the step commits, at most
    kept_bytes: float = 0.0
    kept_activations: int = -1  # forwards whose activations each of its peers keeps; -1: as memory is left when it runs


class PeerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one machine is predicted to do in a step."""

    name: str
    forward_s: float  # one microbatch; the last stage runs no forward of its own
    backward_s: float
    compute_busy: float = 0.0  # share of the time in which microbatches are on their way
    up_busy: float = 0.0
    down_busy: float = 0.0
    sent_bytes: float = 0.0  # per step
    memory_bytes: float = 0.0
    cards: int = 1  # device.count


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan is expected to give."""

    step_s: float
    tokens_per_s: float
    microbatches_s: float  # the step's three parts
    averaging_s: float
    agreeing_s: float
    sent_bytes: float  # by the busiest peer, per step
    bottleneck: str
    price_per_day: float = 0.0  # 0: no prices were given
    basis: str = ""  # of the predicted figures
    codec_s: float = 0.0  # per step, that the busiest peer's processor encodes and decodes


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to travel or to average that was priced, and what the whole run is predicted to do with it."""

    what: str  # boundary, averaging or local steps
    how: str
    step_s: float
    tokens_per_s: float
    sent_bytes: float  # by the busiest peer, per step
    codec_s: float
    taken: bool


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: int  # of the model it was made for
    stages: tuple[StagePlan, ...]
    left_out: tuple[str, ...] = ()
    reason: str = ""
    predicted: Prediction | None = None
    runners_up: tuple[str, ...] = ()  # in words
    peers: tuple[PeerPlan, ...] = ()  # by seat
    routes: tuple[tuple[tuple[int, ...], ...], ...] = ()  # by owner's seat and stage: the seats that serve it, in turn
    # By seat, of its line, kB/s: who owns how much of a round follows them; empty: all own as much
    line_rates: tuple[int, ...] = ()
    microbatch: int = 0  # sequences
    inflight: int = 0  # microbatches that an owner drives at once
    boundary_bytes: float = 0.0  # of one microbatch between two stages
    # How tensors travel: network.activations, gradients and averaging; "": as the configuration says
    activations: str = ""
    gradients: str = ""
    averaging: str = ""
    local_steps: int = 0  # train.local_steps; 0: as the configuration says
    choices: tuple[Choice, ...] = ()  # what plan.allow let the planner choose from

    @property
    def seats(self) -> dict[str, int]:
        """Machines by seat, and the stage of each."""
        return {peer: number for number, stage in enumerate(self.stages) for peer in stage.peers}


ENTRIES: dict[str, type[msgspec.Struct]] = {
    "stages": StagePlan,
    "predicted": Prediction,
    "peers": PeerPlan,
    "choices": Choice,
}  # the tables in a plan's file


def save(plan: Plan, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def load(path: str | Path) -> Plan:
    """ValueError: the file is no JSON, or JSON that is no plan; says where, what is there and what would do."""
    data = Path(path).read_bytes()
    try:
        return msgspec.json.decode(data.decode(), type=Plan)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is no UTF-8 text; is it the right file?"
    except (msgspec.DecodeError, RecursionError) as error:
        problem = _wrong(data.decode(), error)
    raise ValueError(f"{path} is not a plan: {problem}. A whole one: `shoal plan CONFIG --cluster FILE --out {path}`")


def validate(plan: Plan, profile: Profile, cluster: Cluster, value_bytes: int) -> list[str]:
    """Everything that is wrong with the plan for that model on those machines, in words; empty when it can run."""
    if plan.layers != profile.blocks:
        return [f"the plan is for a model of {plan.layers} blocks, this one has {profile.blocks}; plan anew"]
    problems = _cuts(plan) + _seats(plan, cluster) + _routes(plan) + _widths(plan)
    if problems:
        return problems
    device_of = {device.name: device for device in cluster.devices}
    for number, stage in enumerate(plan.stages):
        need = need_of(stage, profile, value_bytes)
        for peer in stage.peers:
            lacks = lacking(need, device_of[peer])
            if lacks > 0:
                problems.append(
                    f"stage {number} does not fit on {peer}: {units.size(lacks)} too much;"
                    f" fewer blocks, a smaller microbatch or another executor than {stage.executor}"
                )
    return problems


def need_of(stage: StagePlan, profile: Profile, value_bytes: int) -> Need:
    work = profile.stage(range(stage.first, stage.end))
    form = swapping if stage.executor == "swapping" else resident
    return msgspec.structs.replace(form(work, profile.boundary_bytes, value_bytes), kept_bytes=stage.kept_bytes)


def _cuts(plan: Plan) -> list[str]:
    if not plan.stages:
        return ["the plan has no stages; it needs at least one"]
    problems = []
    at = 0
    for number, stage in enumerate(plan.stages):
        if stage.executor not in ("resident", "swapping"):
            problems.append(f"stage {number}: executor {stage.executor!r} is not known; resident or swapping")
        if stage.first != at:
            what = "are served twice" if stage.first < at else "are served by nobody"
            low, high = sorted((stage.first, at))
            problems.append(
                f"stage {number} starts at block {stage.first}, not {at}: blocks {low} to {high - 1} {what}"
            )
        if stage.end <= stage.first:
            problems.append(f"stage {number} has no blocks: it starts at {stage.first} and ends before {stage.end}")
        at = stage.end
    if at != plan.layers:
        what = "are served by nobody" if at < plan.layers else "do not exist"
        low, high = sorted((at, plan.layers))
        problems.append(f"the last stage ends before block {at}: blocks {low} to {high - 1} {what}")
    return problems


def _seats(plan: Plan, cluster: Cluster) -> list[str]:
    known = [device.name for device in cluster.devices]
    problems = []
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        if not stage.peers:
            problems.append(f"stage {number} is served by nobody; name at least one peer")
        for peer in stage.peers:
            if peer not in known:
                problems.append(f"stage {number} names {peer}, which the cluster does not have; it has {_few(known)}")
            elif peer in stage_of:
                problems.append(f"{peer} serves stages {stage_of[peer]} and {number}; one peer serves one stage")
            stage_of.setdefault(peer, number)
    forgotten = [name for name in known if name not in stage_of and name not in plan.left_out]
    if forgotten:
        problems.append(f"{_few(forgotten)} serve nothing; give them a stage or list them under left_out")
    return problems


def _routes(plan: Plan) -> list[str]:
    stages, names = list(plan.seats.values()), list(plan.seats)
    if not plan.routes:
        return []
    if len(plan.routes) != len(stages):
        return [
            f"there are routes for {len(plan.routes)} seats, and {len(stages)} seats; give one entry for each, or none"
        ]
    problems = []
    for owner, ways in enumerate(plan.routes):
        if len(ways) != len(plan.stages) or not all(ways):
            problems.append(f"{names[owner]}'s microbatches need a seat at each of {len(plan.stages)} stages")
        for stage, turns in enumerate(ways):
            wrong = [seat for seat in turns if not 0 <= seat < len(stages) or stages[seat] != stage]
            if wrong:
                problems.append(
                    f"{names[owner]}'s microbatches go to seat {wrong[0]} at stage {stage}, which it does not serve"
                )
    return problems


def _widths(plan: Plan) -> list[str]:
    if plan.line_rates and (len(plan.line_rates) != len(plan.seats) or min(plan.line_rates) < 0):
        return [
            f"line_rates {list(plan.line_rates)} are not one number of kB/s, 0 or more, for each of {len(plan.seats)} seats; or give none"
        ]
    return []


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _wrong(text: str, error: Exception) -> str:
    try:
        return (
            _no_plan(str(error), json.loads(text))
            if isinstance(error, msgspec.ValidationError)
            else _no_json(text, str(error))
        )
    except RecursionError:
        return "lists or tables that lie hundreds deep in one another"


def _no_json(text: str, otherwise: str) -> str:
    """Where it stops being JSON: the standard library tells lines and what it expected."""
    if not text.strip():
        return "the file is empty"
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        there = text[error.pos : error.pos + 10].split("\n")[0]
        there_text = f"found {there!r}" if there else "the line ends" if error.pos < len(text) else "the file ends"
        return f"line {error.lineno}, column {error.colno}: {there_text}; {error.msg[0].lower()}{error.msg[1:]}"
    return otherwise  # NaN and the like, which only Python takes for JSON


def _no_plan(error: str, tree: Any) -> str:
    """msgspec's message, in the words of the file: which entry, what it holds, and what it should."""
    what, _, at = error.partition(" - at ")
    where = at.strip("`").removeprefix("$").removeprefix(".")
    kind, here = _entry(where, tree)
    place = where or "the plan"
    name = (re.findall(r"`(\w+)`", what) or [""])[0]
    if what.startswith("Object missing"):
        return f"{place} has no {name!r}; it must say {', '.join(_required(kind))}"
    if what.startswith("Object contains unknown"):
        near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
        return f"{place} has {name!r}, which is nothing; " + (
            f"did you mean {near[0]!r}?" if near else f"try one of {', '.join(kind.__struct_fields__)}"
        )
    wanted = {"int": "a whole number", "float": "a number", "str": "text", "array": "a list", "object": "a table {...}"}
    return f"{place} is {json.dumps(here)[:40]}; it must be {wanted.get(name, name)}"


def _entry(where: str, tree: Any) -> tuple[type[msgspec.Struct], Any]:
    """What stands at a path such as stages[0].first, and the kind of the table there, or around it."""
    kind: type[msgspec.Struct] = Plan
    for index, name in re.findall(r"\[(\d+)\]|(\w+)", where):
        kind = ENTRIES.get(name, kind)
        if index:
            tree = tree[int(index)]
        else:
            tree = tree[name]
    return kind, tree


def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.required]
