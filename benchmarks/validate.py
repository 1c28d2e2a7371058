"""Forecasts against real runs: seconds of a step, and of runs with deaths and joins, on configurations drawn from seeds.

    python benchmarks/validate.py [--first 0] [--configurations 28] [--plot FILE.svg] [--done FILE.jsonl] [--record]

Real processes, real TLS, agreement and averaging, on modelled lines (transport/emulated/shaped.py), with executors that sleep for the
seconds of their machine: the CPU is mostly idle, so that a dozen peers fit on two cores. 2 to 12 peers, 1 to 4 stages, lines of 50 to
1000 Mbit/s, delays of 0 to 150 ms, uneven devices and lines, codes, delayed updates. In every fourth configuration the machines are alike,
a peer is killed twice, and another joins in its place each time (`shoal chaos`). From seed LOCAL_FROM on another fourth has local steps, of
which an emulated executor takes the time of the microbatches. Not here: swapping, which needs a model that computes.

A configuration that would take more of the processor than CORES is left out before it is run, and one whose averaging would wait for the
processor for more than LATE of a step; the rule is printed with it. Every other
one of those that were run is what the two constants (a hop's and a step's own seconds) are fitted to; the figures are of the rest. A run
beside which other programs took more than BESIDE of a core is repeated (--repeats), and the quietest counts. --done keeps what was measured
and goes on from there. The last line is one JSON object: the held-out median difference of step time, 5 % its target.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from predict import environment
from report import at_most, parse, report
from shoal import codec, config, trace
from shoal.core.allreduce.layout import split
from shoal.core.leader.rules.removal import DOUBT_BEATS
from shoal.core.messages import Join, Send
from shoal.forecasting.churn import Presence
from shoal.forecasting.exact import ExactRun
from shoal.forecasting.forecaster import Run
from shoal.forecasting.job import SCAN_BEATS, Job, job_of
from shoal.forecasting.models import step_time
from shoal.forecasting.models.played import Played
from shoal.launcher.files import rundir
from shoal.planner.inputs import cluster
from shoal.planner.inputs.profile import Shape, Work, profile
from shoal.planner.prediction.seats import Seats, of_group
from shoal.planner.strategy import plan, strategy
from shoal.planner.strategy.problem import Problem

MEDIAN_PERCENT, TAIL_PERCENT, CHURN_PERCENT = 5.0, 10.0, 5.0
# Of the processor: a limit, and what a hop, a byte sent, and a value averaged and stepped at a peer cost
CORES, HOP_CPU_S, BYTE_CPU_S, VALUE_CPU_S = 0.5, 0.008, 15e-9, 33e-9
# Of the processor: what a chunk of a round costs at both ends (estimated from runs of seeds 30 and 42), all of which are sent within one
# exchange; and of a step, for how long an exchange may wait for it
CHUNK_CPU_S, LATE = 1.8e-3, 0.05
BESIDE = 0.6
LOCAL_FROM = 28  # from this seed on every fourth configuration has local steps
STEPS, CHURN_STEPS = 7, 14
KILLED = (2.6, 7.3)  # peers of a run with kills, after so many steps' time
LAYERS, SEQUENCES, TOKENS = 6, 8, 64
CONFIG = """
[run]
name = "validate"
steps = {steps}
stages = {stages}
peers = {peers}
inflight = {inflight}
[model]
hidden_size = {hidden}
intermediate_size = {intermediate}
layers = 6
heads = 4
kv_heads = 4
[data]
sequence = 64
[train]
batch = {batch}
microbatch = 8
staleness = {staleness}
{local}
[network]
activations = "{activations}"
gradients = "{gradients}"
averaging = "{averaging}"
{lines}
[device]
executor = "emulated"
{device}
[checkpoint]
every = 0
at_end = false
"""


class Configuration(msgspec.Struct, frozen=True):
    """One drawn configuration: its file, its machines, what is predicted of it."""

    seed: int
    text: str
    machines: str
    churn: bool
    job: Job
    planned: plan.Plan
    words: str
    values: float  # of gradients, at all members together

    @property
    def hops(self) -> int:
        return self.job.microbatches * (2 * self.job.stages - 1)


class Measured(msgspec.Struct, frozen=True):
    """A run: when steps were committed, who died and asked to join when, and the cores that other programs took meanwhile."""

    seed: int
    commits_s: tuple[float, ...]
    changes: tuple[tuple[float, str, bool], ...] = ()  # seconds, peer's label, joins
    beside: float = 0.0


def between(low: float, high: float, rng: Random) -> float:
    return float(low * (high / low) ** rng.random())


def drawn(seed: int, churn_steps: int = CHURN_STEPS) -> Configuration:
    """`churn_steps`: of a run with kills and joins."""
    rng, churn = Random(f"validate/{seed}"), seed % 4 == 3
    local_steps = Random(f"validate/local/{seed}").choice((2, 4, 8)) if seed >= LOCAL_FROM and seed % 4 == 1 else 1
    stages = rng.randint(1, 4) if not churn else rng.randint(1, 3)
    stages = stages if local_steps == 1 else 1
    peers = rng.randint(max(2, stages), 12) if not churn else rng.randint(max(4, 2 * stages + 1), 10)
    hidden, inflight = rng.choice((64, 128, 192, 256)), rng.choice((2, 4))
    staleness = int(not churn and rng.random() < 0.25 and local_steps == 1)
    travel = codec.Travel(
        activations=rng.choice(("none", "bf16", "int8")),
        gradients=rng.choice(("none", "bf16")),
        averaging=rng.choice(("none", "bf16", "int8")),
    )
    work = Work(
        microbatches=rng.randint(2 * peers, 5 * peers) if local_steps == 1 else local_steps * peers,
        sequences=SEQUENCES,
        tokens=TOKENS,
        value_bytes=4,
        inflight=inflight,
    )
    shape = Shape(
        hidden=hidden, layers=LAYERS, heads=4, kv_heads=4, head_dim=hidden // 4, intermediate=2 * hidden, vocabulary=256
    )
    forward_s, delay_s, mbit = between(0.08, 0.25, rng), rng.uniform(0, 0.15), between(50, 1000, rng)
    stage_flops = profile(shape, work).flops / stages
    speeds = [2 ** rng.uniform(-0.7, 0.7) for _ in range(peers)]
    widths = [min(1000.0, between(50, 1000, rng)) for _ in range(peers)]
    if churn:
        speeds, widths = [1.0] * peers, [mbit] * peers
    lines = [(up, up if churn else min(1000.0, up * between(1, 4, rng))) for up in widths]
    tree = _machines(peers, [stage_flops / forward_s * speed for speed in speeds], lines, delay_s)
    machines = cluster.from_tree(tree)
    problem = Problem(
        shape=shape,
        work=work,
        cluster=machines,
        uneven=not churn,
        travel=travel,
        staleness=staleness,
        local_steps=local_steps,
        wiring="stochastic" if churn or rng.random() < 0.5 else "best",
    )
    decided = strategy.decide(problem, np.random.default_rng(0), 400, stages)
    own, line = "emulated_s = 0.0", ""
    if churn:  # whoever joins later has the run's own machine, so that the stages' are alike
        seconds = max(peer.forward_s for peer in decided.peers)
        own = f"emulated_s = {seconds}\n"
        own += f"emulated_values = {round(decided.boundary_bytes / codec.bytes_per_value(travel.activations, 4))}\n"
        raw = max(stage.gradient_bytes for stage in decided.stages) / codec.bytes_per_value(travel.averaging, 4)
        own += f"emulated_gradient = {round(raw)}"
        line = f'bandwidth_Bps = "{mbit:.1f} Mbit/s"\ndelay_s = "{1e3 * delay_s:.1f} ms"'
    text = CONFIG.format(
        steps=churn_steps if churn else STEPS,
        stages=stages,
        peers=peers,
        inflight=inflight,
        hidden=hidden,
        intermediate=2 * hidden,
        batch=8 * work.microbatches // local_steps,
        local=f"local_steps = {local_steps}\nlocal_batch = 8\nlocal_warmup = 0" if local_steps > 1 else "",
        staleness=staleness,
        activations=travel.activations,
        gradients=travel.gradients,
        averaging=travel.averaging,
        lines=line,
        device=own,
    )
    words = (
        f"{peers:>2} peers, {stages} stages, {work.microbatches} microbatches, {min(widths):.0f} to {max(widths):.0f} Mbit/s,"
        f" {1e3 * delay_s:.0f} ms, {'/'.join((travel.activations, travel.gradients, travel.averaging))}"
        + (", delayed" if staleness else "")
        + (f", {local_steps} local steps" if local_steps > 1 else "")
        + (", kills and joins" if churn else "")
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.toml").write_text(text)
        read = config.load(Path(folder) / "run.toml", [])
    if churn:
        problem = msgspec.structs.replace(
            problem,
            emulated_s=read.device.emulated_s,
            emulated_bytes=4.0 * read.device.emulated_values,
            emulated_gradient_bytes=4.0 * read.device.emulated_gradient,
        )
    job = job_of(problem, decided, read)
    coded = [nbytes * len(job.seats.replicas(stage)) for stage, nbytes in enumerate(job.seats.gradient_bytes)]
    values = sum(coded) / codec.bytes_per_value(travel.averaging, 4)
    return Configuration(seed, text, _toml(tree), churn, job, decided, words, values)


def _machines(peers: int, flops: list[float], lines: list[tuple[float, float]], delay_s: float) -> dict[str, object]:
    return {
        "link": {"delay_s": f"{1e3 * delay_s:.3f} ms", "bandwidth_Bps": "10 Gbit/s"},
        "device": [
            {
                "name": f"m{n}",
                "flops": f"{flops[n] / 1e9:.6f} GFLOP/s",
                "up_Bps": f"{lines[n][0]:.1f} Mbit/s",
                "down_Bps": f"{lines[n][1]:.1f} Mbit/s",
            }
            for n in range(peers)
        ],
    }


def _toml(tree: dict[str, object]) -> str:
    link, devices = tree["link"], tree["device"]
    assert isinstance(link, dict) and isinstance(devices, list)
    text = "[link]\n" + "".join(f'{key} = "{value}"\n' for key, value in link.items())
    return text + "".join(
        "[[device]]\n" + "".join(f'{key} = "{value}"\n' for key, value in one.items()) for one in devices
    )


def too_much(one: Configuration) -> str:
    """Why two cores cannot carry it; '' if they can."""
    step = Played(one.job)(np.array(one.job.stage_of))
    assert step is not None
    sent_bytes = one.planned.predicted.sent_bytes * len(one.job.seats.members) if one.planned.predicted else 0.0
    cores = (one.hops * HOP_CPU_S + sent_bytes * BYTE_CPU_S + one.values * VALUE_CPU_S) / step.step_s
    chunks = _chunks(step_time.measured(one.job.seats, one.job, one.job.machines.kind_of))
    late_s = 0.0 if one.job.seats.staleness else chunks * CHUNK_CPU_S / 2 - step.averaging_s
    if cores <= CORES:
        if late_s <= LATE * step.step_s:
            return ""
        return (
            f"{chunks} chunks of {1e3 * CHUNK_CPU_S:g} ms in an exchange of {step.averaging_s:.2f} s make two cores end it"
            f" {late_s:.2f} s later, in a step of {step.step_s:.1f} s; at most {LATE:.0%} of it"
        )
    return (
        f"{one.hops} hops of {HOP_CPU_S:g} s, {sent_bytes / 1e6:.0f} MB of {1e9 * BYTE_CPU_S:g} s/GB and {one.values / 1e6:.0f} million"
        f" values of {1e9 * VALUE_CPU_S:g} ns in a step of {step.step_s:.1f} s take {cores:.2f} cores; at most {CORES}"
    )


def _chunks(seats: Seats) -> int:
    """Parts and sums that are sent in one exchange."""
    sent = 0
    for stage, nbytes in enumerate(seats.gradient_bytes):
        group = seats.replicas(stage)
        line_rates = of_group(seats.line_rates, group)
        owners = split(int(nbytes / seats.value_bytes), tuple(map(str, group)), line_rates=line_rates).owners
        sent += 2 * (len(group) - 1) * len(owners)
    return sent


# ------------------------------------------------------------------------------------------------------------- the runs


def measured(one: Configuration, repeats: int) -> Measured:
    runs = []
    for left in range(repeats, -1, -1):
        step_s = one.planned.predicted.step_s if one.planned.predicted else 10.0
        with tempfile.TemporaryDirectory() as folder:
            runs.append(played(one, Path(folder), [share * step_s for share in KILLED]))
        if runs[-1].beside <= BESIDE:
            break
        print(f"  other programs took {runs[-1].beside:.1f} cores beside it{': again' if left else ''}", flush=True)
    return min(runs, key=lambda run: run.beside)


def played(one: Configuration, there: Path, kills_s: Sequence[float]) -> Measured:
    """One run, in that directory. `kills_s`: of one with kills, when, in seconds of training."""
    (there / "run.toml").write_text(one.text)
    (there / "cluster.toml").write_text(one.machines)
    plan.save(one.planned, there / "plan.json")
    words = ["run.toml", "--plan", "plan.json", *([] if one.churn else ["--cluster", "cluster.toml"])]
    shoal = [sys.executable, "-m", "shoal.cli.main"]
    began_s, own_s, busy_s = time.monotonic(), _own_s(), _busy_s()
    with (there / "log").open("w") as log:
        options = {"cwd": there, "env": environment(), "stdout": log, "stderr": subprocess.STDOUT}
        run = subprocess.Popen([*shoal, "run", *words], **options)  # type: ignore[call-overload]
        if one.churn:
            acts = [f'[[act]]\nat = "{at_s:.1f} s"\nkind = "kill"\nwho = "member"\n' for at_s in kills_s]
            (there / "acts.toml").write_text("".join(acts))
            while run.poll() is None and not (there / "runs/validate/peers.json").exists():
                time.sleep(0.2)
            chaos = ["chaos", "runs/validate", "--schedule", "acts.toml", "--seed", str(one.seed)]
            subprocess.run([*shoal, *chaos], check=False, **options)  # type: ignore[call-overload]
        if run.wait():
            raise SystemExit(f"configuration {one.seed}: {(there / 'log').read_text()[-2000:]}")
    seconds = time.monotonic() - began_s
    beside = (_busy_s() - busy_s - (_own_s() - own_s)) / seconds
    commits_s = tuple(step.heard_s for step in rundir.commits(there / "runs/validate"))
    return Measured(
        one.seed, commits_s, _changes(there / "runs/validate", len(one.job.seats.members)) if one.churn else (), beside
    )


def _changes(directory: Path, peers: int) -> tuple[tuple[float, str, bool], ...]:
    """Deaths, and requests to join of all but the `peers` that the run began with, from the trace. The machine's clock is one."""
    last_s: dict[str, float] = {}
    asked_s: dict[str, float] = {}
    for item in trace.read(trace.find(directory)):
        if isinstance(item, trace.TraceRecord):
            last_s[item.peer] = item.time_s
            if any(isinstance(command, Send) and isinstance(command.message, Join) for command in item.commands):
                asked_s.setdefault(item.peer, item.time_s)
    label = {peer: name for name, peer in rundir.labels(directory).items()}
    commits = rundir.commits(directory)
    began = {f"p{number + 1}" for number in range(peers)}
    changes = [(at, label[peer], True) for peer, at in asked_s.items() if label[peer] not in began]
    changes += [(at, label[peer], False) for peer, at in last_s.items() if at < commits[-1].heard_s - 0.5]
    return tuple(sorted(changes))


