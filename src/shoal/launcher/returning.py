"""Whether the run that is resumed here is still trained by peers on other machines: then this machine returns to it as it stands.

A founder that is started again must not begin a second history beside theirs. They train on when those who answer are a quorum of
the newest view that any of them knows; otherwise they can agree on nothing, and the run goes on from its checkpoint. Asked are
the addresses that the session before wrote down. For launcher/session.py.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal import guest
from shoal.config import Config
from shoal.core.consensus.certificates import can_agree
from shoal.core.messages import Peer, Standing, StandingRequest, View
from shoal.launcher import reach
from shoal.launcher.files import rundir
from shoal.launcher.invites import Office
from shoal.transport.base import Incoming
from shoal.transport.directory.directory import Directory
from shoal.transport.emulated.shaped import Reachable
from shoal.transport.identity.invite import Authority, read_invite

LOOK_S = 30.0  # for a quorum to answer: longer than it takes to remove a peer that has died
ASK_S = 0.5  # between two times of asking
PASS_S = 3600.0  # the pass of the asking connection


class Living(msgspec.Struct, frozen=True):
    """A run that is trained without this machine: its newest view, and addresses where it is found."""

    view: View
    addresses: tuple[str, ...]


def living(config: Config, directory: Path) -> Living | None:
    """None: nobody trains it now. ValueError: somebody does, with other settings than `config`."""
    known = rundir.set_addresses_aside(directory)
    if not (directory / "authority.key").exists() or not known or reach.problems(known):
        return None
    print("other machines may still train this run: asking them", flush=True)
    before = configuration.load(directory / "config.toml")
    view = asyncio.run(_newest(before, directory, known))
    if view is None:
        print("no quorum of its peers answers: the run goes on from its checkpoint")
        return None
    if guest.shared(config) != guest.shared(before):
        raise ValueError(
            f"{len(view.members)} peers on other machines train this run, at step {view.step}, with the settings of {directory}/config.toml"
            ". Give the same command as before to return to it; settings change when they have ended"
        )
    print(
        f"{len(view.members)} peers on other machines train this run, at step {view.step}: this machine returns to it"
    )
    return Living(view, known)


async def _newest(config: Config, directory: Path, addresses: tuple[str, ...]) -> View | None:
    """The newest view, once a quorum of its voters has answered; None for a run that has none, or that is over."""
    from shoal.build import operator

    authority = Authority.load(directory / "authority.key")
    invite = read_invite(authority.invite(addresses, time.time() + PASS_S, config.run.name), 0.0)
    standings: dict[Peer, Standing] = {}
    async with operator(config, invite, Office(directory, authority).pass_list()) as (transport, peers):
        listening = asyncio.create_task(_listen(transport, standings))
        try:
            async with asyncio.timeout(LOOK_S):
                while (view := agreeing(standings)) is None:
                    await _ask(transport, peers)
                    await asyncio.sleep(ASK_S)
        except TimeoutError:
            return None
        finally:
            listening.cancel()
    return None if view.finished else view


def agreeing(standings: dict[Peer, Standing]) -> View | None:
    """The newest view of those who answered, if they can agree on the next one. Pure."""
    newest = max((each.view for each in standings.values()), key=lambda view: (view.epoch, view.number), default=None)
    return newest if newest is not None and newest.members and can_agree(newest, standings) else None


async def _ask(transport: Reachable, directory: Directory) -> None:
    await directory.announce()
    for record in await directory.peers():
        if record.peer != transport.name:
            transport.send(record.peer, StandingRequest())


async def _listen(transport: Reachable, standings: dict[Peer, Standing]) -> None:
    while True:
        item = await transport.receive()
        if isinstance(item, Incoming) and isinstance(item.message, Standing):
            standings[item.peer] = item.message
