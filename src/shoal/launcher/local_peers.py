"""Starting a run's local peers, giving each its invite and the current passes, and listing them for other commands. For launcher.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal import config as configuration
from shoal.config import Config
from shoal.core.messages import Peer, View
from shoal.core.names import invite_of
from shoal.escaping import describe
from shoal.launcher.files import rundir
from shoal.launcher.invites import Office
from shoal.launcher.launch import PeerProcess, PeerProcesses, PeerSpec, Start
from shoal.launcher.process import identify
from shoal.launcher.watching.watch import RunMonitor
from shoal.transport.identity.invite import Authority, read_invite

MOST_ADDRESSES = 32  # in an invite


class RunPasses:
    """The invite and the passes of local peers: from the run's own key, or the invite of somebody else's run.

    `warn` is called when passes cannot be renewed. Training goes on: on a full disk, say, there is time until they expire."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        authority: Authority | None,
        invite: str,
        warn: Callable[[str], None],
        living: tuple[str, ...] = (),
    ) -> None:
        """`living`: addresses of those who train the run already."""
        self.run = authority.run if authority is not None else read_invite(invite, 0.0).run
        self._office = Office(directory, authority) if authority is not None else None
        self._config, self._invite, self._warn, self._living = config, invite, warn, living
        self._failure = ""  # why passes could not be renewed, as last warned of

    @property
    def founded_here(self) -> bool:
        return self._office is not None

    def start(self, addresses: tuple[str, ...]) -> Start:
        """What a new peer is given. `addresses`: where it finds the run."""
        if self._office is None:
            return Start(invite=self._invite, passes=b"")
        addresses = (*addresses, *self._living)[:MOST_ADDRESSES]
        lifetime_s, name = self._config.network.pass_lifetime_s, self._config.run.name
        invite = self._office.local(addresses, lifetime_s, name, again=bool(self._living))
        return Start(invite=invite, passes=self._try(self._office.pass_list))

    def tend(self, view: View | None) -> bytes:
        """Renew the passes of those who take part. Returns the pass list when it has changed, here or by a command."""
        office = self._office
        if office is None:
            return b""
        everyone = view.members + view.joining if view is not None else ()
        return self._try(lambda: office.tend({invite_of(member.peer) for member in everyone}))

    def _try(self, call: Callable[[], bytes]) -> bytes:
        try:
            passes = call()
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                self._failure = str(error)
                self._warn(f"passes are not renewed: {describe(error)}")
            return b""
        self._failure = ""
        return passes


class Starter:
    """Starts peer processes p1, p2, ... of one configuration."""

    def __init__(
        self,
        config: Callable[[int], Config],
        directory: Path,
        processes: PeerProcesses,
        passes: RunPasses,
        first_step: int,
        here: int,
    ) -> None:
        """`config`: of the peer with that number, from 0. `here`: local peers at the start."""
        self._config, self._directory, self._first_step, self._here = config, directory, first_step, here
        self._processes, self._passes = processes, passes
        self._started = 0
        self._joining: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, first: bool) -> PeerProcess:
        """Its process; it takes part when it is introduced. `first`: it founds the run."""
        number = self._started
        self._started += 1
        return await self._processes.start(
            PeerSpec(
                config=configuration.to_tree(self._config(number)),
                directory=str(self._directory),
                label=f"p{number + 1}",
                first=first,
                first_step=self._first_step,
                run=self._passes.run,
                number=number,
                here=self._here,
                key=str(self._directory / "founder.key") if number == 0 and self._passes.founded_here else "",
            )
        )

    def introduce(self, child: PeerProcess) -> None:
        child.write(self._passes.start(self._processes.addresses))
        child.introduced = True

    async def join(self) -> None:
        """One more peer, which joins the run."""
        self.introduce(await self.start(first=False))

    def join_soon(self) -> None:
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self.join())
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def close(self) -> None:
        """Nobody joins any more, also who is being started."""
        self._closed = True
        joining = list(self._joining)
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)


def peers_file(watch: RunMonitor, living: Sequence[PeerProcess], names: Mapping[str, Peer]) -> rundir.PeersFile:
    """The contents of peers.json, which `shoal chaos` reads. `names`: of local peers, by label."""
    view = watch.books.view
    everyone = view.members + view.joining if view is not None else ()
    launcher = identify(os.getpid())
    assert launcher is not None
    return rundir.PeersFile(
        launcher=launcher,
        started=watch.started,
        finished=watch.finished,
        peers=tuple(
            rundir.LocalPeer(
                label=child.label,
                process=child.identity,
                stage=watch.standing[child.label].stage if child.label in watch.standing else None,
                leads=child.label in watch.standing and watch.standing[child.label].leading,
                peer=names.get(child.label, ""),
            )
            for child in living
            if child.identity is not None
        ),
        members=tuple(rundir.MemberSeat(label=label, stage=stage, name=name) for label, stage, name in watch.seats()),
        voters=tuple(watch.voters()),
        casting_voter=watch.casting_voter(),
        names=tuple(each.peer for each in everyone),
    )
