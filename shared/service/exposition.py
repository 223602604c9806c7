"""/metrics over HTTP, for Prometheus: the one file that knows its client; what there is to tell comes from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer

from shared.log import Logger
from shared.metrics import Metric, Sample

Family = CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily

WAIT_S: Final = 5.0
"""How long a scrape waits for a busy service, and for a slow reader; Prometheus gives up after 10 s."""
AT_ONCE: Final = 4
"""Scrapes at the same time; more are refused."""


class Exposition:
    """Serves what ``numbers`` returns, which is called on the loop alone, so that nothing changes under it.

    Whatever goes wrong here is counted and logged, and harms nothing else.
    """

    def __init__(self, numbers: Callable[[], Iterable[Sample]], count: Callable[[str], None], log: Logger) -> None:
        self._numbers, self._count, self._log = numbers, count, log
        self._loop = asyncio.get_running_loop()
        self._server: ThreadingWSGIServer | None = None
        self._room = threading.BoundedSemaphore(AT_ONCE)
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._render = make_wsgi_app(registry)
        self.url: str | None = None
        """None: not served."""

    async def open(self, host: str, port: int) -> None:
        """Port 0 takes a free one. A port that is taken is told, and the service goes on without."""
        try:
            server = await asyncio.to_thread(self._listen, host, port)
        except OSError as error:
            self._count("metrics.not_served")
            self._log.error("metrics are not served", host=host, port=port, error=str(error))
            return
        self._server = server
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{server.server_port}/metrics"
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        self._log.info("metrics are served", url=self.url)

    async def close(self) -> None:
        server, self._server, self.url = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _listen(self, host: str, port: int) -> ThreadingWSGIServer:
        """In a thread: naming a host may ask a name server."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("Server", (_Server,), {"address_family": family, "failed": self._failed})
        made: ThreadingWSGIServer = make_server(host, port, self._answer, kind, handler_class=_Handler)
        return made

    # --- in a thread of each scrape ---

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not self._room.acquire(blocking=False):
            return self._refuse(start, "too many scrapes at once")
        try:
            answer: Iterable[bytes] = self._render(environ, start)
            return answer
        except Exception as error:  # noqa: BLE001  # a bug in a number must not end a service that keeps deadlines
            return self._refuse(start, repr(error) if str(error) else type(error).__name__)
        finally:
            self._room.release()

    def _refuse(self, start: StartResponse, why: str) -> Iterable[bytes]:
        self._failed(why)
        start("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{why}\n".encode()]

    def _failed(self, why: str) -> None:
        self._log.warning("a scrape failed", error=why)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
            self._loop.call_soon_threadsafe(self._count, "metrics.scrapes_failed")

    def collect(self) -> Iterator[Family]:
        """For the registry: one family of each name."""
        taking = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        try:
            samples = taking.result(WAIT_S)
        except TimeoutError:
            taking.cancel()
            raise TimeoutError(f"the service was busy for {WAIT_S:g} s") from None
        yield from families(samples)

    async def _take(self) -> list[Sample]:
        return list(self._numbers())


def families(samples: Iterable[Sample]) -> Iterator[Family]:
    """Samples by name, in the order in which names come first."""
    made: dict[str, Family] = {}
    for metric, labels, value in samples:
        family = made.get(metric.name)
        if family is None:
            family = made[metric.name] = _family(metric)
        family.add_metric(labels, value)
    yield from made.values()


def _family(metric: Metric) -> Family:
    """The client renames counters that do not end in ``_total``; those of others are told under their own name."""
    kind: type[Family] = GaugeMetricFamily
    if metric.kind == "counter":
        kind = CounterMetricFamily if metric.name.endswith("_total") else UnknownMetricFamily
    return kind(metric.name, metric.about, labels=metric.labels)


class _Server(ThreadingWSGIServer):
    failed: Callable[[str], None]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # as its base calls it
        """A reader that went away; Python would print a trace."""
        self.failed(f"the connection of {client_address} broke off")


class _Handler(WSGIRequestHandler):
    timeout = WAIT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as its base names it
        """Nobody reads a line per scrape."""
