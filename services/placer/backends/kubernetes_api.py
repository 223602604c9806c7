"""The API server, asked and followed: time limits, retries, tokens that change, and its refusals as our errors.

Plain paths and plain JSON, as Kubernetes documents them: the client library's models take five times as long to read,
raise after a binding that worked, and hide what they do not know. What is asked lies in ``kubernetes``.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration

from services.placer.backends.kubernetes_options import KubernetesOptions
from shared.clock import Clock
from shared.errors import BackendError, BackendSilentError, FieldError, clip

Json = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
LONGEST_REASON = 500
PAGE = 500
TOKEN_KEPT_US = 60_000_000
FIRST_US, MOST_US = 100_000, 10_000_000
"""Between two tries: doubled each time, and a random part of it, so that many do not come at once."""
TRIES = 6
GOODBYE_US = 100_000


class RefusedError(BackendError):
    """The API server's answer is an error; ``status`` is that of HTTP. What was asked has not happened."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(clip(message, LONGEST_REASON))


class NoAnswerError(BackendSilentError):
    """It did not answer, or not to the point: what was asked may have happened."""


class GoneError(Exception):
    """A list or a watch must begin anew: what it goes on from is not kept any more."""


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    params: Json
    body: Json | None = None
    content_type: str = "application/json"


