"""Pictures of a plan: the map of its stages and links, the timeline of a predicted step, a search's convergence; and the timeline
for Perfetto.

Each picture is written as PNG and as SVG, put in place whole. Colours go by stage and are told apart by most people (Okabe and Ito);
the bottleneck is red, and nothing else is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.play import Bar
from shoal.planner.strategy.plan import Plan

if TYPE_CHECKING:  # only who draws waits for matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Event = dict[str, object]  # of the Trace Event format
Spots = dict[str, tuple[float, float]]  # by peer, in the axes' units

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#999999", "#000000")
RED = "#D55E00"
NAMES_MOST = 24  # peers that are named one by one
LINKS_MOST = 600  # links between neighbouring stages that are drawn, the narrowest ones


def plan_map(plan: Plan, cluster: Cluster, path: str | Path) -> list[Path]:
    """Stages as columns of peers, links between neighbouring stages: the wider, the darker. The worst of each pair of stages
    is named, the worst of all is red, as is the peer or stage that the prediction calls the bottleneck."""
    figure, axes = figure_of(
        max(6.0, 2.4 * len(plan.stages) + 1.5), 0.42 * max(len(s.peers) for s in plan.stages) + 2.6
    )
    place = {device.name: number for number, device in enumerate(cluster.devices)}
    spots = _spots(plan)
    links = _links(plan, cluster, place)
    if links:
        _draw_links(axes, links, spots)
    bottleneck = plan.predicted.bottleneck if plan.predicted else ""
    if bottleneck.startswith("averaging"):
        bottleneck += f"; the narrowest line of a group is at {_narrowest(plan, cluster, place)}"
    _draw_peers(axes, plan, spots, bottleneck, named=len(place) <= NAMES_MOST)
    heights = [y for _, y in spots.values()]
    axes.set(xlim=(-0.6, len(plan.stages) - 0.4), ylim=(min(heights) - 0.7, max(heights) + 1.9))
    axes.set_axis_off()
    step = f"{plan.predicted.step_s:.3g} s a step, predicted" if plan.predicted else "no prediction"
    axes.set_title(f"{len(plan.stages)} stages, {len(spots)} peers: {step}", fontsize=11)
    text = f"bottleneck: {bottleneck}" if bottleneck else ""
    figure.text(0.5, 0.01, text, ha="center", va="bottom", fontsize=9, color=RED, wrap=True)
    if links:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=8)
    return saved(figure, path)


def _spots(plan: Plan) -> Spots:
    """Where each peer is drawn: one column for each stage."""
    tallest = max(len(stage.peers) for stage in plan.stages)
    return {
        peer: (float(number), (tallest - 1) / 2 - row + (len(stage.peers) - 1) / 2 - (tallest - 1) / 2)
        for number, stage in enumerate(plan.stages)
        for row, peer in enumerate(stage.peers)
    }


def _links(plan: Plan, cluster: Cluster, place: dict[str, int]) -> list[tuple[float, str, str]]:
    """Bytes per second between peers of neighbouring stages, in the slower direction; the narrowest first."""
    links = []
    for one, two in zip(plan.stages, plan.stages[1:], strict=False):
        for a in one.peers:
            for b in two.peers:
                i, j = place[a], place[b]
                links.append((min(_usable_Bps(cluster, i, j), _usable_Bps(cluster, j, i)), a, b))
    return sorted(links)


def _draw_links(axes: Axes, links: list[tuple[float, str, str]], spots: Spots) -> None:
    logs = [math.log10(rate) for rate, _, _ in links]
    low, span = logs[0], max(logs[-1] - logs[0], 1e-9)
    for rate, a, b in reversed(links[:LINKS_MOST]):
        width = (math.log10(rate) - low) / span if span > 1e-6 else 0.5
        axes.plot(
            *zip(spots[a], spots[b], strict=True),
            color="#555555",
            alpha=0.15 + 0.35 * width,
            linewidth=0.5 + 2 * width,
            zorder=1,
        )
    rate, a, b = links[0]
    axes.plot(*zip(spots[a], spots[b], strict=True), color=RED, linewidth=2, zorder=2)
    axes.plot([], [], color=RED, linewidth=2, label=f"narrowest link between stages: {a} to {b}, {_rate(rate)}")


def _draw_peers(axes: Axes, plan: Plan, spots: Spots, bottleneck: str, named: bool) -> None:
    """Every stage's peers in its colour; red around the one that `bottleneck` names."""
    top = max(y for _, y in spots.values())
    for number, stage in enumerate(plan.stages):
        for peer in stage.peers:
            worst = _named(bottleneck, peer)
            axes.plot(
                *spots[peer],
                "o",
                markersize=13,
                color=COLOURS[number % len(COLOURS)],
                markeredgecolor=RED if worst else "white",
                markeredgewidth=3 if worst else 1,
                zorder=3,
            )
            if named:
                spot, above = spots[peer], (0, 9)
                axes.annotate(peer, spot, above, textcoords="offset points", ha="center", fontsize=8, zorder=4)
        text = f"stage {number}\nblocks {stage.first}-{stage.end - 1}"
        axes.text(number, top + 0.75, text, ha="center", va="bottom", fontsize=9)


