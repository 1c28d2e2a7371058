"""`shoal invite CONFIG`: a signed, expiring text that lets one more machine take part in a run that is being trained here; which there
are (`--list`); and all of them renewed by hand (`--renew`), where `shoal run` is not there to do it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal import guest, units
from shoal.config import Config
from shoal.core.messages import Peer
from shoal.core.names import invite_of
from shoal.launcher import reach
from shoal.launcher.files import rundir
from shoal.launcher.invites import Issued, Office, distribute
from shoal.model import lent
from shoal.runtime.checkpoints import weight_files
from shoal.transport.identity.invite import PEERS, Authority
from shoal.transport.identity.passes import MAX_PEERS, date

DIGEST_CHARS = 32  # of the data's SHA-256 in an invite: nobody finds other data that begin like this
DISTRIBUTE_S = 20.0  # for the peers of a run to receive a new list
TELL_S, START_S = 2.0, 120.0  # a run that is starting is waited for: until people are told, and at most


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the TOML file of the run, or its directory")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings given to `shoal run`, such as run.name")
    parser.add_argument(
        "--for",
        dest="lifetime",
        default="7 d",
        metavar="TIME",
        help='how long the invite is valid, such as "12 h" (7 days); it is renewed for as long again while a peer takes part by it',
    )
    parser.add_argument(
        "--no-renew", action="store_true", help="let the invite end then, even while peers take part by it"
    )
    parser.add_argument(
        "--peers", type=int, default=PEERS, metavar="N", help=f"how many peers may take part by it at a time ({PEERS})"
    )
    parser.add_argument("--name", default="", help="name of the person or machine it is for; shown by --list")
    parser.add_argument(
        "--out", metavar="FILE", help="write the invite to this file, readable by you alone, instead of printing it"
    )
    add_via(parser)
    parser.add_argument("--list", action="store_true", help="list the invites, and make none")
    parser.add_argument("--renew", action="store_true", help="renew every invite that was not revoked, and make none")


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args.config, args.settings)
    if args.list:
        print(table(Office(directory, _authority(directory)), here(directory)))
        return 0
    await_start(directory, args.via)
    run = Founded(directory, args.via)
    if args.renew:
        return _renew(run)
    lifetime_s = units.parse(args.lifetime, "_s")
    if lifetime_s < 1:
        raise ValueError(f"--for {args.lifetime!r} is over already; try '7 d'")
    if not 1 <= args.peers <= MAX_PEERS:
        raise ValueError(f"--peers {args.peers}: 1 to {MAX_PEERS} may take part by an invite; try {PEERS}")
    hand_over(run.invite(lifetime_s, args.peers, args.name, not args.no_renew), args.out)
    return 0


def await_start(directory: Path, via: Sequence[str] = ()) -> None:
    """Of a run that is starting there, until it can be joined, `via` other addresses or by its own: its first peer may listen a moment
    before that is written. ValueError when that takes too long."""
    began, tell_s = time.monotonic(), TELL_S
    wanted = ("config.toml",) if via else ("config.toml", rundir.BOOTSTRAP)
    while not all((directory / name).exists() for name in wanted) and rundir.running(directory):
        waited_s = time.monotonic() - began
        if waited_s > START_S:
            raise ValueError(
                f"{directory}: the run there has had no peer to join by for {START_S:.0f} s; its launcher says why"
            )
        if waited_s > tell_s:
            print(f"{directory}: the run is starting; waiting for its first peer", file=sys.stderr, flush=True)
            tell_s = START_S
        time.sleep(0.1)


def directory_of(run: str, settings: Sequence[str]) -> Path:
    """Of the run that is named by its directory, or by a TOML file and the settings given to `shoal run`."""
    if Path(run).is_dir() and not settings:
        return Path(run)
    return configuration.load(run, settings).run.directory


def add_via(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--via",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address of a listening peer of the run, from bootstrap.json on a guest's machine; needed where no peer listens on this"
        " machine",
    )


class Founded:
    """A run that was founded on this machine, as its directory tells. ValueError when there is none."""

    def __init__(self, directory: Path, via: Sequence[str] = ()) -> None:
        own = rundir.addresses(directory)
        if not (directory / "config.toml").exists() or (own is None and not via):
            raise ValueError(f"{directory}: no run has been started there; start it with: shoal run CONFIG")
        self.directory = directory
        self.office = Office(directory, _authority(directory))
        self.config = configuration.load(directory / "config.toml")
        self.via = tuple(via)
        self.addresses = (*via, *(own or ()))[:32]

    def invite(self, lifetime_s: float, peers: int, title: str, renews: bool) -> str:
        if not self.addresses:
            raise ValueError(
                f"{self.directory}: none of the run's peers listens (any more); start it with: shoal run CONFIG"
            )
        reach.refuse_private(self.config, self.addresses)
        shared = guest.shared(self._with_digest())
        name, addresses = self.config.run.name, reach.few(self.addresses, self.via)
        return self.office.issue(addresses, lifetime_s, name, shared, peers=peers, title=title[:100], renews=renews)

    def distribute(self, data: bytes) -> None:
        """Send the list to the run's peers, and print how many have received it."""
        received, reached = 0, 0
        if self.addresses:
            try:
                received, reached = asyncio.run(
                    distribute(self.config, self.office.authority, self.addresses, data, DISTRIBUTE_S)
                )
            except ValueError as error:  # a directory that nobody answers from
                print(error)
        if not reached:
            print(
                "no peer of the run answers. The list is saved, and sent when `shoal run` goes on here; if guests go on without this "
                "machine, send it to them now: `shoal invite CONFIG --renew --via ADDRESS`, of one of them"
            )
        else:
            print(
                f"{received} of {reached} peers have received it"
                + ("" if received == reached else "; they send it to the others")
            )

    def _with_digest(self) -> Config:
        from shoal import build

        config = self.config
        if config.device.executor == "emulated" or config.run.serve:
            return config
        data = msgspec.structs.replace(config.data, digest=build.data(config).digest[:DIGEST_CHARS])
        tune = config.tune
        if tune.lend:
            text = lent.described(config.model.path, weight_files.fingerprint(Path(config.model.path)))
            tune = msgspec.structs.replace(tune, description=text)
        return msgspec.structs.replace(config, data=data, tune=tune)  # so that no machine trains on other text


