"""A plan as text, for the terminal: its stages, its predicted numbers, and what it chose."""

from __future__ import annotations

from shoal import units
from shoal.core.allreduce import layout
from shoal.planner.costs import churn
from shoal.planner.inputs.profile import spans
from shoal.planner.strategy import choices
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem, stages_text


def headline(problem: Problem, name: str) -> str:
    work, devices = problem.work, problem.cluster.devices
    kind = "an emulated model" if problem.emulated_s else f"{_many(problem.profile.parameters)} parameters"
    return (
        f"{name}: {kind}, {problem.shape.layers} blocks, {work.step_tokens:,} tokens a step"
        f" in {work.microbatches} microbatches, {len(devices)} devices\nEvery number below is predicted.\n"
    )


def table(plan: Plan) -> str:
    rows = [("stage", "blocks", "peers", "executor", "memory", "kept of a step", "activations kept", "a microbatch")]
    for number, stage in enumerate(plan.stages):
        peers = ", ".join(stage.peers[:4]) + (f" and {len(stage.peers) - 4} more" if len(stage.peers) > 4 else "")
        blocks = f"{stage.first}-{stage.end - 1}"
        kept = f"{stage.kept_activations} forwards" if stage.kept_activations > 0 else "none"
        sizes = units.size(stage.memory_bytes), units.size(stage.kept_bytes)
        rows.append(
            (
                str(number),
                blocks,
                peers,
                stage.executor + ", checkpointing" * stage.checkpointing,
                *sizes,
                kept,
                _seconds(stage.microbatch_s),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def numbers(plan: Plan, problem: Problem) -> str:
    predicted = plan.predicted
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
        f"why           {plan.reason}",
    ]
    routes = f"planned: routes for {len(plan.routes)} owners" if plan.routes else "stochastic: by measured times"
    lines.append(f"wiring        {routes}")
    count = f"{plan.inflight} microbatches" if plan.inflight else "microbatches by what it measures (auto)"
    lines.append(f"at once       each peer drives {count}")
    lines += _owners(plan)
    lines += _travel(plan)
    lines += [f"next best     {text}" for text in plan.runners_up]
    if plan.left_out:
        lines.append(f"left out      {', '.join(plan.left_out)}")
    seated = sum(len(stage.peers) for stage in plan.stages)
    even = spans(problem.shape.layers, len(plan.stages))
    cut = [stage.end - stage.first for stage in plan.stages]
    layers = f" run.layers={cut}" if cut != [len(span) for span in even] else ""
    layers += f" run.inflight={plan.inflight}" if plan.inflight else ""
    lines.append(
        f"to run        --plan FILE of --out, or by hand run.stages={len(plan.stages)} run.peers={seated}{layers}"
    )
    return "\n".join(lines)


def _owners(plan: Plan) -> list[str]:
    """What each peer owns of its stage's rounds, where that follows the lines."""
    rates, owners = dict(zip(plan.seats, plan.line_rates, strict=True)) if plan.line_rates else {}, []
    for number, stage in enumerate(plan.stages):
        if shares := layout.owned([rates.get(peer, 0) for peer in stage.peers]):
            predicted = [f"{peer} {own / sum(shares):.0%}" for peer, own in zip(stage.peers, shares, strict=True)]
            owners.append(f"owners        of stage {number}'s rounds, by their lines: {', '.join(predicted)}")
    return owners


def _travel(plan: Plan) -> list[str]:
    """How tensors travel and how often is averaged, and what else plan.allow has and would give."""
    often = f"every {plan.local_steps} local steps" if plan.local_steps > 1 else "every step"
    travel = f"boundary tensors {plan.activations} there, {plan.gradients} back; averaging {often}, {plan.averaging}"
    if not plan.choices:
        return [f"travel        {travel}: as configured; plan.allow names nothing else to choose from"]
    lines = [f"travel        {travel}: what is allowed must give {choices.GAIN - 1:.0%}"]
    for option in plan.choices:
        lines.append(
            f"  {option.what:<12}{option.how}: {_count(option.tokens_per_s)} tokens/s, {_seconds(option.step_s)} a step, sends"
            f" {units.size(option.sent_bytes)}, codes for {_seconds(option.codec_s)}{' (taken)' if option.taken else ''}"
        )
    return lines


def churn_cost(plan: Plan, problem: Problem, heartbeat_timeout_s: float, checkpoint_every: int) -> str:
    predicted = churn.expected(plan, problem.cluster, heartbeat_timeout_s, checkpoint_every)
    text = f"churn         {predicted.losses_per_h:.3g} losses an hour cost {predicted.share:.1%} of the time, most at {predicted.worst}"
    if predicted.fatal_per_h:
        text += f"; {predicted.fatal_per_h:.3g} an hour empty a stage and undo steps: another replica there would help"
    return text


def comparison(plan: Plan, other: Plan, text: str) -> str:
    assert plan.predicted is not None and other.predicted is not None
    now, then = plan.predicted, other.predicted
    return (
        f"\nwhat if       {text}\n"
        f"              {_seconds(then.step_s)} a step instead of {_seconds(now.step_s)},"
        f" {then.tokens_per_s / now.tokens_per_s:.2f}x the tokens; {stages_text(len(other.stages))}; {then.bottleneck}"
    )


def sensitivity(plan: Plan, change: str, other: Plan) -> str:
    assert plan.predicted is not None and other.predicted is not None
    now, then = plan.predicted, other.predicted
    factor = then.tokens_per_s / now.tokens_per_s
    return f"{change:<13} {then.step_s:.4g} s a step, {factor:.2f}x as fast, {stages_text(len(other.stages))}"


def _seconds(value: float) -> str:
    return units.duration(value) if value >= 0.01 else f"{value * 1e3:.2g} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _many(count: float) -> str:
    for scale, letter in ((1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:,.0f}"
