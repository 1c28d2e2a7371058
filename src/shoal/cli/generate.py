"""`shoal generate PLACE PROMPT`: continue a text, with a checkpoint on this machine or through the peers of a living run.

A checkpoint is an ordinary Hugging Face model directory, so this is transformers' own sampling on the model as a whole;
it shows that the cut model and what was trained are what every other program will load. Through the peers no machine has the whole.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports asyncio and the network, which --help needs none of
    from shoal.api.generating import Sampling


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", help=PLACE)
    parser.add_argument("prompt", help="text to continue")
    options(parser)


PLACE = (
    "a directory of a model, a checkpoint or a PEFT adapter; of a run: while it lives through its peers, else its newest"
    " checkpoint; or @FILE, an invite to a run that lives"
)


def options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, for `shoal chat` too."""
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest (default %(default)s)")
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample among this many tokens; 0 = all (default %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="among the likeliest that have this probability (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default %(default)s)")
    parser.add_argument("--base", metavar="DIR", help="of adapters: where their base model lies now")
    parser.add_argument("--device", default="cpu", help="of a checkpoint: cpu, cuda or mps (default %(default)s)")
    parser.add_argument("--tokenizer", metavar="DIR", default="", help="of a living run, if not the one that it names")


def main(args: argparse.Namespace) -> int:
    from shoal.api import generating

    how = sampling(args)
    with generating.opened(args.place, args.base, args.device, args.tokenizer) as source:
        words = generating.Words(source.tokenizer)
        tokens = generating.asked(source, args.prompt)
        generating.refuse_long(source, tokens)
        words.show(args.prompt)
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not the text
            source.generate(tokens, how, words.take)
        words.end()
    return 0


def sampling(args: argparse.Namespace) -> Sampling:
    from shoal.api.generating import Sampling

    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: must be 1 or more")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: must be 0 or more; try 0.8")
    if args.top_k < 0:
        raise ValueError(f"--top-k {args.top_k}: must be 0 or more")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: must be above 0 and at most 1; try 0.95")
    return Sampling(
        tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
