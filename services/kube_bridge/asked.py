"""A pod's resources and annotations as a request to the placers; no I/O.

What cannot be read is a FieldError that names the place in the pod, what was found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from services.kube_bridge import resources
from services.kube_bridge.gangs import Gang, gang_of
from services.kube_bridge.resources import Reserves
from shared.errors import FieldError
from shared.messages import PlaceRequest, Pod
from shared.subjects import MAX_NAME_BYTES
from shared.units import UnitError, duration_us

GROUP: Final = "laxity.dev/"
GPU_MILLI: Final = f"{GROUP}gpu-milli"
"""Thousandths of one device; from 1000 on a multiple of it, so many whole devices."""
GPU_MIB: Final = f"{GROUP}gpu-mib"
"""Memory on each device."""
DEVICES: Final = f"{GROUP}devices"
"""Annotation that the Binding carries: the devices of a bound pod. Whoever makes a pod may only say `void`."""
LABELS: Final = f"{GROUP}labels"
"""Annotation that the Binding carries: its reservation."""
NVIDIA: Final = "nvidia.com/"

_TIMES: Final = {"deadline": "deadline_us", "period": "period_us", "runtime": "runtime_us"}
_WORDS: Final = {**_TIMES, "kind": "kind", "guarantee": "guarantee", "gate": "gate", "profile": "profile"}
_NO_WISH: Final = {"devices", "labels", "generation", "gated"}
"""Annotations of ours that say nothing of what the pod asks for."""
_MILLI_ALLOWED: Final = "a whole number from 1 to 1000, or a multiple of 1000"
_MOST_PRIORITY: Final = 1_000_000


@dataclass(frozen=True)
class Terms:
    """What every request of this bridge says."""

    hold_us: int
    strategy: str
    ahead: int = 0
    """For so many pods places may be held before their turn."""


@dataclass(frozen=True)
class Asked:
    """`kind`: equal for pods that ask for the same, so that one answer does for all of them."""

    request: PlaceRequest
    kind: str
    gang: Gang | None = None


def asked(pod: Mapping[str, Any], terms: Terms) -> Asked | None:
    """None where the pod asks for nothing of ours. A word that is misspelt is never taken for no word (case KU05)."""
    reserves = resources.reserves(pod)
    _known(pod, reserves)
    gpu, realtime = _gpu(reserves), _realtime(pod)
    if gpu is None and realtime:
        needing = f"{GROUP}{next(word for word, field in _WORDS.items() if field in realtime)}"
        raise FieldError(f"limits[{GPU_MILLI}]", "nothing", f"{_MILLI_ALLOWED}: {needing} needs a device")
    if gpu is None:
        return None
    if realtime and "deadline_us" not in realtime:
        raise FieldError(_annotation("deadline"), "nothing", "a duration such as 50ms: the others say more about it")
    common: dict[str, Any] = {
        "gpu": gpu,
        "cpu_milli": reserves.cpu_milli(),
        "memory_mib": reserves.memory_mib(),
        "priority": _priority(pod),
        "hold_us": terms.hold_us,
        "strategy": terms.strategy,
    }
    if realtime:
        common["realtime"] = realtime | _profile(pod, realtime)
    gang, alike, mine = gang_of(pod), json.dumps(common, sort_keys=True), _named(pod["metadata"])
    request = _request(alike).model_copy(update={"request_id": mine.uid, "name": mine.name, "pods": (mine,)})
    return Asked(request, f"{alike} {gang and gang.size}", gang)


def wants(reserves: Reserves) -> bool:
    """Whether it asks for anything of ours, readable or not."""
    return any(name.startswith(GROUP) for name in reserves.names)


def _known(pod: Mapping[str, Any], reserves: Reserves) -> None:
    """Raises FieldError for what nobody reads in our group."""
    for name in sorted(reserves.names):
        if name.startswith(GROUP) and name not in {GPU_MILLI, GPU_MIB}:
            raise FieldError(f"limits[{name}]", "asked for", f"{GPU_MILLI} and {GPU_MIB}")
    for name in sorted(words_of(pod)):
        word = name.removeprefix(GROUP)
        if name.startswith(GROUP) and word not in {*_WORDS, *_NO_WISH}:
            raise FieldError(_annotation(word), "said", f"{', '.join(_WORDS)}, each after {GROUP}")


def _named(meta: Mapping[str, Any]) -> Pod:
    return Pod.from_json(json.dumps({word: meta[word] for word in ("namespace", "name", "uid")}).encode())


@lru_cache(maxsize=256)
def _request(alike: str) -> PlaceRequest:
    """For no pods yet: all that one owner makes ask for the same, and it is read and checked once."""
    try:
        return PlaceRequest.from_json(json.dumps(json.loads(alike) | {"pods": []}).encode())
    except FieldError as fault:
        raise FieldError(_in_the_pod(fault.field), fault.found, fault.allowed) from None


def _in_the_pod(field: str) -> str:
    """Where a pod says what a field of the request says."""
    words = {f"realtime.{name}": _annotation(word) for word, name in _WORDS.items()}
    words |= {"gpu.memory_mib": f"limits[{GPU_MIB}]", "gpu.count": f"limits[{GPU_MILLI}]"}
    return words.get(field, field)


# --- resources ---


def _gpu(reserves: Reserves) -> dict[str, Any] | None:
    milli, mib = _whole(reserves, GPU_MILLI), _whole(reserves, GPU_MIB)
    if not milli and not mib:
        return None
    if not milli:
        raise FieldError(f"limits[{GPU_MILLI}]", "nothing", f"{_MILLI_ALLOWED}: {GPU_MIB} is memory of that device")
    if beside := sorted(name for name in reserves.names if name.startswith(NVIDIA)):
        raise FieldError(
            f"limits[{beside[0]}]", "asked for", f"nothing beside {GPU_MILLI}: two systems would give the pod devices"
        )
    if milli > 1000 and milli % 1000:
        raise FieldError(f"limits[{GPU_MILLI}]", milli, _MILLI_ALLOWED)
    found: dict[str, Any] = {"count": max(1, milli // 1000), "share": min(milli, 1000) / 1000}
    return found | ({"memory_mib": mib} if mib else {})


def _whole(reserves: Reserves, name: str) -> int:
    found = reserves.requested(name)
    if found.denominator != 1:
        raise FieldError(f"limits[{name}]", str(found), "a whole number")
    return int(found)


def _priority(pod: Mapping[str, Any]) -> int:
    """Kubernetes' own goes far beyond ours; the order of most is kept."""
    found = pod["spec"].get("priority") or 0
    return max(-_MOST_PRIORITY, min(_MOST_PRIORITY, int(found)))


