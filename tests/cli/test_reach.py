"""Where a founder's peers listen, and which invites are refused."""

from __future__ import annotations

import pytest

from shoal.config import from_tree
from shoal.launcher import reach


def test_only_a_run_that_expects_other_machines_opens_a_port_to_them() -> None:
    config = from_tree({"run": {"peers": 3, "stages": 1}})
    assert reach.private(config, 3).network.host == "127.0.0.1"
    assert reach.private(config, 2).network.host == "auto"
    chosen = from_tree({"run": {"peers": 3, "stages": 1}, "network": {"host": "192.0.2.1"}})
    assert reach.private(chosen, 3) == chosen


def test_an_invite_that_leads_to_this_machine_alone_is_refused_unless_that_was_asked_for() -> None:
    for addresses in (("127.0.0.1:4711",), ("/ip4/127.0.0.1/tcp/4711/p2p/x", "127.0.0.1:1")):
        with pytest.raises(ValueError, match=r"--resume network\.host=0\.0\.0\.0"):
            reach.refuse_private(from_tree({}), addresses)
        reach.refuse_private(from_tree({"network": {"host": "127.0.0.1"}}), addresses)
    reach.refuse_private(from_tree({}), ("127.0.0.1:4711", "192.0.2.1:4711"))
