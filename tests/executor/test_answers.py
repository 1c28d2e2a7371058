"""The known-answer test of this machine: the same for whatever executor, and another for what a run would compute otherwise."""

from __future__ import annotations

import pytest

from shoal import config as configuration
from shoal.core.leader.requests import unfit
from shoal.executor.answers import known_answers
from shoal.numerics import optimizer


def test_swapping_and_resident_machines_fit_each_other_and_other_types_do_not() -> None:
    resident, swapping, narrow = (
        known_answers(configuration.load(None, [word]))
        for word in ("device.executor=resident", "device.executor=swapping", "train.dtype=bfloat16")
    )
    assert resident.forward and not unfit(resident, swapping)
    assert "it computes in bfloat16, this run in float32" in unfit(resident, narrow)


@pytest.mark.parametrize("words", [["network.averaging=bf16"], ["train.moments=8bit"]])
def test_the_answers_are_of_the_codecs_and_moments_of_the_run(words: list[str]) -> None:
    assert unfit(known_answers(configuration.load(None, [])), known_answers(configuration.load(None, words)))


def test_a_step_with_other_bits_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.load(None, [])
    ours = known_answers(config)
    monkeypatch.setattr(optimizer, "_power", lambda base, exponent: base**exponent * (1 + 2.0**-22))
    assert "optimizer step" in unfit(ours, known_answers(config))
