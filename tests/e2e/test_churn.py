"""A minute and a half of benchmarks/churn.py's ten: a SIGKILL and a join every 15 s, 8 peers, 4 stages, against the run without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.churn import churned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_under_churn_every_sample_counts_once_losses_stay_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """The longest pause is a matter of the machine here, and printed; benchmarks/churn.py measures it."""
    churn = churned(tmp_path, seconds=90.0, every_s=15.0)
    print(churn)
    assert churn.killed >= 1, churn
    assert churn.leftovers == ()
    assert (churn.lost, churn.twice) == (0, 0)
    assert churn.holds, churn
