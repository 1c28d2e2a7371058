"""A peer that beats and answers, and whose tensors do not arrive, as behind a router that drops large packets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.test_faults import CONFIG, Swarm
from tests.e2e.test_run import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IMPATIENT = CONFIG.replace("min_request_timeout_s = 20.0", "min_request_timeout_s = 3.0")


def test_a_peer_whose_tensors_vanish_is_found_out_and_the_others_go_on(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, IMPATIENT)
    try:
        wait_for(lambda: swarm.going() and (swarm.run_directory / "peers.json").exists() and swarm.locals.started)
        swarm.whole()
        (three,) = swarm.stages_with(3)[:1]
        leads = {peer.label for peer in swarm.locals.peers if peer.leads}
        able = [seat for seat in swarm.locals.members if seat.stage == three and seat.label and seat.label not in leads]
        label, began = able[0].label, len(swarm.commits())
        swarm.chaos(f'kind = "hole"\nwho = "{label}"\ndirection = "out"\nfor = "150 s"')
        # It may be before a screen says that the run stands still
        assert re.search(rf"removed +{label}: removed from the run", swarm.notes())
        assert len(swarm.commits()) > began + 3
        wait_for(lambda: swarm.going() and label in {seat.label for seat in swarm.locals.members})
        swarm.trained(2)
        swarm.assert_every_sample_once()
    finally:
        if swarm.run.poll() is None:
            swarm.run.terminate()
            swarm.run.wait(60)
