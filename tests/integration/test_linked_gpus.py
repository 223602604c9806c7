"""Several GPUs for one container are linked ones: driver, monitor, node list and placer on a real server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shared.testing.service_process import ServiceProcess
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.outside import ask, connect, until, value


async def test_two_gpus_for_one_container_are_those_that_the_driver_says_are_linked(
    nats_url: str, tmp_path: Path
) -> None:
    driver = FakeDriver(build_fake_nvml(tmp_path), tmp_path / "profile")
    driver.plays("a100-pairs")
    monitor = {
        "LAXITY_MONITOR_NODE": "n1",
        "LAXITY_MONITOR_RING_ROOT": str(tmp_path / "rings"),
        "LAXITY_MONITOR_PROBE": "nvml",
        "LAXITY_MONITOR_REGIME": "exclusive",
        "LAXITY_MONITOR_PERIOD_US": "100000",
        **driver.environment,
    }
    placer = {
        "LAXITY_PLACER_BACKENDS": json.dumps({"*": "fake"}),
        "LAXITY_PLACER_STATE_ROOT": str(tmp_path / "state"),
        "LAXITY_PLACER_RING_ROOT": str(tmp_path / "rings"),
    }
    client = await connect(nats_url)

    async def known() -> Any:
        found = await value(client, "rt_nodes", "node.n1")
        return found and found["state"] == "ready" and [device.get("group") for device in found["devices"]]

    async def placed(name: str) -> Any:
        body = {"request_id": name, "image": "i", "gpu": {"count": 2}}
        answer = await ask(client, "rt.place", body)
        return answer["outcome"] == "placed" and {uuid[-1] for uuid in answer["placements"][0]["devices"]}

    with ExitStack() as stack:
        for service, settings in (("placer", placer), ("node_list", {}), ("monitor", monitor)):
            stack.enter_context(ServiceProcess(f"services.{service}", tmp_path, nats_url, **settings))
        assert ["nvlink-00000000:1B:00.0", "nvlink-00000000:43:00.0"] * 2 == await until(known, "the node is ready")
        pairs = [await until(lambda name=name: placed(name), "two GPUs") for name in ("first", "second")]
        assert [{"0", "2"}, {"1", "3"}] == sorted(pairs, key=min)
    await client.close()
