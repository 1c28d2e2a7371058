"""Every decoder of bytes from outside takes them or refuses them in words, whatever they are."""

from __future__ import annotations

import random

import pytest
from tests.fuzz.decoders import CORPUS, TARGETS, Target, attempt, corpus, mutated

MUTATIONS = 400


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_seeds_are_taken(target: Target) -> None:
    taken = [attempt(target, data) for data in target.seeds()]
    assert any(taken), f"none of {len(taken)}: nothing behind the first check is tried"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_comes_is_taken_or_refused(target: Target) -> None:
    chance = random.Random(target.name)
    seeds = corpus(target)
    for data in seeds:
        attempt(target, data)
    for _ in range(MUTATIONS):
        attempt(target, mutated(chance.choice(seeds), chance))


def test_every_folder_of_the_corpus_is_of_a_decoder() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= {target.name for target in TARGETS}
