"""A forecast as text, for the terminal. Every number is simulated, and says so."""

from __future__ import annotations

from statistics import median

import numpy as np

from shoal import units
from shoal.forecasting.fitted import Fitted
from shoal.forecasting.models.step_time import StepTime
from shoal.forecasting.summary import Comparison, Cost, Forecast, Spread

WORDS = {
    "compute": "the busiest stage computes",
    "network": "microbatches wait for lines and delays",
    "averaging": "gradients are averaged",
    "waiting": "agreement, and the dead until they are evicted",
    "redone": "work that deaths undid",
    "joining": "machines start, checkpoints are loaded",
    "stalled": "a stage has nobody, or no majority is left",
}


def report(forecast: Forecast) -> str:
    how = ", message by message" if forecast.exact else ""
    lines = [
        f"{forecast.name}: {forecast.hours:g} hours, {forecast.seeds} seeds{how}.",
        "Every number below is simulated: 5th percentile, median, 95th.",
        f"tokens        {_row(forecast.tokens, _count)}",
        f"steps         {_row(forecast.steps, '{:,.0f}'.format)}   (planned step {forecast.planned_step_s:.3g} s)",
        f"goodput       {_row(forecast.goodput, _percent)}   of the planned machines' if none ever went",
        *_cost(forecast.cost, forecast.tokens),
        f"machines      {_row(forecast.peers, '{:,.1f}'.format)}   on average",
        f"deaths        {_row(forecast.deaths, '{:,.0f}'.format)}   joins {forecast.joins.p50:,.0f}, moves {forecast.moves.p50:,.0f},"
        f" undone steps {forecast.undone_steps.p50:,.0f} (medians)",
        "where the time goes",
    ]
    lines += [f"  {part:<11} {_row(spread, _percent)}   {WORDS[part]}" for part, spread in forecast.parts.items()]
    lines += [f"seed {seed} stops: {why}" for seed, why in list(forecast.stuck.items())[:5]]
    lines.append(f"digest        {forecast.digest}")
    return "\n".join(lines)


def fitted(directory: str, fit: Fitted, step: StepTime, replayed_s: float) -> str:
    """What a run's record says of its machines, and the forecast of the same steps beside what they took."""
    job, own = fit.job, fit.own
    lines = [
        f"{directory}: {len(fit.labels)} machines, {job.stages} stages; {own.steps} steps after the first in {units.duration(own.seconds)}",
        "fitted to its record: of a microbatch forward and backward, s; of the line up and down, as far as it showed",
    ]
    for slot, (label, stage) in enumerate(zip(fit.labels, job.stage_of, strict=True)):
        device, at = job.machines.kinds[slot], max(stage, 0)
        seconds = f"{job.forward_s[slot, at]:7.3f} {job.backward_s[slot, at]:7.3f}"
        where = f"stage {stage}" if stage >= 0 else "no stage"
        lines.append(f"  {label:<10} {where:<9}{seconds}   {_line(device.up_Bps):>12} {_line(device.down_Bps):>12}")
    delays_s = job.machines.delay_s[~np.eye(len(fit.labels), dtype=bool)].tolist() or [0.0]
    lines.append(
        f"delays        {1e3 * min(delays_s):.0f} to {1e3 * max(delays_s):.0f} ms, median {1e3 * median(delays_s):.0f} ms;"
        f" rounds take {1e3 * job.round_s:.0f} ms beside the exchange"
    )
    life = f"a machine lives {units.duration(fit.churn.life_s)} on average" if own.deaths else "no machine died"
    away = f", another comes after {units.duration(fit.churn.away_s)}" if fit.churn.away_s else ""
    lines += [f"churn         {life}{away} ({own.deaths} deaths, {own.joins} joins)", "forecast against the run itself"]
    rows = [
        ("a step", step.step_s, own.step_s),
        ("  microbatches", step.microbatches_s, own.microbatches_s),
        ("  averaging", step.averaging_s, own.averaging_s),
        ("  agreeing", step.agreeing_s, own.agreeing_s),
        (f"{own.steps} steps", replayed_s, own.seconds),
    ]
    for what, forecast_s, measured_s in rows:
        off = f"   {forecast_s / measured_s - 1:+.1%}" if measured_s and not what.startswith(" ") else ""
        lines.append(f"  {what:<16} {forecast_s:8.2f} s, measured {measured_s:8.2f} s{off}")
    return "\n".join(lines)


def _line(rate_Bps: float) -> str:
    return f"{8e-6 * rate_Bps:,.0f} Mbit/s" if rate_Bps else "no limit"


def comparison(compared: Comparison) -> str:
    text = (
        f"{compared.name} makes {compared.more_percent:+.1f} % tokens against {compared.than}, on the mean of the seeds"
    )
    if compared.low_percent is None or compared.high_percent is None:
        return f"{text}; one seed gives no interval"
    within = f"{compared.low_percent:+.1f} to {compared.high_percent:+.1f} %"
    decided = "" if compared.low_percent * compared.high_percent > 0 else ": no difference is proven"
    return f"{text}; with 95 % confidence {within}{decided}"


def _cost(cost: Cost, tokens: Spread) -> list[str]:
    lines = []
    for what, spread in (("rent", cost.rent), ("egress", cost.egress)):
        if spread is not None:
            million = spread.p50 / (tokens.p50 / 1e6) if tokens.p50 else float("inf")
            lines.append(f"{what:<13} {_row(spread, '{:,.2f}'.format)}   {million:.4g} per million tokens")
    return lines + [f"left out      {text}" for text in cost.missing]


def _row(spread: Spread, form: object) -> str:
    assert callable(form)
    return "  ".join(f"{form(value):>9}" for value in (spread.p5, spread.p50, spread.p95))


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {letter}"
    return f"{value:,.0f}"


def fitting(name: str, played: int, of: int) -> str:
    if not played:
        return f"{name}: one history rehearsed, for who serves what"
    return f"{name}: {played} of {of} of its steps played, for what a step takes"


def progress(name: str, seed: int, seeds: int, now_s: float, horizon_s: float) -> str:
    return f"{name}: seed {seed + 1} of {seeds}, {units.duration(now_s)} of {units.duration(horizon_s)} simulated"
