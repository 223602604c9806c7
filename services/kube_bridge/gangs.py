"""Gangs: pods that are placed together or not at all; who belongs to one, and where each has its place; no I/O.

A member that comes before the others is refused, so a part-built gang holds nothing. The first filter call once all are
there asks for all of them in one request, one replica each; a confirmation binds them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.errors import FieldError
from shared.messages import PlaceRequest, Pod

GANG: Final = "laxity.dev/gang"
SIZE: Final = "laxity.dev/gang-size"
"""Labels of a pod: the gang's name within its namespace, and how many pods it has."""
LARGEST: Final = 999
"""A commit of the ledger touches so many nodes at most."""


@dataclass(frozen=True, slots=True)
class Gang:
    namespace: str
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Member:
    """A pod that waits for its place. `candidate`: not bound, not over, not leaving."""

    uid: str
    name: str
    gang: Gang
    candidate: bool


def gang_of(pod: Mapping[str, Any]) -> Gang | None:
    """Raises FieldError for one that does not say how many it has."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    if GANG not in labels:
        if SIZE in labels:
            raise FieldError(f"labels[{GANG}]", "nothing", f"the gang's name: {SIZE} says how many pods it has")
        return None
    text = str(labels.get(SIZE, "nothing"))
    size = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= size <= LARGEST:
        raise FieldError(f"labels[{SIZE}]", text, f"a whole number from 1 to {LARGEST}")
    return Gang(meta["namespace"], labels[GANG], size)


def members(gang: Gang, pods: Iterable[Member]) -> tuple[Member, ...] | None:
    """Those to be placed together, in the order of their names; None while some are missing."""
    waiting = sorted((each for each in pods if each.gang == gang and each.candidate), key=lambda each: each.name)
    return tuple(waiting[: gang.size]) if len(waiting) >= gang.size else None


def together(request: PlaceRequest, gang: Gang, all_of_it: tuple[Member, ...]) -> PlaceRequest:
    """One request for all; its id is the same whoever of them is asked about, and another for other pods."""
    uids = hashlib.sha256(" ".join(each.uid for each in all_of_it).encode()).hexdigest()[:24]
    pods = tuple(Pod(namespace=gang.namespace, name=each.name, uid=each.uid) for each in all_of_it)
    changes = {"request_id": f"gang-{uids}", "name": gang.name, "pods": pods, "replicas": len(pods)}
    return request.model_copy(update=changes)
