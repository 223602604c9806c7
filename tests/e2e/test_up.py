"""``laxity up`` from outside: its ready file, its supervisor, its end, and what the next one finds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.embedded import Embedded, alive, wait_for

pytestmark = pytest.mark.timeout(180)

SLEEPER = """\
request_id: sleeper
command: [sleep, "600"]
candidates: [node-1]
"""
DEVICE = """\
request_id: {id}
image: registry.example/x:1
candidates: [fake-1]
gpu: {{share: 0.5, models: [H200]}}
queue: true
"""


def request(folder: Path, text: str) -> str:
    path = folder / "request.yaml"
    path.write_text(text)
    return str(path)


def sleeping(cluster: Embedded) -> int | None:
    """The pid of the one container's command, from what the backend wrote down; None before it runs."""
    for started in (cluster.state_dir / "containers" / "process").glob("*/started.json"):
        return int(json.loads(started.read_text())["pid"])
    return None


def test_each_process_that_is_killed_comes_back_and_nothing_accepted_is_lost(cluster: Embedded, tmp_path: Path) -> None:
    placed = cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
    assert "placed" == placed["outcome"]
    pid = wait_for(lambda: sleeping(cluster), "the container runs")
    for number, service in enumerate(("monitor", "deadline-tracker", "node-list", "placer", "nats-server")):
        assert alive(cluster.kill(service))
        decided = cluster.laxity("place", "-f", request(tmp_path, DEVICE.format(id=f"after-{number}")), "--wait", "20s")
        assert (service, "placed") == (service, decided["outcome"])
        cluster.laxity("release", f"after-{number}")
    again = cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
    assert ("started", True, placed["placements"][0]["container"]) == (
        again["outcome"],
        again["duplicate"],
        again["placements"][0]["container"],
    )
    assert alive(pid)
    assert pid == sleeping(cluster)


def test_term_ends_every_process_and_every_container(cluster: Embedded, tmp_path: Path) -> None:
    cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
    pids = [*cluster.all_pids(), wait_for(lambda: sleeping(cluster), "the container runs")]
    assert 0 == cluster.stop()
    assert [] == [pid for pid in pids if alive(pid)]
    assert not cluster.ready_file.exists()


def test_a_supervisor_killed_by_force_leaves_no_service_and_the_next_one_finds_its_containers(
    cluster: Embedded, tmp_path: Path
) -> None:
    cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
    container = wait_for(lambda: sleeping(cluster), "the container runs")
    pids = cluster.all_pids()
    assert cluster.process is not None
    os.kill(cluster.process.pid, signal.SIGKILL)
    cluster.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids), "every service has ended")
    assert alive(container)

    cluster.ready_file.unlink()  # what it says was not true any more
    cluster.start()
    again = cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
    assert ("started", True) == (again["outcome"], again["duplicate"])
    assert alive(container)
    assert container == sleeping(cluster)
    assert "released" == cluster.laxity("release", "sleeper")["outcome"]
    assert not alive(container)


def test_containers_are_kept_for_the_next_cluster_where_that_is_wanted(tmp_path: Path) -> None:
    with Embedded(tmp_path, "--fake-nodes", "0", "--placers", "1", "--keep") as cluster:
        cluster.laxity("place", "-f", request(tmp_path, SLEEPER))
        container = wait_for(lambda: sleeping(cluster), "the container runs")
        assert 0 == cluster.stop()
        assert alive(container)
        cluster.start()
        assert "started" == cluster.laxity("place", "-f", request(tmp_path, SLEEPER))["outcome"]
        assert container == sleeping(cluster)
        cluster.laxity("release", "sleeper")
        assert not alive(container)
