"""Devices that Kubernetes gave to claims: told by node and uuid, never bound over, never given beside ours."""

from __future__ import annotations

from typing import Any

import pytest

from services.kube_bridge import sentences
from services.kube_bridge.calls import (
    BindPlain,
    ClaimsChanged,
    ClaimsGone,
    ClaimsListed,
    ClaimsLooked,
    LookAtClaims,
)
from services.kube_bridge.claims import OF_KINDS, ClaimSeen
from services.kube_bridge.core import COMPARE, SOON
from shared.effects import Emit, Publish
from shared.messages import SOMEBODY, BusEvent, KubeNodeFacts
from shared.subjects import NODES, node_key
from tests.kube_bridge_world import Bridge, answer, asked, wanting, written
from tests.kube_claims import DRIVER, claim, device_class, given, slice_of
from tests.kube_pods import pod
from tests.placer_world import facts as node_facts

KIND = {"ResourceClaim": "resourceclaims", "ResourceSlice": "resourceslices", "DeviceClass": "deviceclasses"}
TRAIN = f"claim shop/train by {DRIVER}"


def bridge(*shown: dict[str, Any]) -> Bridge:
    made = Bridge(drivers=(DRIVER,))
    show(made, slice_of("n1", {"gpu-0": "n1-gpu-0", "gpu-1": "n1-gpu-1", "part": "parent:n1-gpu-1", "odd": None}))
    show(made, device_class())
    show(made, device_class("nic.example.com", driver="nic.example.com"))
    for each in shown:
        show(made, each)
    return made


def kind_of(found: dict[str, Any]) -> str:
    spec = found["spec"]
    return "deviceclasses" if "selectors" in spec else "resourceslices" if "pool" in spec else "resourceclaims"


def show(made: Bridge, found: dict[str, Any]) -> None:
    made.tell(ClaimsChanged(kind_of(found), OF_KINDS[kind_of(found)](found)))


def facts(made: Bridge, node: str = "n1") -> KubeNodeFacts | None:
    """As told at the next tick; None where nothing is."""
    told = [each.body for each in made.tick(SOON, 1) if isinstance(each, Emit)]
    return next((each for each in told if isinstance(each, KubeNodeFacts) and each.node == node), None)


def claimed(made: Bridge, node: str = "n1") -> dict[str, str]:
    found = facts(made, node)
    assert found is not None
    return found.claimed


def test_KU39_a_device_of_any_claim_is_told_with_its_node_and_freed_with_the_allocation() -> None:
    made = bridge()
    assert {} == claimed(made)
    show(made, given("train", "gpu-0"))
    assert {"n1-gpu-0": TRAIN} == claimed(made)
    show(made, claim("train"))
    assert {} == claimed(made)
    show(made, given("train", "gpu-0", "gpu-1"))
    assert {"n1-gpu-0": TRAIN, "n1-gpu-1": TRAIN} == claimed(made)
    made.tell(ClaimsGone("resourceclaims", "shop/train"))
    assert {} == claimed(made)


def test_a_part_that_is_yet_to_be_made_takes_its_gpu_and_a_device_without_a_uuid_may_be_any() -> None:
    assert {"n1-gpu-1": TRAIN} == claimed(bridge(given("train", "part")))
    for made in (
        bridge(given("train", "odd")),
        bridge(given("train", "gpu-7")),
        bridge(given("train", "x", pool="n2")),
    ):
        told = [facts for facts in made.tick(SOON, 1) if isinstance(facts, Emit)]
        unknown = [each.body.claimed_unknown for each in told if isinstance(each.body, KubeNodeFacts)]
        (why,) = [each for each in unknown if each]
        assert why.startswith(f"{TRAIN}, device")


def test_who_only_looks_and_who_has_another_drivers_device_takes_nothing() -> None:
    assert {} == claimed(bridge(given("watch", "gpu-0", adminAccess=True)))
    other = bridge(given("nic", "gpu-0", driver="nic.example.com"))
    found = facts(other)
    assert found is not None
    assert ({}, None) == (found.claimed, found.claimed_unknown)


def test_a_slice_that_goes_leaves_what_it_said_of_devices_in_use() -> None:
    made = bridge(given("train", "gpu-0"))
    assert {"n1-gpu-0": TRAIN} == claimed(made)
    made.tell(ClaimsGone("resourceslices", f"n1-{DRIVER}"))
    for _ in range(12):
        told = facts(made)
        assert told is None or {"n1-gpu-0": TRAIN} == told.claimed
    show(made, given("late", "gpu-1"))
    assert {"n1-gpu-0": TRAIN} == claimed(made)
    show(made, slice_of("n1", {"gpu-0": "another", "gpu-1": "n1-gpu-1"}))
    assert {"another": TRAIN, "n1-gpu-1": f"claim shop/late by {DRIVER}"} == claimed(made)


def test_of_a_pool_that_is_made_anew_the_newest_generation_counts() -> None:
    made = bridge(given("train", "gpu-0"))
    show(made, slice_of("n1", {"gpu-0": "newer"}, generation=2, name="a"))
    assert {"newer": TRAIN} == claimed(made)


def test_nothing_is_answered_before_claims_are_loaded_and_without_drivers_nobody_waits_for_them() -> None:
    made = Bridge(loaded=False, drivers=(DRIVER,))
    assert {"resourceclaims", "resourceslices", "deviceclasses"} < set(made.core.missing)
    made.load()
    assert [] == made.core.missing
    assert () == Bridge().core.claims.kinds


