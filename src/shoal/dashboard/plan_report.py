"""A plan as text, for the terminal: its stages, its predicted numbers, and what it chose."""

from __future__ import annotations

from shoal import units
from shoal.core.allreduce import layout
from shoal.planner.costs import churn
from shoal.planner.inputs.profile import spans
from shoal.planner.strategy import choices, plan
from shoal.planner.strategy.problem import Problem, stages_text


def headline(problem: Problem, name: str) -> str:
    work, devices = problem.work, problem.cluster.devices
    kind = "an emulated model" if problem.emulated_s else f"{_many(problem.profile.parameters)} parameters"
    return (
        f"{name}: {kind}, {problem.shape.layers} blocks, {work.step_tokens:,} tokens a step"
        f" in {work.microbatches} microbatches, {len(devices)} devices\nEvery number below is predicted.\n"
    )


def table(made: plan.Plan) -> str:
    rows = [("stage", "blocks", "peers", "executor", "memory", "kept of a step", "activations kept", "a microbatch")]
    for number, stage in enumerate(made.stages):
        peers = ", ".join(stage.peers[:4]) + (f" and {len(stage.peers) - 4} more" if len(stage.peers) > 4 else "")
        blocks = f"{stage.first}-{stage.end - 1}"
        kept = f"{stage.kept_activations} forwards" if stage.kept_activations > 0 else "none"
        sizes = units.size(stage.memory_bytes), units.size(stage.kept_bytes)
        rows.append((str(number), blocks, peers, stage.executor, *sizes, kept, _seconds(stage.microbatch_s)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def numbers(made: plan.Plan, problem: Problem) -> str:
    predicted = made.predicted
    assert predicted is not None, "a plan that was just made has its numbers"
    parts = f"microbatches {_seconds(predicted.microbatches_s)}, averaging {_seconds(predicted.averaging_s)}, agreeing"
    lines = [
        "",
        f"step          {_seconds(predicted.step_s)}: {parts} {_seconds(predicted.agreeing_s)}",
        f"tokens        {_count(predicted.tokens_per_s)} per second",
    ]
    if predicted.price_per_day:
        million = predicted.price_per_day / (predicted.tokens_per_s * 86400) * 1e6
        lines.append(f"price         {predicted.price_per_day:,.2f} a day, {million:,.4g} per million tokens")
    lines += [
        f"traffic       the busiest peer sends {units.size(predicted.sent_bytes)} a step",
        f"bottleneck    {predicted.bottleneck}",
        f"basis         {predicted.basis}",
        f"why           {made.reason}",
    ]
    routes = f"planned: routes for {len(made.routes)} owners" if made.routes else "stochastic: by measured times"
    lines.append(f"wiring        {routes}")
    lines += _owners(made)
    lines += _travel(made)
    lines += [f"next best     {text}" for text in made.runners_up]
    if made.left_out:
        lines.append(f"left out      {', '.join(made.left_out)}")
    seated = sum(len(stage.peers) for stage in made.stages)
    even = spans(problem.shape.layers, len(made.stages))
    cut = [stage.end - stage.first for stage in made.stages]
    layers = f" run.layers={cut}" if cut != [len(span) for span in even] else ""
    lines.append(
        f"to run        --plan FILE of --out, or by hand run.stages={len(made.stages)} run.peers={seated}{layers}"
    )
    return "\n".join(lines)


def _owners(made: plan.Plan) -> list[str]:
    """What each peer owns of its stage's rounds, where that follows the lines."""
    width, found = dict(zip(made.seats, made.line_rates, strict=True)) if made.line_rates else {}, []
    for number, stage in enumerate(made.stages):
        if shares := layout.owned([width.get(peer, 0) for peer in stage.peers]):
            predicted = [f"{peer} {own / sum(shares):.0%}" for peer, own in zip(stage.peers, shares, strict=True)]
            found.append(f"owners        of stage {number}'s rounds, by their lines: {', '.join(predicted)}")
    return found


def _travel(made: plan.Plan) -> list[str]:
    """How tensors travel and how often is averaged, and what else plan.allow has and would give."""
    often = f"every {made.local_steps} local steps" if made.local_steps > 1 else "every step"
    travel = f"boundary tensors {made.activations} there, {made.gradients} back; averaging {often}, {made.averaging}"
    if not made.choices:
        return [f"travel        {travel}: as configured; plan.allow names nothing else to choose from"]
    lines = [f"travel        {travel}: what is allowed must give {choices.GAIN - 1:.0%}"]
    for option in made.choices:
        lines.append(
            f"  {option.what:<12}{option.how}: {_count(option.tokens_per_s)} tokens/s, {_seconds(option.step_s)} a step, sends"
            f" {units.size(option.sent_bytes)}, codes for {_seconds(option.codec_s)}{' (taken)' if option.taken else ''}"
        )
    return lines


def churn_cost(made: plan.Plan, problem: Problem, silence_s: float, checkpoint_every: int) -> str:
    predicted = churn.expected(made, problem.cluster, silence_s, checkpoint_every)
    text = f"churn         {predicted.losses_per_h:.3g} losses an hour cost {predicted.share:.1%} of the time, most at {predicted.worst}"
    if predicted.fatal_per_h:
        text += f"; {predicted.fatal_per_h:.3g} an hour empty a stage and undo steps: another replica there would help"
    return text


def comparison(made: plan.Plan, other: plan.Plan, text: str) -> str:
    assert made.predicted is not None and other.predicted is not None
    now, then = made.predicted, other.predicted
    return (
        f"\nwhat if       {text}\n"
        f"              {_seconds(then.step_s)} a step instead of {_seconds(now.step_s)},"
        f" {then.tokens_per_s / now.tokens_per_s:.2f}x the tokens; {stages_text(len(other.stages))}; {then.bottleneck}"
    )


def sensitivity(made: plan.Plan, change: str, step_s: float, stages: int) -> str:
    assert made.predicted is not None
    factor = made.predicted.step_s / step_s
    return f"{change:<13} {step_s:.4g} s a step, {factor:.2f}x as fast, {stages_text(stages)}"


def _seconds(value: float) -> str:
    return units.duration(value) if value >= 0.01 else f"{value * 1e3:.2g} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _many(count: float) -> str:
    for scale, letter in ((1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:,.0f}"
