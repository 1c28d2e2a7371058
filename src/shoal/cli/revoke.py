"""`shoal revoke CONFIG WHO ...`: shut invites or peers out of a run, for good.

Signed with the run's key, kept in the run's directory and sent to every peer: the others refuse and disconnect a revoked peer, the leader
removes it from the View, and its process ends and says why. Revoking an invite shuts out all its peers, present and future; revoking a
key only the peers with that key: their holder can join again by the same invite, under another key.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from shoal.cli.invite import Founded, add_via, directory_of, hand_over, here, table
from shoal.core.messages import Peer
from shoal.core.names import invite_of, key_of
from shoal.launcher.files import rundir
from shoal.launcher.invites import InviteBook, invite_named
from shoal.transport.identity.identity import KEY_ID_CHARS, key_id_of


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the TOML file of the run, or its directory")
    parser.add_argument(
        "who",
        nargs="+",
        metavar="WHO",
        help="invites, by id or name (`shoal invite CONFIG --list`); peers, by label, name, key id or its beginning",
    )
    parser.add_argument("--rotate", action="store_true", help="print a new invite in the place of each that is revoked")
    add_via(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="with --rotate: write the new invite to this file, readable by you alone"
    )


class Targets(msgspec.Struct, frozen=True):
    """What is to be revoked, by id."""

    invites: tuple[str, ...]
    keys: tuple[str, ...]


def main(args: argparse.Namespace) -> int:
    settings = [word for word in args.who if "=" in word]
    names = [word for word in args.who if "=" not in word]
    run = Founded(directory_of(args.config, settings), args.via)
    book = run.office.book()
    if not names:
        raise ValueError(f"whom? There are these invites:\n{table(run.office, here(run.directory))}")
    targets = _targets(names, book, run.directory)
    _check(targets, book, args)
    _warn_of_lost_majority(targets, here(run.directory))
    pass_list = run.office.revoke(list(targets.invites), list(targets.keys))
    for invite in targets.invites:
        print(f"revoked: invite {invite} ({book.invites[invite].title or 'for nobody by name'})")
    for key in targets.keys:
        print(f"revoked: key {key}{_still(key, here(run.directory))}")
    run.distribute(pass_list)
    for invite in targets.invites if args.rotate else ():
        old = book.invites[invite]
        hand_over(run.invite(old.granted.lifetime_s, old.granted.peers, old.title, old.renews), args.out)
    return 0


def _targets(names: list[str], book: InviteBook, directory: Path) -> Targets:
    targets = [_meant(name, book, rundir.labels(directory), here(directory)) for name in names]
    return Targets(
        invites=tuple(target for kind, target in targets if kind == "invite"),
        keys=tuple(target for kind, target in targets if kind == "key"),
    )


def _check(targets: Targets, book: InviteBook, args: argparse.Namespace) -> None:
    if args.rotate and not targets.invites:
        raise ValueError("--rotate puts a new invite in the place of another: name an invite to revoke")
    if args.out and len(targets.invites) > 1:
        raise ValueError(
            f"--out {args.out}: one file for {len(targets.invites)} invites; revoke them one after the other"
        )
    for invite in targets.invites:
        if book.invites[invite].local:
            raise ValueError(f"invite {invite} is that of this machine's own peers; to end them, end `shoal run`")


def _warn_of_lost_majority(targets: Targets, present: tuple[Peer, ...]) -> None:
    revoked = [peer for peer in present if invite_of(peer) in targets.invites or key_of(peer) in targets.keys]
    if 2 * len(revoked) >= len(present) > 0:
        print(
            f"warning: these are {len(revoked)} of {len(present)} peers of the run; without a majority the others need `shoal recover`"
        )


def _meant(word: str, book: InviteBook, labels: dict[str, Peer], present: tuple[Peer, ...]) -> tuple[str, str]:
    """('invite' or 'key', its id). ValueError: the word names nothing, or several."""
    if word in labels:
        return "key", key_of(labels[word])
    try:
        return "key", key_id_of(word)
    except ValueError:
        pass
    if len(word) == KEY_ID_CHARS and word.isalnum():
        return "key", word
    known = dict.fromkeys(key_of(peer) for peer in (*labels.values(), *present))
    matches = [("invite", each) for each in invite_named(word, book)]
    matches += [("key", key) for key in known if key.startswith(word) and len(word) >= 4]
    if len(matches) != 1:
        many = (
            f"may be {', '.join(f'{kind} {what}' for kind, what in matches)}"
            if matches
            else "is no invite and no peer of the run"
        )
        raise ValueError(f"{word} {many}; `shoal invite CONFIG --list` names the invites, `shoal status` the peers")
    return matches[0]


def _still(key: str, present: tuple[Peer, ...]) -> str:
    """The invite by which the key's holder could join again."""
    by = sorted({invite_of(peer) for peer in present if key_of(peer) == key})
    return f"; its invite {by[0]} still stands: revoke that too, or its holder can come again" if by else ""
