"""Devices that Kubernetes gives itself: claims, slices and classes of dynamic resource allocation (DRA); no I/O.

Laxity is aware of it and allocates nothing: whatever any claim of a GPU driver was given is taken, by the uuid that the
driver's slices say. A device whose uuid nobody says may be any of its node. The objects are those of
resource.k8s.io/v1 (https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.kube_bridge.asked import GPU_MILLI, GROUP
from shared.errors import FieldError

Place = tuple[str, str, str]
"""Driver, pool and name of a device."""


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """One claim. `places`: what it was given for use; who only looks, with admin access, takes nothing."""

    name: str
    """With its namespace."""
    classes: frozenset[str]
    places: tuple[Place, ...]
    nodes: frozenset[str] = frozenset()
    """Where its devices can be reached, if that is said by name."""

    @classmethod
    def of(cls, claim: Mapping[str, Any]) -> ClaimSeen:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        results = (allocation.get("devices") or {}).get("results") or ()
        places = tuple((r["driver"], r["pool"], r["device"]) for r in results if not r.get("adminAccess"))
        return cls(_named(claim), frozenset(_classes(claim)), places, frozenset(_nodes(allocation)))


@dataclass(frozen=True, slots=True)
class SliceSeen:
    """Some devices of a pool. `uuids` has those that say one, else that of the GPU that they are a part of."""

    name: str
    driver: str
    pool: str
    generation: int
    node: str
    """"": the devices belong to no single node."""
    uuids: Mapping[str, str]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> SliceSeen:
        spec, driver = found["spec"], found["spec"]["driver"]
        uuids = {each["name"]: _uuid(driver, each.get("attributes") or {}) for each in spec.get("devices") or ()}
        return cls(
            name=_named(found),
            driver=driver,
            pool=spec["pool"]["name"],
            generation=spec["pool"].get("generation") or 0,
            node=spec.get("nodeName") or "",
            uuids={name: uuid for name, uuid in uuids.items() if uuid},
        )


@dataclass(frozen=True, slots=True)
class ClassSeen:
    """What claims ask for. `selects`: its conditions, in CEL."""

    name: str
    selects: str
    stands_for: str
    """The resource for which kube-scheduler makes claims of this class itself; "" where there is none."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ClassSeen:
        spec = found.get("spec") or {}
        selects = " && ".join((each.get("cel") or {}).get("expression", "") for each in spec.get("selectors") or ())
        return cls(_named(found), selects, spec.get("extendedResourceName") or "")

    @property
    def takes_ours(self) -> bool:
        """Pods that ask us would be given devices by kube-scheduler, behind us."""
        return self.stands_for.startswith(GROUP)


Seen = ClaimSeen | SliceSeen | ClassSeen
OF_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], Seen]]] = {
    "resourceclaims": ClaimSeen.of,
    "resourceslices": SliceSeen.of,
    "deviceclasses": ClassSeen.of,
}
KINDS: Final = tuple(OF_KINDS)


@dataclass(frozen=True, slots=True)
class Claimed:
    """Of one node: who has which device, by uuid; `unknown`: who has one of which nobody says the uuid."""

    devices: Mapping[str, str] = field(default_factory=dict)
    unknown: str | None = None


