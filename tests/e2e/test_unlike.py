"""Real processes of a plan whose lines are unlike: who owns what of a round follows them, and the bits stay those of one process."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tests import reference
from tests.e2e.test_identity import assert_same_bits
from tests.e2e.test_pieces import CONFIG, MICROBATCHES, PEERS, PIECES_BYTES, STEPS, Run

from shoal import trace
from shoal.core.allreduce.layout import SLICES
from shoal.core.messages import Add, Do

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDTHS = {"a": 50_000, "b": 12_500, "c": 25_000, "d": 50_000}  # kB/s; "b" and "c" own nothing


@pytest.mark.parametrize("round_bytes", [1 << 30, PIECES_BYTES])
def test_wide_lines_own_the_round_and_every_bit_is_that_of_one_process(tmp_path: Path, round_bytes: int) -> None:
    (tmp_path / "whole.toml").write_text(CONFIG)
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(5000)))
    stage = {"first": 0, "end": 2, "peers": list(WIDTHS)}
    (tmp_path / "plan.json").write_text(
        json.dumps({"layers": 2, "stages": [stage], "line_rates": list(WIDTHS.values())})
    )
    run = Run(tmp_path, "unlike", f"run.averaging_memory_bytes={round_bytes}", plan=tmp_path / "plan.json")
    left = run.left()
    assert_same_bits(left, reference.commits(left.directory))
    for commit in reference.commits(left.directory):
        (group,) = commit.groups
        assert sorted(itertools.chain(*(share.indices for share in group))) == list(range(MICROBATCHES))
        assert sorted(share.line_rate for share in group) == sorted(WIDTHS.values())
    seat, adds = dict[str, int](), dict[int, int]()
    for item in trace.read(left.trace):
        if isinstance(item, trace.Header):
            seat[item.peer] = item.settings.seat
        elif isinstance(item, trace.TraceRecord):
            added = sum(isinstance(one, Do) and isinstance(one.task, Add) for one in item.commands)
            adds[seat[item.peer]] = adds.get(seat[item.peer], 0) + added
    assert len(adds) == PEERS and adds[1] == adds[2] == 0
    assert adds[0] == adds[3] and adds[0] % (STEPS * SLICES) == 0 < adds[0]
