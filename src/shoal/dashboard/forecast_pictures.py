"""Pictures of forecasts: how many tokens each configuration comes to, and where its time goes. In the manner of pictures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.dashboard.pictures import COLOURS, RED, figure_of, saved
from shoal.forecasting.summary import Forecast

LOST = {"redone", "stalled"}  # parts of the time that churn takes; red in the pictures


def tokens(forecasts: Sequence[Forecast], path: str | Path) -> list[Path]:
    """Every seed as a point, the median as a bar, from the 5th to the 95th percentile a line."""
    figure, axes = figure_of(7.0, 0.7 * len(forecasts) + 1.8)
    for row, forecast in enumerate(forecasts):
        colour = COLOURS[row % len(COLOURS)]
        spread = forecast.tokens
        axes.plot([spread.p5, spread.p95], [row, row], color=colour, linewidth=2)
        axes.plot([spread.p50], [row], marker="|", markersize=18, color=colour, markeredgewidth=3)
        points = [history.tokens for history in forecast.histories]
        axes.plot(points, [row + 0.2] * len(points), ".", color=colour, alpha=0.5)
    axes.set_yticks(range(len(forecasts)), [forecast.name for forecast in forecasts])
    axes.set(ylim=(-0.6, len(forecasts) - 0.3), xlim=(0, None))
    axes.set_xlabel(
        f"tokens in {forecasts[0].hours:g} hours, simulated; median, 5th to 95th percentile, each of the seeds"
    )
    return saved(figure, path)


def parts(forecasts: Sequence[Forecast], path: str | Path) -> list[Path]:
    """Shares of the time, mean over the seeds, as one bar for each configuration."""
    figure, axes = figure_of(7.0, 0.7 * len(forecasts) + 2.2)
    left = [0.0] * len(forecasts)
    neutral = iter(COLOURS)
    for part in forecasts[0].parts:
        shares = [
            100 * sum(getattr(history.parts, part) / history.seconds for history in one.histories) / one.seeds
            for one in forecasts
        ]
        colour, hatch = (RED, "//" if part == "redone" else "") if part in LOST else (next(neutral), "")
        axes.barh(
            range(len(forecasts)),
            shares,
            left=left,
            label=part,
            height=0.5,
            edgecolor="white",
            color=colour,
            hatch=hatch,
        )
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(forecasts)), [forecast.name for forecast in forecasts])
    axes.set(xlim=(0, 100), xlabel="% of the time, simulated")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    return saved(figure, path)
