"""What a replica does with a request for a hop, as a table: the order of the questions is the rule."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.core.test_server import ME, OTHER, OWNER, SETTINGS, a_view

from shoal.core.messages import Apply, Backward
from shoal.core.replica_state import ReplicaState
from shoal.core.server.verdict import AnswerFromBooks, Facts, Ignore, Postpone, Refuse, Request, Take, judge

NOTHING, HERE, DECLINED = Facts(False, False), Facts(False, True), Facts(True, False)
RIGHT = Backward(0, 0, 0, 1, 7, 1, input_from=(ME, OWNER))  # of microbatch 0, which is OWNER's, at the last stage
APPLYING = {"applying": Apply("s/1", 0, 1, 1.0, False)}


@pytest.mark.parametrize(
    ("changes", "peer", "facts", "replica", "verdict"),
    [
        ({}, OWNER, NOTHING, {}, Take()),
        ({"epoch": 1}, OWNER, HERE, {}, Ignore()),
        ({}, OWNER, DECLINED, {}, Ignore()),
        ({}, OWNER, HERE, {}, AnswerFromBooks()),
        ({}, OWNER, HERE, APPLYING, AnswerFromBooks()),  # what is here is never declined
        ({"stage": 0}, OWNER, HERE, {}, AnswerFromBooks()),
        ({}, OTHER, HERE, {}, Ignore()),  # nor by another, who may own it in a view not seen yet
        ({"view": 2}, OWNER, DECLINED, {}, Ignore()),
        ({"view": 2}, OWNER, NOTHING, {}, Postpone()),
        ({"view": 2}, OTHER, NOTHING, {}, Postpone()),
        ({"step": 1}, OWNER, NOTHING, {}, Ignore()),
        ({}, OTHER, NOTHING, {}, Ignore()),
        ({}, OWNER, NOTHING, APPLYING, Postpone()),
        ({"stage": 0}, OWNER, NOTHING, {}, Refuse("stage 0 is not served here", faulty=False)),
        ({"input_from": ()}, OWNER, NOTHING, {}, Refuse("0 holders named where 1 belong", faulty=True)),
    ],
)
def test_a_request_is_judged_by_its_view_its_owner_and_what_is_here(
    changes: dict[str, Any], peer: str, facts: Facts, replica: dict[str, Any], verdict: object
) -> None:
    state = ReplicaState(view=a_view(), has_state=True, stage=1, **replica)
    request = Request(peer, msgspec.structs.replace(RIGHT, **changes), ("tokens",))
    assert judge(request, ME, state, SETTINGS, facts) == verdict


def test_wrong_blobs_are_refused_and_their_sender_reported() -> None:
    state = ReplicaState(view=a_view(), has_state=True, stage=1)
    for request in (Request(OWNER, RIGHT, ()), Request(OWNER, RIGHT, ("tokens",), "values are not finite")):
        verdict = judge(request, ME, state, SETTINGS, NOTHING)
        assert isinstance(verdict, Refuse) and verdict.faulty and verdict.reason
