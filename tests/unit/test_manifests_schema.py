"""Every field in the manifests of k8s/ is one that Kubernetes has and of the right kind; none is missing.

The schema is that of the API server, as the client library's models carry it: no network is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client

from tests.manifests import OVERLAYS, ROOT, objects

PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def wrong(kind: str, found: Any, path: str) -> Iterator[str]:
    """What of a value does not fit a type, which is written as the models write it."""
    if part := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(found, list):
            yield f"{path}: found {found!r}, allowed: a list"
            return
        for number, each in enumerate(found):
            yield from wrong(part[1], each, f"{path}[{number}]")
    elif part := re.fullmatch(r"dict\(str, (.+)\)", kind):
        for key, each in found.items():
            yield from wrong(part[1], each, f"{path}[{key}]")
    elif kind in PLAIN:
        if not isinstance(found, PLAIN[kind]) or (kind != "bool" and isinstance(found, bool)):
            yield f"{path}: found {found!r}, allowed: {kind}"
    elif kind not in {"object", "datetime"}:
        yield from _wrong_object(getattr(client, kind), found, path)


def _wrong_object(model: Any, found: Any, path: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{path}: found {found!r}, allowed: {model.__name__}"
        return
    fields = {wire: (name, model.openapi_types[name]) for name, wire in model.attribute_map.items()}
    given = {}
    for wire, value in found.items():
        if wire not in fields:
            yield f"{path}.{wire}: unknown, allowed: {', '.join(sorted(fields))}"
            continue
        given[fields[wire][0]] = value
        yield from wrong(fields[wire][1], value, f"{path}.{wire}")
    try:
        model(**given)
    except ValueError as error:
        yield f"{path}: {error}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_by_the_schema_of_its_kind(overlay: str) -> None:
    found = [
        problem
        for each in objects(overlay)
        for problem in wrong(f"V1{each['kind']}", each, f"{each['kind']} {each['metadata']['name']}")
    ]

    assert [] == found


@pytest.mark.parametrize("name", ["by-hand.yaml", "deployment.yaml"])
def test_the_examples_are_valid_too(name: str) -> None:
    found = yaml.safe_load((ROOT / "k8s/examples" / name).read_text(encoding="utf-8"))

    assert [] == list(wrong(f"V1{found['kind']}", found, name))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"selector": {}, "template": {}, "replica": 1}, "d.spec.replica: unknown"),
        ({"selector": {}, "template": {}, "replicas": "1"}, "d.spec.replicas: found '1', allowed: int"),
        ({"selector": {}, "template": {}, "paused": 1}, "d.spec.paused: found 1, allowed: bool"),
        ({"template": {}}, "d.spec: Invalid value for `selector`"),
        ({"selector": {}, "template": {"spec": {"containers": {}}}}, "d.spec.template.spec.containers: found {}"),
    ],
)
def test_what_is_wrong_would_be_found(spec: dict[str, Any], problem: str) -> None:
    assert any(each.startswith(problem) for each in wrong("V1Deployment", {"spec": spec}, "d"))
