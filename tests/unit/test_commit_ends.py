"""How a commit ends by what the server says of it: every code of docs/ledger.md, as the server's own list has it.

What a real server was made to say stands in tests/integration/test_bus_commit_codes.py. Not 10008: it is said while a
stream has no leader, and no test can hold an election open.
"""

import json

import pytest

from shared.bus import ApiError
from shared.bus.atomic import end_of, may_pass
from shared.bus.jetstream import without_error
from shared.bus.msg import Msg
from shared.effects import CommitOutcome


def said(status: int, code: int, description: str) -> ApiError:
    """The answer as it comes from the server, decoded."""
    body = {"stream": "KV_rt_ledger", "seq": 0, "error": {"code": status, "err_code": code, "description": description}}
    with pytest.raises(ApiError) as refused:
        without_error("$KV.rt_ledger.a", Msg("_INBOX.1", json.dumps(body).encode()))
    return refused.value


@pytest.mark.parametrize(
    ("status", "code", "description", "again", "end"),
    [
        (400, 10071, "wrong last sequence: 4", False, "conflict"),
        (400, 10164, "wrong last sequence", False, "conflict"),
        (400, 10176, "atomic publish batch is incomplete", True, "conflict"),
        (503, 10008, "JetStream system temporarily unavailable", True, "conflict"),
        (429, 10210, "atomic publish too many inflight", True, "refused"),
        (503, 10023, "insufficient resources", True, "refused"),
        (503, 10077, "maximum bytes exceeded", True, "refused"),
        (400, 10054, "message size exceeds maximum allowed", False, "refused"),
        (400, 10109, "invalid operation on sealed stream", False, "refused"),
        (400, 10166, "per-message TTL is disabled", False, "refused"),
        (400, 10174, "atomic publish is disabled", False, "refused"),
        (400, 10199, "atomic publish batch is too large: 1000", False, "refused"),
        (400, 10201, "atomic publish batch contains duplicate message id", False, "refused"),
    ],
)
def test_every_code_has_its_end(status: int, code: int, description: str, again: bool, end: str) -> None:
    error = said(status, code, description)
    assert (again, CommitOutcome(end)) == (may_pass(error), end_of(error))
    assert f"$KV.rt_ledger.a: {description} ({code})" == str(error)
