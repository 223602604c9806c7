"""What a pod reserves of its node, as Kubernetes counts it; no I/O.

The sum is that of k8s.io/component-helpers `resource.PodRequests`: containers and sidecars (init containers that are
restarted always) add up, of the other init containers the largest with the sidecars that run before it counts where
that is more, the pod's own resources stand instead of both for what they name, and the overhead comes on top.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any, Final

from shared.errors import FieldError
from shared.units import MIB, UnitError, parse_quantity

Amount = int | Fraction
"""Exact. Whole numbers are whole ones, since parts cost ten times as much to add up, and every pod is counted."""


class Reserves:
    """Of one pod, and of all whose containers say the same: each amount is read once."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._known: dict[str, Amount] = {}
        self.names = _names(spec)
        """Every resource that any of its containers names."""

    def requested(self, name: str) -> Amount:
        """How much of one resource, exactly; 0 where it asks for none. Raises FieldError naming the place."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = _requested(self._spec, name)
        return found

    def cpu_milli(self) -> int:
        """Rounded up, as Kubernetes does."""
        return ceil(self.requested("cpu") * 1000)

    def memory_mib(self) -> int:
        return ceil(self.requested("memory") / MIB)


def reserves(pod: Mapping[str, Any]) -> Reserves:
    spec = _of(pod, "spec")
    said = {kind: spec.get(kind) for kind in ("resources", "overhead")}
    for kind in ("containers", "initContainers"):
        said[kind] = [{word: one.get(word) for word in _SAID} for one in _each(spec, kind)]
    return _reserves(json.dumps(said))


@lru_cache(maxsize=1024)
def _reserves(said: str) -> Reserves:
    """The pods of one owner say the same."""
    return Reserves(json.loads(said))


_SAID: Final = ("name", "resources", "restartPolicy")
"""Of a container, all that is looked at here."""


def _requested(spec: Mapping[str, Any], name: str) -> Amount:
    of_pod = _asked(_of(spec, "resources"), name, "spec.resources")
    total = of_pod if of_pod is not None else _of_containers(spec, name)
    overhead = _of(spec, "overhead")
    return total + (_read(overhead[name], f"spec.overhead[{name}]") if name in overhead else 0)


def _names(spec: Mapping[str, Any]) -> frozenset[str]:
    found = set[str]()
    for one in (spec, *_each(spec, "containers"), *_each(spec, "initContainers")):
        resources = _of(one, "resources")
        found.update(_of(resources, "limits"), _of(resources, "requests"))
    return frozenset(found)


def quantity(found: Mapping[str, Any], name: str, field: str) -> Amount | None:
    """One entry of a list of resources, such as a node's allocatable; None where it is absent."""
    return _read(found[name], f"{field}[{name}]") if name in found else None


def _of_containers(spec: Mapping[str, Any], name: str) -> Amount:
    running: Amount = sum(_of_container(one, name, "containers") for one in _each(spec, "containers"))
    beside: Amount = 0
    most: Amount = 0
    for one in _each(spec, "initContainers"):
        its = _of_container(one, name, "initContainers")
        if one.get("restartPolicy") == "Always":
            running, beside = running + its, beside + its
            its = 0
        most = max(most, its + beside)
    return max(running, most)


def _of_container(one: Mapping[str, Any], name: str, kind: str) -> Amount:
    asked = _asked(_of(one, "resources"), name, f"spec.{kind}[{one['name'] or ''}].resources")
    return asked if asked is not None else 0


def _asked(resources: Mapping[str, Any], name: str, field: str) -> Amount | None:
    """A limit without a request is both."""
    for kind in ("requests", "limits"):
        found = _of(resources, kind)
        if name in found:
            return _read(found[name], f"{field}.{kind}[{name}]")
    return None


def _read(text: object, field: str) -> Amount:
    try:
        found = _parsed(str(text))
    except UnitError as error:
        raise FieldError(field, error.found, error.allowed) from None
    if found < 0:
        raise FieldError(field, text, "0 or more")
    return found


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Amount:
    """The same few texts stand in most pods, several times in each."""
    found = parse_quantity(text)
    return found.numerator if found.denominator == 1 else found


def _each(spec: Mapping[str, Any], kind: str) -> Iterable[Mapping[str, Any]]:
    return spec.get(kind) or ()


def _of(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within another; what is absent or null has nothing in it."""
    return found.get(name) or {}