def _busy_s() -> float:
    """Of all cores, since the machine began."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# ------------------------------------------------------------------------------------------------------------ the scores


def step_s(run: Measured) -> float:
    """The first step, in which everybody warms up, is not among them."""
    return statistics.median(later - earlier for earlier, later in pairwise(run.commits_s))


def with_constants(job: Job, hop_s: float, round_s: float) -> Job:
    """The runtime's own seconds of a hop and of a step are the machine's, not the modelled ones'."""
    forward_s, backward_s = job.forward_s + hop_s, job.backward_s + hop_s
    seats = msgspec.structs.replace(
        job.seats,
        forward_s=tuple(seconds + hop_s for seconds in job.seats.forward_s),
        backward_s=tuple(seconds + hop_s for seconds in job.seats.backward_s),
    )
    return msgspec.structs.replace(job, forward_s=forward_s, backward_s=backward_s, seats=seats, round_s=round_s)


def predicted_s(job: Job) -> float:
    step = Played(job)(np.array(job.stage_of))
    assert step is not None
    return step.step_s


def fitted(pairs: list[tuple[Configuration, Measured]]) -> tuple[float, float]:
    """A hop's and a step's own seconds: least squares of relative differences over a grid, since each play is quick."""
    best = (float("inf"), 0.0, 0.0)
    for hop_s in (0.0, 0.002, 0.004, 0.006, 0.008):
        plain = [predicted_s(with_constants(one.job, hop_s, 0.0)) for one, _ in pairs]
        for round_s in np.linspace(0, 0.6, 25).tolist():
            off = sum((have + round_s) / step_s(run) - 1 for have, (_, run) in zip(plain, pairs, strict=True))
            squares = sum(
                ((have + round_s) / step_s(run) - 1) ** 2 for have, (_, run) in zip(plain, pairs, strict=True)
            )
            best = min(best, (squares + 1e-9 * abs(off), hop_s, round_s))
    return best[1], best[2]


