"""invites.json of a run: every invite that was issued, which are renewed, which invites and keys are revoked, and the number of the
list of passes that says so. No secret is in it. And telling the run's peers of a new list.

For `shoal run`, which renews the passes of those who take part, `shoal invite` and `shoal revoke`, which may write it at the same time:
each changes it under a lock, and the launcher looks for changes. An invite is renewed when half of its lifetime is over and a
peer takes part by it: who stays away that long needs a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.core.messages import Passes, PassesRequest, Peer
from shoal.escaping import UNDECODABLE
from shoal.launcher.reach import write_secret
from shoal.runtime.records.report import replace
from shoal.transport.base import Incoming
from shoal.transport.identity.invite import Authority, Invite, as_text, read_invite
from shoal.transport.identity.passes import INVITE_CHARS, MAX_GRANTS, MAX_PEERS, MAX_REVOKED, Grant, PassList

if TYPE_CHECKING:
    from shoal.config import Config

FILE = "invites.json"
LOCAL = "local.invite"  # beside it, readable by its owner alone
KEPT_S = 86400.0  # an invite that is over is listed for so long
DUE = 0.5  # of its lifetime: when it is renewed
TITLES = 4096  # the newest, that are remembered
OPERATOR_S = 3600.0  # the pass of the operator's own connection
ASK_S = 0.5  # between two times of telling


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """One invite. `grant` is its newest, encoded."""

    grant: bytes
    title: str = ""  # whom it is for
    local: bool = False  # the launcher's own peers take part by it
    renews: bool = True  # while somebody takes part by it
    renewed: bool = False  # the grant is another than in the invite's text
    revoked: int = 0  # when; seconds since 1970

    @property
    def granted(self) -> Grant:
        return msgspec.msgpack.decode(self.grant, type=Grant)


class InviteBook(msgspec.Struct, frozen=True):
    """`keys`: ids of revoked keys, and since when. `titles`: whom invites are or were for, which outlasts them."""

    version: int = 0
    invites: dict[str, Issued] = {}
    keys: dict[str, int] = {}
    titles: dict[str, str] = {}


class Office:
    """Whoever has the run's key, at its invites."""

    def __init__(self, directory: Path, authority: Authority, clock: Callable[[], float] = time.time) -> None:
        self.directory, self.authority, self.clock = directory, authority, clock
        self._local: Invite | None = None
        self._seen: tuple[int, InviteBook] = (-1, InviteBook())  # when the file was written, and what it said
        self._told = 0

    def book(self) -> InviteBook:
        path = self.directory / FILE
        try:
            written = path.stat().st_mtime_ns
            if written != self._seen[0]:
                self._seen = written, msgspec.json.decode(path.read_bytes(), type=InviteBook)
        except FileNotFoundError:
            return InviteBook()
        except UNDECODABLE as error:
            raise ValueError(f"{path} is not a list of invites: {error}") from None
        return self._seen[1]

    def issue(
        self,
        addresses: tuple[str, ...],
        lifetime_s: float,
        name: str,
        config: bytes = b"",
        *,
        peers: int,
        title: str = "",
        renews: bool = True,
    ) -> str:
        """The text of a new invite to the run of that name."""
        now = self.clock()
        text = self.authority.invite(addresses, now + lifetime_s, name, config, peers, issued=now)
        self._add(read_invite(text, 0.0).grant, Issued(grant=b"", title=title, renews=renews))
        return text

    def local(self, addresses: tuple[str, ...], lifetime_s: float, name: str, *, again: bool = False) -> str:
        """The invite of the launcher's own peers: one for all, made when it is first asked for. `again`: that of the session before, with
        which they are the founder's to the run that others have gone on with (casting vote, copies of checkpoints)."""
        if self._local is None and again and (self.directory / LOCAL).exists():
            self._local = read_invite((self.directory / LOCAL).read_text(), 0.0)
        if self._local is None:
            now = self.clock()
            text = self.authority.invite((), now + lifetime_s, name, peers=MAX_PEERS, issued=now)
            self._local = read_invite(text, 0.0)
            self._add(self._local.grant, Issued(grant=b"", title="this machine", local=True))
            write_secret(self.directory / LOCAL, text)
        return as_text(msgspec.structs.replace(self._local, addresses=addresses))

    def revoke(self, invites: Collection[str], keys: Collection[str]) -> bytes:
        """The new list. ValueError: there are too many to revoke."""
        now = int(self.clock())
        with self._edited() as book:
            changed = {each: msgspec.structs.replace(book.invites[each], revoked=now) for each in invites}
            revoked = {**dict.fromkeys(keys, now), **book.keys}
            after = msgspec.structs.replace(book, invites={**book.invites, **changed}, keys=revoked)
            if sum(bool(each.revoked) for each in after.invites.values()) + len(revoked) > MAX_REVOKED:
                raise ValueError(f"more than {MAX_REVOKED} invites and keys would be revoked; revoke invites, not keys")
            self._write(after, news=True)
        return self.pass_list()

    def renew(self, wanted: Callable[[str, Issued], bool]) -> bytes:
        """The new list, when one of these was to be renewed and may be; else b''."""
        now = self.clock()
        with self._edited() as book:
            renewed = {}
            for each, issued in book.invites.items():
                grant = issued.granted
                if issued.renews and not issued.revoked and wanted(each, issued):
                    longer = self.authority.renewed(grant, now, now + grant.lifetime_s)
                    if longer.expires > grant.expires:
                        renewed[each] = msgspec.structs.replace(issued, grant=_encoded(longer), renewed=True)
            if not renewed:
                return b""
            self._write(msgspec.structs.replace(book, invites={**book.invites, **renewed}), news=True)
        return self.pass_list()

    def tend(self, in_use: Collection[str]) -> bytes:
        """For the launcher, now and then: renew what is due of the invites `in_use` and its own. The list, when it is news; else b''."""

        def due(each: str, issued: Issued) -> bool:
            grant = issued.granted
            here = self._local is not None and self._local.grant.id == each
            return (here or each in in_use) and grant.expires - self.clock() < DUE * grant.lifetime_s

        if any(
            due(each, issued) for each, issued in self.book().invites.items() if not issued.revoked and issued.renews
        ):
            self.renew(due)
        version = self.book().version
        if version == self._told:
            return b""
        self._told = version
        return self.pass_list()

    def pass_list(self) -> bytes:
        """Signed; b'' when nobody has been renewed or revoked."""
        book = self.book()
        if not book.version:
            return b""
        invites = book.invites.items()
        grants = tuple(issued.granted for _, issued in invites if issued.renewed and not issued.revoked)
        revoked = {each: issued.revoked for each, issued in invites if issued.revoked} | book.keys
        return self.authority.pass_list(
            book.version, grants, tuple(self.authority.revoked(what, since) for what, since in revoked.items())
        )

    # ------------------------------------------------------------------------------------------------- private

    def _add(self, grant: Grant, issued: Issued) -> None:
        with self._edited() as book:
            invites = dict(book.invites)
            if issued.local:  # those of earlier sessions ended with their launchers
                invites = {each: kept for each, kept in invites.items() if not kept.local}
            if len(invites) >= MAX_GRANTS:
                raise ValueError(f"{len(invites)} invites to this run are good; revoke some before you issue more")
            invites[grant.id] = msgspec.structs.replace(issued, grant=_encoded(grant))
            self._write(msgspec.structs.replace(book, invites=invites), news=False)

    @contextlib.contextmanager
    def _edited(self) -> Iterator[InviteBook]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / f".{FILE}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.book()

    def _write(self, book: InviteBook, *, news: bool) -> None:
        """What is over is forgotten: nobody believes its passes. `news`: what peers are told has changed; versions are no smaller than
        the time, so that a run whose list was lost still has newer ones."""
        now = self.clock()
        invites = {each: kept for each, kept in book.invites.items() if kept.granted.ends_s + KEPT_S > now}
        version = max(book.version + 1, int(now)) if news else book.version
        titles = book.titles | {each: kept.title for each, kept in book.invites.items() if kept.title}
        titles = dict(list(titles.items())[-TITLES:])
        book = msgspec.structs.replace(book, version=version, invites=invites, titles=titles)
        replace(self.directory / FILE, msgspec.json.format(msgspec.json.encode(book), indent=1) + b"\n")
        self._seen = (-1, InviteBook())


