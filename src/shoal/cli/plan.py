"""`shoal plan CONFIG --cluster FILE`: how to run that model on those machines, how fast it will be, and what limits it.

    shoal plan my.toml --cluster machines.toml                       the plan, its reason, the runners-up
    shoal plan my.toml --cluster machines.toml --out plan.json       and keep it
    shoal plan my.toml --cluster machines.toml --check plan.json     what is wrong with a plan, if anything
    shoal plan my.toml --cluster machines.toml --what-if "bandwidth=500 Mbit/s, peers=64"
    shoal plan my.toml --cluster machines.toml --pictures DIR        map of stages and links, timeline of a step
    shoal plan my.toml --cluster machines.toml --sensitivity         what doubling each resource would give
    shoal plan my.toml --cluster now.toml --replan runs/my --out new.json      is another plan worth changing over to?
    shoal plan --dtfm worldwide --stages 8 evaluations=5000 seed=1   DT-FM's own problem, with its constants

Numbers are predictions from stated or measured speeds and links. planner/ decides; this file reads, calls and prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal import codec, config, units
from shoal.cli.config import configured
from shoal.core.allreduce import layout
from shoal.launcher import replanning
from shoal.planner.costs import churn, communication
from shoal.planner.inputs import cluster, memory
from shoal.planner.inputs.profile import Profile, Shape, Work, profile, spans
from shoal.planner.prediction import play
from shoal.planner.search import anneal, dtfm, greedy, placements
from shoal.planner.strategy import choices, plan, strategy
from shoal.planner.strategy.pricing import as_planned
from shoal.planner.strategy.problem import Problem, gradient_bytes, stages_text

SEARCHES = ("anneal", "dtfm", "random", "greedy")


def arguments(parser: argparse.ArgumentParser) -> None:
    configured(parser, required=False)
    parser.add_argument("--cluster", metavar="FILE", help="TOML: devices and links (docs in planner/inputs/cluster.py)")
    parser.add_argument("--stages", type=int, metavar="S", help="price only this number of stages")
    parser.add_argument(
        "--wiring", choices=("best", "planned", "stochastic"), default="best", help="fixed routes, or by measured times"
    )
    parser.add_argument("--sizes", action="store_true", help="choose train.microbatch too")
    parser.add_argument("--uneven", action="store_true", help="let stages differ in blocks by more than one")
    parser.add_argument("--swap", action="store_true", help="let a stage be larger than its device")
    parser.add_argument("--what-if", metavar="TEXT", help='e.g. "bandwidth=500 Mbit/s, delay=2x, peers=64, inflight=8"')
    parser.add_argument("--sensitivity", action="store_true", help="what doubling each resource would give")
    parser.add_argument("--check", metavar="PLAN", help="say what is wrong with this plan instead of making one")
    parser.add_argument("--replan", metavar="RUN", help="a run's directory: is another plan worth changing over to?")
    parser.add_argument("--out", metavar="PLAN", help="write the plan there, as JSON")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON line")
    parser.add_argument("--dtfm", metavar="NETWORK", help="search DT-FM's own model: an .npz, or worldwide, spot, ...")
    parser.add_argument("--replicas", type=int, metavar="N", help="devices per stage, with --dtfm")
    parser.add_argument(
        "--pictures", metavar="DIR", help="map and timeline of the plan, or a search's convergence: PNG, SVG, Perfetto"
    )
    parser.add_argument("--search", choices=SEARCHES, default="anneal", help="which search, with --dtfm")


def main(args: argparse.Namespace) -> int:
    if args.dtfm:
        return _dtfm(args)
    tree = _tree(args)
    problem, name = _problem(args, tree)
    if args.check:
        given = plan.load(args.check)
        return _check(given, choices.chosen(problem, given))
    if args.replan:
        return _replan(args, problem)
    seed, budget = 0, 400

    def decide(given: Problem) -> plan.Plan:
        if args.sizes:
            return strategy.decide_sizes(given, lambda: np.random.default_rng(seed), budget, args.stages)
        return strategy.decide(given, np.random.default_rng(seed), budget, args.stages)

    made = choices.choose(problem, tree.plan.allow, decide, lambda peers: _shares_out(tree, peers))
    problem = choices.chosen(problem, made)
    if args.out:
        plan.save(made, args.out)
    if text := config.narrow_store(
        tree, max(problem.profile.boundary_bytes, problem.returned_bytes), len(made.stages), made.inflight
    ):
        print(f"warning: {text}", file=sys.stderr)
    other = None
    if args.what_if:
        changed = what_if(problem, args.what_if)
        other = strategy.decide(changed, np.random.default_rng(seed), budget, args.stages)
    around = strategy.sensitivities(problem, lambda: np.random.default_rng(seed)) if args.sensitivity else []
    if args.pictures:
        _drawn(made, problem, Path(args.pictures))
    if args.json:
        found: dict[str, object] = msgspec.to_builtins(made) | {"what_if": msgspec.to_builtins(other)}
        found["sensitivity"] = [{"change": what, "step_s": s, "stages": stages} for what, s, stages in around]
        print(json.dumps(found))
        return 0
    print(_headline(problem, name))
    print(_table(made))
    print(_numbers(made, problem))
    if any(device.losses_per_h for device in problem.cluster.devices):
        print(_churn(made, problem, tree))
    if other is not None:
        print(_compared(made, other, args.what_if))
    for what, step_s, stages in around:
        assert made.predicted is not None
        print(f"{what:<13} {step_s:.4g} s a step, {made.predicted.step_s / step_s:.2f}x as fast, {stages_text(stages)}")
    return 0


# ------------------------------------------------------------------------------------------------------------ problem


def _tree(args: argparse.Namespace) -> config.Config:
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"two configurations, {files[0]} and {files[1]}; a setting is written section.field=value")
    # The plan chooses run.stages and run.peers, so the file's own need not fit one another.
    return config.load(files[0] if files else None, [word for word in args.words if "=" in word])


def _problem(args: argparse.Namespace, tree: config.Config) -> tuple[Problem, str]:
    lab = tree.device.executor == "emulated"
    if args.cluster:
        machines = cluster.read(args.cluster)
    elif lab:
        machines = _modelled(tree)
    else:
        raise ValueError("no machines: name them with --cluster FILE, a TOML file of [[device]] and [link] tables")
    counted, why_not = (None, "") if lab else _counted(tree)
    if why_not:
        print(f"FLOPs and bytes by formula, as of a plain decoder: {why_not}", file=sys.stderr)
    problem = Problem(
        shape=shape(tree),
        work=work(tree),
        cluster=machines,
        emulated_s=tree.device.emulated_s if lab else 0.0,
        emulated_bytes=4.0 * tree.device.emulated_values if lab else 0.0,
        emulated_gradient_bytes=4.0 * tree.device.emulated_gradient,
        wiring=args.wiring,
        uneven=args.uneven,
        swapping=args.swap,
        travel=travel(tree),
        staleness=tree.train.staleness,
        moments=tree.train.moments,
        local_steps=tree.train.local_steps,
        store_limits=memory.StoreLimits(tree.network.keep_bytes, tree.network.spill_bytes),
        counted=counted,
        counted_sequences=tree.train.microbatch,
    )
    return problem, tree.run.name


def _counted(tree: config.Config) -> tuple[Profile | None, str]:
    """What each part of the model asks for, counted on the meta device; or why that is impossible."""
    from shoal.model import analysis  # imports torch and transformers, which take seconds

    try:
        return analysis.count(tree), ""
    except ValueError as error:
        return None, str(error)


def work(tree: config.Config) -> Work:
    train = tree.train
    return Work(
        microbatches=config.microbatches(train),
        sequences=train.microbatch,
        tokens=tree.data.sequence,
        value_bytes=4 if train.dtype == "float32" else 2,
        inflight=tree.run.inflight,
    )


def refuse_other_size(given: plan.Plan, tree: config.Config, where: str) -> None:
    """ValueError when a plan is for a model of another depth or, by the gradients that its stages average, of another size. By
    formula, and only where that speaks against it by the model itself, as counting takes seconds."""
    if tree.device.executor == "emulated" or not any(stage.gradient_bytes for stage in given.stages):
        return

    def told(made: Profile) -> list[str]:
        if given.layers != made.blocks:
            return [f"it is for a model of {given.layers} blocks, this one has {made.blocks}; plan anew"]
        how = tree.network.averaging
        cut = [range(stage.first, stage.end) for stage in given.stages]
        return strategy.of_another_size(given, [gradient_bytes(made, span, how) for span in cut])

    found = told(profile(shape(tree), work(tree)))
    if found and (counted := _counted(tree)[0]) is not None:
        found = told(counted)
    if found:
        raise ValueError(f"{where}: {found[0]}")


def tensor_bytes(tree: config.Config) -> float:
    """The larger of a boundary tensor and its gradient, as they are kept and travel."""
    lab = tree.device.emulated_values if tree.device.executor == "emulated" else 0
    values = lab or tree.train.microbatch * tree.data.sequence * shape(tree).hidden / travel(tree).narrow
    raw_bytes = 4 if lab or tree.train.dtype == "float32" else 2
    return max(
        values * codec.bytes_per_value(how, raw_bytes) for how in (tree.network.activations, tree.network.gradients)
    )


def travel(tree: config.Config) -> codec.Travel:
    """How its tensors travel; boundary layers make those of a model that computes narrower, not an emulated one's."""
    kind = tree.model.boundary
    narrow = 1 if kind == "none" or tree.device.executor == "emulated" else int(kind[-2])
    network = tree.network
    return codec.Travel(network.activations, network.gradients, network.averaging, narrow)


