"""Ordinary pods, a stock kube-scheduler, a bridge and placers that bind: all of it on a real API server."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest

from services.kube_bridge import sentences
from shared.testing.wait import until
from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.bridged import condition, pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.scheduled import Scheduled, bound, persist, scheduled

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]

SOFT = {"deadline": "50ms", "kind": "soft"}


async def test_a_pod_gets_its_devices_with_its_node_in_one_write(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1")
    made = kube.admin.create(pods, pod("one", SOFT, gpu_milli="250", gpu_mib="1024", cpu="100m"))
    found = await cluster.until_bound(f"{pods}/one")

    assert "k1" == found["spec"]["nodeName"]
    assert "k1-gpu-0" == found["metadata"]["annotations"]["laxity.dev/devices"]
    labels = json.loads(found["metadata"]["annotations"]["laxity.dev/labels"])
    assert (made["metadata"]["uid"], 250_000, 1024, 100) == (
        labels["reservation"]["request_id"],
        labels["reservation"]["share_micro"],
        labels["reservation"]["device_memory_mib"],
        labels["reservation"]["cpu_milli"],
    )
    await cluster.reach(made["metadata"]["uid"], "started")
    kube.say(pods.split("/")[4], "one", phase="Succeeded")
    await cluster.reach(made["metadata"]["uid"], "exited", "released")
    assert {} == condition(kube.admin.get(f"{pods}/one")), "it was never refused"
    assert [] == await cluster.reserved("k1")


async def test_KU11_32_pods_at_once_onto_devices_that_just_suffice_and_no_bind_fails(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1", "k2", "k3", "k4", devices=8)
    warm = kube.admin.create(pods, pod("warm", SOFT, gpu_milli="1"))
    await cluster.reach(warm["metadata"]["uid"], "started")
    kube.admin.delete(f"{pods}/warm", grace_s=0)
    await cluster.reach(warm["metadata"]["uid"], "exited", "released")
    names = [f"p{number}" for number in range(32)]
    begun = time.monotonic()
    for name in names:
        await asyncio.to_thread(kube.admin.create, pods, pod(name, gpu_milli="1000"))
    created = time.monotonic()
    found = [await cluster.until_bound(f"{pods}/{name}") for name in names]
    print(f"32 pods created in {created - begun:.2f} s, bound {time.monotonic() - created:.2f} s later")

    given = [each["metadata"]["annotations"]["laxity.dev/devices"] for each in found]
    assert 32 == len(set(given))
    assert [] == [event["note"] for event in events(kube, pods) if event["reason"] == "FailedScheduling"]


async def test_pods_that_wait_behind_one_get_places_before_their_turn(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1", "k2", devices=8)
    scheduler = cluster.brains[0].scheduler
    scheduler.signal(signal.SIGSTOP)
    for name in (names := [f"p{number}" for number in range(16)]):
        await asyncio.to_thread(kube.admin.create, pods, pod(name, gpu_milli="1000"))
    scheduler.signal(signal.SIGCONT)
    found = [await cluster.until_bound(f"{pods}/{name}") for name in names]

    given = [each["metadata"]["annotations"]["laxity.dev/devices"] for each in found]
    assert 16 == len(set(given))
    assert cluster.extender.numbers()["ahead"] > 0


def events(kube: KubeCluster, pods: str) -> list[Json]:
    return kube.admin.items(f"/apis/events.k8s.io/v1/namespaces/{pods.split('/')[4]}/events")


async def test_KU14_a_pod_that_fits_nowhere_says_why_in_one_clause_and_its_numbers_in_the_condition(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1", "k2", "k3")
    impossible = {"deadline": "50ms", "runtime": "60ms", "kind": "firm"}
    kube.admin.create(pods, pod("impossible", impossible, gpu_milli="500"))
    await until(lambda: scheduled(kube.admin.get(f"{pods}/impossible")).get("reason") == "Unschedulable", 40)
    await until(lambda: condition(kube.admin.get(f"{pods}/impossible")) != {}, 20)
    found = kube.admin.get(f"{pods}/impossible")
    message = scheduled(found)["message"]

    assert 1 == message.count(clause := sentences.OF_CODES["never.deadline"])
    assert f"3 {clause}" in message  # nodes of other tests may be there too
    said = condition(found)
    assert ("False", "NeverDeadline") == (said["status"], said["reason"])
    assert "60 ms" in said["message"]
    assert "50 ms" in said["message"]


async def test_KU09_hopeless_pods_cost_the_placers_one_question_whatever_happens_in_the_cluster(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1")
    for number in range(20):
        kube.admin.create(pods, pod(f"hopeless-{number}", gpu_milli="3000"))
    await until(lambda: condition(kube.admin.get(f"{pods}/hopeless-19")) != {}, 40)
    for number in range(30):
        kube.admin.patch("/api/v1/nodes/k1", {"metadata": {"labels": {"flips": str(number)}}})
        await asyncio.sleep(0.1)
    placed = await cluster.bus.history("RT_PLACE", "rt.place")
    stats = cluster.extender.numbers()
    print(f"filter was called {sum(stats.values()):.0f} times: {stats}; placers were asked {len(placed)} times")

    assert len(placed) <= 20, "one question, and those that were under way before its answer"
    kube.admin.create(pods, pod("one", gpu_milli="1000"))
    assert "k1" == (await cluster.until_bound(f"{pods}/one"))["spec"]["nodeName"]


async def test_KU07_a_node_among_many_is_always_offered(cluster: Scheduled, kube: KubeCluster, pods: str) -> None:
    """From 100 nodes on a kube-scheduler shows an extender a sample, unless its profile says otherwise."""
    await cluster.start("k1")
    others = await asyncio.to_thread(kube.add_nodes, 130, "many-")
    for number in range(3):
        kube.admin.create(pods, pod(f"p{number}", gpu_milli="250"))
        assert "k1" == (await cluster.until_bound(f"{pods}/p{number}"))["spec"]["nodeName"]
    for name in others:
        kube.admin.delete(f"/api/v1/nodes/{name}")


async def test_KU05_no_pod_of_the_profile_slips_past_and_an_ordinary_one_is_bound(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1")
    kube.admin.create(pods, pod("plain", cpu="100m"))
    kube.admin.create(pods, pod("misspelt", {"dedline": "50ms"}, cpu="100m"))

    assert "k1" == (await cluster.until_bound(f"{pods}/plain"))["spec"]["nodeName"]
    await until(lambda: condition(kube.admin.get(f"{pods}/misspelt")).get("reason") == "Unreadable", 30)
    assert "nodeName" not in kube.admin.get(f"{pods}/misspelt")["spec"]
    assert {"plain", "unreadable"} <= cluster.extender.numbers().keys()


async def test_a_pod_that_was_refused_is_tried_again_once_something_is_free(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1")
    first = kube.admin.create(pods, pod("first", gpu_milli="1000"))
    await cluster.until_bound(f"{pods}/first")
    kube.admin.create(pods, pod("second", gpu_milli="1000"))
    await until(lambda: condition(kube.admin.get(f"{pods}/second")).get("status") == "False", 30)
    kube.say(pods.split("/")[4], "first", phase="Failed", reason="UnexpectedAdmissionError")
    await cluster.reach(first["metadata"]["uid"], "exited", "released")

    assert "k1" == (await cluster.until_bound(f"{pods}/second", 30))["spec"]["nodeName"]


async def test_where_a_pod_may_go_is_said_by_kubernetes_affinity_taints_and_other_pods(
    cluster: Scheduled, kube: KubeCluster, pods: str
) -> None:
    await cluster.start("k1", "k2", "k3", devices=2)
    kube.admin.patch("/api/v1/nodes/k1", {"spec": {"taints": [{"key": "kept", "effect": "NoSchedule"}]}})
    kube.admin.patch("/api/v1/nodes/k3", {"metadata": {"labels": {"disk": "fast"}}})
    fast = pod("fast", gpu_milli="250")
    terms = [{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["fast"]}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    fast["spec"]["affinity"] = {"nodeAffinity": required}
    kube.admin.create(pods, fast)
    assert "k3" == (await cluster.until_bound(f"{pods}/fast"))["spec"]["nodeName"]

    for number in range(3):
        apart = pod(f"apart-{number}", gpu_milli="250")
        apart["metadata"]["labels"] = {"app": "apart"}
        term = {"labelSelector": {"matchLabels": {"app": "apart"}}, "topologyKey": "kubernetes.io/hostname"}
        apart["spec"]["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        apart["spec"]["nodeSelector"] = {"laxity.test/of": "this"}
        kube.admin.create(pods, apart)
    for name in ("k1", "k2", "k3"):
        kube.admin.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {"laxity.test/of": "this"}}})
    await until(lambda: 2 == len(bound(kube, pods, "apart")), 40)
    assert {"k2", "k3"} == set(bound(kube, pods, "apart").values())
    (waits,) = {f"apart-{number}" for number in range(3)} - bound(kube, pods, "apart").keys()
    await until(lambda: "taint" in scheduled(kube.admin.get(f"{pods}/{waits}")).get("message", ""), 40)
    kube.admin.patch("/api/v1/nodes/k1", {"spec": {"taints": None}})
    assert "k1" == (await cluster.until_bound(f"{pods}/{waits}"))["spec"]["nodeName"]


async def test_a_pod_goes_where_its_volume_is(cluster: Scheduled, kube: KubeCluster, pods: str) -> None:
    await cluster.start("k1", "k2", "k3")
    namespace, of_claim = pods.split("/")[4], f"{pods.rpartition('/')[0]}/persistentvolumeclaims"
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    asked = {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "data-of-k2"}
    complete = {"pv.kubernetes.io/bind-completed": "yes"}
    claim = kube.admin.create(of_claim, {"metadata": {"name": "data", "annotations": complete}, "spec": asked})
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["k2"]}]}]
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/data"},
        "claimRef": {"namespace": namespace, "name": "data", "uid": claim["metadata"]["uid"]},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    kube.admin.create("/api/v1/persistentvolumes", {"metadata": {"name": "data-of-k2"}, "spec": volume})
    kube.admin.patch(f"{of_claim}/data/status", {"status": {"phase": "Bound"}})
    reads = pod("reads", gpu_milli="1000")
    reads["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    kube.admin.create(pods, reads)
    assert "k2" == (await cluster.until_bound(f"{pods}/reads"))["spec"]["nodeName"]
    kube.admin.delete("/api/v1/persistentvolumes/data-of-k2")


async def test_a_quota_counts_what_is_asked_of_us(cluster: Scheduled, kube: KubeCluster, pods: str) -> None:
    await cluster.start("k1")
    quotas = f"{pods.rpartition('/')[0]}/resourcequotas"
    hard = {"requests.laxity.dev/gpu-milli": "500"}
    kube.admin.create(quotas, {"metadata": {"name": "most"}, "spec": {"hard": hard}})
    used = {"requests.laxity.dev/gpu-milli": "0"}
    kube.admin.patch(f"{quotas}/most/status", {"status": {"hard": hard, "used": used}})  # as its controller does
    await persist(lambda: kube.admin.create(pods, pod("first", gpu_milli="250")))
    kube.admin.create(pods, pod("second", gpu_milli="250"))
    with pytest.raises(ApiRefusedError, match="exceeded quota: most"):
        kube.admin.create(pods, pod("third", gpu_milli="250"))
    for name in ("first", "second"):
        assert "k1" == (await cluster.until_bound(f"{pods}/{name}"))["spec"]["nodeName"]


async def test_a_gang_is_bound_whole_or_not_at_all(cluster: Scheduled, kube: KubeCluster, pods: str) -> None:
    await cluster.start("k1", "k2", devices=2)

    def member(gang: str, number: int, size: int) -> Json:
        found = pod(f"{gang}-{number}", gpu_milli="1000")
        found["metadata"]["labels"] = {"laxity.dev/gang": gang, "laxity.dev/gang-size": str(size)}
        return found

    for number in range(5):
        kube.admin.create(pods, member("large", number, 5))
    for number in range(2):
        kube.admin.create(pods, member("small", number, 3))
    for name in ("large-4", "small-1"):
        await until(lambda name=name: condition(kube.admin.get(f"{pods}/{name}")) != {}, 40)
    assert "GangIncomplete" == condition(kube.admin.get(f"{pods}/small-1"))["reason"]
    assert [] == [*await cluster.reserved("k1"), *await cluster.reserved("k2")], "a part of one holds nothing"
    kube.admin.create(pods, member("small", 2, 3))
    found = [await cluster.until_bound(f"{pods}/small-{number}") for number in range(3)]
    assert 3 == len({each["metadata"]["annotations"]["laxity.dev/devices"] for each in found})
    everybody = [each["metadata"]["name"] for each in kube.admin.items(pods) if each["spec"].get("nodeName")]
    assert [] == [name for name in everybody if name.startswith("large")]
    assert 1 == len({*await cluster.reserved("k1"), *await cluster.reserved("k2")}), "one request for all"
