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
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from shoal import config
from shoal.cli.config import configured, load
from shoal.dashboard import plan_report
from shoal.escaping import describe
from shoal.exit_codes import ExitCode
from shoal.launcher import preflight
from shoal.launcher.planning import deciding, replanning
from shoal.launcher.planning.problem import problem_of
from shoal.model import remote
from shoal.planner.costs import communication
from shoal.planner.inputs import cluster
from shoal.planner.prediction import timed
from shoal.planner.search import anneal, dtfm, greedy, placements
from shoal.planner.strategy import choices, plan, relaxing, strategy
from shoal.planner.strategy.pricing import as_planned
from shoal.planner.strategy.problem import Problem
from shoal.planner.strategy.what_if import what_if

FIRST_S, AGAIN_S = 2.0, 10.0  # a search that takes longer says so, and again
SEARCHES = ("anneal", "dtfm", "random", "greedy")


def arguments(parser: argparse.ArgumentParser) -> None:
    configured(parser, required=False)
    parser.add_argument(
        "--cluster", metavar="FILE", help="a TOML file of machines and links, as `shoal probe` writes it"
    )
    parser.add_argument("--stages", type=int, metavar="S", help="consider this number of stages only")
    parser.add_argument(
        "--wiring",
        choices=("best", "planned", "stochastic"),
        default="best",
        help="planned: fixed routes; stochastic: chosen by measured times while it runs; best: the faster",
    )
    parser.add_argument("--sizes", action="store_true", help="choose train.microbatch, too")
    parser.add_argument("--uneven", action="store_true", help="let stages differ in blocks by more than one")
    parser.add_argument("--swap", action="store_true", help="let a stage be larger than its device")
    parser.add_argument(
        "--what-if",
        metavar="TEXT",
        help='also plan for changed machines, e.g. "bandwidth=500 Mbit/s, delay=2x, peers=64, inflight=8"',
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="also predict what doubling each resource would give"
    )
    parser.add_argument("--check", metavar="PLAN", help="check this plan instead of making one")
    parser.add_argument(
        "--replan", metavar="RUN", help="for this run's directory: is another plan worth the change? Exit code 3: yes"
    )
    parser.add_argument("--out", metavar="PLAN", help="write the plan to this file, for `shoal run --plan`")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON line")
    parser.add_argument(
        "--dtfm",
        metavar="NETWORK",
        help="search a placement in the DT-FM paper's model instead: an .npz, or a built-in network such as worldwide",
    )
    parser.add_argument("--replicas", type=int, metavar="N", help="with --dtfm: devices per stage")
    parser.add_argument(
        "--pictures",
        metavar="DIR",
        help="draw the plan's map and timeline, or with --dtfm the search's convergence, into this directory (PNG, SVG, Perfetto)",
    )
    parser.add_argument("--search", choices=SEARCHES, default="anneal", help="with --dtfm: the search (anneal)")


def main(args: argparse.Namespace) -> int:
    if args.dtfm:
        return _dtfm(args)
    # The plan chooses run.stages and run.peers, so the file's own need not fit one another
    tree = remote.local(load(args))
    preflight.refuse(_faults(args, tree))
    problem = problem_of(tree, args.cluster, args.wiring, args.uneven, args.swap)
    if args.check:
        given = plan.load(args.check)
        return _check(given, choices.chosen(problem, given))
    if args.replan:
        return _replan(args, problem)
    return _plan(args, tree, problem)


