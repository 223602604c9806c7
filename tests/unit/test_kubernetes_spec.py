"""What pods are told and what they say of themselves, without an API server."""

from __future__ import annotations

from typing import Any

import pytest

from services.placer.backends import kubernetes_spec as told
from services.placer.backends.base import StartSpec
from services.placer.backends.kubernetes_options import KubernetesOptions
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import Gpu, PlaceRequest, Volume

OPTIONS = KubernetesOptions(server="https://127.0.0.1:6443", image="base", volumes={"data": "/data", "claim": "shared"})


def spec(**request: Any) -> StartSpec:
    held = Reservation(
        request_id="a",
        replica=0,
        generation=1,
        devices=("GPU-1", "GPU-2"),
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    labels = ContainerLabels(container="laxity-1", ledger_id="l", node="n1", reservation=held)
    return StartSpec(labels, PlaceRequest(gpu=Gpu(count=2), **{"command": ("run",), **request}))


def pod(phase: str = "Running", *states: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "laxity-1", "uid": "u", "generation": 2},
        "spec": {"schedulerName": told.SCHEDULER, "nodeName": "n1", "containers": [{"name": "main"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "main", "state": each} for each in states], **status},
    }


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason}}


@pytest.mark.parametrize(
    "found, code",
    [
        (pod("Succeeded", ended(0, "Completed")), 0),
        (pod("Failed", ended(0), ended(7), ended(9)), 7),
        (pod("Failed", ended(137, "OOMKilled")), 137),
        (pod("Failed", ended(137, "ContainerStatusUnknown")), None),
        (pod("Failed", {"running": {}}, ended(1)), None),
        (pod("Failed", reason="Evicted"), None),
    ],
)
def test_an_exit_code_is_what_somebody_saw_and_else_unknown(found: dict[str, Any], code: int | None) -> None:
    assert code == told.exit_code(found)


def disrupted(reason: str, status: str = "True") -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": status, "reason": reason, "message": "Eviction API: evicting"}]


@pytest.mark.parametrize(
    "found, cause",
    [
        (pod("Succeeded", ended(0, "Completed")), None),
        (pod("Failed", ended(0, "Completed"), ended(7)), "Error"),
        (pod("Failed", ended(0, "Completed"), ended(137, "OOMKilled"), ended(1)), "OOMKilled"),
        (pod("Failed", ended(137, "ContainerStatusUnknown")), "ContainerStatusUnknown"),
        (pod("Failed", ended(137), reason="Evicted", message="low on memory"), "Evicted: low on memory"),
        (pod("Failed", ended(143), reason="DeadlineExceeded"), "DeadlineExceeded"),
        (pod("Failed", reason="NodeLost"), "NodeLost"),
        (
            pod("Failed", ended(143), conditions=disrupted("EvictionByEvictionAPI")),
            "EvictionByEvictionAPI: Eviction API: evicting",
        ),
        (pod("Failed", ended(2), conditions=disrupted("DeletionByPodGC", "False")), "Error"),
    ],
)
def test_what_befell_a_pod_is_said_before_what_its_containers_ended_of(found: dict[str, Any], cause: str) -> None:
    assert str(cause) == str(told.cause(found))


@pytest.mark.parametrize(
    "found, reason",
    [
        (pod("Pending"), None),
        (pod("Pending", {"waiting": {"reason": "ContainerCreating"}}), None),
        (pod("Pending", {"waiting": {"reason": "InvalidImageName", "message": "no"}}), "InvalidImageName: no"),
        (pod("Failed", reason="OutOfpods"), "OutOfpods"),
        (pod("Failed"), "it ended and no reason was given"),
        (pod("Failed", ended(137, "OOMKilled")), None),
        (pod("Failed", ended(128, "StartError")), "StartError"),
    ],
)
def test_what_never_ran_has_failed_to_start_and_what_ran_has_not(found: dict[str, Any], reason: str | None) -> None:
    assert reason == told.failure(found)


