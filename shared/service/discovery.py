"""What the NATS services convention says about a service: $SRV.PING, INFO and STATS, and counts per endpoint."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.bus import Bus, Msg
from shared.service.table import Listen, Service

VERSION = "0.1.0"
_KINDS = ("PING", "INFO", "STATS")
_OPEN = 10_000
"""Requests without an answer yet whose start is remembered for the mean time."""


@dataclass
class Endpoint:
    """Counts of one request subject."""

    name: str
    subject: str
    queue: str
    about: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    answered: int = 0
    processing_us: int = 0

    def failed(self, text: str) -> None:
        self.errors += 1
        self.last_error = text

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "metadata": {"about": self.about},
        }

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.processing_us * 1000,
            "average_processing_time": self.processing_us * 1000 // self.answered if self.answered else 0,
        }


class Discovery:
    """Answers on plain subscriptions: in a queue group one of N would answer (case B20)."""

    def __init__(self, service: Service, bus: Bus, instance: str, data: Callable[[], dict[str, Any]]) -> None:
        self._service = service
        self._bus = bus
        self._instance = instance
        self._data = data
        self._started = datetime.datetime.now(datetime.UTC)
        self.id = os.urandom(8).hex()
        self.endpoints = {listen.subject: self._endpoint(listen) for listen in service.listens if _is_request(listen)}
        self._open: dict[str, tuple[Endpoint, int]] = {}

    def _endpoint(self, listen: Listen) -> Endpoint:
        name = listen.subject.replace(".", "-").replace("*", "any").replace(">", "all")
        return Endpoint(name, f"{self._bus.subjects.prefix}.{listen.subject}", listen.queue or "", listen.about)

    def began(self, endpoint: Endpoint, reply: str, now_us: int) -> None:
        endpoint.requests += 1
        if reply:
            self._open[reply] = (endpoint, now_us)
            if len(self._open) > _OPEN:
                del self._open[next(iter(self._open))]

    def answered(self, reply: str, error: str | None, now_us: int) -> None:
        endpoint, began_us = self._open.pop(reply, (None, 0))
        if endpoint is None:
            return
        endpoint.answered += 1
        endpoint.processing_us += now_us - began_us
        if error is not None:
            endpoint.failed(error)

    async def start(self) -> None:
        for kind in _KINDS:
            for tail in ("", f".{self._service.name}", f".{self._service.name}.{self.id}"):
                await self._bus.subscribe(f"$SRV.{kind}{tail}", self._answer)

    async def _answer(self, msg: Msg) -> None:
        kind = msg.subject.split(".")[1]
        if msg.reply and not self._bus.subjects.reply_refused(msg.reply):
            await self._bus.publish(msg.reply, json.dumps(self._body(kind)).encode())

    def _body(self, kind: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": f"io.nats.micro.v1.{kind.lower()}_response",
            "name": self._service.name,
            "id": self.id,
            "version": VERSION,
            "metadata": {"instance": self._instance, "pid": str(os.getpid()), "state": self._data()["state"]},
        }
        if kind == "INFO":
            body |= {
                "description": self._service.about,
                "endpoints": [endpoint.info() for endpoint in self.endpoints.values()],
            }
        if kind == "STATS":
            started = self._started.isoformat(timespec="microseconds").replace("+00:00", "Z")
            endpoints = [endpoint.stats() for endpoint in self.endpoints.values()]
            body |= {"started": started, "endpoints": endpoints, "data": self._data()}
        return body


def _is_request(listen: Listen) -> bool:
    return listen.kind == "request"
