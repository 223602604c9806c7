"""An outsider's client of the API server: HTTP and JSON from the standard library, and nothing of ours."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
_CLOSED = (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError)


class ApiRefusedError(AssertionError):
    """The answer is an error; ``status`` is that of HTTP, ``body`` the Status object."""

    def __init__(self, what: str, status: int, body: Json) -> None:
        super().__init__(f"{what}: {status} {body.get('message', body)}")
        self.status, self.body = status, body


class Api:
    """One caller, with a token and one connection of its own; safe to use in threads."""

    def __init__(self, port: int, token: str, ca: Path, headers: dict[str, str] | None = None) -> None:
        """``headers``: more of them, such as Impersonate-User."""
        self._port, self._headers = port, {"Authorization": f"Bearer {token}", **(headers or {})}
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._connection: http.client.HTTPSConnection | None = None
        self._lock = threading.Lock()

    def ask(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", timeout_s: float = 30
    ) -> tuple[int, Json]:
        """Status and answer, whatever it is. OSError or HTTPException where there is none."""
        headers = {**self._headers, "Content-Type": content_type}
        data = None if body is None else json.dumps(body).encode()
        with self._lock:
            try:
                connection = self._connected(timeout_s)
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read()
            except BaseException:
                self._close()
                raise
        try:
            found = json.loads(text)
        except ValueError:
            found = {"message": text.decode(errors="replace")}
        return answer.status, found

    def _connected(self, timeout_s: float) -> http.client.HTTPSConnection:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(
                "127.0.0.1", self._port, timeout=timeout_s, context=self._tls
            )
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def do(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Json:
        """The answer; raises ApiRefusedError."""
        status, found = self._ask_again(method, path, body, content_type)
        if status >= 400:
            raise ApiRefusedError(f"{method} {path}", status, found)
        return found

    def _ask_again(self, method: str, path: str, body: Any, content_type: str) -> tuple[int, Json]:
        """Once more where a kept connection turns out to be closed."""
        try:
            return self.ask(method, path, body, content_type)
        except _CLOSED:
            return self.ask(method, path, body, content_type)

    def get(self, path: str) -> Json:
        return self.do("GET", path)

    def find(self, path: str) -> Json | None:
        """None where there is none."""
        try:
            return self.do("GET", path)
        except ApiRefusedError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str) -> list[Json]:
        found: list[Json] = self.do("GET", path)["items"]
        return found

    def create(self, path: str, body: Json) -> Json:
        return self.do("POST", path, body)

    def patch(self, path: str, body: Any, content_type: str = STRATEGIC) -> Json:
        return self.do("PATCH", path, body, content_type)

    def apply(self, path: str, body: Json, manager: str = "tests") -> Json:
        """Server-side apply: made, or made so."""
        return self.do("PATCH", f"{path}?fieldManager={manager}&force=true", body, APPLY)

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """No error where there is none."""
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        status, found = self._ask_again("DELETE", path, options, "application/json")
        if status >= 400 and status != 404:
            raise ApiRefusedError(f"DELETE {path}", status, found)

    def until(self, path: str, wanted: Callable[[Json], object], timeout_s: float = 60) -> Json:
        """The object once it is as wanted."""
        deadline, found = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            if (found := self.find(path)) is not None and wanted(found):
                return found
            time.sleep(0.05)
        shown = {"status": found.get("status"), **found} if found else None
        raise AssertionError(f"{path} not as wanted within {timeout_s} s: {json.dumps(shown, indent=1)[:3000]}")

    def until_gone(self, path: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.find(path) is not None:
            assert time.monotonic() < deadline, f"{path} is there after {timeout_s} s"
            time.sleep(0.05)
