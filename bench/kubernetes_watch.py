"""How ``bench-kubernetes`` learns when pods are bound: by a watch of its own, in a thread."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.kubernetes.api import Json
from tests.kubernetes.cluster import KubeCluster


class BoundPods:
    """`pods` of one namespace, in the order in which they were seen with a node."""

    def __init__(self, kube: KubeCluster, namespace: str) -> None:
        self.pods: dict[str, Json] = {}
        self._last_s = 0.0
        self._more = threading.Condition()
        self._tls = ssl.create_default_context(cafile=str(kube.ca))
        self._port, self._headers = kube.port, {"Authorization": f"Bearer {kube.token()}"}
        self._path = f"/api/v1/namespaces/{namespace}/pods?watch=true&fieldSelector=spec.nodeName!="
        self._over = False
        self._answer = self._watch()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if self._connection.sock is not None:
            self._connection.sock.close()

    def _watch(self) -> http.client.HTTPResponse:
        """Begins with all that are bound already."""
        self._connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls)
        self._connection.request("GET", self._path, headers=self._headers)
        return self._connection.getresponse()

    def _run(self) -> None:
        while not self._over:
            with suppress(OSError, ValueError, http.client.HTTPException):  # it breaks off now and then
                for line in self._answer:
                    event = json.loads(line)
                    if event["type"] in {"ADDED", "MODIFIED"}:
                        self._bound(event["object"])
            if not self._over:
                self._answer = self._watch()

    def _bound(self, pod: Json) -> None:
        if pod["metadata"]["uid"] in self.pods:
            return
        with self._more:
            self._last_s = time.monotonic()
            self.pods[pod["metadata"]["uid"]] = pod
            self._more.notify_all()

    def wait(self, count: int, timeout_s: float) -> float:
        """When the last of so many was bound, by the monotonic clock; raises TimeoutError."""
        with self._more:
            if not self._more.wait_for(lambda: len(self.pods) >= count, timeout_s):
                raise TimeoutError(f"{len(self.pods)} of {count} pods are bound after {timeout_s:g} s")
            return self._last_s
