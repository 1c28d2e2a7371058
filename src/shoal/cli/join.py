"""`shoal join INVITE`: take part in a run by its invite, with one peer or several on this machine.

The same watching and the same directory as `shoal run` (cli/run.py), for a guest: Ctrl-C lets the peers leave at the end of the
step or within 20 s, and the account is the host's to make. An invite is a secret, and every user of a machine sees the arguments of
its programs: so it better comes by a file, by standard input or by the environment. It names no file of this machine: --files DIR
says what the run may read, or settings name things one by one (guest.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launcher.invite_text import INVITE_VARIABLE, invite_text, without_invite

if TYPE_CHECKING:
    from shoal.launcher.ahead import Ahead


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="@FILE | - | INVITE | a.b=c",
        help=f"the file with the invite, - to paste it or pipe it in, or its text, which then shows in `ps`; else {INVITE_VARIABLE}."
        " Then this machine's own settings, such as network.host",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="let the run read files below this directory; file names in the invite are looked up there",
    )
    parser.add_argument("--peers", type=int, default=1, metavar="N", help="start this many peers on this machine (1)")


def main(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    text, settings = invite_text(args.words), without_invite(args.words)
    if args.peers != 1:  # they are forked from one process that has imported all
        return _join(args, text, settings, started_s, None)

    from shoal.config import Device
    from shoal.launcher.ahead import begun

    with begun(os.getpid(), Device()) as ahead:
        return _join(args, text, settings, started_s, ahead)


def _join(args: argparse.Namespace, text: str, settings: list[str], started_s: float, ahead: Ahead | None) -> int:
    from shoal import guest
    from shoal.launcher import preflight, reach
    from shoal.launcher.files import checkpoints, rundir
    from shoal.launcher.launcher import Launcher
    from shoal.launcher.session import RunRequest
    from shoal.model import lent, remote
    from shoal.transport.identity.invite import read_invite
    from shoal.transport.identity.passes import date

    invite = read_invite(text, 0.0)
    joined = guest.joined(invite.config, settings, args.files)
    config = remote.local(lent.local(joined))
    if joined.model.path == lent.PEERS:
        print(f"no model here: the run's peers give the frozen weights of a stage, which stay in {config.model.path}")
    preflight.refuse(
        [
            *_too_many(args.peers, invite.grant.peers),
            *preflight.machine(config),
            *preflight.address(config, config.network.port),
            *reach.problems(invite.addresses),
        ]
    )
    if invite.grant.ends_s <= time.time():
        print(
            f"this invite was good until {date(invite.grant.expires)}: it counts only if the run has renewed it since"
        )
    checkpoints.refuse_others(config, invite.run)
    directory = config.run.directory
    with rundir.claimed(directory) as claim:
        rundir.set_aside(directory, but=checkpoints.kept(config, invite.run))
        again = ["shoal", "join", f"@{reach.keep(directory, text)}", *settings]
        again += [
            *(["--files", str(args.files)] if args.files else []),
            *(["--peers", str(args.peers)] * (args.peers > 1)),
        ]
        job = RunRequest(
            claim=claim,
            config=config,
            directory=directory,
            here=args.peers,
            started_s=started_s,
            ahead=ahead,
            invite=text,
            command=shlex.join(again),
        )
        outcome = asyncio.run(Launcher(job).run())
        print(outcome.text)
        return outcome.code


def _too_many(peers: int, most: int) -> Iterator[str]:
    if peers < 1:
        yield f"--peers {peers}: at least one takes part"
    if peers > most:
        yield f"--peers {peers}: this invite is for {most} at a time; ask for one with more"
