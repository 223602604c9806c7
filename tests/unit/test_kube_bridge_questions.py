"""What a bridge answers where people ask of a pod by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.effects import Received, Reply
from shared.messages import PodFound, PodsQuery, PodsReply, State
from tests.kube_bridge_world import Bridge, wanting
from tests.kube_pods import pod


def ask(bridge: Bridge, name: str = "web", namespace: str | None = None) -> PodsReply:
    query = PodsQuery(name=name, namespace=namespace)
    (effect,) = bridge.tell(Received("rt.pods", query, "_INBOX.1"))
    assert isinstance(effect, Reply)
    assert isinstance(effect.body, PodsReply)
    return effect.body


def the_one(bridge: Bridge, name: str = "web") -> PodFound:
    (found,) = ask(bridge, name).pods
    return found


def said(found: dict[str, Any], kind: str, message: str) -> dict[str, Any]:
    one = {"type": kind, "status": "False", "reason": "Because", "message": message}
    found["status"].setdefault("conditions", []).append(one)
    return found


def test_a_pod_that_waits_says_why_in_its_own_words_and_in_those_of_its_scheduler() -> None:
    bridge = Bridge()
    waits = said(wanting(annotations={"devices": "void"}), "laxity.dev/Placed", "of 3 nodes: 6 ms short")
    bridge.show(said(waits, "PodScheduled", "0/3 nodes are available"))

    found = the_one(bridge)
    assert ("u-1", None, "void", False) == (found.request_id, found.node, found.devices, found.ended)
    assert ("False", "Because", "of 3 nodes: 6 ms short") == (found.status, found.reason, found.message)
    assert "0/3 nodes are available" == found.unscheduled


def test_one_that_nobody_has_spoken_of_says_nothing() -> None:
    bridge = Bridge()
    bridge.show(wanting())
    assert (None, None, None, None) == (
        (found := the_one(bridge)).status,
        found.reason,
        found.message,
        found.unscheduled,
    )


def test_one_that_is_bound_says_where_and_whose_reservation_it_has() -> None:
    bridge = Bridge()
    bridge.show(wanting(node="n2", annotations={"devices": "GPU-1", "labels": labels("gang/7")}))
    found = the_one(bridge)
    assert ("n2", "GPU-1", "gang/7") == (found.node, found.devices, found.request_id)


def labels(request_id: str) -> str:
    held = {"request_id": request_id, "replica": 0, "generation": 1, "devices": [], "share_micro": 0}
    held |= {"device_memory_mib": 0, "cpu_milli": 0, "memory_mib": 0}
    return json.dumps({"container": "laxity-1", "ledger_id": "l", "node": "n2", "reservation": held})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"reservation": {}}'])
def test_labels_that_cannot_be_read_are_none(text: str) -> None:
    bridge = Bridge()
    bridge.show(wanting(node="n2", annotations={"labels": text}))
    assert "u-1" == the_one(bridge).request_id


def test_pods_of_one_name_in_several_namespaces_are_all_told_of_unless_one_is_named() -> None:
    bridge = Bridge()
    for number, namespace in enumerate(("shop", "bank")):
        found = wanting(uid=f"u-{number}")
        found["metadata"]["namespace"] = namespace
        bridge.show(found)
    bridge.record(wanting(uid="u-1"), State.HELD)

    assert ["bank", "shop"] == [each.namespace for each in ask(bridge).pods]
    assert ["u-0"] == [each.uid for each in ask(bridge, namespace="shop").pods]
    assert () == ask(bridge, namespace="nowhere").pods


def test_a_pod_that_asks_for_nothing_of_ours_has_no_request() -> None:
    bridge = Bridge()
    bridge.show(pod("plain", "u-9"))
    assert None is the_one(bridge, "plain").request_id


def test_what_was_not_loaded_is_named_and_a_deleted_pod_is_not_known() -> None:
    bridge = Bridge(loaded=False)
    assert ("pods", "nodes", "rt_ledger", "rt_nodes") == ask(bridge).not_loaded
    bridge.load()
    bridge.show(wanting())
    bridge.delete(wanting())
    assert PodsReply() == ask(bridge)
