"""The service accounts of k8s/ on a real API server: each may do what its roles say, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kubernetes.api import Api
from tests.kubernetes.installed import Installed, binding, pod
from tests.kubernetes.rights import Right, may, rights_of
from tests.manifests import OVERLAYS, ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

ACCOUNTS = ["laxity/placer", "laxity/scheduler", "laxity/node-list", "laxity/deadline-tracker", "laxity/nats"]
ACCOUNTS += ["laxity-nodes/monitor"]
VERBS = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]
GIVEN = [(account, right) for account in ACCOUNTS for right in rights_of(account)]


def account(installed: Installed, name: str) -> Api:
    return installed.kube.api_of(*name.split("/"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_server_takes_every_overlay(installed: Installed, overlay: str) -> None:
    said = installed.kubectl(
        "apply", "-k", str(ROOT / "k8s/overlays" / overlay), "--dry-run=server", "--validate=strict"
    )

    assert [] == [line for line in said.splitlines() if not line.endswith("(server dry run)")]


def test_KU15_every_right_in_the_manifests_is_given(installed: Installed) -> None:
    apis = {name: account(installed, name) for name in ACCOUNTS}

    assert [] == [(name, right) for name, right in GIVEN if not may(apis[name], right)]


@pytest.mark.parametrize(
    "name", ["laxity/placer", "laxity-nodes/monitor", "laxity/node-list", "laxity/deadline-tracker"]
)
def test_KU15_no_right_is_given_that_is_not_in_the_manifests(installed: Installed, name: str) -> None:
    """Of all that any account has to do with, in our namespaces and in a user's."""
    api = account(installed, name)
    given = set(rights_of(name))
    kinds = {(right.group, right.resource) for _, right in GIVEN} | {("", "secrets"), ("", "pods/exec")}

    found = {
        right
        for where in ("laxity", "laxity-nodes", "laxity-pods", "shop")
        for group, resource in kinds
        for verb in VERBS
        if may(api, right := Right(where, group, resource, verb))
    }

    assert set() == {right for right in found if not given & {right, replace(right, where="")}}
    assert {right for right in given if right.where} <= found


def forbidden(answer: tuple[int, object]) -> bool:
    return answer[0] == 403


def test_the_placer_makes_and_changes_pods_in_its_own_namespace_alone(installed: Installed) -> None:
    placer = account(installed, "laxity/placer")
    ours, theirs = "/api/v1/namespaces/laxity-pods/pods", "/api/v1/namespaces/shop/pods"
    restricted = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    body = pod("mine", scheduler="laxity-direct", securityContext=restricted, imagePullPolicy="Never")

    assert 201 == placer.ask("POST", ours, body)[0]
    assert 200 == placer.ask("GET", f"{ours}/mine")[0]
    assert 201 == placer.ask("POST", f"{ours}/mine/binding", binding("mine", "n", {"laxity.dev/devices": "GPU-1"}))[0]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "mine"}}
    assert 201 == placer.ask("POST", f"{ours}/mine/eviction?dryRun=All", eviction)[0]
    assert placer.ask("DELETE", f"{ours}/mine", {"gracePeriodSeconds": 0})[0] in {200, 202}

    assert forbidden(placer.ask("POST", theirs, pod("theirs")))
    installed.alice.create(theirs, pod("theirs"))
    assert forbidden(placer.ask("DELETE", f"{theirs}/theirs"))
    eviction["metadata"] = {"name": "theirs"}
    assert 201 == placer.ask("POST", f"{theirs}/theirs/eviction?dryRun=All", eviction)[0]
    assert forbidden(
        placer.ask("PATCH", f"{theirs}/theirs", {"metadata": {"labels": {"a": "b"}}}, "application/merge-patch+json")
    )
    assert forbidden(placer.ask("GET", "/api/v1/namespaces/laxity/secrets"))
    assert 200 == placer.ask("GET", f"{theirs}/theirs")[0]


def test_the_bridge_says_on_pods_what_it_has_to_say_and_touches_no_node(installed: Installed) -> None:
    scheduler = account(installed, "laxity/scheduler")
    installed.kube.add_node("some-node")

    assert 200 == scheduler.ask("GET", "/api/v1/nodes/some-node")[0]
    assert forbidden(
        scheduler.ask(
            "PATCH", "/api/v1/nodes/some-node", {"spec": {"unschedulable": True}}, "application/merge-patch+json"
        )
    )
    assert forbidden(scheduler.ask("GET", "/api/v1/namespaces/laxity/secrets"))
    assert forbidden(scheduler.ask("POST", "/api/v1/namespaces/shop/pods", pod("x")))


def test_the_scheduler_has_its_own_lease_and_not_that_of_the_clusters_own(installed: Installed) -> None:
    scheduler = account(installed, "laxity/scheduler")
    leases = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
    for namespace, name in (("laxity", "laxity-scheduler"), ("kube-system", "other")):
        installed.kube.admin.create(leases.format(namespace), {"metadata": {"name": name}, "spec": {}})

    assert 200 == scheduler.ask("GET", f"{leases.format('laxity')}/laxity-scheduler")[0]
    assert forbidden(scheduler.ask("GET", f"{leases.format('kube-system')}/other"))
    assert forbidden(scheduler.ask("GET", f"{leases.format('laxity')}/another"))


@pytest.mark.parametrize("name", ["laxity/node-list", "laxity/deadline-tracker", "laxity/nats", "laxity-nodes/monitor"])
def test_who_has_no_business_with_the_api_server_is_refused_everything(installed: Installed, name: str) -> None:
    api = account(installed, name)

    for path in (
        "/api/v1/pods",
        "/api/v1/nodes",
        "/api/v1/namespaces/laxity/secrets",
        "/api/v1/namespaces/laxity/pods",
    ):
        assert forbidden(api.ask("GET", path)), path


def test_a_pod_that_wants_more_is_not_let_into_our_namespaces(installed: Installed) -> None:
    wide = pod("wide", scheduler=None, securityContext={"capabilities": {"add": ["SYS_ADMIN"]}})
    for namespace, level in (("laxity", "restricted"), ("laxity-pods", "baseline")):
        installed.kube.namespace(namespace)
        status, body = installed.alice.ask("POST", f"/api/v1/namespaces/{namespace}/pods", wide)
        assert (403, True) == (status, f'violates PodSecurity "{level}:latest"' in body["message"])
