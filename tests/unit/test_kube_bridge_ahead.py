"""Places are held ahead for pods that wait behind another, and nothing relies on it."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge.calls import Answer, AskPlace, AskRelease, Listed, NodeChanged, PlaceAnswered
from services.kube_bridge.nudging import HEAD_START_US
from services.kube_bridge.seen import NodeSeen, PodSeen
from shared.effects import Effect
from shared.messages import State
from tests.kube_bridge_world import SECOND, Bridge, answer, held, rejected, wanting, written
from tests.kube_pods import node

SPREAD = [{"topologyKey": "kubernetes.io/hostname", "maxSkew": 1}]
NEVER_TOGETHER = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
NOBODY: dict[str, int] = {}


@pytest.fixture
def bridge() -> Bridge:
    return Bridge(ahead=4)


def waits(bridge: Bridge, *uids: str, **spec: Any) -> list[dict[str, Any]]:
    """Pods that the API server shows, and nobody has answered."""
    found = [wanting(uid, uid, **spec) for uid in uids]
    for each in found:
        bridge.show(each)
    return found


def questions(effects: list[Effect]) -> dict[str, int]:
    """Tokens of what the placers are asked, by request id."""
    return {each.request.request_id or "": each.token for each in effects if isinstance(each, AskPlace)}


def first(bridge: Bridge, nodes: list[str] | None = None) -> dict[str, int]:
    """Its turn comes and it gets a place; who is asked about with that."""
    token, _ = bridge.filter(wanting("first", "first"), nodes)
    return questions(bridge.tell(PlaceAnswered(token, held("first", "n1"))))


def test_while_one_is_bound_the_placers_decide_about_those_behind_it(bridge: Bridge) -> None:
    waits(bridge, "u-1", "u-2")
    for uid, token in first(bridge).items():
        assert [] == bridge.tell(PlaceAnswered(token, held(uid, "n2")))

    for uid in ("u-1", "u-2"):
        _, effects = bridge.filter(wanting(uid, uid))
        assert (["n2"], NOBODY) == (answer(effects)["NodeNames"], questions(effects))
    assert 2 == bridge.core.counters["filter.ahead"]


def test_one_whose_turn_comes_meanwhile_gets_that_answer(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()

    mine, effects = bridge.filter(pod)
    assert [] == effects
    (said,) = bridge.tell(PlaceAnswered(token, held("u-1", "n3")))
    assert isinstance(said, Answer)
    assert (mine, ["n3"]) == (said.token, said.body["NodeNames"])


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_place_that_is_not_offered_is_asked_for_anew(bridge: Bridge, meanwhile: bool) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()
    reply = PlaceAnswered(token, held("u-1", "n3"))

    if not meanwhile:
        bridge.tell(reply)
    mine, effects = bridge.filter(pod, ["n1"])
    if meanwhile:
        effects = bridge.tell(reply)
    assert {"u-1": mine} == questions(effects)
    assert ["n1"] == answer(bridge.tell(PlaceAnswered(mine, held("u-1", "n1", 2))))["NodeNames"]


def test_who_is_refused_ahead_hears_of_it_in_its_turn(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()

    assert [] == bridge.tell(PlaceAnswered(token, rejected("u-1")))
    _, effects = bridge.filter(pod)
    assert ([], NOBODY, 1) == (answer(effects)["NodeNames"], questions(effects), len(written(effects)))


def test_who_is_refused_while_its_turn_has_come_hears_of_it_once(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()
    bridge.filter(pod)

    effects = bridge.tell(PlaceAnswered(token, rejected("u-1")))
    assert ([], NOBODY) == (answer(effects)["NodeNames"], questions(effects))


@pytest.mark.parametrize("meanwhile", [True, False])
def test_where_no_placer_answered_it_is_asked_about_in_its_turn(bridge: Bridge, meanwhile: bool) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()

    if not meanwhile:
        bridge.tell(PlaceAnswered(token, None))
    mine, effects = bridge.filter(pod)
    if meanwhile:
        effects = bridge.tell(PlaceAnswered(token, None))
    assert {"u-1": mine} == questions(effects)


def test_a_call_that_comes_again_while_the_first_waits_is_a_question_of_its_own(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()
    bridge.filter(pod)

    again, effects = bridge.filter(pod)
    assert {"u-1": again} == questions(effects)
    bridge.tell(PlaceAnswered(token, held("u-1", "n1")))
    assert ["n1"] == answer(bridge.tell(PlaceAnswered(again, held("u-1", "n1", 2))))["NodeNames"]


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"a": "b"}},
        {"priority": 5},
        {"tolerations": [{"operator": "Exists"}]},
        {"affinity": NEVER_TOGETHER},
        {"topologySpreadConstraints": SPREAD},
        {"schedulingGates": [{"name": "not-yet"}]},
        {"resourceClaims": [{"name": "gpu"}]},
        {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]},
        {"schedulerName": "default-scheduler"},
        {"gpu_milli": None},
        {"node": "n1"},
        {"phase": "Failed"},
    ],
)
def test_nobody_is_asked_about_whom_kubernetes_may_offer_other_nodes(bridge: Bridge, spec: dict[str, Any]) -> None:
    waits(bridge, "u-1", **spec)
    assert NOBODY == first(bridge)


def test_who_asks_for_another_part_of_a_device_is_asked_about_too(bridge: Bridge) -> None:
    waits(bridge, "u-1", gpu_milli=500, annotations={"deadline": "50ms", "runtime": "5ms"})
    assert {"u-1"} == first(bridge).keys()


def test_gangs_those_that_were_refused_and_those_that_go_are_left_to_their_turn(bridge: Bridge) -> None:
    gang, refused, going = (wanting(uid, uid) for uid in ("u-1", "u-2", "u-3"))
    gang["metadata"]["labels"] = {"laxity.dev/gang": "g", "laxity.dev/gang-size": "2"}
    no_node = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    refused["status"]["conditions"] = [no_node]
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for each in (gang, refused, going):
        bridge.show(each)
    assert NOBODY == first(bridge)


def test_so_many_are_held_ahead_and_half_of_them_are_asked_for_at_once(bridge: Bridge) -> None:
    pods = waits(bridge, *(f"u-{number}" for number in range(1, 9)))
    asked = first(bridge)
    assert ["u-1", "u-2", "u-3", "u-4"] == [*asked]
    for uid, token in asked.items():
        bridge.tell(PlaceAnswered(token, held(uid, "n1")))

    assert [NOBODY.keys(), {"u-5", "u-6"}] == [questions(bridge.filter(pod)[1]).keys() for pod in pods[:2]]


def test_what_was_held_in_vain_makes_room_when_its_time_is_over(bridge: Bridge) -> None:
    waits(bridge, "u-1", "u-2", "u-3", "u-4")
    for uid, token in first(bridge).items():
        bridge.tell(PlaceAnswered(token, held(uid, "n1")))
    waits(bridge, "u-5")
    assert NOBODY == first(bridge)

    bridge.now += 31 * SECOND
    assert {"u-5"} == first(bridge).keys()


def test_a_place_held_for_long_is_asked_for_anew(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    ((uid, token),) = first(bridge).items()
    bridge.tell(PlaceAnswered(token, held(uid, "n1")))

    bridge.now += 16 * SECOND
    assert {"u-1"} == questions(bridge.filter(pod)[1]).keys()


@pytest.mark.parametrize("meanwhile", [True, False])
def test_who_asks_for_something_else_by_now_is_asked_about_anew(bridge: Bridge, meanwhile: bool) -> None:
    waits(bridge, "u-1")
    ((uid, token),) = first(bridge).items()
    if not meanwhile:
        bridge.tell(PlaceAnswered(token, held(uid, "n1")))
    assert {"u-1"} == questions(bridge.filter(wanting("u-1", "u-1", gpu_milli=500))[1]).keys()


@pytest.mark.parametrize("before", [True, False])
def test_what_was_held_for_a_pod_that_is_gone_is_given_back(bridge: Bridge, before: bool) -> None:
    (pod,) = waits(bridge, "u-1")
    ((uid, token),) = first(bridge).items()

    effects = bridge.delete(pod) if before else []
    effects += bridge.tell(PlaceAnswered(token, held(uid, "n1")))
    bridge.record(pod, State.HELD)
    effects += bridge.delete(pod) if not before else []
    assert [AskRelease("u-1")] == [each for each in effects if isinstance(each, AskRelease)]


def test_what_is_given_back_makes_room_at_once(bridge: Bridge) -> None:
    pods = waits(bridge, "u-1", "u-2", "u-3", "u-4")
    asked = first(bridge)
    for pod in pods:
        bridge.delete(pod)
    for uid, token in asked.items():
        bridge.tell(PlaceAnswered(token, held(uid, "n1")))
    waits(bridge, "u-5")
    assert {"u-5"} == first(bridge).keys()


def test_who_has_a_place_by_another_bridge_is_left_to_its_turn(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    bridge.record(pod, State.HELD)
    assert NOBODY == first(bridge)


def test_a_place_where_the_node_gives_out_devices_itself_by_now_is_asked_for_anew(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    ((uid, token),) = first(bridge).items()
    bridge.tell(PlaceAnswered(token, held(uid, "n1")))

    unfit = node("n1")
    unfit["status"]["allocatable"]["laxity.dev/gpu-milli"] = "1000"
    bridge.tell(NodeChanged(NodeSeen.of(unfit)))
    assert {"u-1"} == questions(bridge.filter(pod)[1]).keys()


@pytest.mark.parametrize("state", ["asked", "held", "in its turn", "answered"])
def test_nobody_is_asked_about_ahead_twice_whatever_the_api_server_shows_again(bridge: Bridge, state: str) -> None:
    (pod,) = waits(bridge, "u-1")
    ((uid, token),) = first(bridge).items()
    if state != "asked":
        bridge.tell(PlaceAnswered(token, held(uid, "n1")))
    if state in {"in its turn", "answered"}:
        mine, _ = bridge.filter(pod, ["n2"])
        if state == "answered":
            bridge.tell(PlaceAnswered(mine, held(uid, "n2", 2)))
    pod["metadata"]["labels"] = {"changed": "since"}
    bridge.show(pod)
    bridge.tell(Listed(pods=(PodSeen.of(pod, "laxity"),)))
    assert NOBODY == first(bridge)


def test_one_that_was_gone_from_a_list_and_is_shown_again_is_not_asked_about_twice(bridge: Bridge) -> None:
    (pod,) = waits(bridge, "u-1")
    (token,) = first(bridge).values()
    bridge.tell(Listed(pods=()))
    bridge.show(pod)
    assert NOBODY == first(bridge)
    assert [] == bridge.tell(PlaceAnswered(token, None))


def test_one_whose_turn_comes_before_the_watch_shows_it_is_asked_about_once(bridge: Bridge) -> None:
    pod = wanting("u-1", "u-1")
    mine, _ = bridge.filter(pod)
    bridge.show(pod)
    assert NOBODY == first(bridge)
    assert ["n1"] == answer(bridge.tell(PlaceAnswered(mine, held("u-1", "n1"))))["NodeNames"]


def test_a_pod_that_changes_while_it_waits_is_asked_about_as_it_is(bridge: Bridge) -> None:
    waits(bridge, "u-1")
    waits(bridge, "u-1", gpu_milli=500)
    token, _ = bridge.filter(wanting("first", "first"))
    effects = bridge.tell(PlaceAnswered(token, held("first", "n1")))
    assert [0.5] == [each.request.gpu.share for each in effects if isinstance(each, AskPlace)]


def test_while_one_above_them_may_fit_those_behind_wait_for_their_turn(bridge: Bridge) -> None:
    bridge.reserve("n1", "other")
    high = wanting("high", "high", priority=1000)
    token, _ = bridge.filter(high)
    bridge.tell(PlaceAnswered(token, rejected("high")))
    bridge.reserve("n1")
    bridge.filter(wanting("first", "first"))
    bridge.now += HEAD_START_US

    waits(bridge, "u-1")
    assert NOBODY == first(bridge)
    bridge.hold(high, "n1")
    waits(bridge, "u-2")
    assert {"u-2"} == first(bridge).keys()


def test_nobody_is_asked_about_ahead_where_that_is_not_wanted() -> None:
    bridge = Bridge()
    waits(bridge, "u-1")
    assert NOBODY == first(bridge)
