"""A proxy before the API server that a test tells how to misbehave: for answers that are lost, late, or no answers."""

from __future__ import annotations

import http.client
import http.server
import re
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.parts import free_port

TIME = re.compile(rb'"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)((?:\.\d+)?Z")')
"""As every object of Kubernetes has it."""
Fault = Callable[["Asked"], bool]
"""Is shown each request; True where it has dealt with it."""


class Asked(http.server.BaseHTTPRequestHandler):
    """One request, and what can be done with it."""

    protocol_version = "HTTP/1.1"
    front: Front

    def _serve(self) -> None:
        self.body = _later(self.rfile.read(int(self.headers.get("Content-Length") or 0)), -self.front.ahead_s)
        self.front.asked.append(f"{self.command} {self.path}")
        if not any(fault(self) for fault in list(self.front.faults)):
            self.forward()

    def has(self, wanted: str) -> bool:
        return all(word in f"{self.command} {self.path}" for word in wanted.split())

    do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 -- the library's words

    def answer(self, status: int, text: str, content_type: str = "application/json") -> None:
        """Ours, and not the API server's."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def cut(self) -> None:
        """No answer: the connection ends."""
        self.close_connection = True

    def swallow(self) -> None:
        """The API server does what is asked, and the answer is lost."""
        connection, answer = self._ask()
        answer.read()
        connection.close()
        self.cut()

    def forward(self, most_bytes: int | None = None) -> None:
        """As it comes, also what never ends; or only so many bytes of it, and then the connection ends."""
        connection, answer = self._ask()
        self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Connection", "close")
        self.end_headers()
        left = most_bytes
        try:
            while (left is None or left > 0) and (chunk := self._read(answer, 65_536 if left is None else left)):
                self.wfile.write(chunk)
                self.wfile.flush()
                left = None if left is None else left - len(chunk)
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
        """Whole lines where times are changed in them: one may be cut between two reads."""
        if not self.front.ahead_s:
            return answer.read1(most_bytes)
        return _later(answer.readline(), self.front.ahead_s)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((time.time() if timestamp is None else timestamp) + self.front.ahead_s)

    def _ask(self) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.front.behind, context=self.front.trusted)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in {"host", "connection"}}
        connection.request(self.command, self.path, self.body or None, headers)
        return connection, connection.getresponse()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's word
        """Nothing."""


def _later(text: bytes, seconds: float) -> bytes:
    """With all times in it that much later."""

    def move(found: re.Match[bytes]) -> bytes:
        at = datetime.fromisoformat(found[1].decode()).replace(tzinfo=UTC) + timedelta(seconds=seconds)
        return b'"' + at.strftime("%Y-%m-%dT%H:%M:%S").encode() + found[2]

    return TIME.sub(move, text) if seconds else text


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client, or the API server, that has gone is what tests are about."""


class Front:
    """Serves with a certificate of the cluster's own authority while the block runs."""

    def __init__(self, kube: KubeCluster) -> None:
        self.behind, self.port = kube.port, free_port()
        self.faults: list[Fault] = []
        self.ahead_s = 0.0
        """How far the API server's clock is before that of whoever asks here: in every time that it says, and in every
        one that it is told. Who is behind a proxy knows nothing else of that clock.
        """
        self.asked: list[str] = []
        """Method and path of each request so far."""
        self.trusted = ssl.create_default_context(cafile=str(kube.ca))
        name = f"front-{self.port}"
        signed = kube.authority.signed(name)
        served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served.load_cert_chain(signed / "cert.pem", signed / "key.pem")
        handler = type("AskedHere", (Asked,), {"front": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self._server.socket = served.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def once(self, wanted: str, deed: Callable[[Asked], None]) -> None:
        """Do that with the next request of which method and path contain these words."""

        def fault(asked: Asked) -> bool:
            if not asked.has(wanted):
                return False
            self.faults.remove(fault)
            deed(asked)
            return True

        self.faults.append(fault)

    def always(self, wanted: str, deed: Callable[[Asked], None]) -> None:
        """The same with all such requests, until `faults` are cleared."""

        def fault(asked: Asked) -> bool:
            if found := asked.has(wanted):
                deed(asked)
            return found

        self.faults.append(fault)

    def count(self, wanted: str) -> int:
        return sum(all(word in line for word in wanted.split()) for line in self.asked)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
