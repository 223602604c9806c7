"""Whom the placers may be asked about before kube-scheduler asks, so that commits are shared; no I/O.

kube-scheduler asks about one pod at a time and waits, so each pod would be a commit by itself. While it works on one,
places are held for some of those that wait behind it. Nothing relies on it: a place that was held ahead and is not
among the nodes offered when the pod's turn comes is asked about anew, as for any pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

MOST_WAITING: Final = 10_000
"""Pods that are remembered until their turn comes; later ones are asked about in their turn alone."""
_SAME: Final = ("nodeSelector", "affinity", "tolerations", "priority", "runtimeClassName")
"""Of a pod's spec: where these are equal Kubernetes offers the same nodes, or nearly."""
_ALONE: Final = ("schedulingGates", "topologySpreadConstraints", "resourceClaims", "hostNetwork")
"""With one of these it is not to be seen which nodes will be offered, or when."""
_OF_CONTAINER: Final = ("name", "image", "resources", "restartPolicy")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod that nobody has answered yet: as much of it as says what it asks for, since thousands may wait."""

    pod: Mapping[str, Any]
    alike: str
    """Equal where the same nodes will be offered."""


def waiting(pod: Mapping[str, Any]) -> Waiting | None:
    """None where it cannot be known which nodes it will be offered."""
    meta, spec = pod["metadata"], pod["spec"]
    if any(spec.get(name) for name in _ALONE) or not _only_nodes_matter(spec):
        return None
    slim = {name: spec[name] for name in (*_SAME, "resources", "overhead", "schedulerName") if name in spec}
    for kind in ("containers", "initContainers"):
        if spec.get(kind):
            slim[kind] = [{name: one[name] for name in _OF_CONTAINER if name in one} for one in spec[kind]]
    named = {name: meta[name] for name in ("namespace", "name", "uid", "annotations", "labels") if name in meta}
    return Waiting({"metadata": named, "spec": slim}, repr([spec.get(name) for name in _SAME]))


def _only_nodes_matter(spec: Mapping[str, Any]) -> bool:
    """Neither other pods nor volumes or ports decide where it may run."""
    affinity = spec.get("affinity") or {}
    volumes = spec.get("volumes") or ()
    ports = [port for one in spec.get("containers") or () for port in one.get("ports") or ()]
    return not (
        affinity.get("podAffinity")
        or affinity.get("podAntiAffinity")
        or any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in volumes)
        or any(port.get("hostPort") for port in ports)
    )


class Ahead:
    """At most `most` places are held, or asked for, before their pods' turn: so many may be kept in vain, and for as
    long as a hold lasts. With 0 nobody is asked about ahead."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, Waiting] = {}
        """By uid, in the order in which kube-scheduler learned of them too."""
        self._known: dict[str, None] = {}
        """Pods that wait or waited: to ask about one a second time would give it another place than the one in use."""
        self._tokens = 0
        self._asked: dict[str, tuple[Mapping[str, Any], int]] = {}
        """Pods about which a question is under way, as they were then, with its token."""
        self._held: dict[str, tuple[Mapping[str, Any], int]] = {}
        """Pods that have a place before their turn, as they were when it was asked for; until when it is held."""

    def seen(self, uid: str, waits: Waiting | None) -> None:
        """As the API server shows it now; None where it does not wait for its first answer."""
        if waits is None:
            self.forget(uid)
        elif uid in self._waiting:
            self._waiting[uid] = waits
        elif self._most and uid not in self._known and uid not in self._asked and len(self._waiting) < MOST_WAITING:
            self._waiting[uid] = waits
            self._knows(uid)

    def _knows(self, uid: str) -> None:
        self._known[uid] = None
        if len(self._known) > 2 * MOST_WAITING:
            del self._known[next(iter(self._known))]

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
        self._waiting.pop(uid, None)
        self._held.pop(uid, None)

    def next(self, like: Mapping[str, Any], now_us: int) -> list[Mapping[str, Any]]:
        """Those to ask about now that a pod got a place: some that wait under the same conditions, the first first.

        Nobody before half of what may be held ahead is free: what is asked together is committed together.
        """
        self._held = {uid: held for uid, held in self._held.items() if held[1] > now_us}
        room = self._most - len(self._held) - len(self._asked)
        first = waiting(like) if self._waiting and room > 0 and room * 2 >= self._most else None
        if first is None:
            return []
        alike = (uid for uid, each in self._waiting.items() if each.alike == first.alike)
        return [self._waiting.pop(uid).pod for uid in tuple(islice(alike, room))]

    def asks(self, uid: str, pod: Mapping[str, Any]) -> int:
        """The token of a question about it: below 0, where those of calls are above."""
        self._tokens -= 1
        self._asked[uid] = pod, self._tokens
        return self._tokens

    def answered(self, uid: str) -> Mapping[str, Any]:
        """The pod as it was when it was asked about."""
        return self._asked.pop(uid)[0]

    def held(self, uid: str, pod: Mapping[str, Any], until_us: int) -> None:
        self._held[uid] = pod, until_us

    def take(self, uid: str, pod: Mapping[str, Any]) -> tuple[bool, int]:
        """Its turn has come: whether it was asked about as it is now, and the token where that is under way, else 0."""
        self._waiting.pop(uid, None)
        self._knows(uid)  # the watch may show it later
        before, token = self._asked.get(uid, (None, 0))
        if before is None:
            before, _ = self._held.pop(uid, (None, 0))
        now = waiting(pod) if before is not None else None
        return now is not None and now.pod == before, token
