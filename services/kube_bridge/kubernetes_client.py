"""The bridge's side of the API server: the one file here that knows its client.

Raw JSON throughout: the client's models cost four times as much and block the loop for a second on two thousand pods.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final, Literal

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException

from services.kube_bridge.settings import KubeBridgeSettings
from shared.list_watch import Json, KubeError, events_of

PAGE: Final = 500
"""Objects of one answer: its JSON is read without holding up everything else for long."""
WATCH_S: Final = 300
"""The server ends a watch after it."""
STRATEGIC: Final = "application/strategic-merge-patch+json"


class ApiServer:
    """One client for calls, one for watches, which hold their connections."""

    def __init__(self, settings: KubeBridgeSettings) -> None:
        self._settings = settings
        self._calls: ApiClient | None = None
        self._watches: ApiClient | None = None

    async def open(self) -> None:
        """Raises KubeError where nobody says how the server is reached."""
        found = Configuration()
        found.disable_strict_ssl_verification = self._settings.relaxed_certificates
        try:
            if self._settings.kubeconfig is None:
                load: Callable[..., None] = config.load_incluster_config  # reads its token file anew as that changes
                load(client_configuration=found)
            else:
                await config.load_kube_config(str(self._settings.kubeconfig), client_configuration=found)
        except (ConfigException, OSError) as error:
            raise KubeError(f"no way to the API server: {error}") from None
        self._calls, self._watches = ApiClient(found), ApiClient(found)

    async def close(self) -> None:
        for client in (self._calls, self._watches):
            if client is not None:
                await client.close()

    # --- pods and nodes ---

    def kind(self, name: Literal["pods", "nodes"]) -> Kind:
        return Kind(self, f"/api/v1/{name}")

    async def pod(self, namespace: str, name: str) -> Json | None:
        """As the server has it now; None where there is none."""
        try:
            return await self.ask("GET", _pod(namespace, name))
        except KubeError as error:
            if error.status == 404:
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
        self,
        method: str,
        path: str,
        *,
        query: tuple[tuple[str, str], ...] = (),
        body: object = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer; raises KubeError. A token that has just been replaced is read anew."""
        for last in (False, True):
            with _refusals():
                answer = await self._call(self._calls, method, path, query, body, content_type)
                text = await answer.read()
            if answer.status != 401 or last:
                break
        if answer.status >= 300:
            raise _refused(answer, text)
        try:
            found: Json = json.loads(text)
        except ValueError:
            raise KubeError(f"{method} {path}: no JSON: {text[:100]!r}") from None
        return found

    async def stream(self, path: str, query: tuple[tuple[str, str], ...]) -> AsyncIterator[Json]:
        """The events of a watch."""
        silence_s = self._settings.api_silence_us / 1e6
        with _refusals():
            answer = await self._call(self._watches, "GET", path, query, None, "application/json", silence_s)
            try:
                if answer.status != 200:
                    raise _refused(answer, await answer.read())
                async for event in events_of(answer.content.iter_any()):
                    yield event
            finally:
                answer.close()

    async def _call(
        self,
        client: ApiClient | None,
        method: str,
        path: str,
        query: tuple[tuple[str, str], ...],
        body: object,
        content_type: str,
        silence_s: float | None = None,
    ) -> aiohttp.ClientResponse:
        assert client is not None, "open() comes first"
        call_s = self._settings.api_timeout_us / 1e6
        limit = aiohttp.ClientTimeout(total=call_s)
        if silence_s is not None:
            limit = aiohttp.ClientTimeout(sock_connect=call_s, sock_read=silence_s)
        answer: aiohttp.ClientResponse = await client.call_api(
            path,
            method,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limit,
        )
        return answer


class Kind:
    """All objects of one kind, in all namespaces: a Source to follow."""

    def __init__(self, server: ApiServer, path: str) -> None:
        self._server, self._path = server, path

    async def list(self) -> tuple[list[Json], str]:
        """A page at a time, all of one version; from the beginning where that is too old meanwhile."""
        items: list[Json] = []
        token = ""
        while True:
            more = (("continue", token),) if token else ()
            page = await self._server.ask("GET", self._path, query=(("limit", str(PAGE)), *more))
            items += page["items"] or []
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, page["metadata"]["resourceVersion"]

    def watch(self, version: str) -> AsyncIterator[Json]:
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        return self._server.stream(self._path, (*query.items(), ("timeoutSeconds", str(WATCH_S))))


def _pod(namespace: str, name: str) -> str:
    """Names of Kubernetes need no quoting."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _refused(answer: aiohttp.ClientResponse, text: bytes) -> KubeError:
    try:
        message = json.loads(text).get("message", "")
    except (ValueError, AttributeError):
        message = text[:200].decode(errors="replace")
    after = answer.headers.get("Retry-After", "")
    retry_after_us = int(after) * 1_000_000 if after.isdecimal() and len(after) < 6 else 0
    return KubeError(f"{answer.status}: {message}", answer.status, retry_after_us)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What the client raises where the server does not answer, as one kind of error."""
    try:
        yield
    except (TimeoutError, ApiException, aiohttp.ClientError, OSError) as error:
        raise KubeError(str(error) or type(error).__name__) from error
