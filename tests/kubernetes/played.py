"""A kubelet that is played: says of pods what a real one would say, for nodes that are only said to be there."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.kubernetes.api import ApiRefusedError, Json
from tests.kubernetes.cluster import KubeCluster

POLL_S = 0.02


class PlayedKubelet:
    """In a thread. Runs each pod that is bound to a node of ``prefix``, in the words of the fake backend:

    FAKE_EXIT_AFTER_US and FAKE_EXIT_CODE: it ends so; FAKE_IGNORE_TERM=1: it uses its grace; FAKE_START_FAILS: as if
    the image had no such command.
    """

    def __init__(self, kube: KubeCluster, prefix: str) -> None:
        self._kube, self._prefix = kube, prefix
        self._api = kube.api()
        self._stop = threading.Event()
        self._ends_at_s: dict[str, float] = {}
        self.resizes = True
        """False: it says nothing to another size."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(OSError, http.client.HTTPException):  # the API server is away
                for pod in self._api.items("/api/v1/pods"):
                    if pod["spec"].get("nodeName", "").startswith(self._prefix):
                        with suppress(ApiRefusedError):  # it is gone, or changed meanwhile
                            self._play(pod)

    def _play(self, pod: Json) -> None:
        env = {each["name"]: each.get("value", "") for each in pod["spec"]["containers"][0].get("env", [])}
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        if "deletionTimestamp" in pod["metadata"]:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 0) if env.get("FAKE_IGNORE_TERM") == "1" else 0
            at_s = self._ends_at_s.setdefault(f"{uid} deleted", time.monotonic() + grace_s)
            if phase != "Running" or time.monotonic() >= at_s:
                self._api.do("DELETE", _path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        elif phase == "Pending":
            self._start(pod, env)
        elif phase == "Running":
            if time.monotonic() >= self._ends_at_s.get(uid, float("inf")):
                code = int(env.get("FAKE_EXIT_CODE", "0"))
                ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
                self._say(pod, "Failed" if code else "Succeeded", {"terminated": ended})
            elif self.resizes:
                self._resize(pod)

    def _start(self, pod: Json, env: dict[str, str]) -> None:
        if env.get("FAKE_START_FAILS") == "always":
            message = 'exec: "no-such-command": executable file not found in $PATH'
            self._say(pod, "Failed", {"terminated": {"exitCode": 128, "reason": "StartError", "message": message}})
            return
        if "FAKE_EXIT_AFTER_US" in env:
            after_s = int(env["FAKE_EXIT_AFTER_US"]) / 1e6
            self._ends_at_s[pod["metadata"]["uid"]] = time.monotonic() + after_s
        self._say(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    def _resize(self, pod: Json) -> None:
        wanted = pod["spec"]["containers"][0].get("resources") or {}
        said = (pod["status"].get("containerStatuses") or [{"state": {"running": {}}}])[0]
        if wanted.get("limits") != (said.get("resources") or {}).get("limits"):
            self._say(pod, "Running", said["state"])

    def _say(self, pod: Json, phase: str, state: Json) -> None:
        container = pod["spec"]["containers"][0]
        status = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in state,
            "restartCount": 0,
            "state": state,
            "resources": container.get("resources") or {},
        }
        self._api.patch(
            f"{_path(pod)}/status",
            {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"phase": phase, "containerStatuses": [status]}},
        )


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
