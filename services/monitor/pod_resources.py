"""What a kubelet answers to `List` of its pod-resources API: who was given which device by a device plugin; no I/O.

The messages are those of k8s.io/kubelet/pkg/apis/podresources/v1/api.proto. Of them three names and a list are needed,
so they are read as protocol buffers are encoded (https://protobuf.dev/programming-guides/encoding/), without generated
code; fields that nobody knows here are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shared.errors import FieldError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_MOST_SHIFT: Final = 63


@dataclass(frozen=True, slots=True)
class Holding:
    """A pod has a device. ``id`` is the plugin's: a uuid, with more behind it where the plugin shares the device."""

    id: str
    resource: str
    pod: str
    """Namespace and name."""


def holdings(answer: bytes) -> tuple[Holding, ...]:
    """Of all containers of all pods. Raises FieldError where it is no such answer."""
    return tuple(held for pod in _each(answer, 1) for held in _of_pod(pod))


def _of_pod(pod: bytes) -> Iterator[Holding]:
    name = f"{_text(pod, 2)}/{_text(pod, 1)}"
    for container in _each(pod, 3):
        for devices in _each(container, 2):
            resource = _text(devices, 1)
            for device in _each(devices, 2):
                yield Holding(_decoded(device), resource, name)


def _each(message: bytes, number: int) -> Iterator[bytes]:
    return (value for found, value in _fields(message) if found == number and value is not None)


def _text(message: bytes, number: int) -> str:
    """The last one counts, as everywhere; absent is empty."""
    return _decoded((b"", *_each(message, number))[-1])


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise FieldError("pod resources", value, "text in UTF-8") from None


def _fields(message: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Number and value of each field that has a length, None of any other."""
    place = 0
    while place < len(message):
        tag, place = _number(message, place)
        kind = tag & 7
        if kind == _VARINT:
            _, place = _number(message, place)
            yield tag >> 3, None
            continue
        if kind == _BYTES:
            size, place = _number(message, place)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise FieldError("pod resources", f"a field of kind {kind}", "kinds 0, 1, 2 and 5")
        if place + size > len(message):
            raise FieldError("pod resources", f"{len(message) - place} bytes left", f"the {size} that are announced")
        yield tag >> 3, message[place : place + size] if kind == _BYTES else None
        place += size


def _number(message: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first; and where the next thing begins."""
    value = shift = 0
    while place < len(message) and shift <= _MOST_SHIFT:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise FieldError("pod resources", "a number without an end", "at most ten bytes")
