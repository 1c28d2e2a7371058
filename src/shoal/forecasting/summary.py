"""What the histories of several seeds say together: the spread of each figure, what it costs, and how two ways to run compare."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import msgspec
import numpy as np

from shoal.forecasting.forecaster import History, Parts
from shoal.forecasting.job import Job
from shoal.forecasting.machines import Machines
from shoal.forecasting.models.step_time import StepTime

CONFIDENCE = 0.95
GB = 1e9


class Spread(msgspec.Struct, frozen=True):
    """A figure over the seeds: 5th percentile, median, 95th percentile."""

    p5: float
    p50: float
    p95: float


class Cost(msgspec.Struct, frozen=True):
    """In the currency of the cluster file; None: left out, and `missing` says why."""

    rent: Spread | None = None
    egress: Spread | None = None
    missing: tuple[str, ...] = ()


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """All of one configuration, simulated."""

    name: str
    hours: float
    seeds: int
    planned_step_s: float  # with every machine of the plan there
    tokens: Spread
    steps: Spread
    goodput: Spread  # tokens over those of the planned machines if none ever went
    parts: dict[str, Spread]  # shares of the time
    peers: Spread  # on average over the time
    deaths: Spread
    joins: Spread
    moves: Spread
    undone_steps: Spread
    cost: Cost
    stuck: dict[int, str]  # by seed: why it ended without going on
    histories: tuple[History, ...]
    digest: str  # of all seeds
    exact: bool = False  # played message by message


class Comparison(msgspec.Struct, frozen=True):
    """Tokens of one configuration over those of the first, in per cent, seed by seed; an interval of 95 % confidence for the mean."""

    name: str
    than: str
    more_percent: float
    low_percent: float | None  # None: too few seeds
    high_percent: float | None


def summarized(name: str, job: Job, planned: StepTime, histories: Sequence[History], exact: bool = False) -> Forecast:
    seconds = histories[0].seconds
    ideal = seconds / planned.step_s * job.microbatches * job.tokens

    def spread(value: Callable[[History], float]) -> Spread:
        return spread_of([value(history) for history in histories])

    return Forecast(
        name=name,
        hours=seconds / 3600,
        seeds=len(histories),
        planned_step_s=planned.step_s,
        tokens=spread(lambda one: one.tokens),
        steps=spread(lambda one: one.steps),
        goodput=spread(lambda one: one.tokens / ideal),
        parts={
            part: spread(lambda one, part=part: getattr(one.parts, part) / seconds)  # type: ignore[misc]
            for part in Parts.__struct_fields__
        },
        peers=spread(lambda one: sum(one.peer_hours) / (seconds / 3600)),
        deaths=spread(lambda one: one.deaths),
        joins=spread(lambda one: one.joins),
        moves=spread(lambda one: one.moves),
        undone_steps=spread(lambda one: one.undone_steps),
        cost=_cost(job.machines, histories),
        stuck={one.seed: one.stuck for one in histories if one.stuck},
        histories=tuple(histories),
        digest=joint_digest(histories),
        exact=exact,
    )


def spread_of(values: Sequence[float]) -> Spread:
    p5, p50, p95 = np.percentile(np.array(values, dtype=float), (5, 50, 95)).tolist()
    return Spread(p5, p50, p95)


def joint_digest(histories: Sequence[History]) -> str:
    return hashlib.sha256(" ".join(one.digest for one in histories).encode()).hexdigest()[:16]


def _cost(machines: Machines, histories: Sequence[History]) -> Cost:
    missing: list[str] = []

    def priced(what: str, field: str, amounts: Callable[[History], Sequence[float]], unit: float) -> Spread | None:
        prices = [getattr(device, field) for device in machines.kinds]
        free = [kind for kind, price in enumerate(prices) if not price]
        if free:
            slot = machines.kind_of.index(free[0])
            count = sum(kind in free for kind in machines.kind_of)
            missing.append(
                f"{what}: {count} of {len(machines.kind_of)} machines have no {field}, such as number {slot + 1}"
            )
            return None
        return spread_of(
            [
                sum(price * amount / unit for price, amount in zip(prices, amounts(one), strict=True))
                for one in histories
            ]
        )

    rent = priced("rent", "price_per_h", lambda one: one.peer_hours, 1.0)
    egress = priced("egress", "egress_price_per_GB", lambda one: one.sent_bytes, GB)
    return Cost(rent, egress, tuple(missing))


def compared(one: Forecast, other: Forecast) -> Comparison:
    """`other` against `one`, whose seeds had the same machines come and go."""
    pairs = [(a.tokens, b.tokens) for a, b in zip(one.histories, other.histories, strict=True) if a.tokens]
    more = [100 * (b / a - 1) for a, b in pairs]
    if not more:
        raise ValueError(f"{one.name} makes no progress with any seed; nothing can be compared with it")
    mean = fmean(more)
    if len(more) < 2:
        return Comparison(other.name, one.name, mean, None, None)
    from scipy.stats import t  # half a second, only for who compares

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(more) - 1)) * stdev(more) / math.sqrt(len(more))
    return Comparison(other.name, one.name, mean, mean - half, mean + half)
