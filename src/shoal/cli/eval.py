"""`shoal eval PLACE TEXT... [a.b=c ...]`: the loss and perplexity of a checkpoint on text it was not trained on; or scores in tasks.

    shoal eval runs/NAME held-out.jsonl
    shoal eval ./model wiki.txt news.txt data.sequence=1024 --json
    shoal eval runs/NAME --tasks arc_easy,hellaswag

Text is read as in training: the run's tokenizer, format and data.sequence. Each token that can be predicted counts once; of a chat the
assistant's alone. Of preference pairs: the loss of DPO, the share of pairs that are ordered as they should be, and the margin of rewards.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # torch takes seconds to import
    from shoal.api.evaluating import Evaluation

SHOW_S = 2.0  # between two lines of progress


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place", help="a checkpoint or any model directory; or the directory of a run, for its newest checkpoint"
    )
    parser.add_argument(
        "words", nargs="*", metavar="TEXT | a.b=c", help="files, directories or globs of held-out text; and settings"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="N",
        help="at most so many samples of each, evenly spaced (default: all)",
    )
    parser.add_argument(
        "--tasks",
        default="",
        metavar="A,B",
        help="instead of texts: tasks of lm-evaluation-harness, such as arc_easy,hellaswag",
    )
    parser.add_argument("--tasks-in", metavar="DIR", help="a directory with tasks of your own, in the harness's YAML")
    parser.add_argument(
        "--shots", type=int, metavar="N", help="examples before each question (default: as the task says)"
    )
    parser.add_argument("--base", metavar="DIR", help="of adapters: where their base model lies now")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each text")


def main(args: argparse.Namespace) -> int:
    if args.samples < 0:
        raise ValueError(f"--samples {args.samples}: must be 1 or more, or left out for all")
    if args.tasks:
        return _tasks(args)
    if not any("=" not in word for word in args.words):
        raise ValueError(f"nothing to evaluate {args.place} on; name files of held-out text, or tasks with --tasks")
    from shoal.api.evaluating import evaluate

    shown_s = time.monotonic()

    def progress(done: int, count: int, loss: float) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= SHOW_S:
            shown_s = time.monotonic()
            print(f"{done:,} of {count:,} samples: loss {loss:.4f} so far", file=sys.stderr, flush=True)

    texts = [word for word in args.words if "=" not in word]
    settings = [word for word in args.words if "=" in word]
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no result
        results = evaluate(args.place, texts, *settings, samples=args.samples, base=args.base, on_progress=progress)
    for result in results:
        if args.json:
            fields = {name: value for name, value in msgspec.structs.asdict(result).items() if value is not None}
            print(msgspec.json.encode(fields | _perplexity(result)).decode())
            continue
        print(f"{result.path}: loss {result.loss:.4f}, {_beside(result)}")
    return 0


def _perplexity(result: Evaluation) -> dict[str, float]:
    return {} if result.accuracy is not None else {"perplexity": result.perplexity}


def _beside(result: Evaluation) -> str:
    """What is said of a text beside its loss."""
    if result.accuracy is not None:
        return f"accuracy {result.accuracy:.1%}, margin {result.margin:.4g} ({result.samples:,} preference pairs)"
    return f"perplexity {result.perplexity:.4g} ({result.tokens:,} tokens in {result.samples:,} samples)"


def _tasks(args: argparse.Namespace) -> int:
    if args.words:
        raise ValueError(f"{args.words[0]}: texts and --tasks are measured apart; leave one out")
    if args.shots is not None and args.shots < 0:
        raise ValueError(f"--shots {args.shots}: must be 0 or more")
    from shoal.api.harness import scores

    names = [name for name in args.tasks.split(",") if name]
    with contextlib.redirect_stdout(sys.stderr):
        results = scores(
            args.place, names, folder=args.tasks_in, shots=args.shots, samples=args.samples, base=args.base
        )
    for score in results:
        if args.json:
            print(msgspec.json.encode(score).decode())
            continue
        error = "" if score.error is None else f" ± {score.error:.4f}"
        print(f"{score.task}: {score.metric} {score.value:.4f}{error} ({score.samples:,} samples)")
    return 0