def shape(tree: config.Config) -> Shape:
    """The model's shape: from the configuration, or from the config.json of the directory it is read from."""
    model = tree.model
    fields: Mapping[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.path:
        file = Path(model.path) / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is no Hugging Face configuration: {error}") from None
    fields = {**fields, **model.extra}
    try:
        heads = int(fields["num_attention_heads"])
        hidden = int(fields["hidden_size"])
        return Shape(
            hidden=hidden,
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            intermediate=int(fields["intermediate_size"]),
            vocabulary=int(fields["vocab_size"]),
            tied=bool(fields.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        raise ValueError(f"{model.path}/config.json lacks {missing}; its family's shape is not known here") from None


def _modelled(tree: config.Config) -> cluster.Cluster:
    """The lab of a configuration: run.peers alike behind its modelled lines."""
    peers, line = tree.run.peers, tree.network
    devices = tuple(
        cluster.Device(name=f"p{i}", flops=1.0, up_Bps=line.bandwidth_Bps, down_Bps=line.bandwidth_Bps)
        for i in range(peers)
    )
    unlimited = np.full((peers, peers), 1e12)  # the lines alone limit
    return cluster.from_matrices(devices, np.full((peers, peers), line.delay_s), unlimited)


# ------------------------------------------------------------------------------------------------------------ what if


def what_if(problem: Problem, text: str) -> Problem:
    """The problem with changes such as "bandwidth=500 Mbit/s, delay=2x, peers=64"."""
    for change in text.split(","):
        name, sign, value = (word.strip() for word in change.partition("="))
        if not sign or name not in ("bandwidth", "delay", "speed", "memory", "peers", "inflight", "microbatches"):
            raise ValueError(
                f"--what-if: {change.strip()!r} is no change; bandwidth, delay, speed, memory, peers, inflight or"
                ' microbatches = a value or a factor, such as "bandwidth=500 Mbit/s, peers=2x"'
            )
        try:
            problem = _changed(problem, name, value)
        except ValueError as error:
            raise ValueError(f"--what-if {name}: {error}") from None
    return problem


def _changed(problem: Problem, name: str, value: str) -> Problem:
    replace, machines, work = msgspec.structs.replace, problem.cluster, problem.work
    factor = float(value[:-1]) if value.endswith("x") else None
    if factor is not None and not factor > 0:
        raise ValueError(f"{value!r} must be above 0")
    if name in ("peers", "inflight", "microbatches"):
        now = len(machines.devices) if name == "peers" else getattr(work, name)
        count = round(now * factor) if factor is not None else int(value)
        if count < 1:
            raise ValueError(f"{count} must be at least 1")
        if name == "peers":
            return replace(problem, cluster=machines.of_size(count))
        return replace(problem, work=replace(work, **{name: count}))
    if name == "bandwidth":
        changed = (
            machines.scaled(bandwidth=factor) if factor else machines.with_lines(bandwidth_Bps=_above(value, "_Bps"))
        )
    elif name == "delay":
        changed = machines.scaled(delay=factor) if factor else machines.with_lines(delay_s=units.parse(value, "_s"))
    elif name == "speed":
        devices = tuple(
            replace(d, flops=d.flops * factor if factor else cluster.flops(value)) for d in machines.devices
        )
        changed = replace(machines, devices=devices)
    else:
        bytes_ = 0.0 if factor else _above(value, "_bytes")
        devices = tuple(
            replace(d, memory_bytes=d.memory_bytes * factor if factor else bytes_) for d in machines.devices
        )
        changed = replace(machines, devices=devices)
    return replace(problem, cluster=changed)


def _above(text: str, ending: str) -> float:
    value = units.parse(text, ending)
    if value <= 0:
        raise ValueError(f"{text!r} must be above 0")
    return value


# ----------------------------------------------------------------------------------------------------------- printing


def _headline(problem: Problem, name: str) -> str:
    work, devices = problem.work, problem.cluster.devices
    kind = "an emulated model" if problem.emulated_s else f"{_many(problem.profile.parameters)} parameters"
    return (
        f"{name}: {kind}, {problem.shape.layers} blocks, {work.step_tokens:,} tokens a step"
        f" in {work.microbatches} microbatches, {len(devices)} devices\nEvery number below is predicted.\n"
    )


def _table(made: plan.Plan) -> str:
    rows = [("stage", "blocks", "peers", "executor", "memory", "kept of a step", "a microbatch")]
    for number, stage in enumerate(made.stages):
        peers = ", ".join(stage.peers[:4]) + (f" and {len(stage.peers) - 4} more" if len(stage.peers) > 4 else "")
        blocks = f"{stage.first}-{stage.end - 1}"
        sizes = units.size(stage.memory_bytes), units.size(stage.kept_bytes)
        rows.append((str(number), blocks, peers, stage.executor, *sizes, _seconds(stage.microbatch_s)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _numbers(made: plan.Plan, problem: Problem) -> str:
    told = made.predicted
    assert told is not None, "a plan that was just made has its numbers"
    parts = f"microbatches {_seconds(told.microbatches_s)}, averaging {_seconds(told.averaging_s)}, agreeing"
    lines = [
        "",
        f"step          {_seconds(told.step_s)}: {parts} {_seconds(told.agreeing_s)}",
        f"tokens        {_count(told.tokens_per_s)} per second",
    ]
    if told.price_per_day:
        million = told.price_per_day / (told.tokens_per_s * 86400) * 1e6
        lines.append(f"price         {told.price_per_day:,.2f} a day, {million:,.4g} per million tokens")
    lines += [
        f"traffic       the busiest peer sends {units.size(told.sent_bytes)} a step",
        f"bottleneck    {told.bottleneck}",
        f"basis         {told.basis}",
        f"why           {made.reason}",
    ]
    routes = f"planned: routes for {len(made.routes)} owners" if made.routes else "stochastic: by measured times"
    lines.append(f"wiring        {routes}")
    lines += _owning(made)
    lines += _chosen(made)
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


def _owning(made: plan.Plan) -> list[str]:
    """What each peer owns of its stage's rounds, where that follows the lines."""
    width, found = dict(zip(made.seats, made.widths, strict=True)) if made.widths else {}, []
    for number, stage in enumerate(made.stages):
        if shares := layout.owned([width.get(peer, 0) for peer in stage.peers]):
            told = [f"{peer} {own / sum(shares):.0%}" for peer, own in zip(stage.peers, shares, strict=True)]
            found.append(f"owners        of stage {number}'s rounds, by their lines: {', '.join(told)}")
    return found


def _chosen(made: plan.Plan) -> list[str]:
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


def _shares_out(tree: config.Config, peers: int) -> bool:
    """Are a local step's sequences whole microbatches, with so many peers?"""
    train = tree.train
    return bool(train.local_batch) or (train.batch % peers == 0 and train.batch // peers % train.microbatch == 0)


def _churn(made: plan.Plan, problem: Problem, tree: config.Config) -> str:
    told = churn.expected(made, problem.cluster, tree.run.silence_s, tree.checkpoint.every)
    text = (
        f"churn         {told.losses_per_h:.3g} losses an hour cost {told.share:.1%} of the time, most at {told.worst}"
    )
    if told.fatal_per_h:
        text += f"; {told.fatal_per_h:.3g} an hour empty a stage and undo steps: another replica there would help"
    return text


def _drawn(made: plan.Plan, problem: Problem, folder: Path) -> None:
    from shoal.dashboard import pictures  # matplotlib: only who draws waits for it

    folder.mkdir(parents=True, exist_ok=True)
    bars = play.timeline(as_planned(problem, made), problem.cluster, np.random.default_rng(0))
    pictures.plan_map(made, problem.cluster, folder / "map")
    pictures.gantt(bars, made, problem.cluster, folder / "timeline")
    (folder / "timeline.perfetto.json").write_bytes(pictures.perfetto(bars, made, problem.cluster))
    print(f"drawn in {folder}: map, timeline (png, svg), timeline.perfetto.json (ui.perfetto.dev)", file=sys.stderr)


def _compared(made: plan.Plan, other: plan.Plan, text: str) -> str:
    assert made.predicted is not None and other.predicted is not None
    now, then = made.predicted, other.predicted
    return (
        f"\nwhat if       {text}\n"
        f"              {_seconds(then.step_s)} a step instead of {_seconds(now.step_s)},"
        f" {then.tokens_per_s / now.tokens_per_s:.2f}x the tokens; {stages_text(len(other.stages))}; {then.bottleneck}"
    )


def _replan(args: argparse.Namespace, problem: Problem) -> int:
    verdict = replanning.verdict(Path(args.replan), problem)
    print(json.dumps(msgspec.to_builtins(verdict)) if args.json else verdict.reason)
    if verdict.plan is None:
        return 0
    if not args.json:
        print(_table(verdict.plan))
    if args.out:
        plan.save(verdict.plan, args.out)
    if args.out and not args.json:
        print(f"to change over: stop the run, then `shoal run CONFIG --plan {args.out} --resume`")
    return replanning.CHANGE_OVER


def _check(given: plan.Plan, problem: Problem) -> int:
    problems = plan.validate(given, problem.profile, problem.cluster, problem.work.value_bytes)
    problems = problems or strategy.of_another_model(problem, given)
    for found in problems:
        print(found)
    if not problems:
        print(f"the plan can run: {len(given.stages)} stages, {sum(len(stage.peers) for stage in given.stages)} peers")
    return 1 if problems else 0


def _seconds(value: float) -> str:
    return units.duration(value) if value >= 0.01 else f"{value * 1e3:.2g} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _many(count: float) -> str:
    for scale, letter in ((1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:,.0f}"


# --------------------------------------------------------------------------------------------------------------- dtfm


def _dtfm(args: argparse.Namespace) -> int:
    numbers = {"evaluations": 5000, "seed": 0}
    for word in args.words:
        name, sign, value = word.partition("=")
        if name not in numbers or not sign or not value.isdecimal():
            raise ValueError(f"{word!r} does not go with --dtfm; evaluations=5000 and seed=1 do")
        numbers[name] = int(value)
    delay_s, bandwidth_Bps, _ = cluster.read_matrices(cluster.network(args.dtfm))
    devices = tuple(cluster.Device(name=str(number), flops=1.0) for number in range(len(delay_s)))
    cluster.from_matrices(devices, delay_s, bandwidth_Bps, args.dtfm)  # refuses pairs without a link
    stages = args.stages or 8
    if args.replicas and stages * args.replicas != len(delay_s):
        raise ValueError(
            f"{stages} stages of {args.replicas} are not the network's {len(delay_s)} devices; --replicas may be left out"
        )
    model = communication.Model(delay_s, bandwidth_Bps, stages, communication.PUBLISHED)
    rng = np.random.default_rng(numbers["seed"])
    before = time.perf_counter()
    found = _searched(args.search, model, rng, numbers["evaluations"])
    seconds = time.perf_counter() - before
    if args.pictures:
        from shoal.dashboard import pictures

        Path(args.pictures).mkdir(parents=True, exist_ok=True)
        pictures.convergence({args.search: found.curve}, model.lower_bound_s(), Path(args.pictures) / "convergence")
        print(f"drawn in {args.pictures}: convergence (png, svg)", file=sys.stderr)
    result = {
        "total_s": found.cost.total_s,
        "data_parallel_s": found.cost.data_parallel_s,
        "pipeline_s": found.cost.pipeline_s,
        "groups": found.groups,
        "order": found.cost.order,
        "lower_bound_s": model.lower_bound_s(),
        "proven": found.proven,
        "evaluations": found.evaluations,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.dtfm}: {stages} stages of {model.size}, DT-FM's model of communication, predicted")
    for place, stage in enumerate(found.cost.order):
        print(f"  {place}: {', '.join(map(str, found.groups[stage]))}")
    total, shared, hops = found.cost.total_s, found.cost.data_parallel_s, found.cost.pipeline_s
    print(f"{total:.4f} s an iteration: gradients {shared:.4f} s, pipeline {hops:.4f} s")
    bound = "proven optimal" if found.proven else f"no placement is below {model.lower_bound_s():.4f} s"
    print(f"{bound}; {found.evaluations} evaluations in {seconds:.2f} s")
    return 0


def _searched(name: str, model: communication.Model, rng: np.random.Generator, budget: int) -> placements.Found:
    if name == "greedy":
        return greedy.greedy_search(model)
    if name == "random":
        return placements.random_search(model, rng, budget)
    return dtfm.evolve(model, rng, budget) if name == "dtfm" else anneal.anneal(model, rng, budget)
