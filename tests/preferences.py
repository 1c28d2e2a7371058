"""Made-up preference pairs of answers in small and in capital letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LETTERS = "abcdefghijklmnopqrst"


def a_pair(number: int) -> dict[str, Any]:
    """Of two answers of different lengths, of which either may be the longer one."""
    letter = LETTERS[number % len(LETTERS)]
    word = letter * (1 + number * 7 % 5)
    return {"prompt": f"{letter}?", "chosen": word.upper(), "rejected": word[: 1 + number % 3]}


def chatted(pair: dict[str, Any]) -> dict[str, Any]:
    """The same as messages."""
    return {
        "prompt": [{"role": "user", "content": pair["prompt"]}],
        **{name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")},
    }


def some_pairs(path: Path, count: int, *, chats: bool = False) -> str:
    pairs = map(a_pair, range(count))
    path.write_text("".join(json.dumps(chatted(pair) if chats else pair) + "\n" for pair in pairs))
    return str(path)


def a_choice(letter: str, count: int) -> dict[str, str]:
    """Which of two answers of one length is chosen depends on the letter: of the first ten the capital one."""
    small, capital = letter * count, letter.upper() * count
    chosen, rejected = (capital, small) if LETTERS.index(letter) < 10 else (small, capital)
    return {"prompt": f"{letter}{count}?", "chosen": chosen, "rejected": rejected}


def some_choices(folder: Path) -> Path:
    """Writes choices.jsonl to train on, and held.jsonl with other prompts, whose path is returned."""
    rows: dict[str, list[str]] = {"choices.jsonl": [], "held.jsonl": []}
    for number, letter in enumerate(LETTERS):
        for count in range(1, 6):
            name = "held.jsonl" if (number + count) % 5 == 0 else "choices.jsonl"
            rows[name].append(json.dumps(a_choice(letter, count)) + "\n")
    for name, lines in rows.items():
        (folder / name).write_text("".join(lines))
    return folder / "held.jsonl"


def preferred(model: Any, path: Path) -> float:
    """The share of pairs whose chosen answer a model of bytes gives the larger probability."""
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    return sum(_likelihood(model, one, "chosen") > _likelihood(model, one, "rejected") for one in pairs) / len(pairs)


def _likelihood(model: Any, pair: dict[str, str], name: str) -> float:
    ids: Tensor = torch.tensor([*(pair["prompt"] + pair[name]).encode(), 0])[None]
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0].double().log_softmax(-1)
    start = len(pair["prompt"])
    return float(logits.gather(1, ids[0, 1:, None])[start - 1 :].sum())
