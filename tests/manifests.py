"""The manifests of k8s/ as kubectl renders them, and what is in them; what must hold of them is the tests' part."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
OVERLAYS = ("demo", "gpu", "ha")
Json = dict[str, Any]
WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet"}


def kubectl() -> str:
    """That of the locked packages; else whichever is on PATH."""
    locked = Path(sys.executable).parent / "kubectl"
    found = str(locked) if os.access(locked, os.X_OK) else shutil.which("kubectl")
    assert found, "no kubectl: `make setup` installs it"
    return found


@functools.cache
def rendered(overlay: str) -> str:
    """What `kubectl kustomize` makes of an overlay, as text."""
    command = [kubectl(), "kustomize", str(ROOT / "k8s" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


@functools.cache
def objects(overlay: str) -> tuple[Json, ...]:
    return tuple(yaml.safe_load_all(rendered(overlay)))


def of_kind(overlay: str, *kinds: str) -> list[Json]:
    return [found for found in objects(overlay) if found["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Json:
    """The one of this name; a generated name may have a hash behind it."""
    (found,) = (
        each
        for each in of_kind(overlay, kind)
        if each["metadata"]["name"] == name or each["metadata"]["name"].rpartition("-")[0] == name
    )
    return found


@dataclass(frozen=True)
class Pod:
    """The template of one workload."""

    name: str
    namespace: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Json

    @property
    def containers(self) -> list[Json]:
        found: list[Json] = self.spec["containers"]
        return found

    @property
    def all_containers(self) -> list[Json]:
        """With those that run before."""
        return [*self.spec.get("initContainers", ()), *self.containers]


def pods(overlay: str) -> list[Pod]:
    return [
        Pod(
            found["metadata"]["name"],
            found["metadata"]["namespace"],
            found["spec"]["template"]["metadata"].get("labels", {}),
            found["spec"]["template"]["metadata"].get("annotations", {}),
            found["spec"]["template"]["spec"],
        )
        for found in of_kind(overlay, *WORKLOADS)
    ]


def environment(overlay: str, pod: Pod, container: Json) -> dict[str, str]:
    """What a container is told; a value that Kubernetes fills in is that of a node or pod called ``x``."""
    told: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        (found,) = (
            each
            for each in of_kind(overlay, "ConfigMap")
            if (each["metadata"]["namespace"], each["metadata"]["name"]) == (pod.namespace, name)
        )
        told |= found["data"]
    return told | {each["name"]: each.get("value", "x") for each in container.get("env", ())}


def rules(overlay: str) -> Iterator[tuple[str, str, Json]]:
    """Account (namespace/name), where ("" is everywhere), and rule, of each rule of ours that a binding gives."""
    roles = {
        (found["kind"], found["metadata"].get("namespace", ""), found["metadata"]["name"]): found["rules"]
        for found in of_kind(overlay, "Role", "ClusterRole")
    }
    for binding in of_kind(overlay, "RoleBinding", "ClusterRoleBinding"):
        where, role = binding["metadata"].get("namespace", ""), binding["roleRef"]
        for subject in binding["subjects"]:
            key = (role["kind"], where if role["kind"] == "Role" else "", role["name"])
            for rule in roles.get(key, ()):
                yield f"{subject['namespace']}/{subject['name']}", where, rule
