"""`shoal join INVITE`: take part in a run by its invite, with one peer or several on this machine.

The same watching and the same directory as `shoal run` (cli/run.py), for a guest: Ctrl-C lets the peers leave at the next
step boundary, and the account is the host's to make. An invite names no file of this machine: --files DIR says what the run may
read, or settings name things one by one (guest.py).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from shoal.cli import rundir
from shoal.cli.run import Job, Run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("invite", help="the text that `shoal invite` printed")
    parser.add_argument(
        "settings", nargs="*", metavar="a.b=c", help="this machine's own settings, such as network.host"
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="the run may read below this directory; names in the invite are looked up there",
    )
    parser.add_argument("--peers", type=int, default=1, metavar="N", help="peers to start here")


def main(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    from shoal import build
    from shoal.transport.invite import read_invite

    invite = read_invite(args.invite, time.time())
    config = build.joined(invite.config, args.settings, args.files)
    if args.peers < 1:
        raise ValueError(f"--peers {args.peers}: at least one takes part")
    directory = rundir.place(config)
    with rundir.claimed(directory) as claim:
        rundir.set_aside(directory)
        job = Job(
            claim=claim, config=config, directory=directory, here=args.peers, started_s=started_s, invite=args.invite
        )
        return asyncio.run(Run(job).run())
