"""What the backend asks of the API server: a start, and a look at one node among many, cost few calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.placer.backends.kubernetes import KubernetesBackend
from tests.conformance import test_backend as conformance
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.front import Front
from tests.kubernetes.played import PlayedKubelet
from tests.kubernetes.pods import kubernetes_options

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]
NODE = "calls-1"
OTHER = "calls-2"


@pytest.fixture
def front(kube: KubeCluster) -> Iterator[Front]:
    for name in (NODE, OTHER):
        kube.add_node(name)
    with Front(kube) as front, PlayedKubelet(kube, "calls-"):
        yield front
        for name in (NODE, OTHER):
            kube.admin.delete(f"/api/v1/nodes/{name}")


@pytest.fixture
async def backend(kube: KubeCluster, front: Front, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    options = kubernetes_options(kube, tmp_path).model_copy(update={"server": front.url})
    backend = KubernetesBackend(options)
    yield backend
    for node in (NODE, OTHER):
        for seen in await backend.list(node):
            await backend.stop(seen.node, seen.container)
    await backend.close()


async def test_starts_make_and_bind_and_the_watch_says_the_rest(front: Front, backend: KubernetesBackend) -> None:
    starts = [backend.start(conformance.spec(f"c{number}", node=NODE)) for number in range(8)]
    found = await asyncio.gather(*starts)

    assert {"running"} == {each.state for each in found}
    assert (8, 8) == (front.count("POST /pods") - front.count("POST /binding"), front.count("POST /binding"))
    assert 0 == sum("GET /api/v1/namespaces/" in line and "/pods/" in line for line in front.asked)
    assert 1 == front.count(f"GET /api/v1/nodes/{NODE}")


async def test_who_waits_for_one_pod_is_not_woken_by_others(backend: KubernetesBackend) -> None:
    first, _ = await asyncio.gather(*(backend.start(conformance.spec(name, node=NODE)) for name in ("c1", "c2")))
    (uid,) = (uid for uid, pod in backend.pods.found.items() if pod["metadata"]["name"] == first.container)
    version = int(backend.pods.found[uid]["metadata"]["resourceVersion"])
    waiting = asyncio.create_task(backend.pods.newer(uid, version, 30_000_000))
    await backend.start(conformance.spec("c3", node=NODE))
    assert not waiting.done()
    await backend.stop(NODE, first.container)
    found = await waiting

    assert found is None or found["metadata"]["uid"] == uid
    assert None is await backend.pods.newer("nobody", 0, 1)


async def test_a_node_is_listed_by_itself(front: Front, backend: KubernetesBackend) -> None:
    """All pods of a large cluster, again and again, would be most of what the API server does."""
    one = await backend.start(conformance.spec("c1", node=NODE))
    two = await backend.start(conformance.spec("c2", node=OTHER))

    assert ([one], [two]) == (await backend.list(NODE), await backend.list(OTHER))
    listed = [line for line in front.asked if "labelSelector" in line and "watch" not in line]
    assert all("fieldSelector=spec.nodeName" in line for line in listed[1:]), "only the watch begins with all"