def churned(job: Job, run: Measured) -> tuple[float, float, float]:
    """Seconds from the first commit to the last: forecast with the run's own deaths and joins, played message by message with them, and
    measured."""
    first_s, steps = run.commits_s[0], len(run.commits_s) - 1
    job = doubting(job)
    there, changes = there_and_then(job, run)
    played = Run(job, Played(job), [Presence(0.0, slot, True) for slot in there] + changes, 0.0)
    horizon_s = 100.0
    while played.progress.step < steps and horizon_s < 1e6:
        played.play(horizon_s, steps=steps)
        horizon_s *= 2
    return played.progress.began_s, exact_s(job, there, changes, steps), run.commits_s[-1] - first_s


def doubting(job: Job) -> Job:
    """A killed process breaks its connections, by which it is noticed."""
    detection_s = (DOUBT_BEATS + SCAN_BEATS / 2) * job.patience.heartbeat_s
    return msgspec.structs.replace(job, patience=msgspec.structs.replace(job.patience, detection_s=detection_s))


def exact_s(job: Job, there: list[int], changes: list[Presence], steps: int) -> float:
    """Message by message: seconds of so many steps after the first, machines coming and going so long after its commit."""
    exact, began_s = by_message(job, there, changes)
    exact.play(1e6, steps=1 + steps)
    return exact.watch.commits.times_s[-1] - began_s


