"""`shoal generate CHECKPOINT PROMPT`: sample from a checkpoint, or from the newest one of a run.

A checkpoint is an ordinary Hugging Face model directory, so this is transformers' own sampling on the model as a whole;
it shows that the cut model and what was trained are what every other program will load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from shoal.escaping import escaped_lines
from shoal.launcher.files import saved


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a checkpoint directory, or the directory of a run, for its newest checkpoint"
    )
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest (default %(default)s)")
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample among this many tokens; 0 = all (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default %(default)s)")
    parser.add_argument("--base", metavar="DIR", help="of adapters: where their base model lies now")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps (default %(default)s)")


def main(args: argparse.Namespace) -> int:
    _check(args)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not the text
        text = sample(saved.checkpoint(args.checkpoint), args)
    print(escaped_lines(text))  # a model says whatever its data did
    return 0


def sample(path: Path, args: argparse.Namespace) -> str:
    """The prompt and what the model adds to it."""
    import torch
    import transformers

    from shoal.model import sequential

    if json.loads((path / "config.json").read_text()).get("model_type") == sequential.MODEL_TYPE:
        raise ValueError(
            f"{path}: a model of your own (model.factory); load it with shoal.Checkpoint({str(path)!r}).model()"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = saved.model_of(path, args.base).to(args.device)
    except (OSError, ValueError, KeyError) as error:  # all of them are how transformers says that a file is wrong
        raise ValueError(f"{path}: not a model that can be loaded: {error}") from error
    tokens = tokenizer(args.prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if tokens.numel() == 0:
        tokens = tokenizer("\n", return_tensors="pt", add_special_tokens=False).input_ids
    tokens = tokens.to(device=args.device, dtype=torch.int64)
    torch.manual_seed(args.seed)
    chance = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k} if args.temperature else {}
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=args.tokens,
            pad_token_id=tokenizer.pad_token_id or 0,
            **(chance or {"do_sample": False}),
        )
    text = str(tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))
    return f"{args.prompt}{text}".replace("\0", "\n")  # NUL stands between documents in the byte vocabulary


def _check(args: argparse.Namespace) -> None:
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: must be 1 or more")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: must be 0 or more; try 0.8")
    if args.top_k < 0:
        raise ValueError(f"--top-k {args.top_k}: must be 0 or more")
