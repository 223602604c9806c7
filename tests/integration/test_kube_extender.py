"""The extender's HTTP by itself: who is heard, what is answered late or to a call that cannot be read."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.kube_bridge import sentences
from services.kube_bridge.calls import Answer, BindAsked, FilterAsked
from services.kube_bridge.extender import Extender
from services.kube_bridge.settings import KubeBridgeSettings
from shared.log import logger
from tests.docker.certificates import Authority
from tests.kube_pods import pod

Opened = Callable[..., Any]
BIND = {"PodName": "web", "PodNamespace": "default", "PodUID": "u-1", "Node": "n1"}


class Answering:
    """In the place of the core: it answers what it is told to answer, or nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.body: dict[str, Any] | None = {"Error": ""}
        self.extender: Extender

    def post(self, call: object) -> None:
        self.calls.append(call)
        if self.body is not None:
            self.extender.answer(Answer(self.calls[-1].token, self.body))


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with AsyncExitStack() as stack:

        async def open_one(**settings: Any) -> Answering:
            answering = Answering()
            fixed = {"extender_port": 0, "filter_us": 100_000, "bind_us": 100_000}
            made = KubeBridgeSettings(**{**fixed, **settings})
            answering.extender = Extender(made, answering.post, logger())
            await answering.extender.open()
            stack.push_async_callback(answering.extender.close)
            return answering

        yield open_one


async def ask(url: str, body: bytes, tls: ssl.SSLContext | bool = True) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url, data=body, ssl=tls) as answer:
        return answer.status, json.loads(await answer.read())


async def test_calls_come_as_kube_scheduler_sends_them_and_nulls_are_no_fault(opened: Opened) -> None:
    answering = await opened()
    found = pod()
    body = {"Pod": found, "Nodes": None, "NodeNames": ["n1", "n2"]}
    answering.body = {"NodeNames": ["n2"], "Error": ""}
    assert (200, answering.body) == await ask(f"{answering.extender.url}/filter", json.dumps(body).encode())
    assert [FilterAsked(1, found, ("n1", "n2"))] == answering.calls
    answering.body = {"Error": ""}
    assert (200, answering.body) == await ask(f"{answering.extender.url}/bind", json.dumps(BIND).encode())
    assert BindAsked(2, "default", "web", "u-1", "n1") == answering.calls[1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"Pod": {}, "NodeNames": []}',
        json.dumps({"Pod": pod(), "Nodes": {"items": []}, "NodeNames": None}).encode(),
        json.dumps({"Pod": "text", "NodeNames": []}).encode(),
        b"[" * 100_000,
        json.dumps({"Pod": pod(priority="high"), "NodeNames": []}).encode(),
        json.dumps({"Pod": pod(annotations={"guarantee": ["0.9"]}), "NodeNames": []}).encode(),  # type: ignore[dict-item]
        json.dumps({"Pod": pod() | {"spec": {"containers": [5]}}, "NodeNames": []}).encode(),
    ],
)
async def test_KU14_what_cannot_be_read_is_answered_with_200_and_a_reason(opened: Opened, body: bytes) -> None:
    answering = await opened()
    for verb in ("filter", "bind"):
        status, said = await ask(f"{answering.extender.url}/{verb}", body)
        assert (200, sentences.MALFORMED) == (status, said["Error"])
    assert [] == answering.calls


async def test_KU14_an_answer_that_does_not_come_is_one_of_ours_before_the_scheduler_gives_up(opened: Opened) -> None:
    answering = await opened()
    answering.body = None
    counted: list[str] = []
    answering.extender.count = counted.append
    status, said = await ask(f"{answering.extender.url}/bind", json.dumps(BIND).encode())

    assert (200, {"Error": sentences.NO_ANSWER}) == (status, said)
    assert ["extender.late"] == counted
    answering.extender.answer(Answer(1, {"Error": ""}))  # nobody waits for it any more


async def test_only_who_has_a_certificate_of_the_authority_is_heard(opened: Opened, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    bridge = ours.signed("bridge")
    secured = await opened(
        extender_cert=bridge / "cert.pem",
        extender_key=bridge / "key.pem",
        extender_client_ca=tmp_path / "ours" / "ca.pem",
    )
    url = f"{secured.extender.url}/bind"
    assert url.startswith("https://")
    for certificate in (None, others.signed("scheduler")):
        with pytest.raises(aiohttp.ClientError):
            await ask(url, json.dumps(BIND).encode(), _as_client(tmp_path, certificate))
    assert [] == secured.calls
    assert 200 == (await ask(url, json.dumps(BIND).encode(), _as_client(tmp_path, ours.signed("scheduler"))))[0]
    with pytest.raises(aiohttp.ClientError):
        await ask(url.replace("https", "http"), json.dumps(BIND).encode())


def _as_client(folder: Path, certificate: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ours" / "ca.pem"))
    if certificate is not None:
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"extender_host": "0.0.0.0"}, "extender_host"),  # noqa: S104  # refused
        ({"extender_cert": Path("cert.pem")}, "extender_cert"),
        ({"extender_cert": Path("c"), "extender_key": Path("k")}, "extender_cert"),
    ],
)
def test_elsewhere_than_on_loopback_both_sides_need_certificates(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        KubeBridgeSettings(**settings)


async def test_whoever_looks_after_the_process_sees_whether_calls_are_answered(opened: Opened) -> None:
    answering = await opened()
    async with aiohttp.ClientSession() as session:
        for health, status in (("not loaded: pods", 503), ("ok", 200)):
            answering.extender.health = lambda health=health: health
            async with session.get(f"{answering.extender.url}/healthz") as answer:
                assert (status, f"{health}\n") == (answer.status, await answer.text())
