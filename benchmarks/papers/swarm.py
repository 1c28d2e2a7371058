"""SWARM (arXiv 2301.11913): square-cube law, GPipe and offloading, rebalancing, mixed fleets, and the run on preemptible T4s.

SWARM is this project's step as the planner plays it. GPipe is a static pipeline that flushes after as many microbatches as it has
stages; offloading holds the whole model on every worker and averages it. All three take the same seconds and bytes of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np
from rows import Row, claim, differs

import rebalance
import scenarios
from shoal.forecasting.churn import Churn, presences
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job
from shoal.forecasting.machines import Machines
from shoal.forecasting.models.choice import model_of
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict
from shoal.sim.faults.preemption import read

RTT_MS = (0, 10, 50, 100, 200)
UTILISATION = {  # per cent of a stage's device, by round trip
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "GPT-3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "shared layers": (89.5, 87.2, 79.5, 71.5, 59.2),
}
HIDDEN = {"base": 768, "xxlarge": 4096, "GPT-3": 12288}
LINE_Bps = 500e6 / 8
WORKERS, STAGES, BATCH = 16, 4, 4096
INFLIGHT = 4  # microbatches of a peer on their way
HOURS, LONG_HOURS = 6.0, 48.0  # that 400 T4s are forecast; of steps of half an hour 6 hours have ten
T4_RATE, A100_RATE = (
    19.2 / 100,
    25.5 / 14,
)  # microbatches per second of one GPU at one of four stages, from their best rates
SHARED_BYTES = 201.4e6  # of one shared layer's gradient in int8
BOUNDARY_BYTES = 2048 * 4096


def rows() -> Iterator[Row]:
    yield from square_cube()
    yield from against_others()
    yield from rebalancing()
    yield from mixed()
    yield from preemptible()


class Stage(NamedTuple):
    """Seconds of a microbatch at a stage, there and back, and of its boundary tensors on the line, fitted to two cells of a column."""

    compute_s: float
    line_s: float


def fitted(name: str) -> Stage:
    none, _, _, far, _ = (100 / cell for cell in UTILISATION[name])
    compute_s = 0.1 / (far - none)
    return Stage(compute_s, compute_s * (none - 1))


def lines(peers: int, delay_s: float, line_Bps: float = LINE_Bps) -> Cluster:
    devices = tuple(Device(name=f"p{i}", flops=1.0, up_Bps=line_Bps, down_Bps=line_Bps) for i in range(peers))
    return Cluster(devices, np.full((peers, peers), delay_s), np.full((peers, peers), 1e12))


def busy(stage: Stage, delay_s: float, microbatches: int, inflight: int) -> float:
    """Per cent of the time that a stage's device computes, fed over the line by one that does not."""
    tensor_bytes = stage.line_s / 2 * LINE_Bps
    seats = Seats((0, 1), (0.0, 0.0), (0.0, stage.compute_s), (0.0, 0.0), tensor_bytes, 0.0, microbatches, inflight)
    return (
        100
        * microbatches
        * stage.compute_s
        / predict(seats, lines(2, delay_s), np.random.default_rng(0)).microbatches_s
    )


def square_cube() -> Iterator[Row]:
    for name, cells in UTILISATION.items():
        stage = fitted(name)
        for rtt_ms, cell in zip(RTT_MS, cells, strict=True):
            ours = busy(stage, rtt_ms / 2000, 1, 1)
            if rtt_ms not in (0, 100):  # those fit by construction
                yield Row(table="Square-cube law: utilisation of a stage's device", case=f"{name}, round trip {rtt_ms} ms",
                          claimed=claim(cell), ours=ours, unit="%", mark="unconfirmed")  # fmt: skip
        yield Row(table="Square-cube law: utilisation of a stage's device", case=f"{name}, 100 ms, eight microbatches on their way",
                  claimed=None, ours=busy(stage, 0.05, 64, 4), unit="%")  # fmt: skip


def swarm_s(stage: Stage, gradient_bytes: float, delay_s: float) -> float:
    stage_of = tuple(i % STAGES for i in range(WORKERS))
    forward, backward = (stage.compute_s / 4,) * WORKERS, (stage.compute_s * 3 / 4,) * WORKERS
    tensor_bytes = stage.line_s / 2 * LINE_Bps
    seats = Seats(stage_of, forward, backward, (gradient_bytes,) * STAGES, tensor_bytes, 0.0, BATCH, 4)
    return predict(seats, lines(WORKERS, delay_s), np.random.default_rng(0)).step_s


