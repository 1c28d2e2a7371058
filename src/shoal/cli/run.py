"""`shoal run`: train with local peers, each a process of its own, watch them, and account for every sample at the end.

launcher/launcher.py does it. Exit code 0 only when all steps are committed, the account balances and the newest checkpoint that was due
is saved; 75 when its --time was over and it is saved, for a script that repeats the command.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shoal import config as configuration
from shoal import units
from shoal.config import Config
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.launcher import checkpoints, preflight, rundir
from shoal.launcher.launcher import Launcher, RunRequest
from shoal.launcher.planning import plan_settings
from shoal.launcher.planning.problem import refuse_other_size, tensor_bytes
from shoal.launcher.watching import page
from shoal.launcher.watching.watch import Resumed
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy import plan as plans
from shoal.planner.strategy.plan import Plan


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a TOML file")
    options(parser)


def options(parser: argparse.ArgumentParser) -> None:
    """All but the configuration, which `shoal demo` brings along."""
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings that replace those of the file")
    parser.add_argument(
        "--kill-every", type=float, metavar="S", help="SIGKILL a random peer every S seconds; another joins"
    )
    parser.add_argument(
        "--here",
        type=int,
        metavar="N",
        help="start N peers on this machine (default run.peers); the others join by invite",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="take stages, blocks, machines and routes from the plan of `shoal plan --out FILE`",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="with --plan: put each local peer behind a modelled line of its machine in this file (a rehearsal)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest whole checkpoint; begin at step 0 only where none was ever saved, and say so. A supervisor may"
        " repeat the command",
    )
    parser.add_argument(
        "--time", metavar="T", help="end the run after that time, such as '8 h', with a checkpoint and exit code 75"
    )
    parser.add_argument(
        "--page", action="store_true", help="show the run in the browser while it lasts, as `shoal watch` does"
    )
    parser.add_argument("--adopt", action="store_true", help=checkpoints.ADOPT)


def main(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    plan, config, cluster = _configured(args)
    if text := _slow_store(config, plan):
        print(f"warning: {text}", file=sys.stderr)
    here = config.run.peers if args.here is None else args.here
    local = cluster is None  # a rehearsal's peers have loopback addresses of their own
    address = preflight.address(config, config.network.port) if local else []
    if args.page:
        page.require()
    preflight.refuse([*_options(args, config.run.peers, here), *preflight.machine(config), *address])
    directory = config.run.directory
    with rundir.claimed(directory) as claim:
        resumed = Resumed()
        if args.resume:
            resumed = rundir.resume(config, directory, adopt=args.adopt, others=here < config.run.peers)
        if not args.resume:
            checkpoints.begin(config, directory, adopt=args.adopt)
            rundir.set_aside(directory)
        elif resumed.first_step >= config.run.steps and (over := _ended(config, directory)) is not None:
            print(account.text(over))
            return 0
        job = RunRequest(
            claim=claim,
            config=config,
            directory=directory,
            here=here,
            started_s=started_s,
            resumed=resumed,
            plan=plan,
            cluster=cluster,
            kill_every_s=args.kill_every,
            command=shlex.join(["shoal", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"]),
            page=args.page,
            time_s=units.parse(args.time, "_s") if args.time else None,
        )
        return asyncio.run(Launcher(job).run())


def _options(args: argparse.Namespace, peers: int, here: int) -> Iterator[str]:
    """What is wrong with options that do not concern the configuration."""
    if args.kill_every is not None and not args.kill_every > 0:
        yield f"--kill-every {args.kill_every}: seconds between kills must be above 0; try 20"
    try:
        if args.time and not units.parse(args.time, "_s") > 0:
            yield f"--time {args.time}: must be above 0; try '8 h'"
    except ValueError as error:
        yield f"--time: {error}"
    if not 1 <= here <= peers:
        yield f"--here {here}: training starts with run.peers = {peers}; try 1 to {peers}"


def _configured(args: argparse.Namespace) -> tuple[Plan | None, Config, Cluster | None]:
    """The plan, the configuration with what the plan decides, and the cluster whose lines the peers get."""
    plan = plans.load(args.plan) if args.plan else None
    if plan is not None:
        config = plan_settings.load(args.config, args.settings, plan, args.plan)
        refuse_other_size(plan, config, args.plan)
    else:
        config = configuration.load(args.config, args.settings)
    if args.cluster and plan is None:
        raise ValueError("--cluster says what the peers of a plan are; name the plan too, with --plan FILE")
    cluster = plan_settings.read_cluster(args.cluster, plan, config) if args.cluster and plan is not None else None
    return plan, config, cluster


def _slow_store(config: Config, plan: Plan | None) -> str:
    """Why the run would be slow for want of room for boundary tensors; '' when it would not."""
    if config.run.stages == 1:
        return ""
    known_bytes = plan.boundary_bytes if plan is not None else 0.0
    try:
        size_bytes = known_bytes or tensor_bytes(config)
    except (
        ValueError,
        OSError,
    ):  # no such model, which is said elsewhere; or only transformers knows the family's shape
        return ""
    return configuration.narrow_store(config, size_bytes, config.run.stages, config.run.inflight)


def _ended(config: Config, directory: Path) -> Summary | None:
    """The account of a run that has trained all its steps, if its launcher lived to write it."""
    path = directory / "summary.json"
    summary = account.read(path) if path.exists() else None
    whole = summary is not None and summary.balanced and summary.steps == config.run.steps and not summary.unsaved
    return summary if whole else None
