"""Fixtures of the tests that need a real server: one per test, on a free port, with a store of its own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from shared.bus import Bus
from shared.settings import ServiceSettings
from shared.testing.nats_server import NatsServer
from tests.outside import connect


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
async def outside(nats_url: str) -> AsyncIterator[Client]:
    """A client that imports nothing of ours."""
    client = await connect(nats_url)
    yield client
    await client.close()


@pytest.fixture
def settings(nats_url: str) -> ServiceSettings:
    return ServiceSettings(nats_url=nats_url)


@pytest.fixture
async def bus(settings: ServiceSettings) -> AsyncIterator[Bus]:
    """A connection of its own with all streams made."""
    bus = await Bus.connect(settings, "test")
    await bus.ensure_streams()
    yield bus
    await bus.close()


@pytest.fixture
async def impatient_bus(bus: Bus, settings: ServiceSettings) -> AsyncIterator[Bus]:
    """Pings often, so that a test of a dead link need not last; streams are made."""
    impatient = await Bus.connect(settings.model_copy(update={"ping_interval_us": 200_000}), "impatient")
    yield impatient
    await impatient.close()
