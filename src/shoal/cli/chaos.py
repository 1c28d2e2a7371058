"""`shoal chaos RUNDIR`: kills, stops and slows the local peers of a run that is being trained, cuts and slows their links, and says
what it did and why.

What and when: a schedule file, random moments from a seed, or the record of a spot cluster played faster
(launcher/chaos/schedule.py). How: launcher/chaos/chaos.py. However it ends, short of SIGKILL, nobody is left stopped.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from random import Random

from shoal import config as configuration
from shoal import units
from shoal.dashboard import account
from shoal.exit_codes import ExitCode
from shoal.launcher import process
from shoal.launcher.chaos import schedule
from shoal.launcher.chaos.chaos import LOOK_S, Chaos
from shoal.launcher.chaos.schedule import LINKS, Act, Rates
from shoal.sim.faults import preemption

KINDS = ("kill", "stop", "slow", "cut", "hole", "lag")  # that can be drawn
SUMMARY_S = 120.0  # for the launcher of a finished run to write its account


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the directory of a run that is being trained, such as runs/quickstart")
    parser.add_argument("--schedule", metavar="FILE", help=f"a TOML file of acts: {schedule.EXAMPLE}")
    parser.add_argument(
        "--trace", metavar="CSV", help="replay a record of spot instances, such as configs/traces/aws-g4dn-spot.csv"
    )
    parser.add_argument(
        "--compress", type=float, default=60.0, metavar="X", help="replay the record X times faster (60)"
    )
    parser.add_argument(
        "--one-of", type=int, default=1, metavar="K", help="replay every K-th node of the record only (1)"
    )
    parser.add_argument(
        "--as",
        dest="manner",
        choices=("kill", "cut"),
        default="kill",
        help="what happens to the peer of a node that the record takes away (kill)",
    )
    parser.add_argument("--kill-every", metavar="S", help="SIGKILL a peer every S seconds on average; another joins")
    parser.add_argument(
        "--stop-every", metavar="S", help="SIGSTOP a peer every S seconds on average, and SIGCONT it later"
    )
    parser.add_argument("--slow-every", metavar="S", help="slow a peer process every S seconds on average")
    parser.add_argument(
        "--cut-every",
        metavar="S",
        help="cut all links of a peer every S seconds on average; needs network.fault_injection, as --hole-every and --lag-every do",
    )
    parser.add_argument(
        "--hole-every",
        metavar="S",
        help="drop a peer's messages with tensors, not its heartbeats, every S seconds on average",
    )
    parser.add_argument("--lag-every", metavar="S", help="slow a peer's links every S seconds on average")
    parser.add_argument(
        "--stop-for", default=str(schedule.STOP_S), metavar="S", help="how long a peer stays stopped (8)"
    )
    parser.add_argument("--slow-for", default=str(schedule.SLOW_S), metavar="S", help="how long a peer stays slow (20)")
    parser.add_argument("--cut-for", default=str(schedule.CUT_S), metavar="S", help="how long its links stay cut (12)")
    parser.add_argument("--hole-for", default=str(schedule.HOLE_S), metavar="S", help="how long they are dropped (120)")
    parser.add_argument(
        "--cut-direction",
        choices=("both", "out", "in", "any"),
        default="any",
        help="which direction --cut-every and --hole-every disturb; any draws one each time (any)",
    )
    parser.add_argument("--lag-for", default=str(schedule.LAG_S), metavar="S", help="how long links stay slow (20)")
    parser.add_argument(
        "--slow-by",
        type=float,
        default=schedule.SLOW_BY,
        metavar="X",
        help="with --slow-every: how many times slower (10)",
    )
    parser.add_argument(
        "--for", dest="lasting", default="10 min", metavar="S", help="how long random acts continue (10 min)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (0)")
    parser.add_argument(
        "--lose-stages", action="store_true", help="let a stage lose its last replica; else such an act is delayed"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the schedule and change nothing")


def main(args: argparse.Namespace) -> int:
    directory = Path(args.run)
    acts = _acts(args, directory)
    if args.dry_run:
        print("\n".join(map(str, acts)))
        return 0
    _refuse_unwatched(acts, directory)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nobody is left stopped
    chaos = Chaos(directory, Random(f"{args.seed}/who"), lose_stages=args.lose_stages)
    try:
        chaos.run(acts)
    finally:
        chaos.end()
    return _tell_account(directory, chaos)


def _acts(args: argparse.Namespace, directory: Path) -> tuple[Act, ...]:
    rates = _rates(args)
    random = any(getattr(args, f"{kind}_every") is not None for kind in KINDS)
    modes = [args.schedule is not None, args.trace is not None, random]
    if sum(modes) != 1:
        raise ValueError(
            "say what to do in one way: --schedule FILE, --trace CSV, or --kill-every, --stop-every, --slow-every, "
            "--cut-every, --hole-every, --lag-every S"
        )
    if args.schedule is not None:
        return schedule.read(args.schedule)
    if random:
        return schedule.drawn(rates, args.seed, _positive("--for", args.lasting))
    if not args.compress > 0 or args.one_of < 1:
        raise ValueError(f"--compress {args.compress:g} --one-of {args.one_of}: wanted above 0, and 1 or more")
    written = directory / "config.toml"
    if not written.exists():
        raise ValueError(f"{directory}: no run is there; name a run's directory, such as runs/quickstart")
    peers = configuration.load(written).run.peers
    return schedule.from_trace(preemption.read(args.trace), peers, args.compress, args.one_of, args.manner == "cut")


def _refuse_unwatched(acts: tuple[Act, ...], directory: Path) -> None:
    """A run obeys nobody about its links, and writes no trace at once, unless it was started so."""
    needed = next((act for act in acts if act.kind in LINKS or act.on), None)
    written = directory / "config.toml"
    if needed is None or (written.exists() and configuration.load(written).network.fault_injection):
        return
    what = f"on = {needed.on!r}" if needed.on else f"kind = {needed.kind!r}"
    raise ValueError(
        f"{what} needs a run that was started with network.fault_injection=true, which {directory} was not"
    )


def _rates(args: argparse.Namespace) -> Rates:
    if not args.slow_by > 1:
        raise ValueError(f"--slow-by {args.slow_by:g}: wanted above 1, such as 10")
    every = {
        f"{kind}_every_s": _positive(f"--{kind}-every", getattr(args, f"{kind}_every"))
        for kind in KINDS
        if getattr(args, f"{kind}_every") is not None
    }
    return Rates(
        **every,
        stop_s=_positive("--stop-for", args.stop_for),
        slow_s=_positive("--slow-for", args.slow_for),
        cut_s=_positive("--cut-for", args.cut_for),
        hole_s=_positive("--hole-for", args.hole_for),
        lag_s=_positive("--lag-for", args.lag_for),
        cut_direction=args.cut_direction,
        slow_by=args.slow_by,
    )


def _positive(option: str, text: str) -> float:
    seconds = units.parse(text, "_s")
    if not seconds > 0:
        raise ValueError(f"{option} {text}: wanted seconds above 0; try 20")
    return seconds


def _tell_account(directory: Path, chaos: Chaos) -> int:
    """How the run ended, if it did while this was at work."""
    if not chaos.over:
        return 0
    until = time.monotonic() + SUMMARY_S
    while process.lives(chaos.locals.launcher) and time.monotonic() < until:
        time.sleep(LOOK_S)
    path = directory / "summary.json"
    if not path.exists():
        print(f"{directory}: the run is over and left no account")
        return ExitCode.FAILED
    summary = account.read(path)
    print(account.text(summary))
    return 0 if summary.balanced else ExitCode.FAILED
