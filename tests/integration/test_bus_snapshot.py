"""Backups of a bucket on a real server: what comes back is what was there, with its revisions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus import Bus
from shared.errors import BusError
from shared.settings import ServiceSettings
from shared.subjects import LEDGER
from shared.testing.nats_server import NatsServer
from tests.secured import secured_server

SOME = {f"k{n}": random.Random(n).randbytes(40_000) for n in range(20)}
"""Of random bytes, which no compression makes one chunk of."""


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    made = await Bus.connect(ServiceSettings(nats_url=nats_server.url, storage="memory"))
    await made.ensure_streams()
    yield made
    await made.close()


async def filled(bus: Bus) -> dict[str, int]:
    return {key: await bus.put(LEDGER, key, value) for key, value in [*SOME.items(), *SOME.items()]}


async def test_a_bucket_comes_back_with_every_key_and_its_revision(bus: Bus) -> None:
    revisions = await filled(bus)
    chunks: list[bytes] = []
    made = await bus.backup(LEDGER, chunks.append)
    assert len(chunks) > 1
    await bus.put(LEDGER, "k0", b"later")

    await bus.restore(LEDGER, made, chunks, replace=True)

    assert {key: (SOME[key], revisions[key]) for key in SOME} == {key: await bus.get(LEDGER, key) for key in SOME}


async def test_a_bucket_that_is_there_is_not_overwritten_unless_it_is_said(bus: Bus) -> None:
    chunks: list[bytes] = []
    made = await bus.backup(LEDGER, chunks.append)
    revision = await bus.put(LEDGER, "k", b"v")
    with pytest.raises(BusError, match="already in use"):
        await bus.restore(LEDGER, made, chunks, replace=False)
    assert (b"v", revision) == await bus.get(LEDGER, "k")


async def test_a_backup_that_was_damaged_is_refused(bus: Bus) -> None:
    await filled(bus)
    chunks: list[bytes] = []
    made = await bus.backup(LEDGER, chunks.append)
    with pytest.raises(BusError, match="restore failed"):
        await bus.restore(LEDGER, made, [*chunks[:-1], b"damaged"], replace=True)


async def test_where_there_is_no_bucket_there_is_no_backup(nats_server: NatsServer) -> None:
    bus = await Bus.connect(ServiceSettings(nats_url=nats_server.url))
    try:
        with pytest.raises(BusError, match="stream not found"):
            await bus.backup(LEDGER, bytearray().extend)
    finally:
        await bus.close()


@pytest.mark.parametrize(("user", "may"), [("operator", True), ("client", False), ("placer", False)])
async def test_only_the_operator_may_take_and_restore_backups(user: str, may: bool, tmp_path: Path) -> None:
    server, keys = secured_server(tmp_path, ["fake-0"], [])
    with server:
        operator, tried = [await with_key(server, keys, name) for name in ("operator", user)]
        await operator.ensure_streams()
        try:
            assert may == await _round_trip(tried)
        finally:
            await asyncio.gather(operator.close(), tried.close())


async def with_key(server: NatsServer, keys: Path, user: str) -> Bus:
    seed = {"nats_seed_file": keys / f"{user}.nk"}
    settings: Any = {"nats_url": server.url, "storage": "memory", "ack_timeout_us": 2_000_000} | seed
    return await Bus.connect(ServiceSettings(**settings))


async def _round_trip(bus: Bus) -> bool:
    chunks: list[bytes] = []
    try:
        made = await bus.backup(LEDGER, chunks.append)
        await bus.restore(LEDGER, made, chunks, replace=True)
    except BusError:
        return False
    return True
