"""A plain NATS client for tests: nats-py, subjects and JSON alone, as any outside program would; nothing of ours."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

Json = dict[str, Any]


async def connect(url: str) -> Client:
    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)


async def until(seen: Callable[[], Awaitable[Any]], what: str, limit_s: float = 20) -> Any:
    """The first true answer; fails with the last one when the time is over.

    A question that times out, or that a cluster of servers cannot answer yet, is asked again: it may just be starting.
    So is one whose answer does not hold yet.
    """
    deadline, last = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        try:
            if last := await seen():
                return last
        except (TimeoutError, AssertionError, nats.js.errors.ServiceUnavailableError) as error:
            last = error
        await asyncio.sleep(0.05)
    pytest.fail(f"{what}: not within {limit_s} s, last seen {last!r}")


async def ask(client: Client, subject: str, body: Json, timeout_s: float = 10) -> Json:
    answer: Json = json.loads((await client.request(subject, json.dumps(body).encode(), timeout=timeout_s)).data)
    return answer


async def events(client: Client, subject: str) -> list[tuple[str, Json]]:
    """All stored events of a subject, in order: (ce-id, body)."""
    unasked = ConsumerConfig(ack_policy=AckPolicy.NONE)  # else no more than 1,000 come
    sub = await client.jetstream().pull_subscribe(subject, stream="RT_EVENTS", config=unasked)
    found: list[tuple[str, Json]] = []
    consumer = await sub.consumer_info()
    left = consumer.num_pending
    while left:
        messages = await sub.fetch(min(500, left), timeout=30)
        found += [((m.headers or {}).get("ce-id", ""), json.loads(m.data)) for m in messages]
        left = messages[-1].metadata.num_pending
    await sub.unsubscribe()
    await client.jetstream().delete_consumer("RT_EVENTS", consumer.name)  # a stream takes no more than a thousand
    return found


async def states(client: Client, token: str) -> list[str]:
    """The states of one request so far, each step once."""
    seen = dict(await events(client, f"rt.events.place.{token}"))
    return [body["state"] for body in seen.values()]


async def value(client: Client, bucket: str, key: str) -> Json | None:
    """A key of a bucket as JSON; None where it is not there."""
    try:
        entry = await (await client.jetstream().key_value(bucket)).get(key)
    except (nats.js.errors.KeyNotFoundError, nats.js.errors.NotFoundError):
        return None
    found: Json = json.loads(entry.value or b"null")
    return found


async def heartbeat(client: Client, wanted: Callable[[Json], object], what: str, node: str = "n1") -> Json:
    """The first heartbeat of a node that is as wanted."""
    subscription = await client.subscribe(f"rt.metrics.{node}")

    async def next_one() -> Any:
        body = json.loads((await subscription.next_msg(timeout=10)).data)
        return body if wanted(body) else None

    found: Json = await until(next_one, what)
    await subscription.unsubscribe()
    return found
