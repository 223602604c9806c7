"""Accounts that have all rights of one of k8s/ but one, on a real API server; no tests live here."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from tests.kubernetes.api import Api, ApiRefusedError, Json
from tests.kubernetes.cluster import KubeCluster
from tests.manifests import rules

RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Right:
    """One verb of one rule; `where` is a namespace, "" everywhere, and `name` the only object, where there is one."""

    where: str
    group: str
    resource: str
    verb: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"

    @property
    def refusal(self) -> str:
        """What the API server says to whoever lacks it."""
        return f'cannot {self.verb} resource "{self.resource}"'

    @property
    def rule(self) -> Json:
        named = {"resourceNames": [self.name]} if self.name else {}
        return {"apiGroups": [self.group], "resources": [self.resource], "verbs": [self.verb], **named}


def rights_of(account: str) -> list[Right]:
    """Each one that the manifests give an account (namespace/name) by rules of ours."""
    return [
        Right(where, group, resource, verb, (rule.get("resourceNames") or [""])[0])
        for who, where, rule in rules("ha")
        if who == account
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def account_without(kube: KubeCluster, account: str, removed: Right | None) -> str:
    """The token of a new service account with these rights alone, once they hold."""
    rights = [right for right in rights_of(account) if right != removed]
    name = f"{account.rpartition('/')[2]}-without-{removed or 'nothing'}".replace("/", "-").replace(" ", "-").lower()
    kube.namespace("rights")
    token = kube.account_token("rights", name)
    for where in {right.where for right in rights}:
        _give(kube, name, where, [right.rule for right in rights if right.where == where])
    api = kube.api_of("rights", name)
    deadline = time.monotonic() + 20
    while not all(may(api, right) for right in rights):
        assert time.monotonic() < deadline, f"{name} does not have its rights after 20 s"
        time.sleep(0.05)
    return token


def _give(kube: KubeCluster, name: str, where: str, allowed: list[Json]) -> None:
    kind, base = "ClusterRole", f"/apis/{RBAC}/v1"
    if where:
        kind, base = "Role", f"{base}/namespaces/{kube.namespace(where)}"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": "rights"}
    for path, body in (
        (f"{kind.lower()}s", {"rules": allowed}),
        (
            f"{kind.lower()}bindings",
            {"roleRef": {"apiGroup": RBAC, "kind": kind, "name": name}, "subjects": [subject]},
        ),
    ):
        with suppress(ApiRefusedError):  # it is there
            kube.admin.create(f"{base}/{path}", {"metadata": {"name": name}, **body})


def may(api: Api, right: Right) -> bool:
    """What the API server says when an account asks for itself."""
    kind, _, sub = right.resource.partition("/")
    asked = {"namespace": right.where, "group": right.group, "resource": kind, "subresource": sub, "verb": right.verb}
    body = {"spec": {"resourceAttributes": {**asked, "name": right.name}}}
    found = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    return bool(found["status"]["allowed"])
