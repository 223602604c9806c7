"""The tests' own Kubernetes does what tests of it rely on: pods run on a real kubelet, and each part can be killed."""

from __future__ import annotations

import time

import pytest

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.image import IMAGE
from tests.kubernetes.node import Machine

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


def pod(name: str, *command: str) -> dict[str, object]:
    device = {"name": "DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['laxity.dev/devices']"}}}
    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": command, "env": [device]}
    spec = {
        "schedulerName": "nobody",
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    return {"metadata": {"name": name}, "spec": spec}


def test_a_pod_bound_by_us_runs_on_the_real_kubelet_with_what_the_binding_carried(
    kube: KubeCluster, machine: Machine
) -> None:
    pods = f"/api/v1/namespaces/{kube.namespace('harness')}/pods"
    kube.admin.create(pods, pod("one", "sh", "-c", "echo devices $DEVICES; sleep 600"))
    kube.bind("harness", "one", machine.name, {"laxity.dev/devices": "GPU-1,GPU-2"})
    found = kube.admin.until(f"{pods}/one", lambda it: it["status"]["phase"] == "Running")
    machine.until_logged("harness", "one", "devices GPU-1,GPU-2")
    assert "GPU-1,GPU-2" == machine.environment(found["metadata"]["uid"])["DEVICES"]
    kube.admin.delete(f"{pods}/one")
    kube.admin.until_gone(f"{pods}/one")


def test_each_part_can_be_killed_and_comes_back(kube: KubeCluster) -> None:
    kube.add_node("simulated")
    for part in [kube.apiserver, kube.etcd]:
        part.restart()
        kube.apiserver.wait_ready()
        assert "simulated" == kube.admin.get("/api/v1/nodes/simulated")["metadata"]["name"]
    kube.admin.delete("/api/v1/nodes/simulated")


def test_a_service_account_may_do_nothing_until_it_is_told_so(kube: KubeCluster) -> None:
    other = kube.api_of("default", "plain")
    assert 403 == other.ask("GET", "/api/v1/nodes")[0]
    assert 403 == kube.api("nobody").ask("GET", "/api/v1/nodes")[0]
    assert 403 == kube.api_as("somebody").ask("GET", "/api/v1/nodes")[0]
    kube.grant("plain", "system:kube-scheduler", "system:serviceaccount:default:plain")
    deadline = time.monotonic() + 20
    while other.ask("GET", "/api/v1/nodes")[0] != 200:  # the API server learns of it a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kube.admin.delete("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/plain")


def test_the_control_plane_makes_and_schedules_the_pods_of_a_deployment(kube: KubeCluster) -> None:
    kube.add_node("simulated")
    kube.controller_manager()
    kube.scheduler()
    labels = {"app": "three"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": IMAGE}]}}
    spec = {"replicas": 3, "selector": {"matchLabels": labels}, "template": template}
    made = "/apis/apps/v1/namespaces/default/deployments"
    kube.admin.create(made, {"metadata": {"name": "three"}, "spec": spec})
    pods = "/api/v1/namespaces/default/pods?labelSelector=app%3Dthree"

    def bound() -> list[str]:
        return [each["spec"]["nodeName"] for each in kube.admin.items(pods) if "nodeName" in each["spec"]]

    deadline = time.monotonic() + 60
    while len(bound()) < 3:
        assert time.monotonic() < deadline, kube.admin.items(pods)
        time.sleep(0.1)
    kube.admin.delete(f"{made}/three")
    kube.admin.delete("/api/v1/nodes/simulated")
