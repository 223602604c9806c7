"""Which programs an embedded cluster consists of, and with which settings; running them is cli.embedded's work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from cli.output import CommandError, Exit
from services.monitor.slices import UNKNOWN, Sharing, measure
from shared.subjects import encode

MEASURED_CORES: Final = 3
"""A core that is busy cannot be measured, and the next one is tried."""
REAL = "node-1"
"""The node whose devices are this machine's cores."""
FAKE_DEVICES: Final[tuple[dict[str, Any], ...]] = (
    {"count": 1, "model": "H100", "memory_mib": 81_559, "regime": "gated"},
    {"count": 2, "model": "H200", "regime": "exclusive"},
)
"""What each fake node has: a device whose tasks run one at a time by deadline, and two for one tenant each."""


@dataclass(frozen=True)
class Cluster:
    """What ``laxity up`` was asked for."""

    state_dir: Path
    nodes: int = 1
    fake_nodes: int = 3
    placers: int = 2
    trackers: int = 1
    node_lists: int = 1
    storage: Literal["file", "memory"] = "file"
    cores: int | None = None
    sharing: Sharing = UNKNOWN
    """Of this machine's cores, measured before anything else runs on them; unknown: the monitor measures."""
    heartbeat_us: int = 1_000_000
    work_dir: Path = field(default_factory=Path.cwd)
    prefix: str = "rt"

    def __post_init__(self) -> None:
        if self.nodes not in (0, 1):
            raise CommandError(f"--nodes: found {self.nodes}, allowed: 0 or 1, this machine is one node", Exit.USAGE)

    @property
    def rings(self) -> Path:
        return self.state_dir / "rings"

    @property
    def rings_of_fakes(self) -> Path:
        return self.state_dir / "rings-of-fakes"

    @property
    def containers(self) -> Path:
        """State of the process backend."""
        return self.state_dir / "containers" / "process"

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def node_names(self) -> list[str]:
        return [REAL] * self.nodes + [f"fake-{number}" for number in range(1, self.fake_nodes + 1)]


@dataclass(frozen=True)
class Program:
    """One process to keep alive. ``service`` is its name in the ready file, ``label`` that of its log."""

    service: str
    label: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    """Processors that it may use; None: all."""


def programs(cluster: Cluster) -> list[Program]:
    """All services of a cluster; the address of the server is added when they start."""
    made = [_monitor(cluster, name) for name in cluster.node_names]
    counts = {"deadline-tracker": cluster.trackers, "node-list": cluster.node_lists, "placer": cluster.placers}
    for service, count in counts.items():
        made += [_service(cluster, service, f"{service}-{number}") for number in range(1, count + 1)]
    return made


def server(executable: str, cluster: Cluster, ports: Path, port: int) -> Program:
    """The embedded server; port -1 is a free one, which it writes into a file in ``ports``."""
    store = str(cluster.state_dir / "jetstream")
    command = [executable, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", store, "--ports_file_dir", str(ports)]
    return Program("nats-server", "nats-server", command)


def _service(cluster: Cluster, service: str, label: str, **env: str) -> Program:
    module = f"services.{service.replace('-', '_')}"
    usual = {
        "LAXITY_INSTANCE": label,
        "LAXITY_PREFIX": cluster.prefix,
        "LAXITY_STORAGE": cluster.storage,
        "LAXITY_LOG_FORMAT": "json",
        "LAXITY_NODE_LIST_HEARTBEAT_US": str(cluster.heartbeat_us),
        **_placer_settings(cluster),
    }
    return Program(service, label, [sys.executable, "-m", module], usual | env)


def _placer_settings(cluster: Cluster) -> dict[str, str]:
    backends = {name: "process" if name == REAL else "fake" for name in cluster.node_names}
    return {
        "LAXITY_PLACER_BACKENDS": json.dumps(backends),
        "LAXITY_PLACER_STATE_ROOT": str(cluster.containers.parent),
        "LAXITY_PLACER_RING_ROOT": str(cluster.rings),
        "LAXITY_PLACER_FAKE_RING_ROOT": str(cluster.rings_of_fakes),
        "LAXITY_PLACER_WORK_DIR": str(cluster.work_dir),
    }


def _monitor(cluster: Cluster, node: str) -> Program:
    env = {
        "LAXITY_MONITOR_NODE": node,
        "LAXITY_MONITOR_PERIOD_US": str(cluster.heartbeat_us),
        "LAXITY_MONITOR_RING_ROOT": str(cluster.rings),
    }
    if node != REAL:
        env |= {
            "LAXITY_MONITOR_PROBE": "fake",
            "LAXITY_MONITOR_FAKE_DEVICES": json.dumps(FAKE_DEVICES),
            "LAXITY_MONITOR_FAKE_TASKS": "true",
            "LAXITY_MONITOR_FAKE_CONTROL": str(cluster.state_dir / f"{node}.faults.json"),
            "LAXITY_MONITOR_RING_ROOT": str(cluster.rings_of_fakes / encode(node)),
        }
        return _with_cores(_service(cluster, "monitor", f"monitor-{node}", **env), None)
    if cluster.sharing.slice_us is not None:
        env["LAXITY_MONITOR_SLICE_US"] = str(cluster.sharing.slice_us)
        env["LAXITY_MONITOR_SWITCH_US"] = str(cluster.sharing.switch_us)
    return _with_cores(_service(cluster, "monitor", f"monitor-{node}", **env), cluster.cores)


def measured() -> Sharing:
    """How this machine shares a core, from one of them: they all have the same scheduler. Takes half a second."""
    for core in sorted(os.sched_getaffinity(0))[:MEASURED_CORES]:
        found = measure(core)
        if found.slice_us is not None:
            return found
    return UNKNOWN


def _with_cores(program: Program, count: int | None) -> Program:
    """The monitor reports the cores that it may use itself: fewer of them make a smaller node."""
    if count is None:
        return program
    cores = frozenset(sorted(os.sched_getaffinity(0))[:count])
    return Program(program.service, program.label, program.command, program.env, cores)
