"""A server and services on it, each in a folder of its own, for tests beside a real node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess


@contextmanager
def running(folder: Path, told: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The server's address; ``told``: the environment of each service, by its name."""
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(folder / "nats"))
        for name, env in told.items():
            own = folder / name
            own.mkdir()
            stack.enter_context(ServiceProcess(f"services.{name}", own, server.url, LAXITY_STORAGE="memory", **env))
        yield server.url
