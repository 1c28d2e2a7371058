"""With which code `shoal` ends, for every command. docs/operations.md has the same table; a test compares."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USER_ERROR = 2
    CHANGE_OVER = 3
    OUT_OF_TIME = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
    INTERRUPTED = 130  # 128 + SIGINT, as shells count it


MEANING = {
    ExitCode.OK: "all steps are committed and the account balances; with `shoal plan --replan`: no other plan pays;"
    " with `shoal doctor`: nothing is bad",
    ExitCode.FAILED: "not so; the last lines say why",
    ExitCode.USER_ERROR: "something you can mend, in one line, or several things as a list (`--traceback` shows where it came from)",
    ExitCode.CHANGE_OVER: "`shoal plan --replan`: another plan is worth changing over to",
    ExitCode.OUT_OF_TIME: "`--time` is over and everything is saved; `--resume` continues",
    ExitCode.INTERRUPTED: "interrupted",
}


def table() -> str:
    """As Markdown."""
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| {code:d} | {text} |" for code, text in MEANING.items())])
