"""Held-out text as samples: every token that can be predicted is predicted once, and the order is that of the text.

For evaluation. A row of a chat or prompt, or a preference pair, fills one sample; text is cut into windows of data.sequence tokens, the
last one filled up with tokens that do not count. With fewer samples than there are, those taken lie evenly in the text.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from shoal.config import Data
from shoal.runtime.data.rows import FILL
from shoal.runtime.data.sampling import Stored
from shoal.runtime.data.tokenizer import Tokens


def held_out(data: Data, path: str | Path) -> Data:
    """The run's [data], read from this file, directory or glob: lines of JSON where its rows are more than text, or it is named so."""
    name = str(path)
    lines = data.format != "text" or name.endswith((".jsonl", ".jsonl*"))
    return msgspec.structs.replace(
        data,
        source="jsonl" if lines else "text",
        path=name,
        field=data.field if lines and data.source in ("jsonl", "huggingface") else "",
        split=Data().split,
        factory="",
        weights={},
        digest="",
    )


class HeldOut:
    """Samples by number, `count` of them."""

    def __init__(self, tokens: Stored, sequence: int, samples: int, digest: str, describe: str) -> None:
        self._tokens, self._sequence = tokens, sequence
        whole = -(-(len(tokens) - 1) // sequence) if len(tokens) else 0
        self.count = min(samples or whole, whole)
        self._whole = whole
        self.digest = digest
        self.describe = describe

    def sample(self, i: int) -> Tokens:
        """(sequence + 1,) int64; ~id for a token whose loss does not count. From `count` on none does."""
        if i >= self.count:
            return FILL.repeat(self._sequence + 1)
        start = i * self._whole // self.count * self._sequence
        tokens = self._tokens[start : start + self._sequence + 1].astype(np.int64)
        return np.concatenate([tokens, FILL.repeat(self._sequence + 1 - len(tokens))])