@contextlib.contextmanager
def told_while_long(tell: Callable[[float], None]) -> Iterator[None]:
    """Calls `tell` with the seconds so far, from another thread, while what is within takes long."""
    began, ended = time.monotonic(), threading.Event()

    def wait() -> None:
        pause_s = FIRST_S
        while not ended.wait(pause_s):
            tell(time.monotonic() - began)
            pause_s = AGAIN_S

    thread = threading.Thread(target=wait, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _plan(args: argparse.Namespace, tree: config.Config, problem: Problem) -> int:
    plans: list[plan.Plan] = []

    def decide(given: Problem, known: plan.Plan | None = None) -> plan.Plan:
        plans.append(deciding.decide(tree, given, args.stages, args.sizes, known))
        return plans[-1]

    def tell(seconds: float) -> None:
        count = f", {len(plans)} plans found" if plans else ""
        print(f"searching for {seconds:.0f} s{count}", file=sys.stderr, flush=True)

    with told_while_long(tell):
        decided = decide(problem)
        other = relaxing.decide_from(problem, decided, what_if(problem, args.what_if), decide) if args.what_if else None
        sensitivities = relaxing.sensitivities(problem, decided, decide) if args.sensitivity else []
    problem = choices.chosen(problem, decided)
    if args.out:
        plan.save(decided, args.out)
    tensor_bytes = max(problem.profile.boundary_bytes, problem.returned_bytes)
    if warning := config.narrow_store(tree, tensor_bytes, len(decided.stages), decided.inflight):
        print(f"warning: {warning}", file=sys.stderr)
    if args.pictures:
        _draw(decided, problem, Path(args.pictures))
    if args.json:
        rows = [
            {"change": change, "stages": len(than.stages)}
            | {name: getattr(than.predicted, name) for name in ("step_s", "tokens_per_s")}
            for change, than in sensitivities
        ]
        whole = msgspec.to_builtins(decided) | {"what_if": msgspec.to_builtins(other), "sensitivity": rows}
        print(json.dumps(whole))
        return 0
    _print(decided, problem, tree)
    if other is not None:
        print(plan_report.comparison(decided, other, args.what_if))
    for change, than in sensitivities:
        print(plan_report.sensitivity(decided, change, than))
    return 0


def _print(decided: plan.Plan, problem: Problem, tree: config.Config) -> None:
    print(plan_report.headline(problem, tree.run.name))
    print(plan_report.table(decided))
    print(plan_report.numbers(decided, problem))
    if any(device.losses_per_h for device in problem.cluster.devices):
        print(plan_report.churn_cost(decided, problem, tree.run.heartbeat_timeout_s, tree.checkpoint.every))


def _faults(args: argparse.Namespace, tree: config.Config) -> Iterator[str]:
    """What can be seen before the model is counted, which takes seconds."""
    if tree.device.executor != "emulated":
        yield from preflight.shape(tree)
    try:
        if args.cluster:
            cluster.read(args.cluster)
    except (ValueError, OSError) as error:
        yield describe(error)
    if args.out:
        yield from preflight.writable(f"--out {args.out}", Path(args.out).parent)
    if args.stages is not None and args.stages < 1:
        yield f"--stages {args.stages}: a model has at least one"
    try:
        if args.check:
            plan.load(args.check)
    except (ValueError, OSError) as error:
        yield describe(error)


def _draw(decided: plan.Plan, problem: Problem, folder: Path) -> None:
    from shoal.dashboard import pictures  # matplotlib: only who draws waits for it

    folder.mkdir(parents=True, exist_ok=True)
    bars = timed.timeline(as_planned(problem, decided), problem.cluster, np.random.default_rng(0))
    pictures.plan_map(decided, problem.cluster, folder / "map")
    pictures.gantt(bars, decided, problem.cluster, folder / "timeline")
    (folder / "timeline.perfetto.json").write_bytes(pictures.perfetto(bars, decided, problem.cluster))
    print(f"drawn in {folder}: map, timeline (png, svg), timeline.perfetto.json (ui.perfetto.dev)", file=sys.stderr)


def _replan(args: argparse.Namespace, problem: Problem) -> int:
    verdict = replanning.verdict(Path(args.replan), problem)
    print(json.dumps(msgspec.to_builtins(verdict)) if args.json else verdict.reason)
    if verdict.plan is None:
        return 0
    if not args.json:
        print(plan_report.table(verdict.plan))
    if args.out:
        plan.save(verdict.plan, args.out)
    if args.out and not args.json:
        print(f"to change over: stop the run, then `shoal run CONFIG --plan {args.out} --resume`")
    return ExitCode.CHANGE_OVER


def _check(given: plan.Plan, problem: Problem) -> int:
    problems = plan.validate(given, problem.profile, problem.cluster, problem.work.value_bytes)
    problems = problems or strategy.of_another_model(problem, given)
    for problem_text in problems:
        print(problem_text)
    if not problems:
        print(f"the plan can run: {len(given.stages)} stages, {sum(len(stage.peers) for stage in given.stages)} peers")
    return ExitCode.FAILED if problems else ExitCode.OK


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
    placement = _searched(args.search, model, rng, numbers["evaluations"])
    seconds = time.perf_counter() - before
    if args.pictures:
        from shoal.dashboard import pictures

        Path(args.pictures).mkdir(parents=True, exist_ok=True)
        pictures.convergence({args.search: placement.curve}, model.lower_bound_s(), Path(args.pictures) / "convergence")
        print(f"drawn in {args.pictures}: convergence (png, svg)", file=sys.stderr)
    result = {
        "total_s": placement.cost.total_s,
        "data_parallel_s": placement.cost.data_parallel_s,
        "pipeline_s": placement.cost.pipeline_s,
        "groups": placement.groups,
        "order": placement.cost.order,
        "lower_bound_s": model.lower_bound_s(),
        "proven": placement.proven,
        "evaluations": placement.evaluations,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.dtfm}: {stages} stages of {model.size}, DT-FM's model of communication, predicted")
    for place, stage in enumerate(placement.cost.order):
        print(f"  {place}: {', '.join(map(str, placement.groups[stage]))}")
    total, shared, hops = placement.cost.total_s, placement.cost.data_parallel_s, placement.cost.pipeline_s
    print(f"{total:.4f} s an iteration: gradients {shared:.4f} s, pipeline {hops:.4f} s")
    bound = "proven optimal" if placement.proven else f"no placement is below {model.lower_bound_s():.4f} s"
    print(f"{bound}; {placement.evaluations} evaluations in {seconds:.2f} s")
    return 0


def _searched(name: str, model: communication.Model, rng: np.random.Generator, budget: int) -> placements.Found:
    if name == "greedy":
        return greedy.greedy_search(model)
    if name == "random":
        return placements.random_search(model, rng, budget)
    return dtfm.evolve(model, rng, budget) if name == "dtfm" else anneal.anneal(model, rng, budget)
