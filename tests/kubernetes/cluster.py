"""A Kubernetes of the tests' own: etcd and an API server, and on request the rest, down to a kubelet that runs pods."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.docker.certificates import Authority
from tests.kubernetes.api import Api, ApiRefusedError, Json
from tests.kubernetes.node import Machine
from tests.kubernetes.parts import Part, free_port, program

ROLES = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "nobody": ("nobody", ""),
}
"""Token of each: ``<role>-token``. Others are service accounts, or admins that impersonate."""
NODE_CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "1Ti"}


class KubeCluster:
    """Everything in one folder, on ports of 127.0.0.1; ``with`` starts etcd and the API server and ends it all."""

    def __init__(self) -> None:
        # Sockets lie below it, and a socket's path may have 107 bytes only.
        self.folder = Path(tempfile.mkdtemp(prefix="lxk-", dir="/tmp"))
        self.port = free_port()
        self._etcd_port, peer_port = free_port(), free_port()
        self.authority = Authority(self.folder / "pki")
        self.ca = self.folder / "pki" / "ca.pem"
        self.parts: dict[str, Part] = {}
        self.machine: Machine | None = None
        self._clients: list[Api] = []
        self._tokens()
        self.etcd = self._add("etcd", self._etcd_command(peer_port), self._etcd_answers)
        self.apiserver = self._add("kube-apiserver", self._apiserver_command(), self._answers)
        self.admin = self.api("admin")

    # --- for whoever talks to it ---

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def token(self, role: str = "admin") -> str:
        return f"{role}-token"

    def api(self, role: str = "admin", **headers: str) -> Api:
        """A client as one of ROLES."""
        return self._client(self.token(role), headers)

    def api_as(self, user: str, *groups: str) -> Api:
        """A client as any user: an admin that impersonates. With groups only the last one named counts."""
        headers = {"Impersonate-User": user, **({"Impersonate-Group": groups[-1]} if groups else {})}
        return self._client(self.token(), headers)

    def account_token(self, namespace: str, name: str, seconds: int = 3600) -> str:
        """A token of a service account, as a pod would have it; the account is made where it is not there."""
        base = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        if self.admin.find(f"{base}/{name}") is None:
            self.admin.create(base, {"metadata": {"name": name}})
        found = self.admin.create(f"{base}/{name}/token", {"spec": {"expirationSeconds": seconds}})
        return str(found["status"]["token"])

    def api_of(self, namespace: str, name: str) -> Api:
        """A client as a service account."""
        return self._client(self.account_token(namespace, name))

    def kubeconfig(self, name: str, token: str) -> Path:
        """A file as kubectl and all parts take it."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def namespace(self, name: str, **labels: str) -> str:
        """There, with the account that pods have, where no controller manager makes it."""
        for path, body in [
            ("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}),
            (f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}}),
        ]:
            with suppress(ApiRefusedError):  # it is there
                self.admin.create(path, body)
        return name

    # --- nodes that are only said to be there ---

    def add_node(self, name: str, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None) -> Json:
        """A Ready node without a kubelet. What a kubelet would say of pods there is patched by hand: ``say``."""
        body = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}}
        self.admin.create("/api/v1/nodes", body)
        # the taint that admission has put on it
        self.admin.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        amount = {**NODE_CAPACITY, **(capacity or {})}
        status = {"capacity": amount, "allocatable": amount}
        self.admin.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        return self.node_is(name, "True")

    def add_nodes(self, count: int, prefix: str = "node-") -> list[str]:
        """Many, 1 to ``count``."""
        names = [f"{prefix}{number}" for number in range(1, count + 1)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(self.add_node, names))
        return names

    def node_is(self, name: str, ready: str, reason: str = "KubeletReady") -> Json:
        """Condition Ready of a node: True, False or Unknown."""
        condition = {"type": "Ready", "status": ready, "reason": reason, "message": "said by a test"}
        return self.admin.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}})

    def say(self, namespace: str, pod: str, **status: Any) -> Json:
        """What a kubelet would say of a pod: ``phase``, ``conditions``, ``containerStatuses``, ``reason`` …"""
        return self.admin.patch(f"/api/v1/namespaces/{namespace}/pods/{pod}/status", {"status": status})

    def bind(self, namespace: str, pod: str, node: str, annotations: dict[str, str] | None = None) -> None:
        body = {"metadata": {"name": pod, "annotations": annotations or {}}, "target": {"kind": "Node", "name": node}}
        self.admin.create(f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", body)

    # --- the parts that are there on request ---

    def controller_manager(self) -> Part:
        """Deployments, Jobs, garbage, node lifecycle, service accounts.

        It finds no node silent by itself: simulated ones beat never, and it remembers those of the same name.
        """
        if "kube-controller-manager" not in self.parts:
            config, port = self.kubeconfig("controller-manager", self.token("controller-manager")), free_port()
            command = [
                program("kube-controller-manager"),
                *(f"--kubeconfig={config}", f"--authentication-kubeconfig={config}"),
                *(f"--authorization-kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1"),
                *(f"--secure-port={port}", f"--cert-dir={self.folder}", "--use-service-account-credentials=false"),
                *(f"--service-account-private-key-file={self.folder}/sa.key", f"--root-ca-file={self.ca}"),
                "--node-monitor-grace-period=24h",
            ]
            self._add("kube-controller-manager", command, lambda: _listens(port)).start()
            # with its own account it may do all that its controllers' own ones may
            self.grant("controllers", "cluster-admin", "system:kube-controller-manager")
        return self.parts["kube-controller-manager"]

    def scheduler(self, config: Json | None = None, name: str = "kube-scheduler") -> Part:
        """A stock one. ``config``: its KubeSchedulerConfiguration, less what is always so; ``name``: of this one."""
        if name not in self.parts:
            file, port = self.folder / f"{name}.json", free_port()
            fixed = {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {
                    "kubeconfig": str(self.kubeconfig("scheduler", self.token("scheduler"))),
                    "qps": 2000,
                    "burst": 4000,
                },
                "leaderElection": {"leaderElect": False},
            }
            file.write_text(json.dumps({**fixed, **(config or {})}))
            self.grant("volumes", "system:volume-scheduler", "system:kube-scheduler")
            kubeconfig = fixed["clientConnection"]["kubeconfig"]
            command = [
                program("kube-scheduler"),
                *(f"--config={file}", "--bind-address=127.0.0.1", f"--secure-port={port}"),
                *(f"--cert-dir={self.folder}", f"--authentication-kubeconfig={kubeconfig}"),
                *(f"--authorization-kubeconfig={kubeconfig}", "--authentication-tolerate-lookup-failure=true"),
            ]
            self._add(name, command, lambda: _listens(port)).start()
        return self.parts[name]

    def kubelet(self, name: str = "real-1") -> Machine:
        """A real node, Ready: this machine, with a containerd of its own."""
        if self.machine is None:
            config = self.kubeconfig("kubelet", f"node-{name}-token")
            self.machine = Machine(self.folder / "m", name, config, self.admin)
            self.machine.start()
        return self.machine

    def grant(self, binding: str, role: str, user: str) -> None:
        """A user may do cluster-wide what a ClusterRole says."""
        self.admin.apply(
            f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{binding}",
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": binding},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
            },
        )

    # --- how it is made ---

    def _client(self, token: str, headers: dict[str, str] | None = None) -> Api:
        self._clients.append(Api(self.port, token, self.ca, headers))
        return self._clients[-1]

    def _add(self, name: str, command: list[str], ready: Any) -> Part:
        self.parts[name] = Part(name, command, self.folder, ready)
        return self.parts[name]

    def _tokens(self) -> None:
        lines = [f'{self.token(role)},{user},{role},"{group}"' for role, (user, group) in ROLES.items()]
        # a kubelet is known by its node
        lines.append('node-real-1-token,system:node:real-1,node,"system:nodes"')
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        key = ["openssl", "genrsa", "-out", str(self.folder / "sa.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True, timeout=30)

    def _etcd_command(self, peer_port: int) -> list[str]:
        url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{peer_port}"
        return [
            *(program("etcd"), "--name=e", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync", "--log-level=warn"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=e={peer}"),
        ]

    def _apiserver_command(self) -> list[str]:
        served, key = self.authority.signed("apiserver"), f"{self.folder}/sa.key"
        return [
            program("kube-apiserver"),
            *(f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", f"--token-auth-file={self.folder}/tokens.csv"),
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--authorization-mode=Node,RBAC"),
            *(f"--tls-cert-file={served}/cert.pem", f"--tls-private-key-file={served}/key.pem"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={key}"),
            *(f"--service-account-key-file={key}", "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged"),
            *("--endpoint-reconciler-type=none", "--profiling=false", f"--cert-dir={self.folder}"),
        ]

    def _etcd_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._etcd_port}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def _answers(self) -> bool:
        try:
            return self.admin.ask("GET", "/readyz", timeout_s=5)[0] == 200
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def __enter__(self) -> Self:
        try:
            self.etcd.start()
            self.apiserver.start()
            self.namespace("default")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of it is left, whatever was done to it. Its logs are kept where LAXITY_KUBE_LOGS names a folder."""
        for client in self._clients:
            client.close()
        for part in reversed(self.parts.values()):
            part.kill()
        if self.machine is not None:
            self.machine.end()
        if kept := os.environ.get("LAXITY_KUBE_LOGS"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            for log in self.folder.rglob("*.log"):
                shutil.copy(log, kept)
        shutil.rmtree(self.folder, ignore_errors=True)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
