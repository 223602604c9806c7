"""The bridge's side of the API server: the one file here that knows its client.

Raw JSON throughout: the client's models cost four times as much and block the loop for a second on two thousand pods.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, Literal, cast

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException

from services.kube_bridge.list_watch import Json, KubeError, events_of
from services.kube_bridge.settings import KubeBridgeSettings
from shared.clock import Clock

PAGE: Final = 500
"""Objects of one answer: its JSON is read without holding up everything else for long."""
WATCH_S: Final = 300
"""The server ends a watch after it."""
TOKEN_KEPT_US: Final = 60_000_000
"""A token is read anew after it: clusters replace them well before they run out."""
STRATEGIC: Final = "application/strategic-merge-patch+json"
_UNAUTHORISED: Final = 401
_NOT_FOUND: Final = 404

Query = Mapping[str, str]


class ApiServer:
    """One client for calls, one for watches, which hold their connections for minutes."""

    def __init__(self, settings: KubeBridgeSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._configuration = Configuration()
        self._clients: dict[str, ApiClient] = {}
        self._token_us: int | None = None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    # --- pods and nodes ---

    def kind(self, name: Literal["pods", "nodes"]) -> Kind:
        return Kind(self, f"/api/v1/{name}")

    async def pod(self, namespace: str, name: str) -> Json | None:
        """As the server has it now; None where there is none."""
        try:
            return await self.ask("GET", _pod(namespace, name))
        except KubeError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def bind(self, namespace: str, name: str, uid: str, node: str) -> None:
        """Without a word of devices: for pods that ask for none."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"metadata": {"name": name, "uid": uid}, "target": target}
        await self.ask("POST", f"{_pod(namespace, name)}/binding", body=body)

    async def write_condition(self, namespace: str, name: str, uid: str, condition: Mapping[str, Any]) -> None:
        """Of the pod with that uid; merged with its other conditions by type."""
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        await self.ask("PATCH", f"{_pod(namespace, name)}/status", body=body, content_type=STRATEGIC)

    # --- calls ---

    async def ask(
        self, method: str, path: str, query: Query | None = None, body: object = None, content_type: str = ""
    ) -> Json:
        """The answer; raises KubeError. Where a token was replaced just now, it is read and tried once more."""
        limit = aiohttp.ClientTimeout(total=self._settings.api_timeout_us / 1e6)
        with _refusals():
            answer = await self._call("calls", limit, method, path, query, body, content_type)
            if answer.status == _UNAUTHORISED:
                answer.release()
                self._token_us = None
                answer = await self._call("calls", limit, method, path, query, body, content_type)
            text = await answer.read()
        if answer.status >= 300:
            raise _refused(answer, text)
        try:
            return cast(Json, json.loads(text))
        except ValueError:
            raise KubeError(f"{method} {path}: no JSON: {text[:100]!r}") from None

    async def stream(self, path: str, query: Query) -> AsyncIterator[Json]:
        """The events of a watch."""
        call_s, silence_s = self._settings.api_timeout_us / 1e6, self._settings.api_silence_us / 1e6
        limit = aiohttp.ClientTimeout(sock_connect=call_s, sock_read=silence_s)
        with _refusals():
            answer = await self._call("watches", limit, "GET", path, query)
            try:
                if answer.status != 200:
                    self._token_us = None if answer.status == _UNAUTHORISED else self._token_us
                    raise _refused(answer, await answer.read())
                async for event in events_of(answer.content.iter_any()):
                    yield event
            finally:
                answer.close()

    async def _call(
        self,
        pool: str,
        limit: aiohttp.ClientTimeout,
        method: str,
        path: str,
        query: Query | None,
        body: object = None,
        content_type: str = "",
    ) -> aiohttp.ClientResponse:
        self._read_token()
        if pool not in self._clients:
            self._clients[pool] = ApiClient(self._configured())
        answer = await self._clients[pool].call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type or "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limit,
        )
        return cast(aiohttp.ClientResponse, answer)

    def _configured(self) -> Configuration:
        """Raises KubeError where nobody says how the server is reached."""
        settings, found = self._settings, self._configuration
        if not settings.api_server:
            raise KubeError("api_server: found nothing, allowed: https://HOST:PORT; a pod is told it by its cluster")
        found.host, found.ssl_ca_cert = settings.api_server, str(settings.api_ca_file)
        found.disable_strict_ssl_verification = settings.relaxed_certificates
        found.connection_pool_maxsize = 0  # no limit: a call never waits for the connection of another
        return found

    def _read_token(self) -> None:
        """A file that cannot be read just now leaves the one that it had."""
        now_us = self._clock.now_us()
        if self._token_us is not None and now_us - self._token_us < TOKEN_KEPT_US:
            return
        try:
            token = self._settings.api_token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            if not self._configuration.api_key:
                raise KubeError(f"api_token_file {self._settings.api_token_file}: {error.strerror}") from None
        else:
            # under any other name the client asks as nobody, without a word
            self._configuration.api_key["BearerToken"] = f"Bearer {token}"
        self._token_us = now_us


class Kind:
    """All objects of one kind, in all namespaces: a Source to follow."""

    def __init__(self, server: ApiServer, path: str) -> None:
        self._server, self._path = server, path

    async def list(self) -> tuple[list[Json], str]:
        """A page at a time, all of one version; where that is too old meanwhile, it is a 410 as of a watch."""
        items: list[Json] = []
        query = {"limit": str(PAGE)}
        while True:
            page = await self._server.ask("GET", self._path, query)
            items += page["items"] or []
            if not (token := page["metadata"].get("continue")):
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = token

    def watch(self, version: str) -> AsyncIterator[Json]:
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        return self._server.stream(self._path, query | {"timeoutSeconds": str(WATCH_S)})


def _pod(namespace: str, name: str) -> str:
    """Names of Kubernetes need no quoting."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _refused(answer: aiohttp.ClientResponse, text: bytes) -> KubeError:
    try:
        message = json.loads(text)["message"]
    except (ValueError, LookupError, TypeError):
        message = text[:200].decode(errors="replace")
    after = answer.headers.get("Retry-After", "")
    retry_after_us = int(after) * 1_000_000 if after.isdecimal() and len(after) < 6 else 0
    return KubeError(f"{answer.status}: {message}", answer.status, retry_after_us)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What the client raises where the server does not answer, as one kind of error."""
    try:
        yield
    except (ApiException, aiohttp.ClientError, OSError) as error:
        raise KubeError(str(error) or type(error).__name__) from error
