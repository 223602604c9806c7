"""The scheduler extender over HTTP: reads calls, hands them to the core, and answers each in time; decides nothing.

The wire format is that of k8s.io/kube-scheduler/extender/v1. The answer is always 200: of any other status
kube-scheduler throws away the body, and with it the reason.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web

from services.kube_bridge import sentences
from services.kube_bridge.ahead import waiting
from services.kube_bridge.asked import words_of
from services.kube_bridge.calls import Answer, BindAsked, FilterAsked
from services.kube_bridge.scheduling import refuse
from services.kube_bridge.seen import PodSeen
from services.kube_bridge.settings import KubeBridgeSettings
from shared.log import Logger

LARGEST: Final = 8 << 20
"""Bytes of a call: a pod of 1.5 MiB, and 5,000 names of 253."""
LAST_WORDS_S: Final = 1.0
"""For calls under way when the service stops: kube-scheduler tries again."""
BEYOND_US: Final = 500_000
"""What the core has beyond its own limits to settle how something ended."""

UNREADABLE: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError, web.HTTPException)
"""What a body raises that is not what kube-scheduler sends."""


class Extender:
    """Serves `/filter` and `/bind`; `/healthz` says whether calls are answered."""

    def __init__(self, settings: KubeBridgeSettings, post: Callable[[object], None], log: Logger) -> None:
        self._settings, self._post, self._log = settings, post, log
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._calls = 0
        self._runner: web.AppRunner | None = None
        self.health: Callable[[], str] = lambda: "starting"
        self.count: Callable[[str], None] = lambda _: None
        self.url = ""

    async def open(self) -> None:
        """Raises OSError where the port is taken, ssl.SSLError for certificates that cannot be read."""
        settings = self._settings
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/filter", self._filter)
        app.router.add_post("/bind", self._bind)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=LAST_WORDS_S)
        await self._runner.setup()
        secret = _context(settings)
        site = web.TCPSite(self._runner, settings.extender_host, settings.extender_port, ssl_context=secret)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if secret else 'http'}://{shown}:{port}"
        self._log.info("the extender listens", url=self.url)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def answer(self, answer: Answer) -> None:
        """One that nobody waits for any more is let go."""
        waiting = self._waiting.pop(answer.token, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.body)

    # --- calls ---

    async def _filter(self, request: web.Request) -> web.Response:
        self._calls += 1
        token = self._calls
        try:
            body = json.loads(await request.read())
            call = FilterAsked(token, _shaped(body["Pod"]), _texts(body["NodeNames"]))
        except UNREADABLE as error:
            return self._malformed(FilterAsked(token, {}, ()), error)
        return await self._answered(call, self._settings.filter_us)

    async def _bind(self, request: web.Request) -> web.Response:
        self._calls += 1
        token = self._calls
        try:
            body = json.loads(await request.read())
            words = [body[name] for name in ("PodNamespace", "PodName", "PodUID", "Node")]
            call = BindAsked(token, *map(str, words))
        except UNREADABLE as error:
            return self._malformed(BindAsked(token, "", "", "", ""), error)
        return await self._answered(call, self._settings.bind_us)

    async def _answered(self, call: FilterAsked | BindAsked, limit_us: int) -> web.Response:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Mapping[str, Any]] = loop.create_future()
        self._waiting[call.token] = waiting
        late = loop.call_later((limit_us + BEYOND_US) / 1e6, self._late, call)
        self._post(call)
        try:
            return _json(await waiting)
        finally:
            late.cancel()
            self._waiting.pop(call.token, None)

    def _late(self, call: FilterAsked | BindAsked) -> None:
        self.count("extender.late")
        self.answer(refuse(call, sentences.NO_ANSWER))

    def _malformed(self, call: FilterAsked | BindAsked, error: Exception) -> web.Response:
        """Also where kube-scheduler sends whole nodes: it is to be told `nodeCacheCapable: true`."""
        self.count("extender.malformed")
        self._log.warning("a call of the scheduler cannot be read", error=f"{type(error).__name__}: {error}")
        return _json(refuse(call, sentences.MALFORMED).body)

    async def _healthz(self, _: web.Request) -> web.Response:
        health = self.health()
        return web.Response(text=f"{health}\n", status=200 if health == "ok" else 503)


def _shaped(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod, if it has the shape of one: what the core may rely on. Raises one of UNREADABLE."""
    PodSeen.of(pod, "")
    waiting(pod)
    texts = [*(pod["metadata"][name] for name in ("uid", "name", "namespace")), *words_of(pod).values()]
    if not all(isinstance(text, str) for text in texts) or not isinstance(pod["spec"].get("priority") or 0, int):
        raise TypeError("text and a whole number in metadata and priority")
    return pod


def _texts(names: Iterable[Any]) -> tuple[str, ...]:
    found = tuple(names)
    if not set(map(type, found)) <= {str}:
        raise TypeError("names of nodes are text")
    return found


def _json(body: Mapping[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")


def _context(settings: KubeBridgeSettings) -> ssl.SSLContext | None:
    if settings.extender_cert is None:
        return None
    assert settings.extender_key is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(settings.extender_client_ca))
    context.load_cert_chain(settings.extender_cert, settings.extender_key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
