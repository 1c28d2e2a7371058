"""`shoal run`: train with local peers, each a process of its own, watch them, and account for every sample at the end.

launcher/session.py and launcher/launcher.py do it, as for `shoal.run`. Exit code 0 only when all steps are committed, the account
balances and the newest checkpoint that was due is saved; 75 when its --time was over and it is saved, for a script that repeats the
command.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterator

from shoal import units
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.launcher import session
from shoal.launcher.files import checkpoints
from shoal.launcher.launcher import Launcher
from shoal.launcher.session import RunOptions


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
    faults = list(_options(args))
    options = RunOptions(
        here=args.here,
        plan=args.plan or "",
        cluster=args.cluster or "",
        resume=args.resume,
        adopt=args.adopt,
        kill_every_s=args.kill_every,
        page=args.page,
        time_s=units.parse(args.time, "_s") if args.time and not faults else None,
        command=shlex.join(["shoal", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"]),
    )
    prepared = session.prepare(args.config, args.settings, options)
    if prepared.warning:
        print(f"warning: {prepared.warning}", file=sys.stderr)
    peers = prepared.config.run.peers
    if args.here is not None and not 1 <= args.here <= peers:
        faults.append(f"--here {args.here}: training starts with run.peers = {peers}; try 1 to {peers}")
    with session.begin(prepared, options, faults) as job:
        if isinstance(job, Summary):
            print(account.text(job))
            return 0
        outcome = asyncio.run(Launcher(job).run())
        print(outcome.text)
        return outcome.code


def _options(args: argparse.Namespace) -> Iterator[str]:
    """What is wrong with options that do not concern the configuration."""
    if args.kill_every is not None and not args.kill_every > 0:
        yield f"--kill-every {args.kill_every}: seconds between kills must be above 0; try 20"
    try:
        if args.time and not units.parse(args.time, "_s") > 0:
            yield f"--time {args.time}: must be above 0; try '8 h'"
    except ValueError as error:
        yield f"--time: {error}"