def gpipe_s(stage: Stage, gradient_bytes: float, delay_s: float, flushed: int = STAGES) -> float:
    """Four static pipelines; `flushed` microbatches forward, then back, again and again."""
    seconds = 0.0
    for compute_s in (stage.compute_s / 4, stage.compute_s * 3 / 4):
        turn, there = np.arange(flushed), np.zeros(flushed)
        for hop in range(STAGES):
            done = scenarios.passed(there, turn, compute_s)
            there = done if hop == STAGES - 1 else scenarios.passed(done, turn, stage.line_s / 2) + delay_s
        seconds += float(there[-1])
    pipelines = WORKERS // STAGES
    return BATCH / pipelines / flushed * seconds + averaged_s(gradient_bytes, pipelines, delay_s)


def offloaded_s(stage: Stage, gradient_bytes: float, delay_s: float) -> float:
    return BATCH / WORKERS * STAGES * stage.compute_s + averaged_s(STAGES * gradient_bytes, WORKERS, delay_s)


def averaged_s(nbytes: float, replicas: int, delay_s: float) -> float:
    return 2 * (nbytes * (1 - 1 / replicas) / LINE_Bps + delay_s)


def against_others() -> Iterator[Row]:
    table = "SWARM, GPipe and offloading: 16 workers, 500 Mb/s"
    for name, hidden in HIDDEN.items():
        stage, nbytes = fitted(name), 12.0 * hidden**2
        near, far = (
            [policy(stage, nbytes, delay_s) for policy in (swarm_s, gpipe_s, offloaded_s)] for delay_s in (0.0, 0.05)
        )
        many = gpipe_s(stage, nbytes, 0.05, 4 * STAGES) / gpipe_s(stage, nbytes, 0.0, 4 * STAGES)
        rows_of = (
            (f"{name}: SWARM keeps of its rate at 100 ms", claim(90, 100), 100 * near[0] / far[0], "%", "derived",
             "Four microbatches of each worker on their way do not fill a stage of "
             f"{1e3 * stage.compute_s:.2g} ms behind 100 ms: the delay is {0.1 / stage.compute_s:.0f} times the work."),
            (f"{name}: GPipe slower at 100 ms", claim(2, 3), far[1] / near[1], "x", "paper",
             f"The ratio is set by work over delay: with four times as many microbatches between flushes it is {many:.2f} x. "
             "The paper's number of microbatches is not known."),
            (f"{name}: SWARM over GPipe at 0 ms", None, near[1] / near[0], "x", "", ""),
            (f"{name}: SWARM over GPipe at 100 ms", None, far[1] / far[0], "x", "", ""),
            (f"{name}: offloading over SWARM at 0 ms", None, near[0] / near[2], "x", "", ""),
            (f"{name}: offloading over SWARM at 100 ms (the paper: wins on small models)", None, far[0] / far[2], "x", "", ""),
        )  # fmt: skip
        for case, claimed, ours, unit, mark, why in rows_of:
            row = Row(table=table, case=case, claimed=claimed, ours=ours, unit=unit, mark=mark)  # type: ignore[arg-type]
            yield msgspec.structs.replace(row, why=why if differs(row) else "")


def rebalancing() -> Iterator[Row]:
    table = "Rebalancing: per cent of the optimum, 4 stages"
    record = read(rebalance.TRACE)
    calm = rebalance.fleet(0, peers=100)
    claims = {
        "random placement": ("none", claim(82.7), "paper"),
        "SWARM T=300, random": ("T = 300 s", claim(95.8), "paper"),
        "SWARM T=60, random": ("T = 60 s", claim(97.6), "unconfirmed"),
        "ours": ("this project's rule", None, ""),
    }
    for rule in rebalance.RULES:
        if rule.name not in claims:
            continue
        case, claimed, mark = claims[rule.name]
        done = [rebalance.Play(record, 4, rule, seed, {}).run().percent("done") for seed in range(3)]
        other = rebalance.Play(calm, 4, rule, 0, {}).run().percent("done")
        row = Row(table=table, case=case, claimed=claimed, ours=fmean(done), unit="%", mark=mark)  # type: ignore[arg-type]
        why = (
            "The paper's record is not published. Here machines live an hour; of 100 drawn peers that live 8 h the same rule keeps"
            f" {other:.1f} %."
        )
        yield msgspec.structs.replace(row, why=why if differs(row) else "")


def fleet_share(t4: int, a100: int, a100_line_Bps: float) -> float:
    """Of the summed rates of these GPUs at four stages, played."""
    rates = [T4_RATE] * t4 + [A100_RATE] * a100
    stage_of = tuple(i % STAGES for i in range(t4)) + tuple(i % STAGES for i in range(a100))
    devices = tuple(
        Device(name=f"p{i}", flops=1.0, up_Bps=line, down_Bps=line)
        for i, line in enumerate([25e6] * t4 + [a100_line_Bps] * a100)
    )
    peers = len(rates)
    machines = Cluster(devices, np.full((peers, peers), 0.02), np.full((peers, peers), 1e12))
    forward, backward = (tuple(part / rate for rate in rates) for part in (0.25, 0.75))
    seats = Seats(stage_of, forward, backward, (SHARED_BYTES,) * STAGES, BOUNDARY_BYTES, 0.0, BATCH, INFLIGHT)
    step = predict(seats, machines, np.random.default_rng(0))
    return 100 * BATCH / step.microbatches_s / (sum(rates) / STAGES)


