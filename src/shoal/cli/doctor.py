"""`shoal doctor [INVITE]`: is this machine fit to take part, and in that run? One line for each thing, with what to do.

Without an invite it looks at this machine alone. Exit code 0 only if nothing is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.exit_codes import ExitCode
from shoal.launcher.doctor.finding import Finding, Show, Verdict, bad, judged
from shoal.launcher.invite_text import HOW, INVITE_VARIABLE, invite_text, without_invite


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="@FILE | - | INVITE | a.b=c",
        help=f"an invite, and settings as for `shoal join`; {HOW}",
    )
    parser.add_argument("--files", type=Path, metavar="DIR", help="as for `shoal join`")
    parser.add_argument("--json", action="store_true", help="one JSON list of objects: name, verdict, detail, advice")


def main(args: argparse.Namespace) -> int:
    settings = without_invite(args.words)
    findings: list[Finding] = []

    def show(finding: Finding) -> None:
        findings.append(finding)
        if not args.json:
            print(finding.text(), flush=True)

    if len(settings) < len(args.words) or os.environ.get(INVITE_VARIABLE):
        _with_invite(invite_text(args.words), settings, args.files, show)
    else:
        _alone(settings, show)
    if args.json:
        print(msgspec.json.encode(findings).decode())
    else:
        print(summary(findings))
    return ExitCode.FAILED if any(finding.verdict is Verdict.BAD for finding in findings) else ExitCode.OK


def summary(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _alone(settings: Sequence[str], show: Show) -> None:
    from shoal.launcher.doctor import machine

    for finding in machine.checks(configuration.load(None, settings)):
        show(finding)


def _with_invite(text: str, settings: Sequence[str], files: Path | None, show: Show) -> None:
    """What the run asks of this machine is looked at, too."""
    from shoal import guest
    from shoal.launcher import preflight
    from shoal.launcher.doctor import machine, run
    from shoal.model import remote
    from shoal.transport.identity.invite import read_invite

    try:
        invite = read_invite(text, 0.0)
        visitor = guest.visitor(invite.config, settings)
    except ValueError as error:  # it says nothing about the run, and the machine can be looked at all the same
        show(bad("invite", str(error)))
        return _alone([], show)
    config = visitor
    try:
        config = remote.local(guest.joined(invite.config, settings, files))
        faults = list(preflight.files(config))
    except ValueError as error:
        faults = [str(error)]
    before = [
        *judged("version and files", faults, "this version speaks the run's protocol, and what the run reads is here"),
        *run.checks_before(invite, time.time()),
    ]
    for finding in (*before, *machine.checks(config)):
        show(finding)
    if not any(finding.verdict is Verdict.BAD and finding.name == run.ADDRESSES for finding in before):
        asyncio.run(run.checks(visitor, invite, show))