class KubernetesApi:
    """One connection pool for calls and one for watches, which hold a connection each; made within the loop."""

    def __init__(self, options: KubernetesOptions, clock: Clock) -> None:
        """Raises FieldError where the API server, its certificate or the token are not named or cannot be read."""
        self._options, self._clock = options, clock
        self._read_us = 0
        self._config = _configuration(options)
        self._read_token()
        self._clients: dict[str, ApiClient] = {}
        self.counts: dict[str, int] = {}
        """What went wrong and was tried again, by kind."""

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Json | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer. RefusedError where it is an error, NoAnswerError where nobody knows what became of it.

        Asked again where that is harmless: what was refused for a moment only (429), what only reads, a token of old.
        """
        call = _Call(method, path, params or {}, body, content_type)
        for number in range(TRIES):
            try:
                return await self._ask_once(call)
            except RefusedError as error:
                if error.status == 401 and number == 0:
                    self._read_token()
                    continue
                if error.status != 429 or number == TRIES - 1 or path.endswith("/eviction"):
                    raise
            except NoAnswerError:
                if method != "GET" or number == TRIES - 1:
                    raise
            self._count("asked_again")
            await self._clock.sleep_us(backoff_us(number))
        raise AssertionError("the last try raises")

    async def list(self, path: str, params: Json) -> tuple[list[Json], str]:
        """All items, page by page, and the version to follow them from."""
        while True:
            items: list[Json] = []
            page: Json = {"limit": PAGE}
            try:
                while True:
                    found = await self.ask("GET", path, params={**params, **page})
                    items += found.get("items") or ()
                    page = {"limit": PAGE, "continue": found["metadata"].get("continue")}
                    if not page["continue"]:
                        return items, str(found["metadata"].get("resourceVersion", ""))
            except RefusedError as error:
                if error.status != 410 or "continue" not in page:  # 410: the next page is not kept any more
                    raise

    async def watch(self, path: str, params: Json, version: str) -> AsyncIterator[tuple[str, Json]]:
        """Changes since ``version``: type and object, also BOOKMARK. Ends where the server ends it.

        GoneError where the version is too old; NoAnswerError where nothing comes any more, also no bookmark.
        """
        asked = {**params, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        silent_s = self._options.silent_us / 1e6
        limit = aiohttp.ClientTimeout(sock_connect=self._options.call_timeout_us / 1e6, sock_read=silent_s)
        try:
            async with await self._send("watch", _Call("GET", path, asked), limit) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                try:
                    async for line in _lines(response.content):
                        yield self._change(line)
                finally:
                    _abort(response)
        except RefusedError as error:
            if error.status == 410:
                raise GoneError from error
            if error.status == 401:
                self._read_token()
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswerError(f"API server {self._options.server}: watch broke off: {_why(error)}") from error

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()
        if clients:  # those that broke off say goodbye first, which the library does not wait for
            await self._clock.sleep_us(GOODBYE_US)

    # --- one call ---

    async def _ask_once(self, call: _Call) -> Json:
        limit = aiohttp.ClientTimeout(total=self._options.call_timeout_us / 1e6)
        try:
            async with await self._send("calls", call, limit) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswerError(f"API server {self._options.server} does not answer: {_why(error)}") from error
        if status >= 400:
            raise _refusal(status, text)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswerError(f"API server {self._options.server}: found {clip(text)}, allowed: a JSON object")
        return found

    async def _send(self, pool: str, call: _Call, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        if self._clock.now_us() - self._read_us > TOKEN_KEPT_US:
            self._read_token()
        if pool not in self._clients:
            self._clients[pool] = ApiClient(self._config)
        response: aiohttp.ClientResponse = await self._clients[pool].call_api(
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

    def _change(self, line: bytes) -> tuple[str, Json]:
        """One line of a watch. What is no event is a proxy's page, or was cut: the rest cannot be relied on either."""
        try:
            event = json.loads(line)
            kind, found = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            event = None
        if event is None or not isinstance(found, dict):
            self._count("no_event")
            said = clip(line.decode(errors="replace"))
            raise NoAnswerError(f"API server {self._options.server}: a watch said {said}")
        if kind == "ERROR":
            if found.get("code") == 410:
                raise GoneError
            raise _refusal(int(found.get("code") or 500), json.dumps(found))
        return kind, found

    def _read_token(self) -> None:
        """Keeps the one that it has where the file cannot be read just now."""
        self._read_us = self._clock.now_us()
        try:
            token = self._options.token_file.read_text().strip()
        except OSError as error:
            if not self._config.api_key:
                _unreadable("token_file", self._options.token_file, error)
            self._count("token_unreadable")
            return
        # with any other key than this one the library asks as nobody
        self._config.api_key["BearerToken"] = f"Bearer {token}"

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class Follower:
    """Objects as the API server has them, followed for ever; whoever waits for one is woken by its changes.

    A list, and from its version on a watch: again from where that broke off, and from a new list where that is too old
    or nobody can say. It ends with an exception that is a bug, and never by giving up.
    """

    def __init__(self, api: KubernetesApi, path: str, params: Json, clock: Clock) -> None:
        self._api, self._path, self._params, self._clock = api, path, params, clock
        self._task: asyncio.Task[NoReturn] | None = None
        self._changed = asyncio.Condition()
        self.found: dict[str, Json] = {}
        """By uid: the same name with another uid is another object."""
        self.heard_us: int | None = None
        """When the API server last said anything, also that nothing has changed; None: never."""
        self.listed = False
        self.changes = 0

    async def wait(self, at_most_us: int, seen: int | None = None) -> None:
        """Until something changes after ``seen`` changes, or from now on, for at most so long."""
        self.begin()
        before = self.changes if seen is None else seen
        try:
            async with asyncio.timeout(at_most_us / 1e6), self._changed:
                await self._changed.wait_for(lambda: self.changes != before)
        except TimeoutError:
            return

    def begin(self) -> None:
        """Follow them from now on; raises what ended it, if something did."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        elif self._task.done():
            self._task.result()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> NoReturn:
        version, failed = "", 0
        while True:
            heard_us = self.heard_us
            try:
                if not version:
                    version = await self._list()
                async for kind, found in self._api.watch(self._path, self._params, version):
                    version = found["metadata"]["resourceVersion"]
                    await self._take(kind, found)
            except GoneError:
                version = ""
            except BackendError:
                failed += 1
            if self.heard_us == heard_us:  # a version of another cluster, or of a newer backup, is met with silence
                version = ""
            else:
                failed = 0
            await self._clock.sleep_us(backoff_us(failed))

    async def _list(self) -> str:
        items, version = await self._api.list(self._path, self._params)
        async with self._changed:
            self.found = {each["metadata"]["uid"]: each for each in items}
            self.listed = True
            self.heard_us = self._clock.now_us()
            self.changes += 1
            self._changed.notify_all()
        return version

    async def _take(self, kind: str, found: Json) -> None:
        self.heard_us = self._clock.now_us()
        if kind == "BOOKMARK":
            return
        async with self._changed:
            if kind == "DELETED":
                self.found.pop(found["metadata"]["uid"], None)
            else:
                self.found[found["metadata"]["uid"]] = found
            self.changes += 1
            self._changed.notify_all()


def backoff_us(number: int) -> int:
    """After that many failures in a row; half of it is drawn."""
    most = min(MOST_US, FIRST_US << min(number, 20))
    return most // 2 + random.randrange(most // 2 + 1)  # noqa: S311 -- no secret


def _configuration(options: KubernetesOptions) -> Configuration:
    if not options.server:
        raise FieldError("kubernetes.server", "nothing", "https://HOST:PORT; only a pod is told it by its cluster")
    try:
        options.ca_file.read_bytes()
    except OSError as error:
        _unreadable("ca_file", options.ca_file, error)
    config = Configuration()
    config.host, config.ssl_ca_cert = options.server, str(options.ca_file)
    config.disable_strict_ssl_verification = not options.strict_ca
    config.connection_pool_maxsize = 0  # no limit: a call never waits for another one's connection
    return config


def _unreadable(setting: str, path: Path, error: OSError) -> NoReturn:
    raise FieldError(f"kubernetes.{setting}", f"{path}: {error.strerror}", "a file for reading") from None


def _refusal(status: int, text: str) -> BackendError:
    """Of 5xx nobody can say whether it happened: an answer that a proxy gave, a time-out of the store."""
    try:
        found = json.loads(text)
        causes = [each["message"] for each in (found.get("details") or {}).get("causes") or () if "field" not in each]
        message = " ".join([found["message"], *causes])
    except (ValueError, KeyError, TypeError, AttributeError):
        message = text
    if status >= 500:
        return NoAnswerError(clip(f"API server: {status} {message}", LONGEST_REASON))
    return RefusedError(status, str(message))


def _why(error: BaseException) -> str:
    return clip(str(error) or type(error).__name__, LONGEST_REASON)


def _abort(response: aiohttp.ClientResponse) -> None:
    """End a connection of which nobody reads the rest; else it waits for the other side's goodbye for 30 s."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole ones, of any length, which the library's own reader refuses."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
    if rest.strip():
        yield rest
