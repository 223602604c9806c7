"""The numbers that every service has: is it ready, what waits, what was counted and asked; nothing is served here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from shared.metrics import Metric, Sample
from shared.service.discovery import VERSION, Endpoint

_INFO: Final = Metric(
    "laxity_service_info", "gauge", "1, with which service this is.", ("service", "instance", "version")
)
_READY: Final = Metric(
    "laxity_service_ready", "gauge", "1 while it is ready, connected and hears what it needs, else 0."
)
_INBOX: Final = Metric("laxity_service_inbox_events", "gauge", "Events that wait for the core.")
_OUTBOX: Final = Metric("laxity_service_outbox_events", "gauge", "Events that the stream has not stored yet.")
_REPLIES: Final = Metric("laxity_replies_total", "counter", "Replies of the placer by outcome.", ("outcome",))
_COUNTED: Final = Metric(
    "laxity_service_counted_total", "counter", "What a service counts of itself, by the name in $SRV.STATS.", ("what",)
)
_REQUESTS: Final = Metric("laxity_service_requests_total", "counter", "Requests received.", ("endpoint",))
_ERRORS: Final = Metric(
    "laxity_service_request_errors_total", "counter", "Requests answered by an error.", ("endpoint",)
)
_SECONDS: Final = Metric(
    "laxity_service_request_seconds_total",
    "counter",
    "Time from receipt to answer, of all requests that were answered.",
    ("endpoint",),
)
METRICS: Final = (_INFO, _READY, _INBOX, _OUTBOX, _REPLIES, _COUNTED, _REQUESTS, _ERRORS, _SECONDS)
REPLIES: Final = "replies."
"""Begins the names of counters of replies."""


def numbers(
    service: str, instance: str, ready: bool, data: dict[str, Any], endpoints: Iterable[Endpoint]
) -> Iterator[Sample]:
    """``data`` is what $SRV.STATS says."""
    yield from _INFO.of(1, service, instance, VERSION)
    yield from _READY.of(ready)
    yield from _INBOX.of(data["inbox"])
    yield from _OUTBOX.of(data["outbox"])
    for name, count in data["counters"].items():
        outcome = name.removeprefix(REPLIES)
        yield from _COUNTED.of(count, name) if outcome == name else _REPLIES.of(count, outcome)
    for endpoint in endpoints:
        yield from _REQUESTS.of(endpoint.requests, endpoint.name)
        yield from _ERRORS.of(endpoint.errors, endpoint.name)
        yield from _SECONDS.of(endpoint.processing_us / 1e6, endpoint.name)
