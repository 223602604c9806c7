"""The monitor under the load of a full node, for a short time; ``make bench-soak`` does the same for long."""

from __future__ import annotations

import pytest

from bench.soak import measure


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_no_event_of_a_hundred_containers_is_lost() -> None:
    figures = measure(seconds=5, idle_s=0.5)
    told = {name: figures[name] for name in ("events_missing", "events_out_of_turn", "records_lost")}
    assert {"events_missing": 0, "events_out_of_turn": 0, "records_lost": 0} == told
    assert figures["events"] >= 25_000