def mixed() -> Iterator[Row]:
    table = "Mixed fleets: per cent of the GPUs' summed rates"
    why = (
        "Theirs sends every tensor through CPU trainers with one microbatch each. Ours goes from stage to stage; with A100s on lines of"
        " 200 Mb/s like the T4s it is {0:.0f} %."
    )
    for case, t4, a100, claimed in (
        ("T4", 24, 0, 100 * 17.6 / 19.2),
        ("A100", 0, 8, 100 * 16.9 / 25.5),
        ("T4 and A100, 6 : 1", 24, 4, 100 * 27.3 / (19.2 + 25.5)),
    ):
        row = Row(
            table=table,
            case=case,
            claimed=claim(claimed),
            ours=fleet_share(t4, a100, 1e9 / 8),
            unit="%",
            mark="unconfirmed",
        )
        yield msgspec.structs.replace(row, why=why.format(fleet_share(t4, a100, 25e6)) if differs(row) else "")


def t4_job(slots: int, layers: int, staleness: int, batch: int = BATCH) -> Job:
    """T4s at four stages, each with so many layers' gradients."""
    t4 = Device(name="", flops=1.0, up_Bps=25e6, down_Bps=25e6)
    machines = Machines((t4,), (0,) * slots, np.array([[0.04]]), np.array([[1e9]]))
    stage_of = tuple(slot % STAGES for slot in range(slots))
    forward_s, backward_s = (np.full((1, STAGES), part / T4_RATE) for part in (0.25, 0.75))
    own = tuple((part / T4_RATE,) * slots for part in (0.25, 0.75))
    gradient_bytes = (layers * SHARED_BYTES,) * STAGES
    return Job(
        machines=machines,
        stage_of=stage_of,
        forward_s=forward_s,
        backward_s=backward_s,
        seats=Seats(stage_of, *own, gradient_bytes, BOUNDARY_BYTES, 16e3, batch, INFLIGHT, staleness=staleness),
        state_bytes=tuple(12 * nbytes for nbytes in gradient_bytes),
        tokens=2048,
        save_every=10,
    )


def t4_rate(job: Job, churn: Churn, hours: float = HOURS) -> float:
    """Samples per second of 400 T4s that are there."""
    changes = presences(churn, job.machines, hours * 3600, 0)
    model = model_of(job, [changes], churn.start_s, hours * 3600)
    history = forecast(job, model, changes, churn.start_s, hours * 3600, 0)
    return history.steps * job.microbatches / (hours * 3600) * 400 / (sum(history.peer_hours) / hours)


def preemptible() -> Iterator[Row]:
    table = "400 preemptible T4s on 200 Mb/s, replayed spot record"
    record, slots = Churn(record=str(rebalance.TRACE)), 752  # 53 % of the slots have a machine: 400
    shared = t4_job(slots, 1, 0)
    rate = t4_rate(shared, record)
    quiet, large = Churn(life_s=8 * 3600.0), 8 * BATCH
    calm = t4_rate(t4_job(400, 1, 0), quiet)
    both = t4_rate(t4_job(400, 1, 0, large), quiet, LONG_HOURS)
    with_record = t4_rate(t4_job(slots, 1, 0, large), record, LONG_HOURS)
    why = (
        f"With a mean life of 8 h it is {calm:.3g} samples/s, and with eight times the batch as well {both:.3g}: churn, and ten"
        " microbatches of each machine in a step. With the record and eight times the batch it is"
        f" {with_record:.3g}, as a death costs more of a longer step. The published run"
        " states neither its churn nor its batch."
    )
    for case, claimed, ours, unit in (
        ("1B of shared layers", claim(17.6), rate, "samples/s"),
        ("1B, of the summed rates of those there", claim(100 * 17.6 / 19.2), 100 * rate / 19.2, "%"),
        ("1B, machines that live 8 h", None, calm, "samples/s"),
    ):
        row = Row(table=table, case=case, claimed=claimed, ours=ours, unit=unit, mark="unconfirmed" if claimed else "")
        yield msgspec.structs.replace(row, why=why if differs(row) else "")
    for case, staleness, churn in (
        ("13B, nothing shared", 0, record),
        ("13B, delayed updates", 1, record),
        ("13B, delayed updates, machines that live 8 h", 1, Churn(life_s=8 * 3600.0)),
    ):
        ours = t4_rate(t4_job(slots if churn is record else 400, 16, staleness), churn)
        yield Row(table=table, case=case, claimed=None, ours=ours, unit="samples/s")
