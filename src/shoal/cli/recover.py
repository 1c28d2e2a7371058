"""`shoal recover RUNDIR --gone P ...`: the operator states that most of a run's peers are lost for good, so that the others go on.

Asks every peer of the run that can be found how it stands, refuses wherever it can see that those given up may live
(core/consensus/override.py), signs the override with the run's key, tells the survivors and waits until they train. Only where
`authority.key` lies can this be done; what was signed is kept beside it, so that no other side is ever chosen beside the first.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.config import Config, microbatches
from shoal.core.consensus.override import Refusal, decide
from shoal.core.messages import Override, Peer, Standing, StandingRequest, View
from shoal.escaping import escaped
from shoal.exit_codes import ExitCode
from shoal.launcher import process
from shoal.launcher.files import checkpoints, rundir
from shoal.launcher.invites import Office
from shoal.runtime.records.report import replace
from shoal.transport.base import Incoming
from shoal.transport.directory.directory import Directory
from shoal.transport.emulated.shaped import Reachable
from shoal.transport.identity.invite import Authority, read_invite

OVERRIDE = "override.json"  # in the run's directory: the last one that was signed
ASK_S = 1.0  # between two times of asking
PASS_S = 3600.0  # the pass of the operator's own connection
RELOAD_S = 300.0  # for survivors to load the checkpoint and begin


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's directory on the machine that founded it, such as runs/quickstart")
    parser.add_argument(
        "--gone",
        nargs="+",
        default=[],
        metavar="P",
        help="give up these peers: labels such as p3, names or how names begin",
    )
    parser.add_argument(
        "--wait", type=float, default=20.0, metavar="S", help="how long to wait for peers to answer (20)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def main(args: argparse.Namespace) -> int:
    from shoal.build import operator

    directory = Path(args.run)
    if not (directory / "config.toml").exists() or not (directory / "authority.key").exists():
        raise ValueError(f"{directory}: needs the config.toml and authority.key of a run that was founded here")
    if not args.wait > 0:
        raise ValueError(f"--wait {args.wait:g}: wanted seconds above 0; try 20")
    config = configuration.load(directory / "config.toml")
    authority = Authority.load(directory / "authority.key")
    addresses = rundir.addresses(directory)
    if addresses is None:
        raise ValueError(f"{directory}: none of the run's peers has ever listened; there is nobody to ask")
    saved = checkpoints.saved_by(config, authority.run)
    labels = rundir.labels(directory)
    invite = read_invite(authority.invite(addresses, time.time() + PASS_S, config.run.name), 0.0)

    async def recover() -> int:
        async with operator(config, invite, Office(directory, authority).pass_list()) as (transport, peers):
            desk = Desk(transport, peers, config.run.stages)
            standings = await desk.ask(args.wait)
            lost_peers = frozenset(_named(word, standings, labels) for word in args.gone)
            _refuse_running(directory, lost_peers, labels)
            view, term = decide(standings, lost_peers, saved, _microbatches(config), _before(directory))
            print(escaped(f"{view.reason}; this undoes {view.account.undone} microbatches in all"))
            if args.dry_run:
                return 0
            override = authority.override(view, term)
            replace(directory / OVERRIDE, msgspec.json.encode(override))  # first: two sides are never chosen
            return 0 if await desk.send_override(override) else ExitCode.FAILED

    return asyncio.run(recover())


class Desk:
    """Asks and tells the peers of a run of so many stages."""

    def __init__(self, transport: Reachable, directory: Directory, stages: int) -> None:
        self.transport, self.directory, self.stages = transport, directory, stages
        self.standings: dict[Peer, Standing] = {}

    async def ask(self, wait_s: float) -> dict[Peer, Standing]:
        """How everybody stands who answers in that time. All of it is waited for: silence is what is asked about."""
        print(f"asking the peers of the run for {wait_s:g} s", flush=True)
        listening = asyncio.create_task(self._listen())
        try:
            until_s = time.monotonic() + wait_s
            while time.monotonic() < until_s:
                await self._ask_all()
                await asyncio.sleep(ASK_S)
        finally:
            listening.cancel()
        print(f"{len(self.standings)} answer: {', '.join(sorted(peer[:6] for peer in self.standings)) or 'nobody'}")
        return self.standings

    async def send_override(self, override: Override) -> bool:
        """Until the survivors train again."""
        members = [member.peer for member in override.view.members]
        listening = asyncio.create_task(self._listen())
        try:
            until_s, advice = time.monotonic() + RELOAD_S, ""
            while time.monotonic() < until_s:
                for peer in members:
                    self.transport.send(peer, override)
                await self._ask_all()
                await asyncio.sleep(ASK_S)
                views = [self.standings[peer].view for peer in members if peer in self.standings]
                if any(view.epoch >= override.view.epoch and view.started for view in views):
                    print("the survivors train again")
                    return True
                before, advice = advice, self._unserved(views, override.view.epoch)
                if advice and advice != before:
                    print(advice, flush=True)
                if all(view.epoch >= override.view.epoch for view in views) and sys.stderr.isatty():
                    print("the survivors have received it, and load the checkpoint", file=sys.stderr)
        finally:
            listening.cancel()
        print(f"sent, but training has not begun after {RELOAD_S:g} s{': ' * bool(advice)}{advice}")
        return False

    def _unserved(self, views: list[View], epoch: int) -> str:
        """What a run waits for whose survivors have received the override and are too few to serve every stage; '' if they are not."""
        newest = max(views, key=lambda view: (view.epoch, view.number), default=None)
        if newest is None or newest.epoch < epoch or len(newest.members + newest.joining) >= self.stages:
            return ""
        served = {member.stage for member in newest.members + newest.joining}
        without = ", ".join(str(stage) for stage in range(self.stages) if stage not in served)
        return f"no peer is left to serve stage {without} (of {self.stages}): training goes on when one more joins, on any machine"

    async def _ask_all(self) -> None:
        await self.directory.announce()
        for record in await self.directory.peers():
            if record.peer != self.transport.name:
                self.transport.send(record.peer, StandingRequest())

    async def _listen(self) -> None:
        while True:
            item = await self.transport.receive()
            if isinstance(item, Incoming) and isinstance(item.message, Standing):
                self.standings[item.peer] = item.message


def _microbatches(config: Config) -> int:
    return microbatches(config.train)


def _before(directory: Path) -> Override | None:
    path = directory / OVERRIDE
    return msgspec.json.decode(path.read_bytes(), type=Override) if path.exists() else None


def _named(word: str, standings: dict[Peer, Standing], labels: dict[str, Peer]) -> Peer:
    """The one peer that is meant by a label, a name or the beginning of one."""
    if word in labels:
        return labels[word]
    known = {member.peer for standing in standings.values() for member in standing.view.members + standing.view.joining}
    matches = sorted(peer for peer in known if peer.startswith(word))
    if len(matches) != 1:
        raise Refusal(
            f"--gone {word}: {len(matches)} peers of the run are called so; name one of {', '.join(sorted(known))}"
        )
    return matches[0]


def _refuse_running(directory: Path, lost_peers: frozenset[Peer], labels: dict[str, Peer]) -> None:
    """Local processes are looked at, not only asked."""
    try:
        here = rundir.locals_of(directory).peers
    except ValueError:  # its launcher has ended, and its peers with it
        return
    for peer in here:
        if labels.get(peer.label, peer.peer) in lost_peers and process.lives(peer.process):
            raise Refusal(
                f"{peer.label} is said to be gone, but its process {peer.process.pid} is there: kill -9 it first"
            )