def test_a_pod_of_others_runs_once_it_is_bound_and_ours_once_its_command_does() -> None:
    waiting = pod("Pending", {"waiting": {"reason": "ContainerCreating"}})
    assert not told.runs(waiting)
    waiting["spec"]["schedulerName"] = "laxity"
    assert told.runs(waiting)
    del waiting["spec"]["nodeName"]
    assert not told.runs(waiting)
    assert not told.runs(pod("Failed", ended(1)))


def test_what_a_request_writes_is_literal_and_devices_are_the_bindings() -> None:
    body = told.pod_body(spec(command=("sh", "$(A) $$"), env={"A": "$(B)$", "LAXITY_DEVICES": "all"}), OPTIONS)
    (main,) = body["spec"]["containers"]
    env = {each["name"]: each for each in main["env"]}
    assert (["sh", "$$(A) $$$$"], "$$(B)$$") == (main["args"], env["A"]["value"])
    assert told.DEVICES in env["LAXITY_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert {told.DEVICES: "void"} == body["metadata"]["annotations"]
    assert len(env) == len(main["env"])


def test_each_volume_that_is_made_is_mounted_since_a_kubelet_makes_no_other() -> None:
    volumes = (Volume(source="data", target="/d"), Volume(source="claim", target="/c", read_only=False))
    body = told.pod_body(spec(volumes=volumes, shm_mib=16), OPTIONS)["spec"]
    mounted = {each["name"]: each for each in body["containers"][0]["volumeMounts"]}
    assert {each["name"] for each in body["volumes"]} == mounted.keys()
    assert (True, False) == (mounted["volume-0"]["readOnly"], mounted["volume-1"]["readOnly"])
    with pytest.raises(BackendError, match="volumes: found source none, allowed: claim, data"):
        told.pod_body(spec(volumes=(Volume(source="none", target="/d"),)), OPTIONS)


@pytest.mark.parametrize("name", ["laxity-1", "a" * 63])
def test_a_name_that_kubernetes_takes_is_kept(name: str) -> None:
    assert name == told.pod_name(name)


@pytest.mark.parametrize("name", ["A", "a" * 64, "a.b", "-a", "a-", "ü", "", "a/b", "a\n"])
def test_another_name_becomes_one_that_kubernetes_takes(name: str) -> None:
    assert told._NAME.fullmatch(told.pod_name(name))
    with pytest.raises(BackendError, match="node: found"):
        told.node_name(f"{name}/")


def sized(limit: str, actual: str | None, *conditions: dict[str, Any]) -> dict[str, Any]:
    found = pod("Running", {"running": {}}, conditions=list(conditions))
    found["spec"]["containers"][0]["resources"] = {"limits": {"cpu": limit}}
    found["status"]["containerStatuses"][0]["resources"] = {"limits": {"cpu": actual}} if actual else {}
    return found


def test_another_size_holds_once_the_kubelet_says_so_in_whatever_unit() -> None:
    pending = {"type": "PodResizePending", "status": "True", "observedGeneration": 2, "reason": "Infeasible"}
    assert "done" == told.resize_of(sized("1500m", "1.5"))[0]
    assert "waits" == told.resize_of(sized("1500m", "1"))[0]
    assert "waits" == told.resize_of(sized("1500m", None))[0]
    assert "refused" == told.resize_of(sized("8", "1", pending))[0]
    assert "waits" == told.resize_of(sized("8", "1", {**pending, "observedGeneration": 1}))[0]
    assert ("waits", "Deferred") == told.resize_of(sized("8", "1", {**pending, "reason": "Deferred"}))
    assert "waits" == told.resize_of(sized("1", "1", {**pending, "type": "PodResizeInProgress", "reason": "Error"}))[0]


def test_what_a_pod_had_is_all_that_it_is_given_back() -> None:
    had = pod()
    had["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}
    back = told.former_size(had, told.resize_body(had, 2000, 64))
    assert {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}} == back["spec"]["containers"][0]["resources"]
