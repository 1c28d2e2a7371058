"""`shoal.plan`, `shoal.forecast` and `shoal.simulate`: values instead of the commands' text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from shoal.forecasting.summary import Forecast
from shoal.launcher import session
from shoal.launcher.planning import deciding, forecasting
from shoal.launcher.planning.forecasting import Outlook
from shoal.launcher.planning.problem import problem_of
from shoal.launcher.session import Source
from shoal.planner.strategy.plan import Plan
from shoal.sim.run import SeedResult, results


def plan(
    config: Source = None,
    *settings: str,
    cluster: str | Path | None = None,
    wiring: Literal["best", "planned", "stochastic"] = "best",
    stages: int | None = None,
    sizes: bool = False,
) -> Plan:
    """How to run that model on those machines, and how fast it will be: `Plan.predicted` (seconds, tokens/s, bytes).

    config, settings: as for `shoal.run`. cluster: a TOML file of machines and links, as `shoal probe` writes it; only an emulated run
    needs none. stages: consider this number only. sizes: choose train.microbatch, too.
    ValueError: the files are wrong, or no plan fits these machines."""
    tree = session.read(config, settings)
    problem = problem_of(tree, str(cluster) if cluster is not None else None, wiring)
    return deciding.decide(tree, problem, stages, sizes)


def forecast(
    config: Source = None,
    *settings: str,
    cluster: str | Path | None = None,
    churn: str | Path | None = None,
    hours: float = 24.0,
    seeds: int = 20,
    stages: int | None = None,
    plan: str | Path | None = None,
    exact: bool = False,
) -> Forecast:
    """How far that run comes in so many hours on those machines, what it costs and how sure that is: simulated, without messages, or with
    every one (`exact`: slower, and refused where it would take more than an hour).

    config, settings, cluster: as for `plan`. churn: a record of spot instances (CSV, JSON) or a TOML file; None: the machines'
    losses_per_h. seeds: so many histories, from which the percentiles are. stages: plan with this number only. plan: a file of `shoal
    plan`; None: the planner's choice. ValueError: the files are wrong, nothing fits, or no history makes progress."""
    tree = session.read(config, settings)
    files = {
        name: None if file is None else str(file)
        for name, file in (("cluster", cluster), ("churn", churn), ("plan", plan))
    }
    return forecasting.forecasted(
        tree, tree.run.name, Outlook(hours=hours, seeds=seeds, stages=stages, exact=exact, **files)
    )


def simulate(
    scenario: str = "chaos", seeds: int | Iterable[int] = 0, *, staleness: Literal[0, 1] | None = None
) -> list[SeedResult]:
    """Whole swarms in virtual time: the result of each seed, `ok` when no invariant was broken.

    scenario: a built-in name (calm, churn, network, chaos, ..., all) or a TOML file. seeds: one, or several. staleness: for every seed;
    None: drawn from the seed. ValueError: no such scenario."""
    chosen = [seeds] if isinstance(seeds, int) else list(seeds)
    return list(results(scenario, chosen, -1 if staleness is None else staleness))
