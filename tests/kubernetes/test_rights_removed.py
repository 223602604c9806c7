"""KU15: each right of the manifests is taken away in turn, and something that needs it fails and says so.

A right that nothing misses is one too many. What runs is the code of the services, with accounts that have no other
rights: what Kubernetes gives a kube-scheduler, which shares its account with a bridge, would hide what that needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.placer.backends.base import StartSpec
from services.placer.backends.kubernetes import KubernetesBackend
from shared.errors import BackendError
from shared.messages.place import Gpu, PlaceRequest, Pod
from shared.testing.wait import until
from tests.conformance import test_backend as conformance
from tests.kubernetes.bridged import Bridged, Extender, laxity_on, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.image import IMAGE
from tests.kubernetes.played import PlayedKubelet
from tests.kubernetes.pods import kubernetes_options
from tests.kubernetes.rights import Right, account_without, rights_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

NODE = "rights-1"
PLACER, SCHEDULER = "laxity/placer", "laxity/scheduler"
BRIDGE = [right for right in rights_of(SCHEDULER) if right.where == "" and str(right) != "get resourceclaims"]
"""Claims are read one by one only where a pod has some: test_claims.py has such pods."""
LEASES = [right for right in rights_of(SCHEDULER) if right.where == "laxity"]


@pytest.fixture
def node(kube: KubeCluster) -> Iterator[str]:
    kube.add_node(NODE)
    with PlayedKubelet(kube, NODE):
        yield NODE
    kube.admin.delete(f"/api/v1/nodes/{NODE}")


# --- the placer ---


async def life(kube: KubeCluster, backend: KubernetesBackend, pods: str) -> None:
    """All that a placer does with pods, its own and those of others; raises what is refused."""
    mine, theirs = conformance.spec("mine", NODE, cpu_milli=250, memory_mib=64), await given(kube, pods)
    try:
        await backend.start(mine)
        await backend.resize(NODE, "mine", cpu_milli=500, memory_mib=0)
        assert ["mine"] == [seen.container for seen in await backend.list(NODE)]
        await backend.stop(NODE, "mine")
        await backend.start(theirs)
        await backend.stop(NODE, theirs.labels.container)
    finally:
        await backend.close()
        for path in ("/api/v1/namespaces/laxity-pods/pods", pods):
            kube.admin.delete(path, grace_s=0)


async def given(kube: KubeCluster, pods: str) -> StartSpec:
    """A start that binds a pod which somebody else has made."""
    body = {"metadata": {"name": "theirs"}, "spec": {"containers": [{"name": "main", "image": IMAGE}]}}
    body["spec"]["schedulerName"] = "laxity"
    made = (await asyncio.to_thread(kube.admin.create, pods, body))["metadata"]
    of = Pod(namespace=made["namespace"], name=made["name"], uid=made["uid"])
    return StartSpec(conformance.spec("theirs", NODE).labels, PlaceRequest(pods=(of,), gpu=Gpu(share=0.5)))


def placer(kube: KubeCluster, folder: Path, removed: Right | None) -> KubernetesBackend:
    kube.namespace("laxity-pods")
    options = kubernetes_options(kube, folder, call_timeout_us=1_000_000, stop_grace_us=0)
    options.token_file.write_text(account_without(kube, PLACER, removed))
    return KubernetesBackend(options.model_copy(update={"namespace": "laxity-pods"}))


async def test_a_placer_with_all_its_rights_misses_none(
    kube: KubeCluster, node: str, pods: str, tmp_path: Path
) -> None:
    backend = await asyncio.to_thread(placer, kube, tmp_path, None)
    await life(kube, backend, pods)
    assert 0 == backend.pods.follower.failures["refused"]


@pytest.mark.parametrize("removed", rights_of(PLACER), ids=str)
async def test_KU15_a_placer_misses_each_of_its_rights_and_says_which(
    kube: KubeCluster, node: str, pods: str, tmp_path: Path, removed: Right
) -> None:
    backend = await asyncio.to_thread(placer, kube, tmp_path, removed)
    if removed.verb == "watch":  # it goes on, and looks less often; a number says so, and that it is not ready
        await life(kube, backend, pods)
        assert backend.pods.follower.failures["refused"]
        return
    with pytest.raises(BackendError) as refused:
        await life(kube, backend, pods)
    assert removed.refusal in str(refused.value)


# --- kube-bridge ---


@pytest.fixture
async def bridged(kube: KubeCluster, node: str, tmp_path: Path) -> AsyncIterator[Bridged]:
    async with laxity_on(kube, tmp_path, Bridged) as bridged:
        yield bridged


async def told(kube: KubeCluster, bridged: Bridged, pods: str, removed: Right | None) -> str:
    """What a bridge has said once it did all that bridges do at the API server, in its log and to the scheduler; or
    once it said that it cannot begin.
    """
    token = await asyncio.to_thread(account_without, kube, SCHEDULER, removed)
    bridged.use_token("scheduler", token)
    log = bridged.bridge_process()
    log.begin()
    try:
        return await bridge_life(kube, Extender(log), pods, removed)
    finally:
        log.kill()


async def bridge_life(kube: KubeCluster, extender: Extender, pods: str, removed: Right | None) -> str:
    log = extender.process
    await until(lambda: "the extender listens" in log.log, 20)
    plain, unreadable = (
        kube.admin.create(pods, made) for made in (pod("plain"), pod("unreadable", {"deadline": "soon"}))
    )
    refused = removed.refusal.replace('"', r"\"") if removed else "nothing"
    await until(lambda: refused in log.log or not extender.filter(plain, [NODE])["Error"], 20)
    if refused in log.log:
        return log.log
    answer = extender.bind(plain, NODE)["Error"]
    extender.bind(plain, "elsewhere")  # refused with 409: where it is the pod says
    extender.filter(unreadable, [NODE])
    await until(lambda: "a condition was not written" in log.log or conditions(kube, f"{pods}/unreadable"), 20)
    return f"{log.log}{answer}"


def conditions(kube: KubeCluster, path: str) -> bool:
    return any(each["type"] == "laxity.dev/Placed" for each in kube.admin.get(path)["status"].get("conditions", ()))


async def test_a_bridge_with_all_its_rights_misses_none(kube: KubeCluster, bridged: Bridged, pods: str) -> None:
    assert "cannot" not in await told(kube, bridged, pods, None)


@pytest.mark.parametrize("removed", BRIDGE, ids=str)
async def test_KU15_a_bridge_misses_each_of_its_rights_and_says_which(
    kube: KubeCluster, bridged: Bridged, pods: str, removed: Right
) -> None:
    assert removed.refusal in (await told(kube, bridged, pods, removed)).replace(r"\"", '"')


# --- what kube-scheduler needs beyond Kubernetes' own roles ---


@pytest.mark.parametrize("removed", [None, *LEASES], ids=str)
def test_KU15_a_scheduler_misses_each_right_on_its_lease(kube: KubeCluster, removed: Right | None) -> None:
    account_without(kube, SCHEDULER, removed)
    name = f"scheduler-without-{removed or 'nothing'}".replace(" ", "-")
    api, path = kube.api_of("rights", name), "/apis/coordination.k8s.io/v1/namespaces/laxity/leases"
    kube.namespace("laxity")
    lease = {"metadata": {"name": "laxity-scheduler"}, "spec": {"holderIdentity": name}}
    kube.admin.delete(f"{path}/laxity-scheduler")
    answers = {"create": api.ask("POST", path, lease)}
    if answers["create"][0] == 403:
        kube.admin.create(path, lease)
    answers["get"] = api.ask("GET", f"{path}/laxity-scheduler")
    answers["update"] = api.ask("PUT", f"{path}/laxity-scheduler", lease)

    refused = {verb: body["message"] for verb, (status, body) in answers.items() if status == 403}
    assert ([removed.verb] if removed is not None else []) == [*refused]
    assert all(removed is not None and removed.refusal in message for message in refused.values())