def hand_over(text: str, out: str | None) -> None:
    if out is None:
        print(text)
        return
    reach.write_secret(Path(out), text)
    print(f"wrote {out}; on the other machine: shoal join @{out}")


def here(directory: Path) -> tuple[Peer, ...]:
    """All peers of the newest view that the launcher knows."""
    try:
        return rundir.locals_of(directory).names
    except ValueError:  # no launcher
        return ()


def table(office: Office, peers: Iterable[Peer]) -> str:
    """One line for each invite."""
    invites = office.book().invites
    count = Counter(map(invite_of, peers))
    rows = [("invite", "for", "peers", "until", "")]
    for each, issued in invites.items():
        grant = issued.granted
        limit = f"{count[each]}" if issued.local else f"{count[each]} of {grant.peers}"
        rows.append((each, issued.title or "-", limit, date(grant.expires), _state(issued, office.clock())))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    revoked = [f"key {key} was revoked on {date(since)}" for key, since in office.book().keys.items()]
    return "\n".join([*lines, *revoked])


def _state(issued: Issued, now: float) -> str:
    if issued.revoked:
        return f"revoked on {date(issued.revoked)}"
    if issued.granted.ends_s <= now:
        return "over"
    return "renewed while it is used" if issued.renews else "not renewed"


def _renew(run: Founded) -> int:
    data = run.office.renew(lambda _, __: True)
    if not data:
        raise ValueError(f"{run.directory}: there is no invite to renew; make one without --renew")
    print(table(run.office, here(run.directory)))
    run.distribute(data)
    return 0


def _authority(directory: Path) -> Authority:
    key = directory / "authority.key"
    if not key.exists():
        raise ValueError(
            f"{key} is not there: invites are made, renewed and revoked on the machine that founded the run"
        )
    return Authority.load(key)
