"""The backend where the API server is silent, gone, lies, or a proxy speaks for it: cases of Kubernetes, by name."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.placer.backends.kubernetes import KubernetesBackend
from shared.errors import BackendSilentError
from shared.testing.wait import eventually, until
from tests.backends import watched
from tests.conformance import test_backend as conformance
from tests.kubernetes.api import Api
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.front import Asked, Front
from tests.kubernetes.played import PlayedKubelet
from tests.kubernetes.pods import kubernetes_options, pods_in

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

NODE = "faults-1"
BOX = conformance.BOX
TOO_MANY = json.dumps({"kind": "Status", "code": 429, "message": "storage is (re)initializing"})


@pytest.fixture
def front(kube: KubeCluster) -> Iterator[Front]:
    kube.add_node(NODE)
    with Front(kube) as front, PlayedKubelet(kube, NODE):
        yield front
    kube.admin.delete(f"/api/v1/nodes/{NODE}")


@pytest.fixture
async def backend(kube: KubeCluster, front: Front, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    """It reaches the API server through the proxy alone."""
    times = {"call_timeout_us": 1_000_000, "silent_us": 1_500_000}
    options = kubernetes_options(kube, tmp_path, **times).model_copy(update={"server": front.url})
    backend = KubernetesBackend(options)
    yield backend
    front.faults.clear()
    for seen in await backend.list(NODE):
        await backend.stop(seen.node, seen.container)
    await backend.close()


async def test_KU01_KU28_a_binding_whose_answer_was_lost_is_read_and_not_made_twice(
    kube: KubeCluster, front: Front, backend: KubernetesBackend, tmp_path: Path
) -> None:
    front.once("POST /binding", Asked.swallow)
    assert "running" == (await backend.start(conformance.spec(node=NODE))).state
    (pod,) = pods_in(kube, kubernetes_options(kube, tmp_path).namespace)
    assert (NODE, "GPU-5f1") == (pod["spec"]["nodeName"], pod["metadata"]["annotations"]["laxity.dev/devices"])
    assert 1 == front.count("POST /binding")


async def test_a_creation_whose_answer_was_lost_is_adopted(
    kube: KubeCluster, front: Front, backend: KubernetesBackend, tmp_path: Path
) -> None:
    front.once("POST /pods?", Asked.swallow)
    front.once("POST /pods", Asked.swallow)
    assert "running" == (await backend.start(conformance.spec(node=NODE))).state
    assert 1 == len(pods_in(kube, kubernetes_options(kube, tmp_path).namespace))


async def test_KU02_a_binding_that_is_said_and_not_made_is_made_again(front: Front, backend: KubernetesBackend) -> None:
    front.once("POST /binding", lambda asked: asked.answer(201, '{"kind": "Status", "status": "Success"}'))
    assert "running" == (await backend.start(conformance.spec(node=NODE))).state
    assert 2 == front.count("POST /binding")


async def test_KU29_a_silent_api_server_ends_calls_and_watches_in_time(
    kube: KubeCluster, backend: KubernetesBackend
) -> None:
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE, exits_after_s=1, code=4))
        kube.apiserver.signal(signal.SIGSTOP)
        try:
            with pytest.raises(BackendSilentError, match="does not answer"):
                await backend.list(NODE)
            heard_us = backend.pods.follower.heard_us
            await asyncio.sleep(2)  # longer than a watch may be silent
        finally:
            kube.apiserver.signal(signal.SIGCONT)
        assert 4 == (await conformance.first(posts)).exit_code
    assert heard_us is not None
    assert backend.pods.follower.heard_us is not None
    assert backend.pods.follower.heard_us > heard_us  # the age of the last sign of life


async def test_a_glance_asks_nothing_and_is_refused_where_the_watch_is_silent(
    kube: KubeCluster, front: Front, backend: KubernetesBackend
) -> None:
    assert await backend.glance(NODE) is None  # nothing was shown yet
    await backend.start(conformance.spec(node=NODE))
    asked = front.count("GET /pods"), front.count("GET /nodes")
    for _ in range(10):
        assert [BOX] == [seen.container for seen in await backend.glance(NODE) or ()]
    assert asked == (front.count("GET /pods"), front.count("GET /nodes"))
    kube.apiserver.signal(signal.SIGSTOP)
    try:

        async def unknown() -> bool | None:
            return await backend.glance(NODE) is None or None

        await eventually(unknown)
    finally:
        kube.apiserver.signal(signal.SIGCONT)


async def test_KU31_what_a_proxy_says_for_the_api_server_is_no_answer(front: Front, backend: KubernetesBackend) -> None:
    page = "<html>502 bad gateway</html>"
    front.once("GET watch", lambda asked: asked.answer(429, TOO_MANY))
    front.once("GET watch", lambda asked: asked.answer(502, page, "text/html"))
    front.once("GET watch", lambda asked: asked.answer(200, page, "text/html"))
    front.once("GET watch", lambda asked: asked.forward(most_bytes=100))  # a line cut in half
    front.once("GET labelSelector", lambda asked: asked.answer(200, page, "text/html"))
    front.once("POST /pods", lambda asked: asked.answer(429, TOO_MANY))
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE))
        await backend.start(conformance.spec("second", node=NODE, exits_after_s=0, code=5))
        assert 5 == (await conformance.first(posts)).exit_code
        await until(lambda: front.count("GET watch") >= 5)
        await backend.start(conformance.spec("third", node=NODE, exits_after_s=0, code=6))
        await until(lambda: [post.exit_code for post in posts] == [5, 6])
    assert 2 <= backend.pods.follower.failures["not_to_the_point"]
    assert 1 <= backend.pods.follower.failures["refused"]


async def test_a_proxys_404_is_no_pod_that_is_gone(front: Front, backend: KubernetesBackend) -> None:
    await backend.start(conformance.spec(node=NODE))
    front.once("GET /pods/", lambda asked: asked.answer(404, "<html>404 not found</html>", "text/html"))
    await backend.stop(NODE, BOX)
    assert [] == await backend.list(NODE)
    assert 1 <= front.count("DELETE")


@pytest.mark.parametrize("away_s", [0, 2], ids=["at once", "after longer than a call may take"])
async def test_a_server_that_has_just_begun_forbids_for_a_moment_and_that_says_nothing_of_a_start(
    front: Front, backend: KubernetesBackend, away_s: float
) -> None:
    front.always("GET", Asked.cut)
    starting = asyncio.create_task(backend.start(conformance.spec(node=NODE)))
    await asyncio.sleep(away_s)
    forbidden = json.dumps({"kind": "Status", "code": 403, "message": "RBAC: clusterrole not found"})
    for asked_for in ("GET /nodes/", "GET /pods/", "GET /pods/"):
        front.once(asked_for, lambda asked: asked.answer(403, forbidden))
    del front.faults[0]
    assert "running" == (await starting).state
    assert 1 == front.count("POST /binding")


async def test_KU32_a_watch_never_gives_up_and_is_right_again_soon_after(
    kube: KubeCluster, backend: KubernetesBackend
) -> None:
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE))
        kube.apiserver.kill()
        await asyncio.sleep(3)  # many tries, all refused
        await asyncio.to_thread(kube.apiserver.start)
        await backend.start(conformance.spec("later", node=NODE, exits_after_s=0, code=8))
        assert ("later", 8) == ((await conformance.first(posts)).container, posts[0].exit_code)
        assert {"running", "exited"} == {seen.state for seen in await backend.list(NODE)}


async def test_a_watch_from_a_version_that_is_not_kept_begins_anew(front: Front, backend: KubernetesBackend) -> None:
    gone = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old: 1 (534)"}})
    front.once("GET watch", lambda asked: asked.answer(200, gone + "\n"))
    front.once("GET watch", lambda asked: asked.answer(410, json.dumps({"message": "Expired"})))
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE, exits_after_s=0, code=7))
        assert 7 == (await conformance.first(posts)).exit_code
        await until(lambda: front.count("GET watch") >= 3)


@pytest.mark.parametrize("ahead_s", [3600, -3600], ids=["ahead", "behind"])
async def test_an_api_server_whose_clock_is_an_hour_off_changes_nothing_of_a_pods_life(
    kube: KubeCluster, front: Front, backend: KubernetesBackend, tmp_path: Path, ahead_s: float
) -> None:
    front.ahead_s = ahead_s
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE))
        namespace = kubernetes_options(kube, tmp_path).namespace
        (pod,) = Api(front.port, kube.token(), kube.ca).items(f"/api/v1/namespaces/{namespace}/pods")
        said = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
        assert abs(ahead_s - (said - datetime.now(UTC)).total_seconds()) < 600, "it is off"
        assert ["running"] == [seen.state for seen in await backend.list(NODE)]
        await backend.start(conformance.spec("second", node=NODE, exits_after_s=0, code=3))
        assert 3 == (await conformance.first(posts)).exit_code
        for container in (BOX, "second"):
            await backend.stop(NODE, container)
    assert [] == await backend.list(NODE)
    assert [] == pods_in(kube, namespace)


async def test_KU34_a_token_that_was_replaced_is_read_again_where_the_old_one_is_refused(
    kube: KubeCluster, front: Front, tmp_path: Path
) -> None:
    options = kubernetes_options(kube, tmp_path)
    options.token_file.write_text("of-yesterday")
    backend = KubernetesBackend(options)
    options.token_file.write_text(kube.token() + "\n")
    async with watched(backend) as posts:
        await backend.start(conformance.spec(node=NODE, exits_after_s=0, code=2))
        assert 2 == (await conformance.first(posts)).exit_code
    await backend.remove(NODE, BOX)
    await backend.close()


async def test_KU34_a_watch_whose_token_is_refused_reads_it_again(
    kube: KubeCluster, front: Front, backend: KubernetesBackend, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    used: list[str] = []

    def refuse(asked: Asked) -> None:
        token.write_text("of-tomorrow")
        asked.answer(401, json.dumps({"kind": "Status", "code": 401, "message": "Unauthorized"}))

    def pass_on(asked: Asked) -> None:
        used.append(asked.headers["Authorization"])
        token.write_text(kube.token())
        asked.forward()

    front.once("GET watch", refuse)
    front.once("GET watch", pass_on)
    async with watched(backend) as posts:
        await until(lambda: front.count("GET watch") >= 3)
        await backend.start(conformance.spec(node=NODE, exits_after_s=0, code=2))
        assert 2 == (await conformance.first(posts)).exit_code
    assert ["Bearer of-tomorrow"] == used
