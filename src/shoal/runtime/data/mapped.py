"""The user's own dataset, by the function that data.factory names: numbered samples of tokens, in a seeded order.

The function returns a map-style dataset: `len(dataset)` samples, `dataset[i]` with data.sequence + 1 token ids, or a row with them under
"input_ids". Every peer calls it, so it must return the same samples everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal import importing
from shoal.config import Config
from shoal.runtime.data.sampling import permuted
from shoal.runtime.data.tokenizer import Tokens

SETTING = "data.factory"
HASHED = 64  # samples, evenly spaced, that the digest is made from: all of them may take hours to read


class MappedSamples:
    """Every epoch visits each sample once, in an order of its own. ValueError: it is no map-style dataset of tokens."""

    def __init__(self, config: Config) -> None:
        self._where = f"{SETTING} = {config.data.factory!r}"
        function = importing.load(config.data.factory, SETTING)
        try:
            self._dataset: Any = function()
        except Exception as error:  # the user's own code
            raise ValueError(f"{self._where} failed: {error!r}") from error
        kind = type(self._dataset).__name__
        for method, what in (("__len__", "how many samples it has"), ("__getitem__", "sample i")):
            if not hasattr(self._dataset, method):
                raise ValueError(
                    f"{self._where} returns a {kind} without {method}, so nobody can ask it for {what}; return a map-style "
                    "dataset, such as a list of token ids per sample, or a torch Dataset"
                )
        self.count, self._length, self._seed = len(self._dataset), config.data.sequence + 1, config.run.seed
        if self.count < 1:
            raise ValueError(f"{self._where} returns a {kind} without samples; it needs one at least")
        sha = hashlib.sha256(str(self.count).encode())
        for number in np.linspace(0, self.count - 1, min(self.count, HASHED)).astype(int).tolist():
            sha.update(self._tokens(number).tobytes())
        self.digest = sha.hexdigest()
        self.describe = f"{config.data.factory}: {self.count} samples, sha256 of {HASHED} of them {self.digest[:16]}"

    def sample(self, i: int) -> Tokens:
        epoch, position = divmod(i, self.count)
        return self._tokens(permuted(position, self.count, (self._seed, epoch)))

    def _tokens(self, number: int) -> Tokens:
        item = self._dataset[number]
        item = item["input_ids"] if isinstance(item, Mapping) and "input_ids" in item else item
        try:
            tokens = np.asarray(item)
        except Exception as error:  # of any type, as the user's dataset has it
            raise ValueError(f"{self._where}: sample {number} is no array of token ids: {error!r}") from error
        if tokens.shape != (self._length,) or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{self._where}: sample {number} is a {type(item).__name__} of shape {tokens.shape} and type {tokens.dtype}; "
                f"it must be data.sequence + 1 = {self._length} token ids (integers)"
            )
        if tokens.min() < 0:
            raise ValueError(f"{self._where}: sample {number} holds the token id {tokens.min()}; ids are 0 or more")
        return tokens.astype(np.int64)
