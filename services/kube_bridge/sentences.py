"""What people read: fixed sentences for the scheduler's events, numbers for our own condition; no I/O.

kube-scheduler groups nodes by identical text, so a sentence never has a number or a name in it (case KU14).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from services.kube_bridge.seen import Condition, PodSeen
from shared.errors import FieldError
from shared.messages import PlaceReply, Reason

NOT_LOADED: Final = "laxity: starting, not everything is loaded yet"
MALFORMED: Final = "laxity: the call cannot be read, nodeCacheCapable has to be true"
NO_ANSWER: Final = "laxity: no placer answers"
NOT_OURS: Final = "laxity: no device of the node is known"
UNREADABLE: Final = "laxity: the pod's resources or annotations contradict each other, its condition says how"
OVER: Final = "laxity: the place of this pod was given back, make a new pod"
CHANGED: Final = "laxity: the pod asks for something else than when its place was held, make a new pod"
GANG: Final = "laxity: waiting for the rest of its gang"
LATER: Final = "laxity: pods of a higher priority that might fit now are tried first"
NO_HOLD: Final = "laxity: no place is held for the pod on this node"
NOT_BOUND: Final = "laxity: the pod was not bound, its condition says why"
ELSEWHERE: Final = "laxity: the pod has its place on a node that is not offered"
CLASS: Final = "laxity: a DeviceClass stands for resources of laxity.dev, an operator has to change it"
CLAIMED: Final = "laxity: a claim of the pod was given a device that is reserved for others"
DOUBTFUL: Final = "laxity: the ledger is not the one that the placers knew, an operator is needed"
PUBLISHED: Final = "laxity: the node publishes resources of laxity.dev itself"

OF_CODES: Final = {
    "not_now.deadline": "laxity: the deadline cannot be guaranteed beside what runs there now",
    "would_break.deadline": "laxity: a deadline that is guaranteed already would be missed",
    "not_now.share": "laxity: no device has such a share free now",
    "not_now.memory": "laxity: no device has so much memory free now",
    "not_now.devices": "laxity: not enough devices are free together now",
    "not_now.cpu": "laxity: not enough CPU is free now",
    "not_now.node_memory": "laxity: not enough memory of the node is free now",
    "not_now.binding": NOT_BOUND,
    "never.deadline": "laxity: no device could keep the deadline, not even an empty one",
    "never.gate": "laxity: the device is gated and the pod says no gate",
    "never.guarantee": "laxity: a deadline of kind hard cannot be guaranteed on such a device",
    "never.model": "laxity: no device of that model",
    "never.memory": "laxity: no device has so much memory",
    "never.devices": "laxity: no node has so many devices",
    "excluded.unhealthy": "laxity: the device is not healthy",
    "excluded.taken": "laxity: the device was given away by a device plugin or a claim",
    "excluded.stale": "laxity: what is known of the device is too old",
    "excluded.unreachable": "laxity: the monitor of the node is not heard",
    "excluded.lost": "laxity: the monitor of the node is not heard",
    "excluded.unknown_node": NOT_OURS,
    "excluded.no_node": NOT_OURS,
}
OF_GROUPS: Final = {
    "not_now": "laxity: no device can take the pod now",
    "would_break": "laxity: a deadline that is guaranteed already would be missed",
    "never": "laxity: no device could ever take the pod",
    "excluded": "laxity: no device can be used now",
}
"""For codes that have no sentence of their own."""

_TAKEN: Final = Condition("False", "BoundByOthers", "bound by somebody else: it has no devices and no deadline is kept")
OF_DRIFTS: Final = {
    "no_request": _TAKEN,
    "not_ours": _TAKEN,
    "held_by_silent_node": Condition(
        "True", "NodeSilent", "it keeps its devices, since it may still run: its node is not heard"
    ),
}
"""What a pod itself says of a difference between it and the ledger."""

_NOT_OFFERED: Final = "excluded.not_candidate"
_MOST_CHARACTERS: Final = 900
"""Of a message; events of Kubernetes take 1,024 bytes."""


def sentence(reasons: Iterable[Reason]) -> str:
    """That of the reason nearest to fitting."""
    told = _told(reasons)
    if not told:
        return OF_GROUPS["not_now"]
    code = told[0].code
    return OF_CODES.get(code) or OF_GROUPS.get(code.partition(".")[0], OF_GROUPS["not_now"])


def refused(reply: PlaceReply, offered: int, unheard: Sequence[str] = ()) -> Condition:
    """Why it has no place, in numbers. `offered`: the nodes that Kubernetes would have taken and we know. `unheard`:
    those that keep what went, since it may still run there (case KU06).
    """
    told = _told(reply.reasons)
    reason = _word(told[0].code) if told else "NotNow"
    why = "; ".join(f"{each.message} ({each.count} of them)" for each in told) or "no device can take it now"
    would = f"; would fit if: {', or '.join(reply.would_fit_if)}" if reply.would_fit_if else ""
    held = f"; held by nodes that are not heard: {', '.join(unheard)}" if unheard else ""
    return Condition("False", reason, _clipped(f"of {offered} nodes offered: {why}{would}{held}"))


def placed(reply: PlaceReply) -> Condition:
    """Where it is, and by what its deadline is kept."""
    where = "; ".join(f"{', '.join(each.devices) or 'no device'} of {each.node}" for each in reply.placements)
    share = next((each.share for each in reply.placements if each.share is not None), None)
    text = f"on {where}" + (f", share {share:g} of each" if share is not None else "")
    text += f"; {reply.measured}" if reply.measured else ""
    text += "; the deadline is admitted on what the pod declares, not yet on what was measured" * reply.unproven
    return Condition("True", "Bound", _clipped(text))


def bound(pod: PodSeen) -> Condition:
    """As far as the pod itself tells."""
    return Condition("True", "Bound", _clipped(f"on {(pod.devices or '').replace(',', ', ')} of {pod.node}"))


def unreadable(fault: FieldError) -> Condition:
    return Condition("False", "Unreadable", _clipped(str(fault)))


def plain(word: str, sentence: str) -> Condition:
    """A condition without numbers: there are none."""
    return Condition("False", word, sentence.removeprefix("laxity: "))


def _told(reasons: Iterable[Reason]) -> list[Reason]:
    """Without the nodes that Kubernetes ruled out itself."""
    return [each for each in reasons if each.code != _NOT_OFFERED]


def _word(code: str) -> str:
    """`not_now.deadline` → `NotNowDeadline`."""
    return "".join(part.capitalize() for part in code.replace(".", "_").split("_"))


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