def by_message(job: Job, there: list[int], changes: list[Presence]) -> tuple[ExactRun, float]:
    """A run, not played yet, in which machines come and go so long after its first commit, and when that is."""
    first = [Presence(0.0, slot, True) for slot in there]
    alone = ExactRun(job, first, 0.0, 0)
    alone.play(1e6, steps=1)
    began_s = alone.watch.commits.times_s[0]
    later = [msgspec.structs.replace(one, at_s=one.at_s + began_s) for one in changes]
    return ExactRun(job, first + later, 0.0, 0), began_s


def there_and_then(job: Job, run: Measured) -> tuple[list[int], list[Presence]]:
    """Slots with a machine at the first commit, and who comes and goes afterwards, seconds after it. Who asked to join before it and had
    not begun with the others joins at once."""
    first_s = run.commits_s[0]
    slots = [slot for slot, stage in enumerate(job.stage_of) if stage >= 0]
    slot_of = {f"p{number + 1}": job.seats.seated[number] for number in range(len(slots))}
    there, free, changes = set(slots), [], []
    for at_s, label, joins in run.changes:
        if joins and free:  # a new machine on the place of one that died
            slot_of[label] = free.pop(0)
        if label not in slot_of:
            continue
        slot = slot_of[label]
        if not joins:
            free.append(slot)
        if at_s <= first_s and not joins and slot in there:
            there.discard(slot)
        else:
            changes.append(Presence(max(at_s - first_s, 0.001), slot, joins))
    return sorted(there), changes


