"""What services tell at /metrics, in Prometheus' own parser, and what it does with what is unknown or broken."""

import asyncio
import re
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from cli.generate_docs import SERVICES
from services.monitor import numbers as of_monitor
from services.monitor.core import Core, Probed
from services.monitor.probes.base import (
    Capacity,
    ContainerReading,
    ContainerUseReading,
    DeviceReading,
    Reading,
    Snapshot,
    XidReading,
)
from shared.effects import Tick
from shared.kubernetes import list_watch
from shared.log import logger
from shared.messages import Pod, Regime
from shared.metrics import Metric, Sample
from shared.service import numbers as of_all
from shared.service.exposition import Exposition

GAUGE = Metric("laxity_toy_things", "gauge", "Things.", ("kind",))
TOTAL = Metric("laxity_toy_seen_total", "counter", "Seen.")
FOREIGN = Metric("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy (in mJ).")
ALL = [*of_all.METRICS, *list_watch.METRICS, *(metric for service in SERVICES for metric in service.metrics)]


def parsed(text: str) -> dict[str, Family]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(families: dict[str, Family]) -> dict[tuple[str, tuple[str, ...]], float]:
    found = [sample for family in families.values() for sample in family.samples]
    return {(one.name, tuple(one.labels.values())): one.value for one in found if one.name.startswith(("lax", "DCGM"))}


async def scrape(url: str | None, accept: str = "text/plain") -> str:
    assert url is not None
    asked = urllib.request.Request(url, headers={"Accept": accept})  # noqa: S310  # our own

    def read() -> str:
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310  # our own
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"

    return await asyncio.to_thread(read)


