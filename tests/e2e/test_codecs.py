"""A run that encodes what it sends has the bits of one process that encodes the same: losses, norms, every replica's parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests import reference
from tests.pipeline import Pipeline
from tests.runtime.test_node import TINY, Swarm

from shoal import trace
from shoal.config import Network


@pytest.mark.parametrize("boundary", [pytest.param("none", marks=pytest.mark.slow), "maxout-2x"])
def test_a_run_with_codecs_and_one_process_get_the_same_bits(
    boundary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    monkeypatch.chdir(tmp_path)
    changed = msgspec.structs.replace
    config = changed(
        TINY,
        run=changed(TINY.run, stages=2, peers=4, steps=2),
        model=changed(TINY.model, boundary=boundary),
        train=changed(TINY.train, batch=16),
        network=Network(activations="int4", gradients="int8", averaging="int8"),
    )
    swarm = Swarm(config, tmp_path)
    for _ in range(config.run.peers):
        swarm.add()
    finishes = asyncio.run(swarm.run())
    swarm.close()
    assert all(finish.ok for finish in finishes)
    commits = [step.commit for step in swarm.books().steps]
    process = Pipeline(config, swarm.dataset)
    wanted = {}
    for commit in commits:
        names = tuple(tuple(share.peer for share in group) for group in commit.groups)
        trained = process.train(reference.as_recorded(commit), names)
        assert (trained.loss, trained.norm) == (commit.loss, commit.norm), commit.step
        wanted |= {(stage, commit.step + 1): digest for stage, digest in enumerate(trained.digests)}
    trace.merge([[path] for path in sorted(tmp_path.glob("[0-9]*.jsonl"))], tmp_path / "trace.jsonl")
    held = [one for one in reference.held(tmp_path / "trace.jsonl") if one.step > 0]
    there = {(one.stage, one.step) for one in held}
    last = {
        (stage, config.run.steps) for stage in range(2)
    }  # a peer may be told that the run is over before its last step is done
    assert wanted.keys() - last <= there <= wanted.keys()
    assert [one for one in held if one.digest != wanted[one.stage, one.step]] == []
    if all(len(group) > 1 for group in commits[0].groups):
        assert any(
            one.left() is None and one._residual is not None for each in process.averaging for one in each.values()
        )