def plotted(points: list[tuple[float, float, str]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    for kind, marker in (("fitted", "x"), ("held out", "o"), ("kills and joins, a step's share", "s")):
        own = [(have, forecast) for have, forecast, name in points if name == kind]
        if own:
            axes.scatter(*zip(*own, strict=True), marker=marker, label=kind)
    most = 1.1 * max(max(have, forecast) for have, forecast, _ in points)
    axes.plot([0, most], [0, most], linewidth=0.8, color="gray")
    axes.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], alpha=0.15, color="gray", label="within 5 %")
    axes.set(xlabel="measured, s a step", ylabel="forecast, s a step", xlim=(0, most), ylim=(0, most))
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--configurations", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=2, help="of a run beside which other programs were busy")
    parser.add_argument("--plot", metavar="FILE", help="draw forecast against measured")
    parser.add_argument("--done", metavar="FILE", help="what was measured before, to which the rest is added")
    args = parse(parser)
    done = Path(args.done) if args.done else None
    known = {}
    if done is not None and done.exists():
        known = {run.seed: run for run in map(_decoded, done.read_bytes().splitlines())}
    pairs: list[tuple[Configuration, Measured]] = []
    left_out: dict[str, str] = {}
    for seed in range(args.first, args.first + args.configurations):
        one = drawn(seed)
        if why := too_much(one):
            left_out[str(seed)] = why
            print(f"{seed:>3}: {one.words}: left out: {why}", flush=True)
            continue
        run = known.get(seed)
        if run is None:
            run = measured(one, args.repeats)
            if done is not None:
                with done.open("ab") as file:
                    file.write(msgspec.json.encode(run) + b"\n")
        pairs.append((one, run))
        print(
            f"{seed:>3}: {one.words}: predicted {predicted_s(one.job):.2f} s, measured {step_s(run):.2f} s", flush=True
        )
    scored(pairs, left_out, args)


