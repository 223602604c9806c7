"""The streams and buckets of a cluster as data: names, limits and why; creating them is the bus's work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.settings import ServiceSettings
from shared.subjects import DEADLINES, EVENTS_STREAM, LEARNED, LEDGER, NODES, PLACE_STREAM

_SECOND_NS = 1_000_000_000
_MIB = 1024 * 1024

DUPLICATE_WINDOW_NS = 120 * _SECOND_NS
"""A repeat with the same Nats-Msg-Id within it is stored once; later repeats are told apart by ``ce-id``."""
PLACE_MAX_AGE_NS = 3_600 * _SECOND_NS
"""The recovery copy of a request; final ledger keys outlive it (24 h), so that no copy can look new."""


@dataclass(frozen=True)
class StreamSpec:
    """One stream: its name and the configuration that it must have, in the words of the JetStream API."""

    name: str
    config: dict[str, Any]


def named(name: str, prefix: str) -> str:
    """The real name of a stream or bucket: ``RT_EVENTS``, ``rt_ledger`` under prefix rt, ``X_EVENTS`` under x."""
    if name.startswith("rt_"):
        return prefix + name[2:]
    if name.startswith("RT_"):
        return prefix.upper() + name[2:]
    return name


def bucket_stream(bucket: str, prefix: str) -> str:
    return f"KV_{named(bucket, prefix)}"


def wanted(settings: ServiceSettings) -> tuple[StreamSpec, ...]:
    """Every stream and bucket of the cluster."""
    buckets = (LEDGER, NODES, DEADLINES, LEARNED)
    return (_events(settings), _place(settings), *(_bucket(name, settings) for name in buckets))


def _stream(name: str, subject: str, settings: ServiceSettings, **config: Any) -> StreamSpec:
    usual = {
        "name": name,
        "subjects": [subject],
        "retention": "limits",
        "storage": settings.storage,
        "num_replicas": settings.replicas,
        "duplicate_window": DUPLICATE_WINDOW_NS,
        "allow_direct": True,
    }
    return StreamSpec(name, usual | config)


def _events(settings: ServiceSettings) -> StreamSpec:
    return _stream(
        named(EVENTS_STREAM, settings.prefix),
        f"{settings.prefix}.events.>",
        settings,
        max_age=settings.events_max_age_s * _SECOND_NS,
        max_bytes=settings.events_max_mib * _MIB,
        discard="old",
    )


def _place(settings: ServiceSettings) -> StreamSpec:
    """``no_ack``: a stream that acknowledges would answer the requester before the placer does."""
    return _stream(
        named(PLACE_STREAM, settings.prefix),
        f"{settings.prefix}.place",
        settings,
        max_age=PLACE_MAX_AGE_NS,
        max_bytes=settings.place_max_mib * _MIB,
        no_ack=True,
        discard="old",
    )


def _bucket(name: str, settings: ServiceSettings) -> StreamSpec:
    """A usual key-value bucket, so that any client's KV calls work on it, plus atomic batches and a TTL per key."""
    return _stream(
        bucket_stream(name, settings.prefix),
        f"$KV.{named(name, settings.prefix)}.>",
        settings,
        max_msgs_per_subject=1,
        discard="new",
        allow_rollup_hdrs=True,
        deny_delete=True,
        allow_msg_ttl=True,
        allow_atomic=True,
    )
