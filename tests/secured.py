"""A cluster whose server enforces what ``laxity keys`` wrote, and outside clients with each user's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from cli.keys import make
from cli.permissions import Rules
from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess
from tests.e2e.processes import Cluster

USERS = {
    "services.node_list": "node-list",
    "services.deadline_tracker": "deadline-tracker",
    "services.placer": "placer",
}
OTHER_NODE = "else.where"


def secured_server(folder: Path, nodes: list[str], clients: list[str]) -> tuple[NatsServer, Path]:
    """A server that is not started yet, and the folder with the keys of its users."""
    keys = folder / "keys"
    make(keys, Rules(), nodes, clients)
    return NatsServer(folder / "nats", "-c", str(keys / "authorization.conf")), keys


class SecuredCluster(Cluster):
    """The cluster of the tests that stand outside, each service with its own key."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        nodes = [f"fake-{number}" for number in range(options.get("nodes", 1))]
        self.nats, self.keys = secured_server(folder, [*nodes, OTHER_NODE], ["second"])

    def service(self, module: str, name: str, **env: str) -> ServiceProcess:
        user = USERS.get(module) or f"monitor-{env['LAXITY_MONITOR_NODE']}"
        return super().service(module, name, **env, LAXITY_NATS_SEED_FILE=str(self.keys / f"{user}.nk"))

    async def connect(self, user: str, refused: list[str] | None = None, inbox: str = "") -> Client:
        return await connect(self.nats.url, self.keys, user, refused, inbox)


async def connect(url: str, keys: Path, user: str, refused: list[str] | None = None, inbox: str = "") -> Client:
    """An outside client with the key of ``user``; what the server refuses it goes to ``refused``."""

    async def on_error(error: Exception) -> None:
        if refused is not None:
            refused.append(str(error))

    seed, prefix = str(keys / f"{user}.nk"), inbox or f"_INBOX.{user}"
    return await nats.connect(url, nkeys_seed=seed, inbox_prefix=prefix, error_cb=on_error)


async def settled(client: Client) -> None:
    """Returns once the server has taken all that was said, and everything it says of that is here.

    Twice, because the client may take the answer to the ping of its own connect for that to its first flush.
    """
    await client.flush()
    await client.flush()