class Toy:
    """Numbers that a test can change, and what was counted."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.broken: Exception | None = None

    def numbers(self) -> Iterator[Sample]:
        if self.broken is not None:
            raise self.broken
        yield from self.samples

    def count(self, name: str) -> None:
        self.counted[name] += 1


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
async def served(toy: Toy) -> Any:
    exposition = Exposition(toy.numbers, toy.count, logger(service="toy"))
    await exposition.open("127.0.0.1", 0)
    yield exposition
    await exposition.close()


async def test_what_is_told_can_be_read_by_the_parser_of_prometheus(toy: Toy, served: Exposition) -> None:
    toy.samples = [*GAUGE.of(2, 'a "quoted"\n one'), *TOTAL.of(3), *FOREIGN.of(7), *GAUGE.of(0, None)]
    told = parsed(await scrape(served.url))
    expected = {
        ("laxity_toy_things", ('a "quoted"\n one',)): 2,
        ("laxity_toy_things", ("",)): 0,
        ("laxity_toy_seen_total", ()): 3,
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", ()): 7,
    }
    assert expected == values(told)
    assert ["gauge", "counter"] == [told[name].type for name in ("laxity_toy_things", "laxity_toy_seen")]
    assert told["process_resident_memory_bytes"].samples[0].value > 0


async def test_openmetrics_is_told_to_those_who_ask_for_it(toy: Toy, served: Exposition) -> None:
    toy.samples = list(TOTAL.of(3))
    assert (await scrape(served.url, "application/openmetrics-text; version=1.0.0")).endswith("# EOF\n")


def test_what_is_unknown_is_absent_and_never_zero() -> None:
    assert [] == list(TOTAL.of(None))


async def test_a_scrape_that_fails_is_counted_and_the_next_one_is_served(toy: Toy, served: Exposition) -> None:
    toy.broken = LookupError("no such thing")
    assert "503 LookupError('no such thing')\n" == await scrape(served.url)
    toy.broken, toy.samples = None, list(TOTAL.of(1))
    assert "laxity_toy_seen_total 1.0" in await scrape(served.url)
    assert {"metrics.scrapes_failed": 1} == toy.counted


async def test_a_port_that_is_taken_is_counted_and_harms_nothing(toy: Toy) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exposition = Exposition(toy.numbers, toy.count, logger(service="toy"))
        await exposition.open("127.0.0.1", taken.getsockname()[1])
        assert (None, {"metrics.not_served": 1}) == (exposition.url, toy.counted)
        await exposition.close()


async def test_who_connects_and_sends_nonsense_does_not_keep_others_from_reading(toy: Toy, served: Exposition) -> None:
    assert served.url is not None
    host, port = served.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as wrong:
        wrong.sendall(b"\x00\xff\r\n\r\n")
        assert "process_cpu_seconds_total" in await scrape(served.url)
        assert silent.fileno() >= 0


# --- what the monitor tells ---


def reading(uuid: str, utilisation: Reading) -> DeviceReading:
    return DeviceReading(
        uuid=uuid,
        index=3,
        model="H100",
        regime=Regime.EXCLUSIVE,
        slice_us=None,
        switch_us=None,
        group=None,
        fault=None,
        memory_mib=Reading(81_559),
        utilisation_ratio=utilisation,
        memory_used_mib=Reading(559),
        foreign_share_micro=Reading(250_000),
        foreign_memory_mib=Reading(0),
    )


def monitored(
    *readings: DeviceReading, containers: tuple[ContainerReading, ...] = ()
) -> dict[tuple[str, tuple[str, ...]], float]:
    core = Core("node-1", "s", "b", Capacity(1000, 1024))
    core.handle(Probed(Snapshot(devices=readings, containers=containers)), 0)
    assert [] == list(of_monitor.numbers(core))
    core.handle(Tick("metrics", 0), 0)
    return {(metric.name, labels): value for metric, labels, value in of_monitor.numbers(core)}


def test_a_gpu_has_the_names_units_and_labels_of_dcgm_exporter() -> None:
    told = monitored(reading("GPU-1", Reading(0.5)))
    labels = ("3", "GPU-1", "", "nvidia3", "H100", "", "", "node-1", "node-1", "", "", "")
    known = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "hostname")
    assert (*known, "container", "namespace", "pod") == of_monitor.DCGM_FIELDS[0].metric.labels
    dcgm = {name: value for (name, of), value in told.items() if name.startswith("DCGM") and of == labels}
    assert {"DCGM_FI_DEV_GPU_UTIL": 50, "DCGM_FI_DEV_FB_USED": 559, "DCGM_FI_DEV_FB_FREE": 81_000} == dcgm
    assert 559 * 2**20 == told["laxity_device_memory_used_bytes", ("node-1", "GPU-1")]
    assert 0.25 == told["laxity_device_foreign_ratio", ("node-1", "GPU-1")]


def test_what_a_mig_parent_cannot_tell_is_absent_and_its_reason_is_told() -> None:
    told = monitored(reading("GPU-1", Reading(None, "mig_enabled")))
    assert {"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"} == {name for name, _ in told if name.startswith("DCGM")}
    assert ("laxity_device_utilisation_ratio", ("node-1", "GPU-1")) not in told
    at = ("node-1", "GPU-1", "utilisation_ratio", "mig_enabled")
    assert 0 == told["laxity_device_field_supported", at]
    assert 1 == told["laxity_device_field_supported", ("node-1", "GPU-1", "memory_used_mib", "")]


def test_health_has_the_names_and_units_of_dcgm_exporter_and_what_is_unknown_is_absent_with_its_reason() -> None:
    health = {"power_mw": Reading(118_500), "xid": Reading(79), "energy_mj": Reading(None, "not_supported")}
    card = replace(reading("MIG-1", Reading(0.5)), pci_bus_id="00000000:1B:00.0", gpu_instance=2, mig_profile="1g.18gb")
    told = monitored(replace(card, health=health))
    labels = ("3", "MIG-1", "00000000:1B:00.0", "nvidia3", "H100", "1g.18gb", "2", "node-1", "node-1", "", "", "")
    assert (118.5, 79) == tuple(told[f"DCGM_FI_DEV_{name}", labels] for name in ("POWER_USAGE", "XID_ERRORS"))
    assert ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", labels) not in told
    assert 0 == told["laxity_device_field_supported", ("node-1", "MIG-1", "energy_mj", "not_supported")]


def test_time_in_which_clocks_were_held_back_is_told_in_seconds() -> None:
    health = {"power_throttled_us": Reading(2_500_000), "thermal_throttled_us": Reading(None, "deprecated")}
    told = monitored(replace(reading("GPU-1", Reading(0.5)), health=health))
    assert {("laxity_device_power_throttled_seconds_total", ("node-1", "GPU-1")): 2.5} == {
        key: value for key, value in told.items() if "throttled" in key[0]
    }
    assert 0 == told["laxity_device_field_supported", ("node-1", "GPU-1", "thermal_throttled_us", "deprecated")]


def test_xids_are_told_by_code_with_the_time_of_the_last() -> None:
    told = monitored(replace(reading("GPU-1", Reading(0.5)), xids=(XidReading(79, 2, 1_500_000), XidReading(13, 1, 9))))
    found = {(name, of[2]): value for (name, of), value in told.items() if name.startswith("laxity_device_xid")}
    assert {
        ("laxity_device_xid_errors_total", "79"): 2,
        ("laxity_device_xid_last_timestamp_seconds", "79"): 1.5,
        ("laxity_device_xid_errors_total", "13"): 1,
        ("laxity_device_xid_last_timestamp_seconds", "13"): 9e-6,
    } == found


def test_what_a_containers_control_group_says_is_told_and_what_it_does_not_say_is_absent() -> None:
    gpus = {"GPU-1": Reading(300), "GPU-2": Reading(None, "not_told_apart")}
    use = ContainerUseReading(cpu_us=Reading(2_500_000), throttled_periods=Reading(None, "not_visible"), gpus=gpus)
    told = monitored(containers=(ContainerReading("c", "q", use=use),))
    assert {
        ("laxity_container_cpu_seconds_total", ("node-1", "c", "q", "", "")): 2.5,
        ("laxity_container_device_memory_bytes", ("node-1", "c", "q", "", "", "GPU-1")): 300 * 2**20,
    } == {key: value for key, value in told.items() if key[0].startswith("laxity_container")}


def holder(container: str, pod: Pod | None, *uuids: str) -> ContainerReading:
    return ContainerReading(
        container, "q", pod=pod, use=ContainerUseReading(gpus=dict.fromkeys(uuids, Reading(1)), cpu_us=Reading(0))
    )


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([holder("laxity-1", None, "GPU-1")], ("laxity-1", "", "")),
        (
            [holder("laxity-1", Pod(namespace="vision", name="detector-0", uid="u"), "GPU-1")],
            ("", "vision", "detector-0"),
        ),
        ([holder("laxity-1", None, "GPU-1"), holder("laxity-2", None, "GPU-1")], ("", "", "")),
        ([holder("laxity-1", None, "GPU-2")], ("", "", "")),
    ],
    ids=["docker", "pod", "shared", "elsewhere"],
)
def test_a_gpu_that_one_container_has_is_told_with_its_names(
    containers: list[ContainerReading], expected: tuple[str, str, str]
) -> None:
    told = monitored(reading("GPU-1", Reading(0.5)), containers=tuple(containers))
    assert [expected] == [of[-3:] for name, of in told if name == "DCGM_FI_DEV_GPU_UTIL"]


def test_what_a_container_in_a_pod_uses_is_told_with_the_names_of_the_pod() -> None:
    pod = Pod(namespace="vision", name="detector-0", uid="u")
    told = monitored(containers=(holder("laxity-1", pod, "GPU-1"),))
    of = ("node-1", "laxity-1", "q", "vision", "detector-0")
    assert {("laxity_container_cpu_seconds_total", of), ("laxity_container_device_memory_bytes", (*of, "GPU-1"))} == {
        key for key in told if key[0].startswith("laxity_container")
    }


def test_a_core_has_no_dcgm_name() -> None:
    told = monitored(reading("CPU-1", Reading(0.5)))
    assert [] == [name for name, _ in told if name.startswith("DCGM")]
    assert 0.5 == told["laxity_device_utilisation_ratio", ("node-1", "CPU-1")]


# --- names ---


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions_of_prometheus(metric: Metric) -> None:
    if metric.name.startswith("DCGM_FI_"):
        return
    assert re.fullmatch(r"laxity_[a-z_]+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert not re.search(r"_(us|ms|mib|percent|milli|micro)(_total)?$", metric.name)
    assert metric.about.endswith(".")
    assert not {"task", "seq", "ring", "pid"} & set(metric.labels)


def test_no_name_is_given_twice() -> None:
    assert [] == [name for name, count in Counter(metric.name for metric in ALL).items() if count > 1]
