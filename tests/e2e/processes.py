"""A cluster of single processes for the tests that stand outside: each can be killed, stopped and started alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.testing.nats_server import NatsServer
from shared.testing.service_process import ServiceProcess

DEVICE = {"model": "fake", "memory_mib": 80_000, "regime": "time_sliced", "slice_us": 2_000, "switch_us": 10}


class Cluster:
    """nats-server, fake nodes with their monitors, a tracker, a node-list, and placers on the fake backend."""

    def __init__(
        self, folder: Path, *, placers: int = 1, nodes: int = 1, devices: int = 8, storage: str = "memory"
    ) -> None:
        self.folder = folder
        self.nats = NatsServer(folder / "nats")
        self._storage = storage
        self._count = placers
        self._nodes = nodes
        self._devices = devices
        self.others: list[ServiceProcess] = []
        self.placers: list[ServiceProcess] = []

    def __enter__(self) -> Self:
        self.nats.start()
        for number in range(self._nodes):
            devices = json.dumps([{"count": self._devices, **DEVICE}])
            env = {"LAXITY_MONITOR_NODE": f"fake-{number}", "LAXITY_MONITOR_PROBE": "fake"}
            env |= {"LAXITY_MONITOR_FAKE_DEVICES": devices, "LAXITY_MONITOR_PERIOD_US": "300000"}
            self.others.append(self.service("services.monitor", f"monitor-{number}", **env))
        grace = {"LAXITY_NODE_LIST_HEARTBEAT_US": "300000", "LAXITY_NODE_LIST_GRACE_US": "8000000"}
        self.others.append(self.service("services.node_list", "node-list", **grace))
        self.others.append(self.service("services.deadline_tracker", "tracker"))
        self.placers = [self.placer(number) for number in range(self._count)]
        self.start_all()
        return self

    def start_all(self) -> None:
        """All services, at the same time."""
        for each in [*self.others, *self.placers]:
            each.begin()
        for each in [*self.others, *self.placers]:
            each.until_ready()

    def placer(self, number: int) -> ServiceProcess:
        """Not started yet."""
        return self.service("services.placer", f"placer-{number}", LAXITY_PLACER_BACKENDS='{"*": "fake"}')

    def service(self, module: str, name: str, **env: str) -> ServiceProcess:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        rings = self.folder / "rings"
        rings.mkdir(exist_ok=True)
        usual = {
            "LAXITY_STORAGE": self._storage,
            "LAXITY_INSTANCE": name,
            "LAXITY_MONITOR_RING_ROOT": str(rings),
            "LAXITY_PLACER_RING_ROOT": str(rings),
            "LAXITY_PLACER_STATE_ROOT": str(self.folder / "state"),
            "LAXITY_PING_INTERVAL_US": "300000",
        }
        return ServiceProcess(module, folder, self.nats.url, **(usual | env))

    def containers(self) -> list[str]:
        """Names of the fake containers that exist."""
        root = self.folder / "state" / "fake"
        return sorted(path.stem for path in root.glob("*/laxity-*.json"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in [*self.placers, *self.others]:
            each.__exit__(None, None, None)
        self.nats.__exit__(None, None, None)
