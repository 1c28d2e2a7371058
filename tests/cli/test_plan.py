"""A search for a plan that takes long says so while it goes on, and no longer."""

from __future__ import annotations

import threading

import pytest

from shoal.cli import plan


def test_a_long_search_is_told_again_and_again_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FIRST_S", 0.001)
    monkeypatch.setattr(plan, "AGAIN_S", 0.001)
    seconds, second = list[float](), threading.Event()

    def tell(passed_s: float) -> None:
        seconds.append(passed_s)
        if len(seconds) == 2:
            second.set()

    with pytest.raises(KeyboardInterrupt), plan.told_while_long(tell):
        assert second.wait(60.0)
        raise KeyboardInterrupt
    assert 0.0 < seconds[0] < seconds[1]
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    monkeypatch.setattr(plan, "FIRST_S", 60.0)
    seconds.clear()
    with plan.told_while_long(tell):
        pass
    assert seconds == []
