"""One client of an API server: connections, TLS, its token, time limits; the one file that knows the client library.

Paths and JSON as they are. The library's models take five times as long to read, its own watch ends with an error after
a while and waits for ever where a connection has died without a word, and some of its answers are errors of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException

from shared.clock import Clock
from shared.errors import FieldError, KubernetesError, NotToThePointError
from shared.kubernetes.list_watch import GONE, Event, Json, backoff_us, events_of
from shared.kubernetes.options import ApiOptions

STRATEGIC: Final = "application/strategic-merge-patch+json"
PAGE: Final = 500
"""Objects of one answer: its JSON is read without holding up everything else for long."""
WATCH_S: Final = 300
"""The server ends a watch after it."""
TOKEN_KEPT_US: Final = 60_000_000
"""A token is read anew after it: clusters replace them well before they run out."""
GOODBYE_US: Final = 100_000
"""For connections that broke off to say goodbye, which the library does not wait for."""
CALLS_AT_ONCE: Final = 32
"""Of one client, each on a connection that is kept: to begin one costs the server more than most calls."""
_UNAUTHORISED, _TOO_MANY = 401, 429


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    params: Json
    body: Json | None = None
    content_type: str = "application/json"

    def may_be_repeated(self, error: KubernetesError) -> bool:
        """What was refused for a moment only, what only reads. An eviction's 429 is a budget's, and may last."""
        if error.status == _TOO_MANY:
            return not self.path.endswith("/eviction")
        return error.unclear and self.method == "GET"


class ApiServer:
    """Its calls and watches. Connections are made when they are needed, within the loop."""

    def __init__(self, options: ApiOptions, clock: Clock, tries: int = 1) -> None:
        """Up to ``tries`` for each call where that is harmless.

        FieldError where the API server, its certificate or the token are not named or cannot be read.
        """
        self._options, self._clock, self._tries = options, clock, tries
        self._config = _configuration(options)
        self._read_us = 0
        self._read_token()
        self._client: ApiClient | None = None
        self._room = asyncio.Semaphore(CALLS_AT_ONCE)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Json | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer. KubernetesError where it is an error, or none came; it says whether that leaves it unclear."""
        call = _Call(method, path, params or {}, body, content_type)
        failures = 0
        while True:
            try:
                async with self._room:
                    return await self._ask_once(call)
            except KubernetesError as error:
                if failures + 1 >= self._tries or not call.may_be_repeated(error):
                    raise
                wait_us = max(error.retry_after_us, backoff_us(failures))
            failures += 1
            await self._clock.sleep_us(wait_us)

    @asynccontextmanager
    async def watch(self, path: str, params: Json) -> AsyncIterator[AsyncIterator[Event]]:
        """Entered once the server has taken it. Ends, also with KubernetesError, where that ends it or says nothing."""
        call_s, silent_s = self._options.call_timeout_us / 1e6, self._options.silent_us / 1e6
        limit = aiohttp.ClientTimeout(sock_connect=call_s, sock_read=silent_s)
        with self._answers():
            async with await self._send(_Call("GET", path, params), limit) as response:
                if response.status == _UNAUTHORISED:
                    self._read_token()
                if response.status != 200:
                    raise _refusal(response, await response.text(errors="replace"))
                try:
                    yield events_of(response.content.iter_any())
                finally:
                    _abort(response)

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
            await self._clock.sleep_us(GOODBYE_US)

    # --- one call ---

    async def _ask_once(self, call: _Call) -> Json:
        """Where its token is refused, which was replaced just now then, it is read again for one more try."""
        limit = aiohttp.ClientTimeout(total=self._options.call_timeout_us / 1e6)
        with self._answers():
            response = await self._send(call, limit)
            if response.status == _UNAUTHORISED:
                response.release()
                self._read_token()
                response = await self._send(call, limit)
            async with response:
                text = await response.text(errors="replace")
        if response.status >= 300:
            raise _refusal(response, text)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NotToThePointError(f"API server {self._options.server}: found {text[:100]!r}, allowed: a JSON object")
        return found

    async def _send(self, call: _Call, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        if self._clock.now_us() - self._read_us > TOKEN_KEPT_US:
            self._read_token()
        if self._client is None:
            self._client = _client(self._config)
        response: aiohttp.ClientResponse = await self._client.call_api(
            call.path,
            call.method,
            query_params=list(call.params.items()),
            header_params={"Accept": "application/json", "Content-Type": call.content_type},
            body=call.body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limit,
        )
        return response

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """What the client raises where the server does not answer, as one kind of error."""
        try:
            yield
        except (ApiException, aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise KubernetesError(f"API server {self._options.server} does not answer: {why}") from error

    def _read_token(self) -> None:
        """Keeps the one that it has where the file cannot be read just now."""
        self._read_us = self._clock.now_us()
        try:
            token = self._options.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            if not self._config.api_key:
                _unreadable("token_file", self._options.token_file, error)
            return
        # with any other key than this one the library asks as nobody
        self._config.api_key["BearerToken"] = f"Bearer {token}"


@dataclass(frozen=True)
class Kind:
    """All objects of one kind, in all namespaces, that ``params`` select: a Source to follow."""

    server: ApiServer
    path: str
    params: Json

    async def list(self) -> tuple[list[Json], str]:
        """A page at a time, all of one version, and that version to follow them from."""
        while True:
            items: list[Json] = []
            page: Json = {"limit": PAGE}
            try:
                while True:
                    found = await self.server.ask("GET", self.path, params={**self.params, **page})
                    items += found.get("items") or ()
                    page = {"limit": PAGE, "continue": found["metadata"].get("continue")}
                    if not page["continue"]:
                        return items, str(found["metadata"]["resourceVersion"])
            except KubernetesError as error:
                if error.status != GONE or "continue" not in page:  # else the next page is not kept any more
                    raise
            except (LookupError, TypeError, AttributeError) as error:
                raise NotToThePointError(f"{self.path}: no list") from error

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        asked = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": WATCH_S}
        return self.server.watch(self.path, {**self.params, **asked})


def _configuration(options: ApiOptions) -> Configuration:
    if not options.server:
        raise FieldError("kubernetes.server", "nothing", "https://HOST:PORT; only a pod is told it by its cluster")
    try:
        options.ca_file.read_bytes()
    except OSError as error:
        _unreadable("ca_file", options.ca_file, error)
    config = Configuration()
    config.host, config.ssl_ca_cert = options.server, str(options.ca_file)
    config.disable_strict_ssl_verification = not options.strict_ca
    config.connection_pool_maxsize = 0  # no limit: a call never waits for the connection of another, or of a watch
    server = urlsplit(options.server)
    if not proxy_bypass(server.hostname or ""):
        config.proxy = getproxies().get(server.scheme)
    return config


def _client(config: Configuration) -> ApiClient:
    """The library's own session looks for proxies and logins of the environment before each call, in threads, which
    takes longer than the rest of it."""
    client = ApiClient(config)
    session = client.rest_client.pool_manager
    client.rest_client.pool_manager = aiohttp.ClientSession(connector=session.connector)
    session.detach()
    return client


def _unreadable(setting: str, path: Path, error: OSError) -> NoReturn:
    raise FieldError(f"kubernetes.{setting}", f"{path}: {error.strerror}", "a file for reading") from None


def _refusal(response: aiohttp.ClientResponse, text: str) -> KubernetesError:
    """In the server's words. A page without any says nothing: a proxy's 404 is no pod that is gone."""
    after = response.headers.get("Retry-After", "")
    retry_after_us = int(after) * 1_000_000 if after.isdecimal() and len(after) < 4 else 0
    try:
        found = json.loads(text)
        causes = [each["message"] for each in (found.get("details") or {}).get("causes") or () if "field" not in each]
        words = " ".join([found["message"], *causes])
    except (ValueError, LookupError, TypeError, AttributeError):
        if response.status != _TOO_MANY:  # which an API server says without JSON
            return NotToThePointError(repr(text[:100]), response.status, retry_after_us)
        words = text
    return KubernetesError(words, response.status, retry_after_us)


def _abort(response: aiohttp.ClientResponse) -> None:
    """End a connection of which nobody reads the rest; else it waits for the other side's goodbye for 30 s."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
