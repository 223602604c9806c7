"""kube-scheduler with the configuration and the account of k8s/: it leads, asks its extender, and may what it must."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from tests.kubernetes.api import Json
from tests.kubernetes.installed import Installed, binding, pod
from tests.kubernetes.parts import Part, free_port, program
from tests.manifests import named

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

PODS = "/api/v1/namespaces/shop/pods"


class Extender:
    """In the place of kube-bridge: takes the first node, and has the placer's account bind the pod."""

    def __init__(self, installed: Installed) -> None:
        self.filtered: list[Json] = []
        self._placer = installed.kube.api_of("laxity", "placer")
        extender = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(extender.filter(body) if self.path == "/filter" else extender.bind(body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as its base names it
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def filter(self, body: Json) -> Json:
        self.filtered.append(body)
        return {"NodeNames": sorted(body["NodeNames"])[:1]}

    def bind(self, body: Json) -> Json:
        made = binding(body["PodName"], body["Node"], {"laxity.dev/devices": "GPU-1"})
        self._placer.create(f"{PODS}/{body['PodName']}/binding", made)
        return {"Error": ""}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def extender(installed: Installed) -> Iterator[Extender]:
    installed.clear()
    made = Extender(installed)
    yield made
    made.close()


@pytest.fixture
def scheduler(installed: Installed, extender: Extender) -> Iterator[Part]:
    """As the manifests have it, but for where it finds the API server, its extender, and files."""
    kube, port = installed.kube, free_port()
    config: Json = yaml.safe_load(named("ha", "ConfigMap", "scheduler")["data"]["scheduler.yaml"])
    kubeconfig = str(kube.kubeconfig("laxity-scheduler", kube.account_token("laxity", "scheduler")))
    config["clientConnection"] = {"kubeconfig": kubeconfig}
    config["extenders"][0]["urlPrefix"] = extender.url
    file = kube.folder / "laxity-scheduler.json"
    file.write_text(json.dumps(config))
    command = [program("kube-scheduler"), f"--config={file}", "--bind-address=127.0.0.1", f"--secure-port={port}"]
    command += [f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}"]
    lease = "/apis/coordination.k8s.io/v1/namespaces/laxity/leases/laxity-scheduler"
    kube.admin.delete(lease)
    made = Part("laxity-scheduler", command, kube.folder, lambda: kube.admin.find(lease) is not None)
    made.start()
    yield made
    made.kill()


def test_KU05_every_pod_of_the_profile_comes_to_the_extender_and_is_bound_with_its_devices(
    installed: Installed, extender: Extender, scheduler: Part
) -> None:
    installed.kube.add_node("big")
    asks = pod("asks", limits={"laxity.dev/gpu-milli": "250", "laxity.dev/gpu-mib": "4096"})
    plain = pod("asks-nothing")
    others = pod("of-another", scheduler="default-scheduler")
    for body in (asks, plain, others):
        installed.alice.create(PODS, body)

    for name in ("asks", "asks-nothing"):
        found = installed.kube.admin.until(f"{PODS}/{name}", lambda it: it["spec"].get("nodeName"))
        assert "GPU-1" == found["metadata"]["annotations"]["laxity.dev/devices"]

    names = {call["Pod"]["metadata"]["name"] for call in extender.filtered}
    assert {"asks", "asks-nothing"} <= names
    assert "of-another" not in names
    assert "nodeName" not in installed.kube.admin.get(f"{PODS}/of-another")["spec"]
    assert [] == [line for line in scheduler.log.splitlines() if "forbidden" in line.lower()]