def _decoded(line: bytes) -> Measured:
    return msgspec.json.decode(line, type=Measured)


def scored(pairs: list[tuple[Configuration, Measured]], left_out: dict[str, str], args: argparse.Namespace) -> None:
    calm = [pair for pair in pairs if not pair[0].churn]
    constants = fitted(calm[::2])
    print(f"fitted to every other of {len(calm)}: {1e3 * constants[0]:g} ms a hop, {1e3 * constants[1]:g} ms a step")
    points: list[tuple[float, float, str]] = []
    rows: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {"fitted": [], "held out": [], "kills": []}
    for number, (one, run) in enumerate(calm):
        kind, forecast = ("held out", "fitted")[number % 2 == 0], predicted_s(with_constants(one.job, *constants))
        errors[kind].append(100 * abs(forecast / step_s(run) - 1))
        points.append((step_s(run), forecast, kind))
        rows[str(one.seed)] = [round(forecast, 3), round(step_s(run), 3), round(100 * (forecast / step_s(run) - 1), 1)]
        print(
            f"| {one.seed} | {one.words} | {forecast:.2f} | {step_s(run):.2f} | {rows[str(one.seed)][2]:+.1f} % | {kind} |"
        )
    for one, run in (pair for pair in pairs if pair[0].churn):
        forecast, exact, have = churned(with_constants(one.job, *constants), run)
        errors["kills"].append(100 * abs(forecast / have - 1))
        steps = len(run.commits_s) - 1
        points.append((have / steps, forecast / steps, "kills and joins, a step's share"))
        rows[str(one.seed)] = [
            *(round(each, 2) for each in (forecast, exact, have)),
            round(100 * (forecast / have - 1), 1),
        ]
        print(
            f"| {one.seed} | {one.words} | {forecast:.1f} | {have:.1f} | {rows[str(one.seed)][3]:+.1f} % | {steps} steps,"
            f" every message {exact:.1f} |"
        )
    if args.plot:
        plotted(points, args.plot)
    held_out = errors["held out"]
    tail = float(np.percentile(held_out, 95))
    worst_churn = max(errors["kills"], default=0.0)
    print(
        f"held out: median {statistics.median(held_out):.1f} %, 95th percentile {tail:.1f} %; with kills: median"
        f" {statistics.median(errors['kills'] or [0.0]):.1f} %, worst {worst_churn:.1f} %"
    )
    report(
        "validate",
        statistics.median(held_out),
        "% median difference of forecast from measured step time, held-out configurations of real processes",
        at_most(MEDIAN_PERCENT),
        {
            "tail_percent": round(tail, 2),
            "tail_target": TAIL_PERCENT,
            "churn_percent": [round(each, 2) for each in errors["kills"]],
            "churn_target": CHURN_PERCENT,
            "constants_s": [float(each) for each in constants],
            "configurations": rows,
            "left_out": left_out,
        },
        args.record,
    )


if __name__ == "__main__":
    main()