def test_a_list_replaces_what_was_known() -> None:
    made = bridge(given("train", "gpu-0"))
    made.tell(ClaimsListed("resourceclaims", (ClaimSeen.of(given("other", "gpu-1")),)))
    assert {"n1-gpu-1": f"claim shop/other by {DRIVER}"} == claimed(made)


# ------------------------------------------------------------------------------------------ pods of the profile


def with_claim(name: str = "web", **more: Any) -> dict[str, Any]:
    made = pod(name, resourceClaims=[{"name": "gpu", "resourceClaimName": "train"}], **more)
    made["metadata"]["namespace"] = "shop"
    return made


def made_for_it(name: str = "web", **more: Any) -> dict[str, Any]:
    """The claim is made of a template: its name stands in the status."""
    made = pod(name, resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}], **more)
    made["metadata"]["namespace"] = "shop"
    made["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": "train"}]
    return made


@pytest.mark.parametrize("found", [with_claim(gpu_milli=250), made_for_it(gpu_milli=250)])
@pytest.mark.parametrize("shown", [claim("train"), given("train", "gpu-0")])
def test_two_systems_never_give_one_pod_devices(found: dict[str, Any], shown: dict[str, Any]) -> None:
    made = bridge(shown)
    _, effects = made.filter(found)

    assert {sentences.UNREADABLE} == set(answer(effects)["FailedAndUnresolvableNodes"].values())
    (said,) = written(effects)
    assert "resourceClaims[gpu]: found shop/train, allowed: no claim of GPUs beside" in said.condition.message


def test_a_claim_of_something_else_is_no_hindrance() -> None:
    made = bridge(claim("train", of="nic.example.com"))
    _, effects = made.filter(with_claim(gpu_milli=250))
    assert 0.25 == asked(effects).gpu.share  # type: ignore[union-attr]


def bound(made: Bridge, found: dict[str, Any], *looked: dict[str, Any] | None) -> list[object]:
    """Filter, bind, and what follows from the claims as the API server has them then."""
    made.filter(found)
    token, effects = made.bind(found, "n1")
    assert [LookAtClaims(token, ("shop/train",))] == effects
    seen = None if None in looked else tuple(ClaimSeen.of(each) for each in looked if each is not None)
    return list(made.tell(ClaimsLooked(token, seen)))


def test_a_pod_with_a_claim_is_bound_as_it_is_and_its_device_is_taken_at_once() -> None:
    made = bridge(claim("train"))
    (effect,) = bound(made, with_claim(), given("train", "gpu-0"))

    assert isinstance(effect, BindPlain)
    assert {"n1-gpu-0": TRAIN} == claimed(made)


def test_KU39_a_pod_whose_claim_was_given_a_reserved_device_is_not_bound() -> None:
    made = bridge(claim("train"))
    made.reserve("n1", "r-1")

    assert {"Error": sentences.CLAIMED} == answer(bound(made, with_claim(), given("train", "gpu-0")))  # type: ignore[arg-type]
    (effect,) = bound(made, with_claim(), given("train", "gpu-1"))
    assert isinstance(effect, BindPlain)


def test_an_api_server_that_does_not_say_what_a_claim_has_leaves_the_pod_unbound() -> None:
    assert {"Error": sentences.NO_ANSWER} == answer(bound(bridge(), with_claim(), None))  # type: ignore[arg-type]


def test_a_pod_that_another_bridge_was_asked_about_is_looked_at_as_well() -> None:
    made, found = bridge(claim("train")), with_claim()
    made.show(found)
    token, effects = made.bind(found, "n1")
    assert [LookAtClaims(token, ("shop/train",))] == effects


# --------------------------------------------------------------------------------------------- what is reported


def told(made: Bridge) -> list[tuple[str, str]]:
    events = [*made.tick(COMPARE), *made.tick(COMPARE, 5), *made.tick(COMPARE, 5)]
    bodies = [each.body for each in events if isinstance(each, Publish)]
    return [(each.kind, each.detail) for each in bodies if isinstance(each, BusEvent)]


def test_KU39_a_device_that_both_gave_away_is_reported_once() -> None:
    made = bridge(given("train", "gpu-0"))
    made.reserve("n1", "r-1")
    facts(made)

    assert [("drift_given_twice", f"n1/n1-gpu-0: given to {TRAIN}, and reserved for r-1")] == told(made)
    assert [] == told(made)


@pytest.mark.parametrize("holder, reported", [("pod shop/train", True), (SOMEBODY, False)])
def test_KU22_a_device_that_a_plugin_gave_away_though_it_is_reserved_is_reported(holder: str, reported: bool) -> None:
    made = bridge()
    made.reserve("n1", "r-1")
    shown = node_facts("n1")
    devices = tuple(each.model_copy(update={"plugin_holder": holder}) for each in shown.devices)
    made.key(NODES, node_key("n1"), shown.model_copy(update={"devices": devices}).to_json())

    expected = [("drift_given_twice", f"n1/n1-gpu-0: given to {holder}, and reserved for r-1")]
    assert (expected if reported else []) == told(made)


def test_a_class_that_stands_for_our_resource_while_we_run_is_reported_and_pods_are_refused() -> None:
    made = bridge(device_class("ours", "laxity.dev/gpu-milli"))
    _, effects = made.filter(wanting())

    assert {sentences.CLASS} == set(answer(effects)["FailedAndUnresolvableNodes"].values())
    assert ["ClassTakesOurs"] == [each.condition.reason for each in written(effects)]
    ((kind, text),) = told(made)
    assert ("drift_class_takes_ours", True) == (kind, "ours: it stands for laxity.dev/gpu-milli" in text)
    made.tell(ClaimsGone("deviceclasses", "ours"))
    assert "web" == asked(made.filter(wanting())[1]).name