def titles(directory: Path) -> dict[str, str]:
    """Whom each invite is for, by its id, as `shoal invite --name` was told. Empty where the run was founded elsewhere."""
    path = directory / FILE
    try:
        book = msgspec.json.decode(path.read_bytes(), type=InviteBook)
    except FileNotFoundError:
        return {}
    except UNDECODABLE as error:
        raise ValueError(f"{path} is not a list of invites: {error}") from None
    return book.titles


def invite_named(word: str, book: InviteBook) -> list[str]:
    """Ids of the invites that are meant by an id, the beginning of one, or whom they are for."""
    by_title = [each for each, issued in book.invites.items() if issued.title == word]
    return by_title or [each for each in book.invites if each.startswith(word) and 4 <= len(word) <= INVITE_CHARS]


async def distribute(
    config: Config, authority: Authority, addresses: tuple[str, ...], data: bytes, wait_s: float
) -> tuple[int, int]:
    """Send the list to every peer of the run that is found. Returns how many have received it, of how many."""
    from shoal.build import operator

    invite = read_invite(authority.invite(addresses, time.time() + OPERATOR_S, config.run.name), 0.0)
    received: set[Peer] = set()
    peers: set[Peer] = set()
    async with operator(config, invite, data) as (transport, directory):
        version = msgspec.msgpack.decode(data, type=PassList).version

        async def listen() -> None:
            while True:
                item = await transport.receive()
                if isinstance(item, Incoming) and isinstance(item.message, Passes) and item.message.version >= version:
                    received.add(item.peer)

        listening = asyncio.create_task(listen())
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await directory.announce()
                    peers = {record.peer for record in await directory.peers()} - {transport.name}
                    if peers and peers <= received:
                        break
                    for peer in peers - received:
                        transport.send(peer, Passes(version, data))
                        transport.send(peer, PassesRequest(version))
                    await asyncio.sleep(ASK_S)
        except TimeoutError:
            pass
        finally:
            listening.cancel()
    return len(peers & received), len(peers)


def _encoded(grant: Grant) -> bytes:
    return msgspec.msgpack.encode(grant)