class Claims:
    """Of `drivers` alone: others give no GPUs."""

    def __init__(self, drivers: Collection[str] = ()) -> None:
        self._drivers = frozenset(drivers)
        self._known: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._uuids: dict[Place, tuple[str, str]] | None = {}
        """Node and uuid of each device, as the slices say; None: to be worked out anew."""
        self._said: dict[Place, tuple[str, str]] = {}
        """The same of what is claimed, as last said: a slice may go while its devices are in use."""
        self.changes = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """What has to be followed."""
        return KINDS if self._drivers else ()

    def listed(self, kind: str, found: Iterable[Seen]) -> None:
        self._known[kind] = {each.name: each for each in found}
        self._note(kind)

    def changed(self, kind: str, found: Seen) -> None:
        if self._known[kind].get(found.name) != found:
            self._known[kind][found.name] = found
            self._note(kind)

    def gone(self, kind: str, name: str) -> None:
        if self._known[kind].pop(name, None) is not None:
            self._note(kind)

    def _note(self, kind: str) -> None:
        self.changes += 1
        if kind == "resourceslices":
            self._uuids = None

    # --- what follows ---

    def by_node(self, nodes: Collection[str]) -> dict[str, Claimed]:
        """What is claimed of these nodes."""
        said = self._by_place()
        claims: list[ClaimSeen] = sorted(self._known["resourceclaims"].values(), key=lambda each: each.name)
        places = [(claim, place) for claim in claims for place in claim.places if place[0] in self._drivers]
        self._said = {place: known for _, place in places if (known := said.get(place) or self._said.get(place))}
        devices: dict[str, dict[str, str]] = {}
        unknown: dict[str, str] = {}
        for claim, place in places:
            node, uuid = self._said.get(place, ("", ""))
            for name in [node] if node else _somewhere(claim, place, nodes):
                if uuid:
                    devices.setdefault(name, {})[uuid] = _words(claim, place)
                else:
                    unknown[name] = f"{_words(claim, place)}, device {place[2]} of which no slice says the uuid"
        return {name: Claimed(devices.get(name, {}), unknown.get(name)) for name in devices.keys() | unknown.keys()}

    def _by_place(self) -> dict[Place, tuple[str, str]]:
        """Of a pool that is being made anew its newest generation counts."""
        if self._uuids is None:
            slices: list[SliceSeen] = sorted(self._known["resourceslices"].values(), key=lambda each: each.generation)
            self._uuids = {
                (each.driver, each.pool, name): (each.node, uuid)
                for each in slices
                if each.driver in self._drivers
                for name, uuid in each.uuids.items()
            }
        return self._uuids

    def of_claims(self, claims: Iterable[ClaimSeen]) -> set[str]:
        """Uuids of what these have."""
        said = self._by_place()
        return {said[place][1] for claim in claims for place in claim.places if place in said}

    def of_gpus(self, claim: ClaimSeen) -> bool:
        """It has GPUs, or asks for them: by a class whose conditions name one of the drivers."""
        if any(driver in self._drivers for driver, _, _ in claim.places):
            return True
        classes: Mapping[str, ClassSeen] = self._known["deviceclasses"]
        return any(
            driver in classes[name].selects for name in claim.classes if name in classes for driver in self._drivers
        )

    def check_beside(self, pod: Mapping[str, Any]) -> None:
        """Raises FieldError where a pod that asks us for devices has a claim of GPUs too."""
        for name, claim in claims_of(pod).items():
            found = self._known["resourceclaims"].get(claim)
            if found is not None and self.of_gpus(found):
                allowed = f"no claim of GPUs beside {GPU_MILLI}: two systems would give the pod devices"
                raise FieldError(f"resourceClaims[{name}]", claim, allowed)

    @property
    def taking_ours(self) -> list[ClassSeen]:
        return [each for _, each in sorted(self._known["deviceclasses"].items()) if each.takes_ours]


def claims_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Names of the claims that a pod has, with their namespace, by the names that it has for them."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    made = {each["name"]: each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or ()}
    found = {each["name"]: each.get("resourceClaimName") or made.get(each["name"]) for each in _wanted(spec)}
    return {name: f"{pod['metadata']['namespace']}/{claim}" for name, claim in found.items() if claim}


def _wanted(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return spec.get("resourceClaims") or ()


def _somewhere(claim: ClaimSeen, place: Place, nodes: Collection[str]) -> Iterable[str]:
    """Where a device may be that belongs to no single node as far as is known: drivers name pools after their nodes."""
    return [place[1]] if place[1] in nodes else claim.nodes


def _words(claim: ClaimSeen, place: Place) -> str:
    return f"claim {claim.name} by {place[0]}"


def _named(found: Mapping[str, Any]) -> str:
    meta = found["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])


def _classes(claim: Mapping[str, Any]) -> Iterator[str]:
    for request in ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ():
        for one in (request.get("exactly") or {}, *(request.get("firstAvailable") or ())):
            if name := one.get("deviceClassName"):
                yield name


def _nodes(allocation: Mapping[str, Any]) -> Iterator[str]:
    for term in (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or ():
        for field_ in term.get("matchFields") or ():
            if field_.get("key") == "metadata.name" and field_.get("operator") == "In":
                yield from field_.get("values") or ()


def _uuid(driver: str, attributes: Mapping[str, Any]) -> str:
    """Attributes have the driver's name before theirs, or none. A part that is yet to be made has its GPU's alone."""
    for name in ("uuid", "parentUUID"):
        for key in (name, f"{driver}/{name}"):
            if found := (attributes.get(key) or {}).get("string"):
                return str(found)
    return ""
