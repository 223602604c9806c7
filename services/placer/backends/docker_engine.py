"""One Docker engine, asked and listened to: time limits, connections, TLS, and its refusals as our errors.

What it is asked lies in ``docker``, what it is told in ``docker_spec``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiodocker import Docker
from aiodocker.exceptions import DockerError

from services.placer.backends.docker_options import DockerEngine
from services.placer.backends.docker_secrets import only_ours
from shared.errors import BackendError, BackendSilentError, FieldError, clip

NO_ENGINE = 900
"""The client library's status where it cannot connect."""
LONGEST_REASON = 500


class RefusedError(BackendError):
    """The engine's answer is an error; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(clip(message, LONGEST_REASON))


class NoAnswerError(BackendSilentError):
    """The engine did not answer in time, or cannot be reached."""


class Engine:
    """One engine: every call with a time limit of its own and a connection of its own, which ends with the call."""

    def __init__(self, where: DockerEngine, call_timeout_us: int) -> None:
        """Raises FieldError where its certificates cannot be used: now, and not at the first request."""
        self.where = where
        self.connector: aiohttp.BaseConnector | None = None
        self.unstarted_since_us: dict[str, int] = {}
        """When each container that is made and not started was first seen."""
        self._call_timeout_us = call_timeout_us
        self._tls = _tls(where.url, where.tls) if where.tls is not None else None
        self._client: Docker | None = None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
        timeout_us: int | None = None,
    ) -> Any:
        """Its answer. Raises RefusedError or NoAnswerError."""
        with self._refusals():
            async with asyncio.timeout((timeout_us or self._call_timeout_us) / 1e6):
                return await self._docker()._query_json(path, method, params=params, data=body)  # noqa: SLF001

    async def inspect(self, container: str, timeout_us: int | None = None) -> dict[str, Any] | None:
        """By id or name; None where there is none. Engines answer when no start or stop of it is under way."""
        try:
            found: dict[str, Any] = await self.ask("GET", f"containers/{container}/json", timeout_us=timeout_us)
        except RefusedError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def delete(self, container_id: str, *, force: bool) -> bool:
        """True where it is gone; False while the engine refuses, as it does for one that runs or is just removed."""
        try:
            await self.ask("DELETE", f"containers/{container_id}", params={"force": force, "v": True})
        except RefusedError as error:
            if error.status == 409:
                return False
            if error.status != 404:
                raise
        return True

    async def put(self, container: str, folder: str, archive: bytes) -> None:
        """Unpack an archive in a container's folder, whether it runs or not; mounts count as they do inside."""
        params, headers = {"path": folder}, {"Content-Type": "application/x-tar"}
        path = f"containers/{container}/archive"
        with self._refusals():
            async with asyncio.timeout(self._call_timeout_us / 1e6):
                async with self._docker()._query(path, "PUT", params=params, data=archive, headers=headers):  # noqa: SLF001
                    return

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, params: dict[str, Any], headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Its answer, line by line as it comes; the connection is closed at the end, which the library forgets."""
        async with AsyncExitStack() as stack:
            with self._refusals():
                async with asyncio.timeout(self._call_timeout_us / 1e6):
                    query = self._docker()._query(path, method, params=params, headers=headers)  # noqa: SLF001
                    response = await stack.enter_async_context(query)
                    stack.callback(response.close)
            yield response.content

    async def line(self, lines: aiohttp.StreamReader, timeout_us: int) -> bytes | None:
        """The next line of a stream, empty at its end; None where none came in time."""
        with self._refusals():
            try:
                async with asyncio.timeout(timeout_us / 1e6):
                    return await lines.readline()
            except TimeoutError:
                return None

    async def close(self) -> None:
        """Close its connections; a later call opens new ones."""
        client, self._client = self._client, None
        connector, self.connector = self.connector, None
        if client is not None and connector is not None:
            await client.session.close()
            await client.close()
            await connector.close()

    def _docker(self) -> Docker:
        """Made within the loop. The library's own connector stops at a hundred connections, and its tcp is plain."""
        if self._client is None:
            url = "unix://localhost" if self.where.local else self.where.url.replace("tcp://", "http://", 1)
            self.connector = self._connect()
            self._client = Docker(url, connector=self.connector)
        return self._client

    def _connect(self) -> aiohttp.BaseConnector:
        if self.where.local:
            return aiohttp.UnixConnector(self.where.url.removeprefix("unix://"), limit=0, force_close=True)
        return aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, limit=0, force_close=True)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What can go wrong with an engine, as our errors."""
        try:
            yield
        except DockerError as error:
            if error.status == NO_ENGINE:
                why = clip(str(error.__context__ or error.message), LONGEST_REASON)
                raise NoAnswerError(f"engine {self.where.url} is not reached: {why}") from error
            raise RefusedError(error.status, error.message) from error
        except TimeoutError as error:
            raise NoAnswerError(f"engine {self.where.url} does not answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # also a line that is too long, or no JSON
            raise NoAnswerError(f"engine {self.where.url} broke off: {clip(str(error))}") from error


def _tls(url: str, folder: Path) -> ssl.SSLContext:
    """The three files that Docker's own client has; FieldError names the one that is missing or wrong."""
    setting, authority, key = f"docker.engines, tls of {url}", folder / "ca.pem", folder / "key.pem"
    file = authority
    try:
        context = ssl.create_default_context(cafile=str(authority))
        for file in (folder / "cert.pem", key):
            file.open("rb").close()
        only_ours(key)
        context.load_cert_chain(folder / "cert.pem", key)
    except BackendError as error:
        raise FieldError(setting, str(error), "a file that only its owner may read (chmod 600)") from None
    except (OSError, ssl.SSLError) as error:
        found = f"{file}: {error.strerror or error}"
        raise FieldError(setting, found, "a folder with ca.pem, cert.pem and key.pem in PEM, for reading") from None
    return context
