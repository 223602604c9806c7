"""What a pod may be and what may become of it, told by a kubelet that is played or by hand; cases by their names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.kubernetes import KubernetesBackend
from shared.errors import BackendError, BackendSilentError, FieldError
from shared.messages.place import Gpu, PlaceRequest, Pod
from shared.testing.wait import eventually
from tests.backends import watched
from tests.conformance import test_backend as conformance
from tests.kubernetes.api import Json
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.image import IMAGE
from tests.kubernetes.played import PlayedKubelet
from tests.kubernetes.pods import kubernetes_options, pods_in

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

NODE = "backend-1"
BOX = conformance.BOX


@pytest.fixture
def node(kube: KubeCluster) -> Iterator[str]:
    """Nobody says anything of its pods but the test."""
    kube.add_node(NODE)
    yield NODE
    kube.admin.delete(f"/api/v1/nodes/{NODE}")


@pytest.fixture
def namespace(kube: KubeCluster, tmp_path: Path) -> str:
    return kubernetes_options(kube, tmp_path).namespace


@pytest.fixture
async def backend(kube: KubeCluster, node: str, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    options = kubernetes_options(kube, tmp_path, resize_timeout_us=1_000_000, left_after_us=200_000)
    backend = KubernetesBackend(options)
    yield backend
    for pod in pods_in(kube, options.namespace):
        kube.admin.delete(f"/api/v1/namespaces/{options.namespace}/pods/{pod['metadata']['name']}", grace_s=0)
    await backend.close()


def of(spec: StartSpec, **more: Any) -> StartSpec:
    """The same start of a request that asks for more."""
    return StartSpec(spec.labels, spec.request.model_copy(update=more))


async def bound(kube: KubeCluster, namespace: str) -> Json:
    """The only pod, once it has a node."""

    async def look() -> Json | None:
        found = pods_in(kube, namespace)
        return found[0] if found and "nodeName" in found[0]["spec"] else None

    return await eventually(look)


async def given(kube: KubeCluster, namespace: str, name: str, **spec: Any) -> StartSpec:
    """A start that binds a pod which somebody else has made."""
    container = {"name": "theirs", "image": IMAGE}
    body = {"metadata": {"name": name, "labels": {"app": name}}, "spec": {"containers": [container], **spec}}
    body["spec"].setdefault("schedulerName", "laxity")
    made = kube.admin.create(f"/api/v1/namespaces/{namespace}/pods", body)
    pod = Pod(namespace=namespace, name=name, uid=made["metadata"]["uid"])
    labels = conformance.spec(f"box-of-{name}", NODE).labels
    return StartSpec(labels, PlaceRequest(pods=(pod,), gpu=Gpu(share=0.5)))


# --- what a start makes ---


async def test_a_pod_gets_its_node_devices_and_labels_in_one_write_and_void_before(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    start = asyncio.create_task(backend.start(conformance.spec(node=NODE, cpu_milli=250, memory_mib=64)))
    pod = await bound(kube, namespace)
    made = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['laxity.dev/devices']"}}
    assert source == made["NVIDIA_VISIBLE_DEVICES"]["valueFrom"] == made["LAXITY_DEVICES"]["valueFrom"]
    told = pod["metadata"]["annotations"]
    assert ("GPU-5f1", "1") == (told["laxity.dev/devices"], told["laxity.dev/generation"])
    assert {"cpu": "250m", "memory": "64Mi"} == pod["spec"]["containers"][0]["resources"]["limits"]
    assert "Guaranteed" == pod["status"]["qosClass"]
    kube.say(namespace, BOX, phase="Running", containerStatuses=[ran(running={})])
    assert "running" == (await start).state


def ran(name: str = "main", **state: Json) -> Json:
    return {"name": name, "image": IMAGE, "imageID": "", "ready": False, "restartCount": 0, "state": state}


@pytest.mark.parametrize(
    "status, reason",
    [
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"},
            "UnexpectedAdmissionError: Allocate failed",
        ),
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough"}, "OutOfcpu: Node didn't"),
        (
            {"containerStatuses": [ran(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling"})]},
            "ImagePullBackOff: Back-off pulling",
        ),
        (
            {"containerStatuses": [ran(waiting={"reason": "CreateContainerConfigError", "message": "no secret v"})]},
            "CreateContainerConfigError: no secret v",
        ),
        (
            {"phase": "Failed", "containerStatuses": [ran(terminated={"exitCode": 128, "reason": "StartError"})]},
            "StartError",
        ),
    ],
)
async def test_KU12_what_a_kubelet_refuses_is_a_failed_start_with_its_reason_and_leaves_nothing(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str, status: Json, reason: str
) -> None:
    start = asyncio.create_task(backend.start(conformance.spec(node=NODE)))
    await bound(kube, namespace)
    kube.say(namespace, BOX, **status)
    with pytest.raises(BackendError, match=reason):
        await start
    assert [] == await backend.list(NODE)
    if "phase" not in status:  # only its kubelet says that a pod that has not ended is gone
        kube.admin.delete(f"/api/v1/namespaces/{namespace}/pods/{BOX}", grace_s=0)
    assert [] == pods_in(kube, namespace)


async def test_a_pod_that_is_deleted_while_it_starts_is_a_failed_start(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    start = asyncio.create_task(backend.start(conformance.spec(node=NODE)))
    await bound(kube, namespace)
    kube.admin.delete(f"/api/v1/namespaces/{namespace}/pods/{BOX}", grace_s=0)
    with pytest.raises(BackendError, match="was deleted while it started"):
        await start


async def test_a_pod_that_has_taken_the_name_meanwhile_is_not_deleted(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    body = {"metadata": {"name": BOX}, "spec": {"containers": [{"name": "main", "image": IMAGE}]}}
    former = kube.admin.create(pods, body)
    kube.admin.delete(f"{pods}/{BOX}", grace_s=0)
    present = kube.admin.create(pods, body)
    await backend._delete(former)
    assert [present["metadata"]["uid"]] == [pod["metadata"]["uid"] for pod in pods_in(kube, namespace)]


async def test_a_start_that_nobody_waits_for_any_more_leaves_nothing(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    start = asyncio.create_task(backend.start(conformance.spec(node=NODE)))
    await bound(kube, namespace)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    (pod,) = pods_in(kube, namespace)
    assert "deletionTimestamp" in pod["metadata"]  # the rest is its kubelet's to say


async def test_a_name_that_another_pod_has_is_an_error_and_that_pod_stays(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    body = {"metadata": {"name": BOX}, "spec": {"containers": [{"name": "theirs", "image": IMAGE}]}}
    kube.admin.create(f"/api/v1/namespaces/{namespace}/pods", body)
    with pytest.raises(BackendError, match="is not this container"):
        await backend.start(conformance.spec(node=NODE))
    await backend.stop(NODE, BOX)
    assert 1 == len(pods_in(kube, namespace))


@pytest.mark.parametrize(
    "more, field",
    [
        ({"user": "root"}, "user"),
        ({"image": "elsewhere/image"}, "image"),
        ({"env": {"TOKEN": conformance.Secret(secret="no-key")}}, "TOKEN"),
    ],
)
async def test_what_a_request_may_not_ask_is_refused_before_anything_is_made(
    kube: KubeCluster, node: str, tmp_path: Path, more: dict[str, Any], field: str
) -> None:
    options = kubernetes_options(kube, tmp_path, images=("laxity.test/*",))
    backend = KubernetesBackend(options)
    with pytest.raises(BackendError, match=field):
        await backend.start(of(conformance.spec(node=NODE), **more))
    with pytest.raises(BackendError, match="a node of this Kubernetes"):
        await backend.start(conformance.spec(node="ghost"))
    assert [] == pods_in(kube, options.namespace)
    await backend.close()


@pytest.mark.parametrize("device", ["all", "a,b", "", "x" * 300])
async def test_devices_that_could_be_taken_for_others_are_not_handed_over(
    backend: KubernetesBackend, device: str
) -> None:
    spec = conformance.spec(node=NODE)
    held = spec.labels.reservation.model_copy(update={"devices": (device,)})
    labels = spec.labels.model_copy(update={"reservation": held})
    with pytest.raises(BackendError, match="devices: found"):
        await backend.start(StartSpec(labels, spec.request))


async def test_annotations_that_would_spoil_a_pod_are_never_posted(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    spec = conformance.spec(node=NODE)
    devices = tuple(f"GPU-{number}-{'x' * 240}" for number in range(1024))
    held = spec.labels.reservation.model_copy(update={"devices": devices})
    with pytest.raises(BackendError, match="annotations have a limit"):
        await backend.start(StartSpec(spec.labels.model_copy(update={"reservation": held}), spec.request))
    assert [] == pods_in(kube, namespace)


@pytest.mark.parametrize("how", ["list", "glance"])
async def test_what_a_killed_placer_left_unbound_goes_after_a_while(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str, how: str
) -> None:
    look = getattr(backend, how)
    await eventually(lambda: shown(backend))
    kube.admin.create(f"/api/v1/namespaces/{namespace}/pods", unbound())
    assert [] == await look(NODE)
    assert 1 == len(pods_in(kube, namespace))

    async def gone() -> bool | None:
        await look(NODE)
        return not pods_in(kube, namespace) or None

    await eventually(gone)


def unbound() -> Json:
    """A pod as a start makes it, before it has a node."""
    return {
        "metadata": {"name": BOX, "labels": {"laxity.dev/container": BOX}},
        "spec": {"schedulerName": "laxity-direct", "containers": [{"name": "main", "image": IMAGE}]},
    }


async def shown(backend: KubernetesBackend) -> bool | None:
    """Its watch has begun."""
    return await backend.glance(NODE) is not None or None


def test_a_wrong_setting_is_named(kube: KubeCluster, tmp_path: Path) -> None:
    options = kubernetes_options(kube, tmp_path)
    for wrong in ({"server": ""}, {"ca_file": tmp_path / "none"}, {"token_file": tmp_path / "none"}):
        with pytest.raises(FieldError, match=f"kubernetes.{next(iter(wrong))}"):
            KubernetesBackend(options.model_copy(update=wrong))


# --- pods that others made ---


async def test_a_pod_of_others_is_started_once_it_is_bound_and_its_end_is_posted(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    spec = await given(kube, namespace, "job")
    async with watched(backend) as posts:
        started = await backend.start(spec)
        assert ("running", spec.labels) == (started.state, started.labels)
        assert started == await backend.start(spec)
        assert [started] == await backend.list(NODE)
        kube.say(namespace, "job", phase="Succeeded", containerStatuses=[ran("theirs", terminated={"exitCode": 0})])
        posted: Seen = await conformance.first(posts)
    assert ("exited", 0) == (posted.state, posted.exit_code)
    await backend.remove(NODE, posted.container)
    assert [] == await backend.list(NODE)
    assert 1 == len(pods_in(kube, namespace))  # its owner's, with its log


async def test_KU12_a_pod_of_others_that_its_kubelet_refused_has_ended(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    async with watched(backend) as posts:
        await backend.start(await given(kube, namespace, "refused"))
        kube.say(namespace, "refused", phase="Failed", reason="OutOfcpu", message="Node didn't have enough")
        posted = await conformance.first(posts)
    assert ("exited", None) == (posted.state, posted.exit_code)


async def test_a_pod_that_is_another_one_by_now_or_has_another_place_is_not_bound(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    spec = await given(kube, namespace, "remade")
    kube.admin.delete(f"/api/v1/namespaces/{namespace}/pods/remade", grace_s=0)
    await given(kube, namespace, "remade")
    with pytest.raises(BackendError, match="is gone"):
        await backend.start(spec)
    taken = await given(kube, namespace, "taken")
    kube.bind(namespace, "taken", NODE)
    with pytest.raises(BackendError, match=f"is bound to {NODE} by somebody else"):
        await backend.start(taken)
    with pytest.raises(BackendError, match="waits behind a scheduling gate"):
        await backend.start(await given(kube, namespace, "gated", schedulingGates=[{"name": "laxity.dev/gang"}]))
    assert [] == await backend.list(NODE)


async def test_a_glance_shows_who_is_bound_where_until_they_go(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    spec = await given(kube, namespace, "glanced")
    kube.admin.create(f"/api/v1/namespaces/{namespace}/pods", unbound())
    started = await backend.start(spec)
    await until_glanced(backend, NODE, [started])
    kube.say(namespace, "glanced", phase="Succeeded", containerStatuses=[ran("theirs", terminated={"exitCode": 0})])
    (ended,) = await backend.list(NODE)
    await until_glanced(backend, NODE, [ended])
    await backend.remove(NODE, ended.container)
    assert [] == await backend.glance(NODE)
    kube.admin.delete(f"/api/v1/namespaces/{namespace}/pods/glanced", grace_s=0)
    await eventually(lambda: no_longer(backend, NODE))


async def until_glanced(backend: KubernetesBackend, node: str, seen: list[Seen]) -> None:
    async def glanced() -> bool | None:
        return await backend.glance(node) == seen or None

    await eventually(glanced)


async def no_longer(backend: KubernetesBackend, node: str) -> bool | None:
    """The watch has shown that nothing is there any more."""
    return not backend.pods.on(node) or None


@pytest.mark.parametrize("end", ["back", "out of service", "deleted"])
async def test_KU06_a_pod_that_is_gone_from_a_silent_node_may_still_run_until_somebody_knows(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str, end: str
) -> None:
    container = (await backend.start(await given(kube, namespace, "gone"))).container
    kube.node_is(NODE, "Unknown", "NodeStatusUnknown")
    kube.admin.delete(f"/api/v1/namespaces/{namespace}/pods/gone", grace_s=0)
    for ask in (backend.list(NODE), backend.stop(NODE, container)):
        with pytest.raises(BackendSilentError, match=f"{NODE} is not heard.* NodeStatusUnknown"):
            await ask
    path = f"/api/v1/nodes/{NODE}"
    if end == "back":
        kube.node_is(NODE, "True")
    elif end == "out of service":
        taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        kube.admin.patch(path, {"spec": {"taints": [taint]}})
    else:
        kube.admin.delete(path)
    assert [] == await backend.list(NODE)
    await backend.stop(NODE, container)


async def test_a_pod_of_others_is_evicted_and_a_disruption_budget_may_forbid_it(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str
) -> None:
    spec = await given(kube, namespace, "guarded")
    await backend.start(spec)
    kube.say(namespace, "guarded", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    wanted = {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}
    kube.admin.create(budgets, {"metadata": {"name": "one"}, "spec": wanted})
    with pytest.raises(BackendError, match=r"may not be evicted now.*disruption budget one"):
        await backend.stop(NODE, spec.labels.container)
    assert "running" == (await backend.list(NODE))[0].state
    kube.admin.delete(f"{budgets}/one")
    with PlayedKubelet(kube, NODE):
        await backend.stop(NODE, spec.labels.container)
    assert [] == await backend.list(NODE)


# --- another size ---


@pytest.mark.parametrize("reason", ["Infeasible", "Deferred"])
async def test_another_size_that_the_kubelet_does_not_give_is_taken_back(
    kube: KubeCluster, backend: KubernetesBackend, namespace: str, reason: str
) -> None:
    with PlayedKubelet(kube, NODE) as kubelet:
        await backend.start(conformance.spec(node=NODE, cpu_milli=250, memory_mib=64))
        await backend.resize(NODE, BOX, cpu_milli=300, memory_mib=0)
        kubelet.resizes = False
        resize = asyncio.create_task(backend.resize(NODE, BOX, cpu_milli=5000, memory_mib=0))

        async def asked() -> Json | None:
            (pod,) = pods_in(kube, namespace)
            wanted = pod["spec"]["containers"][0]["resources"]["limits"]
            return pod if wanted == {"cpu": "5", "memory": "64Mi"} else None

        generation = (await eventually(asked))["metadata"]["generation"]
        pending = {"type": "PodResizePending", "status": "True", "reason": reason, "message": "too much"}
        kube.say(namespace, BOX, conditions=[{**pending, "observedGeneration": generation}])

        async def given_back() -> bool | None:
            (pod,) = pods_in(kube, namespace)
            return pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "300m" or None

        await eventually(given_back)
        kube.say(namespace, BOX, conditions=[{"type": "PodResizePending", "$patch": "delete"}])
        with pytest.raises(BackendError, match=f"keeps what it had: {reason}: too much"):
            await resize


async def test_another_size_that_the_api_server_refuses_changes_nothing(
    kube: KubeCluster, backend: KubernetesBackend
) -> None:
    with PlayedKubelet(kube, NODE):
        await backend.start(conformance.spec(node=NODE))
        with pytest.raises(BackendError, match=r"(?i)qos"):
            await backend.resize(NODE, BOX, cpu_milli=100, memory_mib=100)
