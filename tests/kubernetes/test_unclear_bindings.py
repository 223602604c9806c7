"""A Binding that fails, or whose end nobody knows, after the ledger was written: it is undone or done, and nothing is
kept for it for long after the API server answers again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shared.testing.wait import eventually, until
from tests.kubernetes.api import Json
from tests.kubernetes.bridged import pod
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.front import Asked, Front
from tests.kubernetes.scheduled import Scheduled, persist

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(240)]

Deed = Callable[[Asked], None]
IMPATIENT = {
    "LAXITY_PLACER_START_TIMEOUT_US": "1500000",
    "LAXITY_PLACER_KUBERNETES__CALL_TIMEOUT_US": "1000000",
}


@pytest.fixture
def front(kube: KubeCluster) -> Iterator[Front]:
    with Front(kube) as front:
        yield front


async def start(cluster: Scheduled, front: Front, **placer: str) -> None:
    """Only placers reach the API server through the proxy."""
    cluster.api_url = front.url
    await cluster.start("k1", placer=placer)


def status(code: int, message: str) -> Deed:
    return lambda asked: asked.answer(code, json.dumps({"kind": "Status", "code": code, "message": message}))


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(status(403, "RBAC: clusterrole not found"), id="forbidden"),
        pytest.param(status(500, "etcdserver: request timed out"), id="failed"),
    ],
)
async def test_a_binding_that_fails_for_a_while_is_made_once_it_can_be_and_the_ledger_has_it_once(
    cluster: Scheduled, kube: KubeCluster, front: Front, pods: str, deed: Deed
) -> None:
    await start(cluster, front)
    front.always("POST /binding", deed)
    made = kube.admin.create(pods, pod("one", gpu_milli="1000"))
    await until(lambda: front.count("POST /binding") >= 3, 40)
    front.faults.clear()
    await agrees(cluster, pods, made)


async def agrees(cluster: Scheduled, pods: str, made: Json) -> None:
    """The pod is bound as its record says, and nothing else is reserved."""
    healed = time.monotonic()
    found = await cluster.until_bound(f"{pods}/{made['metadata']['name']}")
    uid = made["metadata"]["uid"]
    record = await cluster.reach(uid, "started")
    print(f"bound {time.monotonic() - healed:.1f} s after the API server answers again")
    assert ("k1", "k1-gpu-0") == (found["spec"]["nodeName"], found["metadata"]["annotations"]["laxity.dev/devices"])
    assert record.replicas[0].devices == ("k1-gpu-0",)
    assert [uid] == await cluster.reserved("k1")


async def test_a_pod_that_is_bound_while_nobody_can_read_it_is_neither_called_failed_nor_evicted(
    cluster: Scheduled, kube: KubeCluster, front: Front, pods: str
) -> None:
    """The answer to its Binding is lost, and then the API server cannot be asked for longer than a start may take."""
    await start(cluster, front, **IMPATIENT)
    away = threading.Event()

    def lose(asked: Asked) -> None:
        away.set()
        asked.swallow()

    front.faults.append(lambda asked: away.is_set() and (asked.cut() or True))
    front.once("POST /binding", lose)
    made = kube.admin.create(pods, pod("one", gpu_milli="1000"))
    await cluster.until_bound(f"{pods}/one")
    await asyncio.sleep(3)  # longer than a start may take
    assert [made["metadata"]["uid"]] == await cluster.reserved("k1"), "it is bound: it has its device"
    away.clear()
    await agrees(cluster, pods, made)
    await asyncio.sleep(5)  # longer than the placers need to look at what runs
    assert kube.admin.get(f"{pods}/one")["metadata"]["uid"] == made["metadata"]["uid"], "nobody has evicted it"


async def test_a_binding_that_was_the_last_deed_of_an_api_server_is_known_when_it_is_back(
    cluster: Scheduled, kube: KubeCluster, front: Front, pods: str
) -> None:
    await start(cluster, front)

    def die(asked: Asked) -> None:
        asked.swallow()
        kube.apiserver.kill()

    front.once("POST /binding", die)
    made = kube.admin.create(pods, pod("one", gpu_milli="1000"))
    await until(lambda: not kube.apiserver.running, 40)
    await asyncio.sleep(3)
    await asyncio.to_thread(kube.apiserver.start)
    await agrees(cluster, pods, made)


async def test_what_a_pod_has_that_goes_while_its_binding_is_unclear_is_given_back(
    cluster: Scheduled, kube: KubeCluster, front: Front, pods: str
) -> None:
    await start(cluster, front)

    def die(asked: Asked) -> None:
        kube.apiserver.kill()
        asked.cut()

    front.once("POST /binding", die)
    first = kube.admin.create(pods, pod("first", gpu_milli="1000"))
    await until(lambda: not kube.apiserver.running, 40)
    assert "placed" == (await cluster.reach(first["metadata"]["uid"], "placed")).state
    await asyncio.to_thread(kube.apiserver.start)
    await persist(lambda: kube.admin.delete(f"{pods}/first", grace_s=0))
    back = time.monotonic()

    async def free() -> bool | None:
        return not await cluster.reserved("k1") or None

    await eventually(free, 60)
    print(f"given back {time.monotonic() - back:.1f} s after the API server answers again")
    second = await persist(lambda: kube.admin.create(pods, pod("second", gpu_milli="1000")))
    await agrees(cluster, pods, second)
