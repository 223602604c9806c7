"""Keys and permissions as Kubernetes Secrets, each with no more than one kind of pod needs; makes and reads no key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import yaml

from cli.output import CommandError, Exit
from cli.permissions import SERVICES, User
from shared.subjects import decode

SERVERS: Final = 3
"""Of a NATS cluster, as k8s/components/three has it."""
_MONITOR: Final = "monitor-"
_NODE: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")

Json = dict[str, Any]


def manifests(users: Sequence[User], seeds: Mapping[str, str], authorization: str, password: str) -> str:
    """YAML for `kubectl apply`. ``seeds``: by user. Raises CommandError where Kubernetes cannot have such a node."""
    monitors = (user for user in users if user.name.startswith(_MONITOR))
    nodes = dict(sorted((_node(user), seeds[user.name]) for user in monitors))
    found = [
        *(_secret(f"key-{name}", "laxity", {f"{name}.nk": seeds[name]}) for name in SERVICES),
        _secret("keys-monitors", "laxity-nodes", nodes),
        _secret("nats-cluster", "laxity", {"cluster.conf": _cluster(password)}),
        _object("ConfigMap", "nats-authorization", "laxity") | {"data": {"authorization.conf": authorization}},
    ]
    return _NOTE + yaml.safe_dump_all(found, sort_keys=False)


_NOTE: Final = "# Made by `laxity keys`; it holds the keys of a cluster: apply it and remove it.\n"


def _node(user: User) -> str:
    node = decode(user.name.removeprefix(_MONITOR))
    if not _NODE.fullmatch(node):
        raise CommandError(f"node {node}: found in the folder, allowed: the name of a Kubernetes node", Exit.USAGE)
    return node


def _cluster(password: str) -> str:
    """What the servers know each other by."""
    names = [f"nats-{number}.nats-headless.laxity.svc" for number in range(SERVERS)]
    routes: Iterable[str] = (f'  "nats-route://route:{password}@{name}:6222"' for name in names)
    return "\n".join(
        [f'authorization: {{user: route, password: "{password}", timeout: 5}}', "routes: [", *routes, "]\n"]
    )


def _secret(name: str, namespace: str, data: Mapping[str, str]) -> Json:
    return _object("Secret", name, namespace) | {"type": "Opaque", "stringData": dict(data)}


def _object(kind: str, name: str, namespace: str) -> Json:
    labels = {"app.kubernetes.io/part-of": "laxity"}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": labels}}