def gantt(bars: Sequence[Bar], plan: Plan, cluster: Cluster, path: str | Path) -> list[Path]:
    """One row per peer, forwards light and backwards dark; averaging and agreeing at the end, grey."""
    order = [peer for stage in plan.stages for peer in stage.peers]
    row_of = {peer: row for row, peer in enumerate(order)}
    figure, axes = figure_of(11.0, min(0.32 * len(order) + 1.8, 24.0))
    for bar in bars:
        name = cluster.devices[bar.device].name
        colour = COLOURS[bar.stage % len(COLOURS)]
        axes.broken_barh(
            [(bar.start_s, bar.end_s - bar.start_s)],
            (row_of[name] - 0.4, 0.8),
            facecolors=colour,
            alpha=0.45 if bar.forward else 1.0,
            edgecolor="white",
            linewidth=0.4,
        )
    end = max((bar.end_s for bar in bars), default=0.0)
    for share, (what, seconds) in enumerate(_after(plan)):
        axes.broken_barh(
            [(end, seconds)],
            (-0.4, len(order) - 0.2),
            facecolors=("#BBBBBB", "#DDDDDD")[share],
            label=f"{what} {seconds:.3g} s",
        )
        end += seconds
    for number in range(len(plan.stages)):
        colour = COLOURS[number % len(COLOURS)]
        axes.broken_barh([(0, 0)], (0, 0), facecolors=colour, label=f"stage {number}: backward, forward lighter")
    axes.set(xlabel="seconds", ylim=(len(order) - 0.4, -0.6), xlim=(0, end * 1.01))
    shown = len(order) <= 64
    axes.set_yticks(range(len(order)) if shown else [], order if shown else [], fontsize=8)
    bottleneck = f"; {plan.predicted.bottleneck}" if plan.predicted else ""
    axes.set_title(f"one predicted step{bottleneck}", fontsize=10)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.75 / (0.32 * len(order) + 0.8)), ncol=3, frameon=False, fontsize=8
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return saved(figure, path)


def convergence(curves: dict[str, Sequence[tuple[int, float]]], bound_s: float, path: str | Path) -> list[Path]:
    """Best cost so far over evaluations, of one search or several, and what nothing can be below."""
    figure, axes = figure_of(8.0, 4.5)
    last = max(evaluations for curve in curves.values() for evaluations, _ in curve)
    for number, (name, curve) in enumerate(curves.items()):
        at, cost = zip(*curve, strict=True)
        axes.step(
            [*at, last],
            [*cost, cost[-1]],
            where="post",
            color=COLOURS[number % len(COLOURS)],
            linewidth=1.6,
            label=f"{name}: {cost[-1]:.4g} s",
        )
    axes.axhline(bound_s, color="#555555", linestyle="--", linewidth=1, label=f"no placement is below {bound_s:.4g} s")
    axes.set(xscale="log" if last > 100 else "linear", xlabel="evaluations", ylabel="seconds per iteration, predicted")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("search for a placement", fontsize=11)
    return saved(figure, path)


def perfetto(bars: Sequence[Bar], plan: Plan, cluster: Cluster) -> bytes:
    """The timeline in the Trace Event format: open it at ui.perfetto.dev. A process per stage, a thread per peer."""
    events: list[Event] = []
    place = {device.name: number for number, device in enumerate(cluster.devices)}
    for number, stage in enumerate(plan.stages):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"stage {number}"}})
        for peer in stage.peers:
            about: Event = {"ph": "M", "name": "thread_name", "pid": number, "tid": place[peer], "args": {"name": peer}}
            events.append(about)
    for bar in bars:
        what = f"{'forward' if bar.forward else 'backward'} {bar.microbatch}"
        events.append(_event(what, bar.stage, bar.device, bar.start_s, bar.end_s - bar.start_s))
    end = max((bar.end_s for bar in bars), default=0.0)
    for what, seconds in _after(plan):
        for number, stage in enumerate(plan.stages):
            events += [_event(what, number, place[peer], end, seconds) for peer in stage.peers]
        end += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def _event(name: str, process: int, thread: int, start_s: float, seconds: float) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": "step",
        "pid": process,
        "tid": thread,
        "ts": start_s * 1e6,
        "dur": seconds * 1e6,
    }


def _after(plan: Plan) -> list[tuple[str, float]]:
    predicted = plan.predicted
    parts = [("averaging", predicted.averaging_s), ("agreeing", predicted.agreeing_s)] if predicted else []
    return [(what, seconds) for what, seconds in parts if seconds > 0]


def _narrowest(plan: Plan, cluster: Cluster, place: dict[str, int]) -> str:
    """The peer that its stage's averaging waits for, as far as links tell."""
    rates = [
        (min(_usable_Bps(cluster, i, j) for i, j in ((place[peer], place[other]), (place[other], place[peer]))), peer)
        for stage in plan.stages
        for peer in stage.peers
        for other in stage.peers
        if peer != other
    ]
    total = {peer: sum(1 / rate for rate, own in rates if own == peer) for _, peer in rates}
    return max(sorted(total), key=lambda peer: total[peer])


def _usable_Bps(cluster: Cluster, source: int, target: int) -> float:
    """The pair's link, or the own line of either end where that is narrower."""
    lines = (cluster.devices[source].up_Bps or np.inf, cluster.devices[target].down_Bps or np.inf)
    return float(min(cluster.bandwidth_Bps[source, target], *lines))


def _named(bottleneck: str, peer: str) -> bool:
    words = bottleneck.replace(",", " ").replace("(", " ").replace(")", " ").split()
    return peer in words and not bottleneck.startswith(("latency", "few microbatches"))


def _rate(value_Bps: float) -> str:
    bits = 8 * value_Bps
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def saved(figure: Figure, path: str | Path) -> list[Path]:
    written = []
    for ending in ("png", "svg"):
        target = Path(path).with_suffix(f".{ending}")
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        figure.savefig(beside, format=ending, dpi=130, bbox_inches="tight", facecolor="white")
        os.replace(beside, target)
        written.append(target)
    return written
