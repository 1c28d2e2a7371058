"""Text that came from somebody else, made fit to be shown: on a terminal, in a log, in a report, in a file that people look at.

A reason, a title, a file's name or a device's name that another peer sent may hold control characters, and a terminal obeys them:
it moves the cursor, renames its window, writes over what stood there. They are shown as escapes instead (`\\x1b`, `\\u202e`).
Used where such text enters (runtime/records/record.py, launcher/watching/watch.py) and again where it is shown, so that no file is
trusted either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes that somebody else sent. RecursionError: lists in lists in lists."""

# C0, DEL and C1; marks and overrides of the writing direction; what ends a line or hides; halves of surrogate pairs, which no
# terminal can encode. Joiners (U+200C, U+200D) stay: Persian and many emoji are written with them.
_HOSTILE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
_ALL = re.compile(f"[{_HOSTILE}]")
_BUT_LINES = re.compile(f"(?![\n\t])[{_HOSTILE}]")
_IN_JSON = re.compile(f"(?![\x00-\x1f])[{_HOSTILE}]")


class Faults(ValueError):
    """Several things that a user can mend, in one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


def escaped(text: str) -> str:
    """One line, safe to show."""
    return _ALL.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """The same of several lines: ends of lines and tabs stay."""
    return _BUT_LINES.sub(_escape, text)


def escaped_json(data: bytes) -> bytes:
    """JSON that means the same to a program and holds nothing that a terminal obeys. JSON itself escapes what is below a space."""
    if data.isascii() and b"\x7f" not in data:
        return data
    return _IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()


def listed(error: ValueError | OSError) -> str:
    """The error as one line, several faults as a list."""
    if not isinstance(error, Faults) or len(error.lines) == 1:
        return describe(error)
    return "\n".join([f"{len(error.lines)} things are wrong:", *(f"  {escaped(line)}" for line in error.lines)])


def describe(error: ValueError | OSError) -> str:
    """The error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return escaped(f"{error.filename}: {error.strerror}")
    return escaped(" ".join(str(error).split())) or type(error).__name__


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