# --- annotations ---


def _realtime(pod: Mapping[str, Any]) -> dict[str, Any]:
    found = words_of(pod)
    said = {word: found[f"{GROUP}{word}"] for word in _WORDS if f"{GROUP}{word}" in found}
    return {_WORDS[word]: _value(word, text) for word, text in said.items()}


def words_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("annotations") or {}


@lru_cache(maxsize=1024)
def _value(word: str, text: str) -> object:
    if word in _TIMES:
        try:
            return duration_us(text)
        except UnitError as error:
            raise FieldError(_annotation(word), error.found, error.allowed) from None
    if word == "guarantee":
        return _ratio(word, text)
    if word == "gate":
        if text not in {"true", "false"}:
            raise FieldError(_annotation(word), text, "true or false")
        return text == "true"
    return text


def _ratio(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FieldError(_annotation(word), text, "a number above 0 and below 1, such as 0.99") from None


def _profile(pod: Mapping[str, Any], realtime: Mapping[str, Any]) -> dict[str, str]:
    """Where none is named that of the first image, as a placer makes it of a request that has one."""
    containers = pod["spec"].get("containers") or [{}]
    name = f"{containers[0].get('image', '')} {realtime.get('runtime_us', '')}".strip()
    fits = "profile" not in realtime and 0 < len(name.encode()) <= MAX_NAME_BYTES
    return {"profile": name} if fits else {}


def _annotation(word: str) -> str:
    return f"annotations[{GROUP}{word}]"
