"""An invite as a command takes it: by its file, pasted, through a pipe, from the environment, or as it is. For join, doctor and probe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

INVITE_VARIABLE = "SHOAL_INVITE"  # a peer gets its invite by its standard input, and hands nothing on to what it starts
MOST_CHARS = 10_000  # that are read, more than any invite has
HOW = (
    f"name it as `@FILE`, `-` (standard input), {INVITE_VARIABLE} in the environment, or as it is (then `ps` shows it)"
)


def without_invite(words: Sequence[str]) -> list[str]:
    """The settings among a command's words. A file's name may hold a sign of equality."""
    return [word for word in words if "=" in word and not word.startswith("@")]


def invite_text(words: Sequence[str]) -> str:
    """The invite's text, wherever it was put. ValueError: nowhere, or in several places."""
    settings = without_invite(words)
    texts = [word for word in words if word not in settings]
    if len(texts) > 1:
        raise ValueError(f"one invite, not {len(texts)}: {HOW}")
    word = texts[0] if texts else os.environ.get(INVITE_VARIABLE, "")
    if not word:
        raise ValueError(f"no invite: {HOW}")
    if word == "-":
        return _from_input()
    if not word.startswith("@"):
        return word
    path = Path(word[1:]).expanduser()
    if os.name == "posix" and path.stat().st_mode & 0o077:
        print(f"warning: others can read the invite in {path}; chmod 600 {path}", file=sys.stderr)
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MOST_CHARS)


def _from_input() -> str:
    """One line that a person pastes; all of it from a pipe or a file."""
    if not sys.stdin.isatty():
        return sys.stdin.read(MOST_CHARS)
    print("paste the invite: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline(MOST_CHARS)
