"""Protocol buffers by hand, as far as tests need them to play a kubelet or a device plugin."""

from __future__ import annotations


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def put(number: int, value: str | bytes | int) -> bytes:
    """One field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    body = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(body)) + body


def pod_resources(*held: tuple[str, str, str, tuple[str, ...]]) -> bytes:
    """ListPodResourcesResponse: namespace, pod, resource, ids; with fields beside them that a kubelet sends too."""
    return b"".join(
        put(
            1,
            put(1, pod)
            + put(2, namespace)
            + put(
                3,
                put(1, "main")
                + put(2, put(1, resource) + b"".join(put(2, each) for each in ids) + put(3, put(1, put(1, 1))))
                + put(3, 300),
            )
            + put(4, 7),
        )
        for namespace, pod, resource, ids in held
    )
