"""Gangs as a bridge's core handles them: nothing is held for a part of one, one request is for all."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge import sentences
from services.kube_bridge.calls import AskConfirm, AskPlace, AskRelease, PlaceAnswered
from services.kube_bridge.core import SOON
from services.kube_bridge.gangs import LARGEST
from shared.messages import Placement, PlaceReply, PlaceRequest
from tests.kube_bridge_world import SECOND, Bridge, answer, asked, rejected, wanting, written


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


def member(number: int, size: object = 3, gang: str | None = "g", **more: Any) -> dict[str, Any]:
    found = wanting(f"m-{number}", f"u-{number}", **more)
    labels = {"laxity.dev/gang": gang, "laxity.dev/gang-size": str(size)}
    found["metadata"]["labels"] = {name: text for name, text in labels.items() if text}
    return found


def held(request: PlaceRequest, *nodes: str, generation: int = 1) -> PlaceReply:
    placements = tuple(
        Placement(replica=number, node=node, devices=(f"{node}-gpu-0",), generation=generation)
        for number, node in enumerate(nodes)
    )
    return PlaceReply(outcome="held", request_id=request.request_id, generation=generation, placements=placements)


def test_a_member_waits_without_a_question_until_all_are_there(bridge: Bridge) -> None:
    for number in (1, 2):
        bridge.show(member(number))
        _, effects = bridge.filter(member(number))
        assert {sentences.GANG} == set(answer(effects)["FailedAndUnresolvableNodes"].values())
        assert ["GangIncomplete"] == [each.condition.reason for each in written(effects)]
    bridge.show(member(3, gang="other"))
    assert [] == [each for each in bridge.filter(member(2))[1] if isinstance(each, AskPlace)]


def test_the_last_one_asks_for_all_and_each_gets_its_own_node(bridge: Bridge) -> None:
    for number in (1, 2, 3):
        bridge.show(member(number))
    token, effects = bridge.filter(member(3))
    request = asked(effects)
    assert request.pods is not None
    assert (3, ["u-1", "u-2", "u-3"]) == (request.replicas, [each.uid for each in request.pods])
    assert ["n3"] == answer(bridge.tell(PlaceAnswered(token, held(request, "n1", "n2", "n3"))))["NodeNames"]
    for number in (1, 2):
        _, effects = bridge.filter(member(number))
        assert [f"n{number}"] == answer(effects)["NodeNames"], "to ask again would move them all"
    for number in (1, 2, 3):
        token, effects = bridge.bind(member(number), f"n{number}")
        assert [AskConfirm(token, str(request.request_id), 1)] == effects


def test_one_that_was_asked_about_before_all_were_seen_is_nudged(bridge: Bridge) -> None:
    for number in (1, 2):
        bridge.show(member(number))
    bridge.filter(member(3))
    assert [] == written(bridge.tick(SOON, 1))
    bridge.show(member(3))
    assert [("u-3", True)] == [(each.uid, each.probed) for each in written(bridge.tick(SOON, 1))]
    assert [] == written(bridge.tick(SOON, 1))


def test_a_hold_that_may_be_over_is_asked_for_again_with_the_same_id(bridge: Bridge) -> None:
    for number in (1, 2, 3):
        bridge.show(member(number))
    token, effects = bridge.filter(member(3))
    first = asked(effects)
    bridge.tell(PlaceAnswered(token, held(first, "n1", "n2", "n3")))
    bridge.now += 16 * SECOND

    assert first == asked(bridge.filter(member(1))[1])


def test_another_pod_in_the_place_of_one_makes_another_request(bridge: Bridge) -> None:
    for number in (1, 2, 3):
        bridge.show(member(number))
    first = asked(bridge.filter(member(3))[1])
    bridge.delete(member(3))
    another = member(3)
    another["metadata"]["uid"] = "u-4"
    bridge.show(another)

    assert first.request_id != asked(bridge.filter(another)[1]).request_id


def test_what_cannot_be_placed_together_is_refused_for_all_of_its_kind(bridge: Bridge) -> None:
    for number in (1, 2, 3):
        bridge.show(member(number))
    token, _ = bridge.filter(member(3))
    bridge.tell(PlaceAnswered(token, rejected("g", "not_now.nodes")))

    assert [] == [each for each in bridge.filter(member(1))[1] if isinstance(each, AskPlace)]


def test_a_hold_for_all_is_given_back_when_one_of_them_goes(bridge: Bridge) -> None:
    for number in (1, 2, 3):
        bridge.show(member(number))
    token, effects = bridge.filter(member(3))
    bridge.delete(member(1))
    request = asked(effects)

    assert AskRelease(str(request.request_id)) in bridge.tell(PlaceAnswered(token, held(request, "n1", "n2", "n3")))


def test_bound_and_leaving_pods_are_no_members(bridge: Bridge) -> None:
    leaving = member(2)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for found in (member(1, node="n1"), leaving, member(3), member(4)):
        bridge.show(found)

    assert {sentences.GANG} == set(answer(bridge.filter(member(4))[1])["FailedAndUnresolvableNodes"].values())


@pytest.mark.parametrize(
    "found, field",
    [
        (member(1, size=0), "labels[laxity.dev/gang-size]"),
        (member(1, size="many"), "labels[laxity.dev/gang-size]"),
        (member(1, size=""), "labels[laxity.dev/gang-size]"),
        (member(1, size=LARGEST + 1), "labels[laxity.dev/gang-size]"),
        (member(1, gang=None), "labels[laxity.dev/gang]"),
    ],
)
def test_a_gang_without_a_size_is_refused(bridge: Bridge, found: dict[str, Any], field: str) -> None:
    _, effects = bridge.filter(found)

    assert {sentences.UNREADABLE} == set(answer(effects)["FailedAndUnresolvableNodes"].values())
    assert field in written(effects)[0].condition.message
