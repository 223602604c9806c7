"""The scheduler's calls, as a bridge's core answers them: filter decides and holds, bind confirms."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge import sentences
from services.kube_bridge.calls import (
    AskConfirm,
    AskPlace,
    AskRelease,
    BindPlain,
    ConfirmAnswered,
    Listed,
    LookAtPod,
    NodeChanged,
    PlaceAnswered,
    PlainBound,
    PodLooked,
)
from services.kube_bridge.core import SOON
from services.kube_bridge.seen import NodeSeen
from shared.effects import Disconnected, WatchReplayed
from shared.messages import AllExcept, PlaceReply, Reason, State
from shared.subjects import LEDGER, NODES, node_key
from tests.kube_bridge_world import SECOND, Bridge, answer, asked, held, rejected, wanting, written
from tests.kube_pods import node, pod
from tests.placer_world import facts


@pytest.fixture
def bridge() -> Bridge:
    return Bridge()


# --- filter ---


def test_filter_asks_for_a_hold_among_the_nodes_offered_and_answers_with_one(bridge: Bridge) -> None:
    token, effects = bridge.filter(wanting(), ["n3", "unknown"])
    request = asked(effects)

    assert ("u-1", False, ("n3",)) == (request.request_id, request.queue, request.candidates)
    said = answer(bridge.tell(PlaceAnswered(token, held("u-1", "n3"))))
    assert {"NodeNames": ["n3"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""} == said


def test_the_nodes_offered_are_named_in_the_fewest_words(bridge: Bridge) -> None:
    """A thousand names in each request cost more than all the rest of it."""
    bridge.tell(NodeChanged(NodeSeen.of(node("elsewhere"))))  # the node list does not know it
    offered = {
        ("n1",): ("n1",),
        ("n1", "n3", "elsewhere"): AllExcept(all_except=("n2",)),
        ("n3", "n2", "n1"): None,
    }
    for nodes, candidates in offered.items():
        assert candidates == asked(bridge.filter(wanting(), list(nodes))[1]).candidates


def test_nothing_is_answered_before_pods_nodes_and_ledger_are_loaded() -> None:
    bridge = Bridge(loaded=False)
    steps = [
        WatchReplayed(NODES, frozenset()),
        WatchReplayed(LEDGER, frozenset()),
        Listed(pods=()),
        Listed(nodes=()),
    ]
    for step in steps:
        _, effects = bridge.filter(wanting(), ["n1"])
        assert sentences.NOT_LOADED == answer(effects)["Error"]
        assert sentences.NOT_LOADED == answer(bridge.bind(wanting(), "n1")[1])["Error"]
        bridge.tell(step)
    assert "ok" == bridge.core.health
    bridge.tell(Disconnected())
    assert sentences.NOT_LOADED == answer(bridge.filter(wanting(), ["n1"])[1])["Error"]


def test_KU05_a_pod_without_our_resources_passes_everywhere_and_is_bound_as_it_is(bridge: Bridge) -> None:
    plain = pod("plain", "u-9", cpu="1")
    assert ["n1", "other"] == answer(bridge.filter(plain, ["n1", "other"])[1])["NodeNames"]
    token, effects = bridge.bind(plain, "other")

    assert [BindPlain(token, "default", "plain", "u-9", "other")] == effects
    assert {"Error": ""} == answer(bridge.tell(PlainBound(token)))


def test_KU05_a_plain_pod_is_bound_by_the_next_bridge_too(bridge: Bridge) -> None:
    plain = pod("plain", "u-9", cpu="1")
    bridge.show(plain)
    token, effects = bridge.bind(plain, "other")

    assert [BindPlain(token, "default", "plain", "u-9", "other")] == effects


@pytest.mark.parametrize(
    "found, said",
    [
        (wanting(annotations={"deadline": "soon"}), "annotations[laxity.dev/deadline]: found soon"),
        (pod(extra={"laxity.dev/gpu-mili": "250"}), "limits[laxity.dev/gpu-mili]: found asked for"),
    ],
)
def test_KU05_what_is_misspelt_is_refused_and_the_condition_says_how(
    bridge: Bridge, found: dict[str, Any], said: str
) -> None:
    _, effects = bridge.filter(found)
    whys = answer(effects)["FailedAndUnresolvableNodes"]

    assert {sentences.UNREADABLE} == set(whys.values())
    assert {"n1", "n2", "n3"} == set(whys)
    (written_one,) = written(effects)
    assert ("False", "Unreadable") == (written_one.condition.status, written_one.condition.reason)
    assert said in written_one.condition.message


def test_no_answer_of_a_placer_is_a_fault_that_is_tried_again(bridge: Bridge) -> None:
    token, _ = bridge.filter(wanting())
    said = answer(bridge.tell(PlaceAnswered(token, None)))

    assert sentences.NO_ANSWER == said["Error"]
    assert {} == said["FailedAndUnresolvableNodes"]


def test_KU14_each_node_has_the_same_sentence_and_the_numbers_are_in_the_condition(bridge: Bridge) -> None:
    token, _ = bridge.filter(wanting(), ["n1", "n2", "stranger"])
    reply = PlaceReply(
        outcome="rejected",
        request_id="u-1",
        reasons=(
            Reason(code="not_now.deadline", count=2, message="demand 47.2 ms by 50 ms"),
            Reason(code="excluded.not_candidate", count=7, message="not among the candidates: n3"),
        ),
        would_fit_if=("deadline_us is 60000",),
    )
    effects = bridge.tell(PlaceAnswered(token, reply))
    whys = answer(effects)["FailedAndUnresolvableNodes"]

    assert {"n1", "n2", "stranger"} == set(whys)
    assert {sentences.OF_CODES["not_now.deadline"], sentences.NOT_OURS} == set(whys.values())
    (said,) = written(effects)
    assert "NotNowDeadline" == said.condition.reason
    assert "of 2 nodes offered: demand 47.2 ms by 50 ms (2 of them); would fit if: deadline_us is 60000" == (
        said.condition.message
    )


def test_KU14_no_sentence_has_a_number_or_is_too_long() -> None:
    names = [name for name in vars(sentences) if name.isupper() and isinstance(vars(sentences)[name], str)]
    said = [vars(sentences)[name] for name in names if not name.startswith("_")]
    said += [*sentences.OF_CODES.values(), *sentences.OF_GROUPS.values()]

    assert [] == [each for each in said if any(c.isdigit() for c in each) or len(each) > 120]
    assert all(each.startswith("laxity: ") for each in said)


@pytest.mark.parametrize("code", ["not_now.unheard_of", "never.unheard_of", "odd"])
def test_a_code_that_came_later_has_the_sentence_of_its_group(bridge: Bridge, code: str) -> None:
    token, _ = bridge.filter(wanting())
    whys = answer(bridge.tell(PlaceAnswered(token, rejected("u-1", code))))["FailedAndUnresolvableNodes"]

    assert {sentences.OF_GROUPS.get(code.partition(".")[0], sentences.OF_GROUPS["not_now"])} == set(whys.values())


def test_KU09_a_hopeless_pod_is_not_asked_about_again_until_something_is_free(bridge: Bridge) -> None:
    bridge.reserve("n1", "other", "another")
    token, _ = bridge.filter(wanting())
    first = bridge.tell(PlaceAnswered(token, rejected("u-1")))
    assert 1 == len(written(first))
    for uid in ("u-1", "u-2"):  # of the same kind
        for _ in range(20):
            _, effects = bridge.filter(wanting(uid=uid))
            assert [] == [each for each in effects if isinstance(each, AskPlace)]
            assert answer(first) == answer(effects)
    assert 40 == bridge.core.counters["filter.known_refusal"]
    bridge.reserve("n1", "other", "another", "one more")
    assert [] == _places(bridge), "what is reserved beside it frees nothing"
    bridge.reserve("n1", "other", "one more")
    assert [1] == _places(bridge)


def test_KU09_a_refusal_is_of_one_kind_among_the_same_nodes_and_for_a_while(bridge: Bridge) -> None:
    token, _ = bridge.filter(wanting())
    bridge.tell(PlaceAnswered(token, rejected("u-1")))

    assert [] == _places(bridge)
    assert [1] == _places(bridge, gpu_milli=100)
    assert [1] == _places(bridge, nodes=("n1", "n2"))
    bridge.key(NODES, node_key("n1"), facts("n1", 2).to_json())
    assert [1] == _places(bridge)
    token, _ = bridge.filter(wanting())
    bridge.tell(PlaceAnswered(token, rejected("u-1")))
    bridge.now += 11 * SECOND
    assert [1] == _places(bridge)


def test_KU09_a_refusal_of_others_says_nothing_of_a_pod_that_holds_a_place_itself(bridge: Bridge) -> None:
    """Its cycle failed after filter, and it comes again: its own hold makes room for it."""
    bridge.hold(wanting(), "n1")
    bridge.record(wanting(), State.HELD)
    token, _ = bridge.filter(wanting(uid="u-2"))
    bridge.tell(PlaceAnswered(token, rejected("u-2")))

    assert [1] == _places(bridge)
    bridge.record(wanting(), State.EXPIRED)
    assert [] == _places(bridge)


def _places(bridge: Bridge, nodes: tuple[str, ...] | None = None, **pod: int) -> list[int]:
    """How many requests each filter made, where it made one."""
    _, effects = bridge.filter(wanting(**pod), nodes)
    return [1 for each in effects if isinstance(each, AskPlace)]


def test_KU09_the_condition_is_written_when_the_reason_changes_and_new_numbers_wait(bridge: Bridge) -> None:
    def refuse(code: str, message: str) -> int:
        bridge.core.view.world += 1
        token, _ = bridge.filter(wanting())
        return len(written(bridge.tell(PlaceAnswered(token, rejected("u-1", code, message)))))

    assert [1, 0, 0] == [refuse("not_now.share", text) for text in ("0.1", "0.1", "0.2")]
    assert 1 == refuse("not_now.memory", "1 MiB")
    bridge.now += 31 * SECOND
    assert [1, 0] == [refuse("not_now.memory", "2 MiB") for _ in range(2)]


def test_what_a_pod_says_already_is_not_written_again_by_the_next_bridge(bridge: Bridge) -> None:
    token, _ = bridge.filter(wanting())
    (said,) = written(bridge.tell(PlaceAnswered(token, rejected("u-1"))))
    condition = {
        "type": "laxity.dev/Placed",
        "status": said.condition.status,
        "reason": said.condition.reason,
        "message": said.condition.message,
    }
    shown = wanting()
    shown["status"]["conditions"] = [condition]
    other = Bridge()
    token, _ = other.filter(shown)

    assert [] == written(other.tell(PlaceAnswered(token, rejected("u-1"))))


def test_a_repeat_makes_a_new_hold_and_bind_confirms_that_one(bridge: Bridge) -> None:
    bridge.hold(wanting(), "n1", 1)
    bridge.hold(wanting(), "n2", 2)
    token, effects = bridge.bind(wanting(), "n2")

    assert [AskConfirm(token, "u-1", 2)] == effects


def test_a_place_that_is_not_offered_any_more_is_not_answered(bridge: Bridge) -> None:
    """A node that was not offered would fail the whole cycle."""
    token, _ = bridge.filter(wanting(), ["n1"])
    said = answer(bridge.tell(PlaceAnswered(token, held("u-1", "n2", outcome="started"))))

    assert ([], {"n1": sentences.ELSEWHERE}) == (said["NodeNames"], said["FailedAndUnresolvableNodes"])


def test_a_hold_on_a_node_that_was_not_offered_is_asked_for_again(bridge: Bridge) -> None:
    """The placers may know a node earlier than the bridge."""
    token, _ = bridge.filter(wanting())
    said = answer(bridge.tell(PlaceAnswered(token, held("u-1", "n4"))))

    assert ([], {}, sentences.ELSEWHERE) == (said["NodeNames"], said["FailedAndUnresolvableNodes"], said["Error"])


@pytest.mark.parametrize("outcome", ["released", "exited", "failed", "stopping"])
def test_a_request_that_is_over_says_so(bridge: Bridge, outcome: str) -> None:
    token, _ = bridge.filter(wanting())
    said = answer(bridge.tell(PlaceAnswered(token, PlaceReply(outcome=outcome, request_id="u-1"))))

    assert {sentences.OVER} == set(said["FailedAndUnresolvableNodes"].values())


def test_KU18_a_node_that_publishes_our_resources_gets_none_of_our_pods(bridge: Bridge) -> None:
    unfit = node("n1")
    unfit["status"]["allocatable"]["laxity.dev/gpu-milli"] = "1000"
    bridge.tell(NodeChanged(NodeSeen.of(unfit)))
    token, effects = bridge.filter(wanting(), ["n1", "n2"])

    assert ("n2",) == asked(effects).candidates
    whys = answer(bridge.tell(PlaceAnswered(token, rejected("u-1"))))["FailedAndUnresolvableNodes"]
    assert sentences.PUBLISHED == whys["n1"]
    bridge.tell(NodeChanged(NodeSeen.of(node("n1"))))
    assert AllExcept(all_except=("n3",)) == asked(bridge.filter(wanting(), ["n1", "n2"])[1]).candidates


# --- bind ---


def test_bind_is_answered_once_the_placers_say_that_it_is_bound(bridge: Bridge) -> None:
    bridge.hold(wanting(), "n1")
    token, effects = bridge.bind(wanting(), "n1")
    assert [AskConfirm(token, "u-1", 1)] == effects
    effects = bridge.tell(ConfirmAnswered(token, held("u-1", "n1", outcome="started")))

    assert {"Error": ""} == answer(effects)
    assert [] == written(effects), "it was never refused, and shows itself that it is bound"


def test_a_bridge_that_has_just_started_binds_by_what_the_ledger_says(bridge: Bridge) -> None:
    bridge.record(wanting(), State.HELD, "n2", 4)
    token, effects = bridge.bind(wanting(), "n2")

    assert [AskConfirm(token, "u-1", 4)] == effects
    assert sentences.NO_HOLD == answer(bridge.bind(wanting(), "n1")[1])["Error"]
    assert sentences.NO_HOLD == answer(bridge.bind(wanting("other", "u-2"), "n1")[1])["Error"]


def test_a_binding_that_was_refused_is_an_error_and_the_condition_says_why(bridge: Bridge) -> None:
    bridge.hold(wanting(), "n1")
    token, _ = bridge.bind(wanting(), "n1")
    reason = Reason(code="not_now.binding", count=1, message="not bound to n1: already assigned to node n7")
    effects = bridge.tell(ConfirmAnswered(token, PlaceReply(outcome="expired", request_id="u-1", reasons=(reason,))))

    assert {"Error": sentences.NOT_BOUND} == answer(effects)
    assert "already assigned to node n7" in written(effects)[0].condition.message


@pytest.mark.parametrize(
    "looked, error",
    [
        ((True, "n1"), ""),
        ((True, ""), sentences.NOT_BOUND),
        ((True, "n2"), sentences.NOT_BOUND),
        ((False, ""), sentences.NOT_BOUND),
        ((None, ""), sentences.NO_ANSWER),
    ],
)
def test_KU01_an_unclear_outcome_is_settled_by_the_pod_itself(
    bridge: Bridge, looked: tuple[bool | None, str], error: str
) -> None:
    bridge.hold(wanting(), "n1")
    token, _ = bridge.bind(wanting(), "n1")
    assert [LookAtPod("default", "web", "u-1", token)] == bridge.tell(ConfirmAnswered(token, None))
    there, where = looked

    assert {"Error": error} == answer(bridge.tell(PodLooked("u-1", there, where, token)))


def test_KU12_a_pod_that_goes_between_filter_and_bind_gives_its_hold_back(bridge: Bridge) -> None:
    bridge.show(wanting())
    bridge.hold(wanting(), "n1")
    bridge.record(wanting(), State.HELD)

    assert [AskRelease("u-1")] == bridge.delete(wanting())
    assert sentences.NO_HOLD != answer_or_ask(bridge)


def answer_or_ask(bridge: Bridge) -> object:
    """A bind that comes nevertheless goes to the placers, who know that it is released."""
    _, effects = bridge.bind(wanting(), "n1")
    return effects[0]


def test_KU12_a_hold_that_comes_after_its_pod_has_gone_is_given_back_at_once(bridge: Bridge) -> None:
    bridge.show(wanting())
    token, _ = bridge.filter(wanting())
    bridge.delete(wanting())
    effects = bridge.tell(PlaceAnswered(token, held("u-1", "n1")))

    assert AskRelease("u-1") in effects


# --- those that were refused ---


def nudged(bridge: Bridge, seconds: float = 1) -> list[str]:
    return [each.uid for each in written(bridge.tick(SOON, seconds)) if each.probed]


def refuse(bridge: Bridge, uid: str, **more: Any) -> None:
    token, _ = bridge.filter(wanting(uid=uid, **more))
    bridge.tell(PlaceAnswered(token, rejected(uid)))


def test_a_refused_pod_is_nudged_once_something_is_free_and_not_before(bridge: Bridge) -> None:
    bridge.reserve("n1", "other")
    refuse(bridge, "u-1")
    assert [] == nudged(bridge)
    bridge.reserve("n1")
    assert ["u-1"] == nudged(bridge)
    refuse(bridge, "u-1")
    assert [] == nudged(bridge)


def test_of_many_alike_some_are_nudged_until_one_is_refused_again(bridge: Bridge) -> None:
    uids = [f"u-{number}" for number in range(20)]
    bridge.reserve("n1", "other")
    for uid in uids:
        refuse(bridge, uid)
    bridge.reserve("n1")
    assert uids[:8] == nudged(bridge)
    for uid in uids[:8]:
        bridge.hold(wanting(uid=uid), "n1")
    assert uids[8:16] == nudged(bridge)
    refuse(bridge, uids[8])
    assert [] == nudged(bridge)


def test_a_pod_that_has_a_place_or_is_gone_is_not_nudged(bridge: Bridge) -> None:
    bridge.reserve("n1", "other")
    for uid in ("u-1", "u-2"):
        bridge.show(wanting(uid=uid))
        refuse(bridge, uid)
    bridge.reserve("n1")
    bridge.hold(wanting(uid="u-1"), "n1")
    bridge.delete(wanting(uid="u-2"))

    assert [] == nudged(bridge)
