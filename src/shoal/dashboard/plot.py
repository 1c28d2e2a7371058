"""The loss curve, as a picture and in the terminal. For `shoal run`, `shoal status` and the live view."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"


THINNED = 400  # losses, enough for a curve on any terminal
SPIKE_STEPS = 16  # before a step, with which its loss is compared
SPIKE_SPREADS = 6.0  # of those steps' losses around their mean, above which a loss is a spike
SPIKE_RISE = 1.2  # and at least so many times their mean


def spike(losses: Sequence[float]) -> str:
    """What to say of the newest loss, when it is far above those before it; '' when it is not."""
    if len(losses) <= SPIKE_STEPS:
        return ""
    loss, before = losses[-1], losses[-1 - SPIKE_STEPS : -1]
    mean = sum(before) / SPIKE_STEPS
    spread = math.sqrt(sum((one - mean) ** 2 for one in before) / SPIKE_STEPS)
    if not loss > max(mean + SPIKE_SPREADS * spread, SPIKE_RISE * mean):
        return ""
    return f"the loss rises to {loss:.4g}, where the mean of the {SPIKE_STEPS} steps before is {mean:.4g}"


def thinned(losses: Sequence[float]) -> tuple[float, ...]:
    """At most THINNED losses: means of equal numbers of steps, and the last loss."""
    if len(losses) <= THINNED:
        return tuple(losses)
    finite = [loss for loss in losses[:-1] if math.isfinite(loss)] or [losses[-1]]
    return (*_resample(finite, THINNED - 1), losses[-1])


def curve(losses: Sequence[float], width: int = 72, height: int = 10) -> str:
    """The curve in block characters: at most `height` rows of at most `width` columns, lowest loss at the bottom.

    More steps than columns are averaged, fewer are stretched. '' when there is nothing to draw or no room for it.
    """
    points = [loss for loss in losses if math.isfinite(loss)]
    if not points or height < 1:
        return ""
    low, high = min(points), max(points)
    labels = [f"{high:.3g}"] + [""] * (height - 2) + ([f"{low:.3g}"] if height > 1 else [])
    margin = max(map(len, labels)) + 1
    columns = width - margin - 1
    if columns < 2:
        return ""
    # The lowest point keeps one eighth, so that the curve never disappears into its axis.
    span = (high - low) or 1.0
    heights = [1 + round((value - low) / span * (8 * height - 1)) for value in _resample(points, columns)]
    rows = []
    for row in range(height):
        floor = 8 * (height - 1 - row)
        cells = "".join(_EIGHTHS[min(8, max(0, level - floor))] for level in heights)
        rows.append(f"{labels[row]:>{margin - 1}} │{cells}".rstrip())
    return "\n".join(rows)


def save(losses: Sequence[float], path: str | Path, title: str = "", first_step: int = 0) -> None:
    """Write the curve as a PNG, atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(first_step + 1, first_step + len(losses) + 1)
    axes.plot(steps, losses, linewidth=1.2, marker="." if len(losses) < 3 else "")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(draft, format="png", dpi=120)
    os.replace(draft, path)


def _resample(points: Sequence[float], columns: int) -> list[float]:
    """`columns` values: means of runs of points, or the nearest point where there are too few."""
    count = len(points)
    values = []
    for column in range(columns):
        start = column * count // columns
        end = max(start + 1, (column + 1) * count // columns)
        values.append(math.fsum(points[start:end]) / (end - start))
    return values
