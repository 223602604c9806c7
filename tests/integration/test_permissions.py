"""A real server with the permissions that ``laxity keys`` wrote: the cluster works, and every "may not" is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from cli.keys import make
from cli.main import main
from cli.permissions import Rules
from shared.bus import Bus
from shared.messages import TaskEventKind
from shared.settings import ServiceSettings
from shared.testing.nats_server import NatsServer
from tests.outside import ask, until, value
from tests.secured import OTHER_NODE, SecuredCluster, connect, secured_server, settled
from tests.unit.test_tracker_core import batch, row

NODES, CLIENTS = ["fake-0", OTHER_NODE], ["second"]
USERS = {user.name: user for user in Rules().users(NODES, CLIENTS)}
ELSE = next(name for name in USERS if "else" in name)
PLACE = {"image": "x", "gpu": {"count": 1}, "realtime": {"deadline_us": 50_000, "period_us": 100_000}}
PLACE["realtime"] |= {"runtime_us": 1_000}  # type: ignore[operator]


# --- every user on every subject that anybody may use, on a server without services ---


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    server, keys = secured_server(tmp_path_factory.mktemp("bare"), NODES, CLIENTS)
    with server:
        yield server.url, keys


def matches(subject: str, allowed: str) -> bool:
    pattern = re.escape(allowed).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(pattern, subject) is not None


def concrete(subject: str) -> str:
    return subject.replace("*", "anything").replace(">", "any.thing")


def said(words: str, refused: list[str]) -> set[str]:
    return {found[1] for text in refused if (found := re.search(f'{words} to "([^"]*)"', text))}


SAID = {concrete(subject) for user in USERS.values() for subject in user.publish}
SAID |= {f"rt.{kind}.never.seen" for kind in ("metrics", "events", "other")} | {"else.where", "$SYS.REQ.SERVER.PING"}
SAID |= {f"$JS.API.STREAM.{verb}.RT_EVENTS" for verb in ("DELETE", "PURGE", "MSG.DELETE", "RESTORE", "SNAPSHOT")}
SAID |= {f"$JS.API.STREAM.{verb}.KV_rt_ledger" for verb in ("DELETE", "PURGE", "MSG.DELETE")}
SAID |= {
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.CONSUMER.DELETE.RT_PLACE.placer",
    "$JS.API.CONSUMER.CREATE.RT_EVENTS.x",
}
HEARD = {subject for user in USERS.values() for subject in user.subscribe}
HEARD |= {
    ">",
    "rt.>",
    "*.place",
    "rt.metrics.>",
    "$JS.>",
    "$KV.>",
    "$KV.rt_ledger.>",
    "_INBOX.>",
    "_INBOX.*.*",
    "_R_.>",
}


@pytest.mark.parametrize("name", USERS)
async def test_what_a_user_may_not_say_is_refused_and_what_it_may_is_not(bare: tuple[str, Path], name: str) -> None:
    refused: list[str] = []
    client = await connect(*bare, name, refused)
    for subject in SAID:
        await client.publish(subject, b"")
    await settled(client)
    await client.close()
    may = {subject for subject in SAID if any(matches(subject, allowed) for allowed in USERS[name].publish)}
    assert {subject.lower() for subject in SAID - may} == said("publish", refused)
    assert may


@pytest.mark.parametrize("name", USERS)
async def test_what_a_user_may_not_hear_is_refused_and_what_it_may_is_not(bare: tuple[str, Path], name: str) -> None:
    refused: list[str] = []
    client = await connect(*bare, name, refused)
    for subject in HEARD:
        await client.subscribe(subject)
    await settled(client)
    await client.close()
    may = {subject for subject in HEARD if any(matches(subject, allowed) for allowed in USERS[name].subscribe)}
    assert {subject.lower() for subject in HEARD - may} == said("subscription", refused)
    assert may


async def test_nobody_connects_without_a_key_or_with_one_that_the_server_does_not_know(
    bare: tuple[str, Path], tmp_path: Path
) -> None:
    url, _ = bare
    make(tmp_path / "others", Rules(), [], [])
    assert [False, False] == [await opens(url, seed) for seed in (None, tmp_path / "others" / "client.nk")]


async def opens(url: str, seed: Path | None) -> bool:
    """Whether the server takes a connection with this key, within the time that a refusal takes and more."""
    try:
        async with asyncio.timeout(1):
            bus = await Bus.connect(ServiceSettings(nats_url=url, nats_seed_file=seed))
    except TimeoutError:
        return False
    await bus.close()
    return True


async def test_a_rotated_key_is_the_only_one_that_opens_and_nobody_else_notices(tmp_path: Path) -> None:
    server, keys = secured_server(tmp_path, NODES, [])
    with server:
        old, other = tmp_path / "old", await connect(server.url, keys, "placer")
        old.mkdir(mode=0o700)
        (keys / "client.nk").rename(old / "client.nk")
        (keys / "client.nk").write_bytes((old / "client.nk").read_bytes())
        (keys / "client.nk").chmod(0o600)
        make(keys, Rules(), [], [], ["client"])
        os.kill(server.pid, signal.SIGHUP)

        async def renewed() -> bool:
            return await opens(server.url, keys / "client.nk")

        await until(renewed, "the new key")
        assert not await opens(server.url, old / "client.nk")
        assert (True, 0) == (other.is_connected, other.stats["reconnects"])
        await other.close()


# --- the services at work ---


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured"), nodes=1) as made:
        yield made


class Outside:
    """Clients with several keys, and what was refused to them."""

    def __init__(self, cluster: SecuredCluster) -> None:
        self.cluster = cluster
        self.refused: list[str] = []
        self._open: dict[str, Client] = {}

    async def of(self, name: str) -> Client:
        if name not in self._open:
            self._open[name] = await self.cluster.connect(name, self.refused)
        return self._open[name]

    async def close(self) -> None:
        for client in self._open.values():
            await client.close()


@pytest.fixture
async def outside(cluster: SecuredCluster) -> AsyncIterator[Outside]:
    made = Outside(cluster)
    yield made
    await made.close()


async def keys_of(operator: Client, bucket: str) -> set[str]:
    answer = await ask(operator, f"$JS.API.STREAM.INFO.KV_{bucket}", {"subjects_filter": ">"})
    return {subject.removeprefix(f"$KV.{bucket}.") for subject in answer["state"].get("subjects") or {}}


async def test_a_whole_placement_works_and_nothing_that_the_services_need_is_refused(
    cluster: SecuredCluster, outside: Outside
) -> None:
    client, operator = await outside.of("client"), await outside.of("operator")
    heard: list[str] = []

    async def hear(msg: Any) -> None:
        heard.append(json.loads(msg.data)["state"])

    await client.subscribe("rt.events.place.whole", cb=hear)
    reply = await ask(client, "rt.place", {"request_id": "whole", **PLACE, "queue": True})
    assert reply["outcome"] in {"placed", "queued"}

    async def started() -> bool:
        return "started" in heard

    await until(started, "started")
    listed = await ask(client, "rt.nodes", {})
    assert {"fake-0"} == {device["node"] for device in listed["devices"]}
    assert "whole" in (await value(operator, "rt_ledger", "request.whole") or {}).values()
    await ask(client, "rt.release", {"request_id": "whole"})

    async def released() -> bool:
        return heard[-1] == "released"

    await until(released, "released")
    assert [] == outside.refused
    # what they ask and learn that they may not: making streams, which the placer does; a monitor's look at streams
    asked = r"STREAM\.CREATE\.(RT|KV)_\w+|STREAM\.INFO\.(RT|KV)_\w+|STREAM\.MSG\.GET\.RT_EVENTS"
    violations = set(re.findall(r'Violation - Subject "([^"]*)"', cluster.nats.log))
    assert set() == {subject for subject in violations if not re.fullmatch(rf"\$JS\.API\.({asked})", subject)}


async def test_a_monitors_tasks_are_judged_and_the_verdict_comes_to_a_client(outside: Outside) -> None:
    client, monitor = await outside.of("client"), await outside.of(ELSE)
    verdicts: asyncio.Queue[Any] = asyncio.Queue()
    await client.subscribe("rt.events.deadline.>", cb=verdicts.put)
    await settled(client)
    rows = [row(TaskEventKind.BEGIN, 1), row(TaskEventKind.OVERDUE, 1)]
    body = batch(rows).model_copy(update={"node": OTHER_NODE}).to_json()
    stored = json.loads((await monitor.request("rt.events.task.else=2Ewhere", body)).data)
    assert "RT_EVENTS" == stored["stream"]
    said = [json.loads((await asyncio.wait_for(verdicts.get(), 10)).data) for _ in range(2)]
    told = [(each["node"], each["container"], each["kind"]) for each in said]
    assert [(OTHER_NODE, "c0", "at_risk"), (OTHER_NODE, "c0", "missed")] == told


async def test_services_of_all_accounts_answer_a_client_and_the_operator(outside: Outside) -> None:
    for name in ("client", "operator"):
        client = await outside.of(name)
        found: list[str] = []

        async def hear(msg: Any, found: list[str] = found) -> None:
            found.append(json.loads(msg.data)["name"])

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=hear)
        await client.publish("$SRV.PING", b"", reply=inbox)

        async def all_four(found: list[str] = found) -> bool:
            return {"placer", "node-list", "deadline-tracker", "monitor"} == set(found)

        await until(all_four, f"answers to {name}")
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request("$SRV.PING.nobody", b"", timeout=5)


FORGED = [
    *[(name, "rt.metrics.fake-0", "heartbeat") for name in ("client", ELSE, "placer", "deadline-tracker", "operator")],
    *[(name, "rt.events.task.fake-0", "task end") for name in ("client", ELSE, "placer", "node-list", "operator")],
    *[(name, "rt.events.deadline.fake-0.c", "verdict") for name in ("client", ELSE, "placer", "node-list")],
    *[(name, "rt.events.node.fake-0", "node state") for name in ("client", ELSE, "placer", "deadline-tracker")],
    *[(name, "rt.events.list.fast", "list change") for name in ("client", ELSE, "placer", "deadline-tracker")],
    *[(name, "rt.events.place.forged", "decision") for name in ("client", ELSE, "node-list", "deadline-tracker")],
    *[(name, "$KV.rt_ledger.request.forged", "ledger") for name in ("client", ELSE, "node-list", "deadline-tracker")],
    ("operator", "$KV.rt_ledger.request.forged", "ledger"),
    *[(name, "$KV.rt_nodes.node.forged", "node list") for name in ("client", ELSE, "placer", "deadline-tracker")],
    *[(name, "$KV.rt_deadlines.node.forged", "records") for name in ("client", ELSE, "placer", "node-list")],
    *[(name, "$KV.rt_learned.profile.forged", "times") for name in ("client", ELSE, "placer", "deadline-tracker")],
    *[(name, "rt.place", "placing") for name in (ELSE, "placer", "node-list", "deadline-tracker")],
]


@pytest.mark.parametrize(("name", "subject", "what"), FORGED)
async def test_a_forged_message_reaches_nobody(outside: Outside, name: str, subject: str, what: str) -> None:
    forger, operator = await outside.of(name), await outside.of("operator")
    heard: list[str] = []

    async def hear(msg: Any) -> None:
        if msg.data == b'"forged"':
            heard.append(msg.subject)

    await operator.subscribe("rt.>", cb=hear)
    await settled(operator)
    await forger.publish(subject, b'"forged"')
    await settled(forger)
    await settled(operator)
    assert ({subject.lower()}, []) == (said("publish", outside.refused), heard)
    for bucket in ("rt_ledger", "rt_nodes", "rt_deadlines", "rt_learned"):
        assert set() == {key for key in await keys_of(operator, bucket) if "forged" in key}


STREAMS = [
    *[
        (name, f"STREAM.{verb}")
        for name in ("client", ELSE)
        for verb in ("INFO.RT_EVENTS", "NAMES", "MSG.GET.RT_PLACE")
    ],
    *[(name, "CONSUMER.CREATE.RT_EVENTS.theirs") for name in ("client", ELSE, "placer")],
    *[(name, "STREAM.CREATE.THEIRS") for name in USERS if name != "operator"],
    *[(name, "STREAM.UPDATE.RT_EVENTS") for name in USERS if name not in {"operator", "placer"}],
    *[(name, f"STREAM.{verb}.RT_EVENTS") for name in USERS if name != "operator" for verb in ("DELETE", "PURGE")],
    *[(name, "STREAM.PURGE.KV_rt_ledger") for name in USERS if name != "operator"],
    *[(name, "STREAM.MSG.DELETE.RT_EVENTS") for name in USERS if name != "operator"],
    *[(name, "CONSUMER.DELETE.RT_PLACE.placer") for name in USERS if name != "operator"],
    *[(name, "STREAM.MSG.GET.KV_rt_ledger") for name in ("client", ELSE)],
]


@pytest.mark.parametrize("name", USERS)
async def test_nobody_else_makes_empties_or_removes_a_stream(outside: Outside, name: str) -> None:
    client, operator = await outside.of(name), await outside.of("operator")
    before = (await ask(operator, "$JS.API.STREAM.INFO.RT_EVENTS", {}))["state"]["first_seq"]
    tried = {f"$JS.API.{call}" for who, call in STREAMS if who == name}
    for subject in tried:
        body = {"name": "THEIRS", "subjects": ["theirs"], "stream_name": "RT_EVENTS", "config": {}}
        await client.publish(subject, json.dumps(body).encode(), reply=client.new_inbox())
    await settled(client)
    assert {subject.lower() for subject in tried} == said("publish", outside.refused)
    assert "error" in await ask(operator, "$JS.API.STREAM.INFO.THEIRS", {})
    assert before == (await ask(operator, "$JS.API.STREAM.INFO.RT_EVENTS", {}))["state"]["first_seq"]


OVERHEARD = {
    "client": (
        ">",
        "rt.>",
        "rt.place",
        "rt.metrics.>",
        "_INBOX.>",
        "_INBOX.client-second.>",
        "_INBOX.placer.>",
        "_R_.>",
    ),
    "client-second": ("_INBOX.client.>", "_INBOX.*.x", "$KV.rt_ledger.>", "$SRV.PING.placer", "$JS.API.>"),
    ELSE: (">", "rt.>", "rt.events.>", "rt.metrics.*", "rt.place", "_INBOX.monitor-fake-0.>", "_INBOX.client.>"),
    "deadline-tracker": (">", "rt.place", "rt.nodes", "$KV.rt_ledger.>", "_INBOX.placer.>", "_R_.>"),
    "node-list": (">", "rt.place", "rt.release", "_INBOX.placer.>", "_INBOX.operator.>", "$JS.API.>"),
    "placer": (">", "rt.nodes", "rt.metrics.*", "_INBOX.node-list.>", "_INBOX.operator.>", "_R_.>"),
    "operator": (">", "_INBOX.>", "_INBOX.placer.>", "_R_.>"),
}


@pytest.mark.parametrize("name", OVERHEARD)
async def test_nobody_hears_what_is_not_for_them(outside: Outside, name: str) -> None:
    client = await outside.of(name)
    for subject in OVERHEARD[name]:
        await client.subscribe(subject)
        await client.subscribe(subject, queue="placer")
    await settled(client)
    assert {subject.lower() for subject in OVERHEARD[name]} == said("subscription", outside.refused)


async def test_a_monitor_that_names_another_node_in_its_body_is_not_believed(outside: Outside) -> None:
    monitor, operator = await outside.of(ELSE), await outside.of("operator")
    await monitor.publish("rt.metrics.else=2Ewhere", json.dumps({"node": "forged"}).encode())
    body = batch([row(TaskEventKind.BEGIN, 1), row(TaskEventKind.OVERDUE, 1)]).model_copy(update={"node": "forged"})
    await monitor.request("rt.events.task.else=2Ewhere", body.to_json())
    marker = body.model_copy(update={"node": OTHER_NODE, "counter": 99}).to_json()
    await monitor.request("rt.events.task.else=2Ewhere", marker)

    async def judged() -> bool:
        return "node.else=2Ewhere" in await keys_of(operator, "rt_deadlines")

    await until(judged, "the batch behind it is in the records")
    for bucket in ("rt_nodes", "rt_deadlines"):
        assert "node.forged" not in await keys_of(operator, bucket)


TRICKS = [
    ("client", "$JS.API.DIRECT.GET.RT_EVENTS", b'{"seq":1}'),
    ("client", "rt.nodes", b"{}"),
    ("client", "rt.place", b"{}"),
    ("client", "$SRV.PING", b""),
    ("client", "$SRV.PING.placer", b""),
    (ELSE, "rt.events.task.else=2Ewhere", b"{}"),
    (ELSE, "$JS.API.DIRECT.GET.RT_EVENTS.rt.events.task.else=2Ewhere", b""),
    ("operator", "$SRV.PING.placer", b""),
]


@pytest.mark.parametrize(("name", "subject", "body"), TRICKS)
async def test_no_answer_goes_where_its_asker_may_not_publish(
    outside: Outside, name: str, subject: str, body: bytes
) -> None:
    """The server does not compare reply subjects with what their user may publish on: accounts must hold them."""
    asker, operator = await outside.of(name), await outside.of("operator")
    heard: list[str] = []

    async def hear(msg: Any) -> None:
        if not msg.data.startswith(b'{"node":"fake-0"'):
            heard.append(msg.subject)

    for watched in ("rt.metrics.fake-0", "rt.events.task.fake-0"):
        await operator.subscribe(watched, cb=hear)
    await settled(operator)
    for reply in (
        "$KV.rt_ledger.request.trick",
        "$KV.rt_nodes.node.trick",
        "rt.metrics.fake-0",
        "rt.events.task.fake-0",
    ):
        await asker.publish(subject, body, reply=reply)
    await settled(asker)
    await ask(operator, "rt.nodes", {})  # through a service and back
    assert [] == heard
    for bucket in ("rt_ledger", "rt_nodes"):
        assert set() == {key for key in await keys_of(operator, bucket) if "trick" in key}


@pytest.mark.parametrize(
    ("name", "subject", "header"),
    [
        ("client", "rt.place", "Nats-Trace-Dest"),
        ("client", "$JS.API.DIRECT.GET.RT_EVENTS", "Nats-Trace-Dest"),
        (ELSE, "rt.events.task.else=2Ewhere", "Nats-Trace-Dest"),
        (ELSE, "rt.metrics.else=2Ewhere", "Nats-Trace-Dest"),
        (ELSE, "rt.events.task.else=2Ewhere", "Nats-Schedule-Target"),
    ],
)
async def test_no_header_makes_the_server_write_elsewhere(
    outside: Outside, name: str, subject: str, header: str
) -> None:
    client, operator = await outside.of(name), await outside.of("operator")
    for target in ("$KV.rt_ledger.request.trick", "$KV.rt_nodes.node.trick"):
        headers = {header: target, "Nats-Schedule": "@every 1s"} if "Schedule" in header else {header: target}
        await client.publish(subject, b"{}", headers=headers)
    await settled(client)
    await ask(operator, "rt.nodes", {})
    for bucket in ("rt_ledger", "rt_nodes"):
        assert set() == {key for key in await keys_of(operator, bucket) if "trick" in key}


async def test_no_header_empties_the_stream(outside: Outside) -> None:
    monitor, operator = await outside.of(ELSE), await outside.of("operator")
    before = (await ask(operator, "$JS.API.STREAM.INFO.RT_EVENTS", {}))["state"]["first_seq"]
    for extent in ("all", "sub"):
        answer = await monitor.request("rt.events.task.else=2Ewhere", b"{}", headers={"Nats-Rollup": extent}, timeout=5)
        assert "error" in json.loads(answer.data)
    assert before == (await ask(operator, "$JS.API.STREAM.INFO.RT_EVENTS", {}))["state"]["first_seq"]


async def test_allow_lists_in_one_account_would_not_hold(tmp_path: Path) -> None:
    """Why there are three accounts. Should the server ever refuse this, one account is enough."""
    may = 'permissions: {publish: ["$JS.API.DIRECT.GET.RT_EVENTS"], subscribe: ["_INBOX.>"]}'
    users = f"authorization {{users: [{{user: a, password: a}}, {{user: c, password: c, {may}}}]}}"
    (tmp_path / "one.conf").write_text(users)
    with NatsServer(tmp_path / "nats", "-c", str(tmp_path / "one.conf")) as server:
        admin = await nats.connect(server.url, user="a", password="a")
        await admin.jetstream().add_stream(name="RT_EVENTS", subjects=["rt.events.>"], allow_direct=True)
        await admin.jetstream().create_key_value(bucket="rt_ledger")
        await admin.jetstream().publish("rt.events.x", b'"forged"')
        client = await nats.connect(server.url, user="c", password="c")
        await client.publish("$JS.API.DIRECT.GET.RT_EVENTS", b'{"seq":1}', reply="$KV.rt_ledger.trick")
        await client.flush()

        async def written() -> Any:
            return await value(admin, "rt_ledger", "trick")

        assert "forged" == await until(written, "the key")
        await client.close()
        await admin.close()


# --- the command ---


def test_the_command_works_with_a_clients_key_and_with_the_operators(
    cluster: SecuredCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAXITY_NATS_URL", cluster.nats.url)
    (tmp_path / "request.yaml").write_text(json.dumps({"request_id": "typed", **PLACE}))
    monkeypatch.setenv("LAXITY_NATS_SEED_FILE", str(cluster.keys / "client.nk"))
    assert 0 == main(["place", "-f", str(tmp_path / "request.yaml"), "-o", "json"])
    assert 0 == main(["events", "--subject", "rt.events.place.typed", "-o", "json"])
    assert "laxity.place.accepted" in capsys.readouterr().out
    assert 0 == main(["resize", "typed", "--memory", "64Mi", "-o", "json"])
    assert 0 == main(["release", "typed", "-o", "json"])
    capsys.readouterr()
    assert 4 == main(["status"])
    assert "not allowed to publish on $JS.API" in capsys.readouterr().err
    assert 4 == main(["defragment", "typed"])
    assert "not allowed to publish on rt.defragment" in capsys.readouterr().err
    assert 4 == main(["ledger", "gone", "n9"])
    assert "not allowed to publish on rt.gone" in capsys.readouterr().err
    monkeypatch.setenv("LAXITY_NATS_SEED_FILE", str(cluster.keys / "operator.nk"))
    assert 0 == main(["status", "-o", "json"])
    assert 0 == main(["ledger", "accept", "0123abcd"])
    assert 0 == main(["explain", "typed"])
    assert 2 == main(["defragment", "typed", "-o", "json"])
    assert 0 == main(["ledger", "gone", "n9"])
