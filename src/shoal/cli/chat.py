"""`shoal chat PLACE`: talk with a model by its chat template, with a checkpoint on this machine or through the peers of a living run.

Ctrl-C ends an answer; at the prompt, like the end of input, it ends the chat.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import msgspec

from shoal.api import generating
from shoal.api.generating import Source, Words
from shoal.cli import generate

ASK = "> "


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", help=generate.PLACE)
    parser.add_argument("--system", default="", help="what the model is told before the chat")
    generate.options(parser)


def main(args: argparse.Namespace) -> int:
    how = generate.sampling(args)
    with generating.opened(args.place, args.base, args.device, args.tokenizer) as source:
        if not source.tokenizer.chat_template:
            raise ValueError(
                f"{args.place}: its tokenizer has no chat template, so that nobody knows how a chat is written for this model;"
                " continue a text with `shoal generate`"
            )
        chat: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
        for number, line in enumerate(iter(_line, None)):
            chat.append({"role": "user", "content": line})
            tokens = generating.written(source, chat)
            generating.refuse_long(source, tokens)
            answer = _answer(source, tokens, msgspec.structs.replace(how, seed=how.seed + number))
            chat.append({"role": "assistant", "content": answer})
    return 0


def _line() -> str | None:
    """What the person says; None at the end."""
    if sys.stdin.isatty():
        print(ASK, end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    return line.rstrip("\n") if line else None


def _answer(source: Source, tokens: list[int], how: Any) -> str:
    """Shown as it is made, and what of it there is when the person interrupts."""
    words, added = Words(source.tokenizer), list[int]()

    def take(token: int) -> None:
        added.append(token)
        words.take(token)

    with contextlib.suppress(KeyboardInterrupt), contextlib.redirect_stdout(sys.stderr):
        source.generate(tokens, how, take)
    words.end()
    return str(source.tokenizer.decode(added, skip_special_tokens=True))
