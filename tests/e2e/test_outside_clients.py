"""What a plain NATS client may rely on, seen by one that imports nothing of ours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from tests.e2e.processes import Cluster
from tests.outside import Json, ask, connect, events, states, until, value

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For the tests that leave it as it was; three placers, so that whatever holds does so across them."""
    with Cluster(tmp_path_factory.mktemp("shared"), placers=3, nodes=4) as cluster:
        yield cluster


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    """Of the test's own, with one placer."""
    with Cluster(tmp_path, placers=1) as cluster:
        yield cluster


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    """Of the test's own, with three placers."""
    with Cluster(tmp_path, placers=3) as cluster:
        yield cluster


def wanted(request_id: str, **more: Any) -> Json:
    return {"request_id": request_id, "command": ["sleep", "600"], "gpu": {"share": 0.1}} | more


async def ready(client: Client) -> None:
    """The node list has its nodes ready."""

    async def listed() -> Any:
        reply = json.loads((await client.request("rt.nodes", b"{}", timeout=5)).data)
        devices = reply["devices"]
        return devices and all(d["standing"] != "excluded" for d in devices)

    await until(listed, "all devices are in the list")


@pytest.fixture
async def outside(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    name = next(n for n in ("shared_cluster", "one", "three") if n in request.fixturenames)
    client = await connect(request.getfixturevalue(name).nats.url)
    await ready(client)
    yield client
    await client.close()


async def test_a_request_gets_exactly_one_json_reply_from_three_placers(three: Cluster, outside: Client) -> None:
    await _exactly_one_reply_each(outside)
    assert len(three.containers()) == 20


async def test_a_request_gets_exactly_one_json_reply_from_one_placer(one: Cluster, outside: Client) -> None:
    await _exactly_one_reply_each(outside)
    assert len(one.containers()) == 20


async def _exactly_one_reply_each(outside: Client) -> None:
    replies: list[Json] = []

    async def heard(message: Any) -> None:
        replies.append(json.loads(message.data))

    await outside.subscribe("_INBOX.outside.*", cb=heard)
    for n in range(20):
        await outside.publish("rt.place", json.dumps(wanted(f"q{n}")).encode(), reply=f"_INBOX.outside.{n}")

    async def all_started() -> bool:
        started = [body for _, body in await events(outside, "rt.events.place.*") if body["state"] == "started"]
        return len({body["request_id"] for body in started}) == 20

    await until(all_started, "all are started")
    assert sorted((r["request_id"], r["outcome"]) for r in replies) == sorted((f"q{n}", "placed") for n in range(20))


async def test_history_comes_from_the_stream_in_order(shared_cluster: Cluster, outside: Client) -> None:
    await ask(outside, "rt.place", wanted("told"))
    await until(lambda: _has(outside, "told", "started"), "started")
    await ask(outside, "rt.release", {"request_id": "told"})
    await until(lambda: _has(outside, "told", "released"), "released")
    assert await states(outside, "told") == ["accepted", "placed", "started", "stopping", "released"]


async def _has(client: Client, token: str, state: str) -> bool:
    return state in await states(client, token)


async def test_without_a_placer_discovery_says_so_at_once_and_the_request_is_decided_when_one_comes(
    one: Cluster, outside: Client
) -> None:
    assert one.placers[0].stop() == 0
    began = time.monotonic()
    with pytest.raises(nats.errors.NoRespondersError):
        await outside.request("$SRV.PING.placer", b"", timeout=10)
    assert time.monotonic() - began < 5
    await outside.publish("rt.place", json.dumps(wanted("later")).encode())
    late = wanted("too-late", place_by_us=time.time_ns() // 1000 - 1)
    await outside.publish("rt.place", json.dumps(late).encode())
    one.placers[0].start()
    await until(lambda: _has(outside, "later", "started"), "decided by the placer that came")
    await until(lambda: _has(outside, "too-late", "expired"), "expired")
    assert await states(outside, "later") == ["accepted", "placed", "started"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_requests_in_the_hands_of_a_placer_that_is_gone_are_decided_once_by_another(
    how: signal.Signals, three: Cluster, outside: Client
) -> None:
    asked = [asyncio.create_task(_asked(outside, f"q{n}")) for n in range(30)]
    os.kill(three.placers[1].pid, how)
    try:
        await asyncio.gather(*asked)

        async def all_started() -> Any:
            done = [await _has(outside, f"q{n}", "started") for n in range(30)]
            return all(done)

        await until(all_started, "all thirty are started", 60)
    finally:
        if how == signal.SIGSTOP:
            os.kill(three.placers[1].pid, signal.SIGCONT)
    placed = [body for _, body in dict(await _unique(outside)).items() if body["state"] == "placed"]
    assert sorted(body["request_id"] for body in placed) == sorted(f"q{n}" for n in range(30))


async def _asked(client: Client, request_id: str) -> Json | None:
    try:
        return await ask(client, "rt.place", wanted(request_id), timeout_s=3)
    except nats.errors.TimeoutError:
        return None


async def _unique(client: Client) -> list[tuple[str, Json]]:
    return list(dict(await events(client, "rt.events.place.*")).items())


async def test_the_same_id_again_is_the_same_placement_marked_as_duplicate_also_after_a_restart_of_all(
    three: Cluster, outside: Client
) -> None:
    first = await ask(outside, "rt.place", wanted("q1"))
    again = [await ask(outside, "rt.place", wanted("q1")) for _ in range(9)]
    for each in [*three.placers, *three.others]:
        each.kill()
    three.start_all()
    again.append(await ask(outside, "rt.place", wanted("q1")))
    where = [(p["node"], p["devices"]) for p in first["placements"]]
    assert (first["outcome"], first["duplicate"]) == ("placed", False)
    assert {reply["duplicate"] for reply in again} == {True}
    assert [[(p["node"], p["devices"]) for p in reply["placements"]] for reply in again] == [where] * 10
    await until(lambda: _has(outside, "q1", "started"), "started")
    assert len(three.containers()) == 1


async def test_the_same_id_with_another_body_is_an_error_on_request_id(
    shared_cluster: Cluster, outside: Client
) -> None:
    await ask(outside, "rt.place", wanted("q1"))
    reply = await ask(outside, "rt.place", wanted("q1", gpu={"share": 0.2}))
    assert (reply["outcome"], reply["error"]["field"]) == ("error", "request_id")


async def test_P1_sixteen_halves_at_once_on_eight_devices_are_two_per_device(three: Cluster, outside: Client) -> None:
    replies = await asyncio.gather(*(ask(outside, "rt.place", wanted(f"q{n}", gpu={"share": 0.5})) for n in range(16)))
    devices = [device for reply in replies for p in reply["placements"] for device in p["devices"]]
    assert {reply["outcome"] for reply in replies} == {"placed"}
    assert sorted(devices.count(device) for device in set(devices)) == [2] * 8
    node = await value(outside, "rt_ledger", "node.fake-0")
    assert node is not None
    assert len(node["reservations"]) == 16


async def test_a_lost_ledger_removes_nothing_that_runs_and_raises_an_alarm(one: Cluster, outside: Client) -> None:
    await ask(outside, "rt.place", wanted("q1"))
    await until(lambda: _has(outside, "q1", "started"), "started")
    before = one.containers()
    one.placers[0].kill()
    await outside.jetstream().delete_stream("KV_rt_ledger")
    one.placers[0].start()

    async def alarm() -> Any:
        return [
            body for _, body in await events(outside, "rt.events.bus.placer") if body["kind"] == "container_foreign"
        ]

    assert await until(alarm, "an alarm on the bus")
    assert one.containers() == before
    node = await until(lambda: value(outside, "rt_ledger", "node.fake-0"), "its reservation is rebuilt from labels")
    assert [(r["request_id"], r["share_micro"]) for r in node["reservations"]] == [("q1", 100_000)]


async def test_what_is_over_the_servers_limit_is_refused_before_us_and_the_service_goes_on(
    shared_cluster: Cluster, outside: Client
) -> None:
    with pytest.raises(nats.errors.MaxPayloadError):
        await outside.request("rt.place", b"x" * (outside.max_payload + 1), timeout=5)
    too_large = await ask(outside, "rt.place", wanted("big", name="x" * 300_000))
    assert (too_large["outcome"], too_large["error"]["field"]) == ("error", "(body)")
    assert (await ask(outside, "rt.place", wanted("small")))["outcome"] == "placed"


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "größe", "a/b", "x" * 253, "=2E", "\t"])
async def test_hostile_names_are_placed_under_their_token_and_come_back_unchanged(
    name: str, shared_cluster: Cluster, outside: Client
) -> None:
    reply = await ask(outside, "rt.place", wanted(name))
    assert (reply["outcome"], reply["request_id"]) == ("placed", name)
    assert (await ask(outside, "rt.release", {"request_id": name}))["outcome"] in {"stopping", "released"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "(body)"),
        (b"{", "(body)"),
        (b"[1]", "(body)"),
        (json.dumps(wanted("q", replicas=-1)).encode(), "replicas"),
        (json.dumps(wanted("q", replicas=1e300)).encode(), "replicas"),
        (b'{"request_id": "q", "command": ["x"], "gpu": {"share": NaN}}', "gpu.share"),
        (json.dumps(wanted("q", strategy="best")).encode(), "strategy"),
        (json.dumps(wanted("x" * 300)).encode(), "request_id"),
        (json.dumps(wanted("q", gpu={"share": "half"})).encode(), "gpu.share"),
    ],
)
async def test_bad_input_is_answered_with_field_found_and_allowed(
    body: bytes, field: str, shared_cluster: Cluster, outside: Client
) -> None:
    message = await outside.request("rt.place", body, timeout=5)
    reply = json.loads(message.data)
    assert (reply["outcome"], reply["error"]["field"]) == ("error", field)
    assert reply["error"]["allowed"]
    assert "request_id" in reply
    assert (message.headers or {})["Nats-Service-Error-Code"] == "400"


