"""`shoal revoke CONFIG WHO ...`: shut invites or peers out of a run, for good.

Signed with the run's key, kept in the run's directory and told to every peer: the others refuse and cut whoever is revoked, the leader
removes it from the View, and its process ends and says why. An invite takes all its peers along and whoever would come by it; a key only
the peers with that key: their holder can come again by the same invite, under another.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from shoal import config as configuration
from shoal.cli.invite import Founded, add_via, hand_over, here, table
from shoal.core.messages import Peer
from shoal.core.names import invite_of, key_of
from shoal.launcher import rundir
from shoal.launcher.invites import InviteBook, invite_named
from shoal.transport.identity.identity import KEY_ID_CHARS, key_id_of


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the TOML file of the run")
    parser.add_argument(
        "who",
        nargs="+",
        metavar="WHO",
        help="invites, by id or by whom they are for (`shoal invite CONFIG --list`); peers, by label, name, key id or its beginning",
    )
    parser.add_argument("--rotate", action="store_true", help="print a new invite in the place of each that is revoked")
    add_via(parser)
    parser.add_argument("--out", metavar="FILE", help="with --rotate: write it there, for your eyes only")


def main(args: argparse.Namespace) -> int:
    settings = [word for word in args.who if "=" in word]
    words = [word for word in args.who if "=" not in word]
    run = Founded(rundir.place(configuration.load(args.config, settings)), args.via)
    book = run.office.book()
    if not words:
        raise ValueError(f"whom? There are these invites:\n{table(run.office, here(run.directory))}")
    found = [_meant(word, book, _labels(run.directory), here(run.directory)) for word in words]
    invites = [what for kind, what in found if kind == "invite"]
    keys = [what for kind, what in found if kind == "key"]
    if args.rotate and not invites:
        raise ValueError("--rotate puts a new invite in the place of another: name an invite to revoke")
    if args.out and len(invites) > 1:
        raise ValueError(f"--out {args.out}: one file for {len(invites)} invites; revoke them one after the other")
    for each in invites:
        if book.invites[each].local:
            raise ValueError(f"invite {each} is that of this machine's own peers; to end them, end `shoal run`")
    present = here(run.directory)
    gone = [peer for peer in present if invite_of(peer) in invites or key_of(peer) in keys]
    if 2 * len(gone) >= len(present) > 0:
        print(
            f"warning: these are {len(gone)} of {len(present)} peers of the run; without a majority the others need `shoal recover`"
        )
    data = run.office.revoke(invites, keys)
    for each in invites:
        print(f"revoked: invite {each} ({book.invites[each].title or 'for nobody by name'})")
    for key in keys:
        print(f"revoked: key {key}{_still(key, here(run.directory))}")
    run.tell(data)
    for each in invites if args.rotate else ():
        old = book.invites[each]
        hand_over(run.invite(old.granted.lifetime_s, old.granted.peers, old.title, old.renews), args.out)
    return 0


def _meant(word: str, book: InviteBook, labels: dict[str, Peer], present: tuple[Peer, ...]) -> tuple[str, str]:
    """('invite' or 'key', its id). ValueError: it is nothing, or may be several."""
    if word in labels:
        return "key", key_of(labels[word])
    try:
        return "key", key_id_of(word)
    except ValueError:
        pass
    if len(word) == KEY_ID_CHARS and word.isalnum():
        return "key", word
    known = dict.fromkeys(key_of(peer) for peer in (*labels.values(), *present))
    found = [("invite", each) for each in invite_named(word, book)]
    found += [("key", key) for key in known if key.startswith(word) and len(word) >= 4]
    if len(found) != 1:
        many = (
            f"may be {', '.join(f'{kind} {what}' for kind, what in found)}"
            if found
            else "is no invite and no peer of the run"
        )
        raise ValueError(f"{word} {many}; `shoal invite CONFIG --list` names the invites, `shoal status` the peers")
    return found[0]


def _still(key: str, present: tuple[Peer, ...]) -> str:
    """By which invite its holder could come again."""
    by = sorted({invite_of(peer) for peer in present if key_of(peer) == key})
    return f"; its invite {by[0]} still stands: revoke that too, or its holder can come again" if by else ""


def _labels(directory: Path) -> dict[str, Peer]:
    """The names of this machine's peers by their labels, those that have ended too."""
    path = directory / "names.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Peer]) if path.exists() else {}
