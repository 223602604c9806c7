"""Moves that nobody waits for: by policy, so that a larger block of devices is free."""

from __future__ import annotations

from typing import Any

import pytest

from services.placer.core.intents import Rules
from tests.unit.test_placer_moving import WIDE, fragmented, moves_told


@pytest.mark.parametrize("policy, wide", [("widen", "placed"), ("waiting", "queued"), ("off", "queued")])
def test_while_nobody_waits_others_move_only_where_the_policy_is_to_widen(policy: Any, wide: str) -> None:
    world = fragmented(Rules(defragment=policy))
    world.release("p1", "wide")
    world.pass_time(120)
    assert wide == world.place("p1", **WIDE | {"request_id": "next"}).outcome
    world.check_settled()


def test_where_no_move_widens_anything_nobody_moves() -> None:
    world = fragmented(Rules(defragment="widen"))
    world.release("p1", "wide")
    world.place("p1", request_id="e", gpu={"share": 1.0})
    world.pass_time(120)
    assert [] == [each for name in ("c", "d", "e") for each in moves_told(world, name)]