async def test_a_reply_subject_that_is_no_inbox_gets_no_reply_and_does_no_harm(
    shared_cluster: Cluster, outside: Client
) -> None:
    for reply in ("rt.release", "rt.events.place.forged", "$JS.API.STREAM.DELETE.RT_EVENTS"):
        await outside.publish("rt.place", json.dumps(wanted("forger")).encode(), reply=reply)
    await until(lambda: _has(outside, "forger", "started"), "placed all the same")
    assert (await outside.jetstream().stream_info("RT_EVENTS")).config.name == "RT_EVENTS"
    assert await events(outside, "rt.events.place.forged") == []


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here: the JavaScript client is not tried")
async def test_a_javascript_client_needs_subjects_and_json_alone(shared_cluster: Cluster, outside: Client) -> None:
    source, build = Path(__file__).parent / "node", Path(__file__).parents[2] / "build" / "node"
    shutil.copytree(source, build, dirs_exist_ok=True)
    install = await asyncio.create_subprocess_exec("npm", "ci", "--no-audit", "--no-fund", cwd=build)
    assert await install.wait() == 0
    node = await asyncio.create_subprocess_exec(
        "node", "outside.mjs", shared_cluster.nats.url, "js-1", cwd=build, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(node.communicate(), 60)
    saw = json.loads(output)
    assert [(r["outcome"], r["duplicate"]) for r in saw["replies"]] == [("placed", False)]
    assert saw["again"]["duplicate"] is True
    assert saw["again"]["placements"][0]["devices"] == saw["replies"][0]["placements"][0]["devices"]
    assert saw["states"] == ["accepted", "placed", "started"]
    assert saw["released"]["outcome"] == "stopping"
