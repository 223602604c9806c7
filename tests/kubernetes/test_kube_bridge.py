"""A bridge on a real API server and a real nats-server, asked in kube-scheduler's own wire format."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.kube_bridge import sentences
from shared.bus import Msg
from shared.messages import KubeNodeFacts
from shared.subjects import PLACE_STREAM
from shared.testing.wait import eventually, until
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import Bridged, Extender, condition, laxity_on, pod
from tests.kubernetes.cluster import KubeCluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

SOFT = {"deadline": "50ms", "kind": "soft"}


@pytest.fixture
async def bridged(kube: KubeCluster, tmp_path: Path) -> AsyncIterator[Bridged]:
    async with laxity_on(kube, tmp_path, Bridged) as bridged:
        yield bridged


async def started(bridged: Bridged, *nodes: str, devices: int = 1) -> Extender:
    """A placer and a bridge that knows everything."""
    for name in nodes:
        await bridged.add_node(name, devices)
    _, extender = await asyncio.gather(asyncio.to_thread(bridged.placer), asyncio.to_thread(bridged.bridge))
    await until(lambda: "the extender listens" in extender.process.log, 20)
    probe = {"metadata": {"name": "x", "namespace": "x", "uid": "x"}, "spec": {}}
    await until(lambda: not extender.filter(probe, [])["Error"], 20)
    return extender


async def test_filter_holds_one_node_and_the_condition_says_why_another_pod_has_none(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1", "k2")
    first, second = (kube.admin.create(pods, pod(name, SOFT, gpu_milli="1000")) for name in ("first", "second"))
    third = kube.admin.create(pods, pod("third", SOFT, gpu_milli="1000"))

    answers = [extender.filter(each, ["k1", "k2", "other"]) for each in (first, second)]
    assert {"k1", "k2"} == {node for answer in answers for node in answer["NodeNames"]}
    assert ["held", "held"] == [
        (await bridged.reach(each["metadata"]["uid"], "held")).state for each in (first, second)
    ]
    said = extender.filter(third, ["k1", "k2", "other"])
    assert ([], "") == (said["NodeNames"], said["Error"])
    assert {"k1": sentences.OF_CODES["not_now.share"], "other": sentences.NOT_OURS} == {
        node: said["FailedAndUnresolvableNodes"][node] for node in ("k1", "other")
    }
    shown = await eventually(lambda: _shown(kube, f"{pods}/third"), 10)
    assert ("False", "NotNowShare") == (shown["status"], shown["reason"])
    assert "needs a share of 1 of one device, largest free is 0" in shown["message"]
    assert shown["lastTransitionTime"]


async def _shown(kube: KubeCluster, path: str) -> Json | None:
    return condition(kube.admin.get(path)) or None


async def held(extender: Extender, found: Json, *nodes: str) -> str:
    """The node that filter answers with."""
    said = await asyncio.to_thread(extender.filter, found, list(nodes))
    (node,) = said["NodeNames"]
    return str(node)


async def bound(extender: Extender, found: Json, *nodes: str) -> str:
    node = await held(extender, found, *nodes)
    assert {"Error": ""} == await asyncio.to_thread(extender.bind, found, node)
    return node


async def test_bind_is_answered_once_the_ledger_says_started(bridged: Bridged, kube: KubeCluster, pods: str) -> None:
    extender = await started(bridged, "k1")
    found = kube.admin.create(pods, pod("one", SOFT, gpu_milli="250", gpu_mib="1024"))
    assert "k1" == await bound(extender, found, "k1")
    assert "started" == (await bridged.reach(found["metadata"]["uid"], "started")).state
    again = await held(extender, found, "k1")
    assert ("k1", {"Error": ""}) == (again, extender.bind(found, "k1")), "asked again, the same answer"


async def test_the_condition_of_a_pod_that_was_refused_says_so_no_longer_once_it_is_bound(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1")
    first, second = (kube.admin.create(pods, pod(name, SOFT, gpu_milli="1000")) for name in ("first", "second"))
    assert "k1" == await bound(extender, first, "k1")
    assert [] == extender.filter(second, ["k1"])["NodeNames"]
    await eventually(lambda: _says(kube, f"{pods}/second", "False"), 10)
    await bridged.add_node("k2", 1)
    await until(lambda: extender.filter(second, ["k2"])["NodeNames"] == ["k2"], 10)
    assert {"Error": ""} == await asyncio.to_thread(extender.bind, second, "k2")
    shown = await eventually(lambda: _says(kube, f"{pods}/second", "True"), 10)

    assert ("Bound", "on k2-gpu-0 of k2, share 1 of each") == (shown["reason"], shown["message"])


async def _says(kube: KubeCluster, path: str, status: str) -> Json | None:
    found = await _shown(kube, path)
    return found if found is not None and found["status"] == status else None


async def test_KU05_a_pod_that_asks_for_nothing_of_ours_is_bound_by_an_ordinary_binding(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1")
    kube.add_node("plain-node")
    found = kube.admin.create(pods, pod("plain", cpu="100m"))
    assert ["k1", "plain-node"] == extender.filter(found, ["k1", "plain-node"])["NodeNames"]
    assert {"Error": ""} == extender.bind(found, "plain-node")
    assert "plain-node" == kube.admin.get(f"{pods}/plain")["spec"]["nodeName"]
    assert {"Error": ""} == extender.bind(found, "plain-node"), "asked again, it is bound as asked"
    assert "already assigned" in extender.bind(found, "k1")["Error"]
    gone = kube.admin.create(pods, pod("gone", cpu="100m"))
    extender.filter(gone, ["plain-node"])
    kube.admin.delete(f"{pods}/gone", grace_s=0)
    assert extender.bind(gone, "plain-node")["Error"]
    assert await bridged.record(found["metadata"]["uid"]) is None
    kube.admin.delete("/api/v1/nodes/plain-node")


async def test_KU09_a_hundred_calls_for_hopeless_pods_cost_the_placers_one(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1")
    first, hopeless = (kube.admin.create(pods, pod(name, gpu_milli="1000")) for name in ("first", "hopeless"))
    await held(extender, first, "k1")
    process = psutil.Process(extender.process.pid)
    begun, spent = time.monotonic(), sum(process.cpu_times()[:2])
    for _ in range(100):
        assert [] == extender.filter(hopeless, ["k1"])["NodeNames"]
    wall_ms, cpu_ms = (time.monotonic() - begun) * 10, (sum(process.cpu_times()[:2]) - spent) * 10
    print(f"a call costs the bridge {cpu_ms:.2f} ms of CPU, with its HTTP; {wall_ms:.2f} ms went by")
    assert 1 == await asked(bridged, hopeless)
    kube.admin.delete(f"{pods}/first", grace_s=0)
    await bridged.reach(first["metadata"]["uid"], "released")
    assert "k1" == await held(extender, hopeless, "k1"), "what is free is seen at once"


async def asked(bridged: Bridged, found: Json) -> int:
    """How many requests for a pod reached the placers."""
    wanted = f'"request_id":"{found["metadata"]["uid"]}"'.encode()
    return sum(wanted in each.body for each in await bridged.bus.history(PLACE_STREAM, "rt.place"))


async def test_KU11_32_pods_at_once_onto_devices_that_just_suffice_and_no_bind_fails(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    nodes = ["k1", "k2", "k3", "k4"]
    extender = await started(bridged, *nodes, devices=8)
    wanted = [kube.admin.create(pods, pod(f"p{number}", gpu_milli="1000")) for number in range(32)]
    begun = time.monotonic()
    where = await asyncio.gather(*(bound(extender, each, *nodes) for each in wanted))
    print(f"32 pods held and bound in {time.monotonic() - begun:.2f} s")

    assert dict.fromkeys(nodes, 8) == Counter(where)
    more = kube.admin.create(pods, pod("more", gpu_milli="1000"))
    assert [] == extender.filter(more, nodes)["NodeNames"]


async def test_KU12_what_ends_is_free_for_the_next(bridged: Bridged, kube: KubeCluster, pods: str) -> None:
    """Rejected by the kubelet and still an object; deleted before it was bound; deleted and made again."""
    extender = await started(bridged, "k1")
    first, second, third = (kube.admin.create(pods, pod(name, gpu_milli="1000")) for name in ("one", "two", "three"))
    await bound(extender, first, "k1")
    kube.say(pods.split("/")[4], "one", phase="Failed", reason="UnexpectedAdmissionError")
    await bridged.reach(first["metadata"]["uid"], "released", "exited")
    assert "k1" == await held(extender, second, "k1")
    kube.admin.delete(f"{pods}/two", grace_s=0)
    await bridged.reach(second["metadata"]["uid"], "released")
    assert "k1" == await bound(extender, third, "k1")
    kube.admin.delete(f"{pods}/three", grace_s=0)
    another = kube.admin.create(pods, pod("three", gpu_milli="1000"))
    await bridged.reach(third["metadata"]["uid"], "released", "exited")
    assert "k1" == await held(extender, another, "k1")
    assert [another["metadata"]["uid"]] == await bridged.reserved("k1")


async def test_KU12_what_ended_while_no_bridge_was_there_is_given_back_by_the_next(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1", devices=3)
    kube.add_node("k1")  # what the ledger has on nodes of other clusters is not looked at
    found = [kube.admin.create(pods, pod(name, gpu_milli="1000")) for name in ("stays", "ends", "goes")]
    for each in found:
        await bound(extender, each, "k1")
    extender.process.kill()
    stays, *over = [each["metadata"]["uid"] for each in found]
    kube.say(pods.split("/")[4], "ends", phase="Succeeded")
    kube.admin.delete(f"{pods}/goes", grace_s=0)
    await asyncio.to_thread(bridged.bridge, "b2")
    for uid in over:
        await bridged.reach(uid, "released", "exited")
    assert [stays] == await bridged.reserved("k1")
    kube.admin.delete("/api/v1/nodes/k1")


async def test_any_of_two_bridges_binds_what_the_other_one_held(bridged: Bridged, kube: KubeCluster, pods: str) -> None:
    extender = await started(bridged, "k1")
    other = await asyncio.to_thread(bridged.bridge, "b2")
    await until(lambda: "the extender listens" in other.process.log, 20)
    found = kube.admin.create(pods, pod("one", gpu_milli="250"))
    await held(extender, found, "k1")
    extender.process.kill()
    await until(lambda: {"Error": ""} == other.bind(found, "k1"), 20)
    assert "started" == (await bridged.reach(found["metadata"]["uid"], "started")).state


@pytest.mark.parametrize("body", [{}, {"Pod": {}, "NodeNames": ["k1"]}, {"Pod": None, "Nodes": {"items": []}}, []])
async def test_a_call_that_cannot_be_read_gets_an_answer_all_the_same(bridged: Bridged, body: object) -> None:
    """KU14: of any status but 200 kube-scheduler throws the reason away."""
    extender = await started(bridged, "k1")

    for verb in ("filter", "bind"):
        assert sentences.MALFORMED == extender.ask(verb, body)["Error"]


async def test_the_facts_of_nodes_are_told_on_the_bus(bridged: Bridged, kube: KubeCluster, pods: str) -> None:
    heard: dict[str, KubeNodeFacts] = {}

    async def hear(msg: Msg) -> None:
        facts = KubeNodeFacts.from_json(msg.body)
        heard[facts.node] = facts

    await bridged.bus.subscribe("rt.metrics.*.kube", hear)
    kube.add_node("told", {"zone": "a"}, {"cpu": "7910m", "memory": "31Gi"})
    await started(bridged, "k1")
    await until(lambda: "told" in heard, 20)
    assert (7910, 31 * 1024, True, False) == (
        heard["told"].cpu_milli,
        heard["told"].memory_mib,
        heard["told"].ready,
        heard["told"].unschedulable,
    )
    assert "a" == heard["told"].labels["zone"]
    kube.admin.patch("/api/v1/nodes/told", {"spec": {"unschedulable": True}})
    foreign = pod("foreign", cpu="250m", memory="64Mi")
    foreign["spec"]["schedulerName"] = "somebody-else"
    kube.admin.create(pods, foreign)
    kube.bind(pods.split("/")[4], "foreign", "told", {})
    await until(lambda: (heard["told"].unschedulable, heard["told"].foreign_cpu_milli) == (True, 250), 20)
    assert 64 == heard["told"].foreign_memory_mib
    kube.admin.delete("/api/v1/nodes/told")
    await until(lambda: heard["told"].gone, 20)


async def test_KU32_an_api_server_that_dies_and_comes_back_is_followed_on(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    extender = await started(bridged, "k1")
    found = [kube.admin.create(pods, pod(name, gpu_milli="250")) for name in ("one", "two")]
    for each in found:
        await held(extender, each, "k1")
    await asyncio.to_thread(kube.apiserver.restart)
    await until(lambda: "the API server is not heard" in extender.process.log, 30)
    kube.admin.delete(f"{pods}/one", grace_s=0)
    await bridged.reach(found[0]["metadata"]["uid"], "released")
    await asyncio.to_thread(kube.etcd.restart)
    await asyncio.to_thread(kube.apiserver.wait_ready)
    kube.admin.delete(f"{pods}/two", grace_s=0)
    await bridged.reach(found[1]["metadata"]["uid"], "released")
    assert 0 == await asyncio.to_thread(extender.process.stop), "with its watches open"


async def test_KU29_a_watch_that_dies_without_a_word_is_begun_anew(
    bridged: Bridged, kube: KubeCluster, pods: str
) -> None:
    """Meanwhile bridge and placer are not ready, and say since when they hear nothing."""
    await bridged.add_node("k1", 1)
    times = {"SILENT_US": "2000000", "CALL_TIMEOUT_US": "1000000"}
    of_placer = {f"LAXITY_PLACER_KUBERNETES__{name}": value for name, value in times.items()}
    of_bridge = {f"LAXITY_KUBE_BRIDGE_KUBERNETES__{name}": value for name, value in times.items()}
    placer = await asyncio.to_thread(lambda: bridged.placer(backend="kubernetes", **of_placer))
    extender = await asyncio.to_thread(lambda: bridged.bridge(**of_bridge))
    await until(lambda: "the extender listens" in extender.process.log, 20)
    found = kube.admin.create(pods, pod("one", gpu_milli="250"))
    await until(lambda: bool(extender.filter(found, ["k1"])["NodeNames"]), 20)
    kube.apiserver.signal(signal.SIGSTOP)
    try:
        await until(lambda: "the API server is not heard" in extender.process.log, 30)
        await until(lambda: not placer.ready and not extender.process.ready, 30)
        assert any(seconds > 2 for seconds in extender.numbers("laxity_kubernetes_silent_seconds").values())
    finally:
        kube.apiserver.signal(signal.SIGCONT)
    await asyncio.to_thread(kube.apiserver.wait_ready)
    kube.admin.delete(f"{pods}/one", grace_s=0)
    await bridged.reach(found["metadata"]["uid"], "released")
    await until(lambda: placer.ready and extender.process.ready, 60)
