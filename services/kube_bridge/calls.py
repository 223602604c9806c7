"""What happens to the bridge's core and what it asks of its shell: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.kube_bridge.claims import ClaimSeen, Seen
from services.kube_bridge.seen import Condition, NodeSeen, PodSeen
from shared.messages import PlaceReply, PlaceRequest

# --- events: what the scheduler asks; `token` names the call that waits for the Answer ---


@dataclass(frozen=True, slots=True)
class FilterAsked:
    """Which of these nodes can take the pod."""

    token: int
    pod: Mapping[str, Any]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BindAsked:
    token: int
    namespace: str
    name: str
    uid: str
    node: str


# --- events: what the API server shows ---


@dataclass(frozen=True, slots=True)
class Listed:
    """All that there is of one kind, after a start or a gap; what is not among it is gone."""

    pods: tuple[PodSeen, ...] | None = None
    nodes: tuple[NodeSeen, ...] | None = None


@dataclass(frozen=True, slots=True)
class PodChanged:
    pod: PodSeen


@dataclass(frozen=True, slots=True)
class PodGone:
    """Deleted. `uid`: another pod of the same name is another one."""

    uid: str


@dataclass(frozen=True, slots=True)
class NodeChanged:
    node: NodeSeen


@dataclass(frozen=True, slots=True)
class NodeGone:
    name: str


@dataclass(frozen=True, slots=True)
class ClaimsListed:
    """All that there is of one kind of `claims.KINDS`."""

    kind: str
    found: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class ClaimsChanged:
    kind: str
    found: Seen


@dataclass(frozen=True, slots=True)
class ClaimsGone:
    """`name`: with its namespace, where it has one."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Silent:
    """The API server's watch of one kind broke off: what is known of it may be old until the next word."""

    kind: str


# --- effects: slow, each ends in the event behind its arrow ---


@dataclass(frozen=True, slots=True)
class Answer:
    """→ nothing. The JSON body of an answer to the scheduler; nobody may wait for it any more."""

    token: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskPlace:
    """→ PlaceAnswered"""

    token: int
    request: PlaceRequest


@dataclass(frozen=True, slots=True)
class AskConfirm:
    """→ ConfirmAnswered"""

    token: int
    request_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class AskRelease:
    """→ ReleaseAnswered"""

    request_id: str


@dataclass(frozen=True, slots=True)
class LookAtPod:
    """→ PodLooked. Read from the API server itself, not from what a watch has shown so far."""

    namespace: str
    name: str
    uid: str
    token: int = 0


@dataclass(frozen=True, slots=True)
class LookAtClaims:
    """→ ClaimsLooked. `claims`: their names with their namespace, read from the API server itself."""

    token: int
    claims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BindPlain:
    """→ PlainBound. A pod that asks for nothing of ours: bound as Kubernetes' own binder would."""

    token: int
    namespace: str
    name: str
    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """→ nothing: the pod shows it. `turned`: its status is another than before; `probed`: only the time is new."""

    namespace: str
    name: str
    uid: str
    condition: Condition
    turned: bool
    probed: bool = False


# --- events: how those ended; `reply` None where nobody answered in time ---


@dataclass(frozen=True, slots=True)
class PlaceAnswered:
    token: int
    reply: PlaceReply | None


@dataclass(frozen=True, slots=True)
class ConfirmAnswered:
    token: int
    reply: PlaceReply | None


@dataclass(frozen=True, slots=True)
class ReleaseAnswered:
    request_id: str
    reply: PlaceReply | None


@dataclass(frozen=True, slots=True)
class PodLooked:
    """`there` None: the API server did not answer. False: gone, ended, or another pod has its name."""

    uid: str
    there: bool | None
    node: str = ""
    token: int = 0


@dataclass(frozen=True, slots=True)
class ClaimsLooked:
    """`found` None: the API server did not answer for all of them."""

    token: int
    found: tuple[ClaimSeen, ...] | None


@dataclass(frozen=True, slots=True)
class PlainBound:
    """`error` is empty where the pod is on its node."""

    token: int
    error: str = field(default="")
