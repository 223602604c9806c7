"""What stays in its order, or of one life of the server, however long something waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from shared.bus import Bus, StoredMsg
from shared.effects import WatchBegins, WatchReplayed
from shared.service import Runtime
from shared.service.inbox import Inbox
from shared.service.intake import Intake
from shared.service.table import Listen
from shared.subjects import LEDGER
from shared.testing.nats_server import NatsServer
from shared.testing.wait import until
from tests.integration.test_bus_streams import running


async def test_a_full_inbox_lets_no_key_come_before_the_word_that_a_session_begins(bus: Bus) -> None:
    inbox, listen = Inbox(limit=1), Listen(LEDGER, "watch")
    inbox.post("a service's own")
    intake = Intake(cast(Runtime, SimpleNamespace(bus=bus, inbox=inbox)), listen)
    async with running(intake.watch(lambda: None)):
        await until(lambda: len(inbox) == 3)  # an empty bucket: nothing of this waits for room
        assert ["a service's own", WatchBegins(LEDGER), WatchReplayed(LEDGER, frozenset())] == [
            await inbox.get() for _ in range(3)
        ]


async def test_keys_that_are_read_together_are_of_one_life_of_the_server(
    bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = await bus.put(LEDGER, "lease.a", b"older")
    nats_server.keep()
    await until(lambda: bus.connection.counters["reconnects"] == 1)
    assert older < await bus.put(LEDGER, "lease.a", b"lost")
    jetstream, second_key = bus._commits._js, asyncio.Event()
    last = jetstream.last

    async def one_answer_before_the_power_loss(stream: str, subject: str) -> StoredMsg | None:
        if subject.endswith("request.b") and not second_key.is_set():
            second_key.set()
            await asyncio.sleep(0.3)
            nats_server.rewind()
        return await last(stream, subject)

    monkeypatch.setattr(jetstream, "last", one_answer_before_the_power_loss)
    found = await bus.read(LEDGER, ["lease.a", "request.b"])
    assert [(b"older", older), (None, 0)] == [(change.value, change.revision) for change in found]
