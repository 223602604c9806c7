"""How long containers had a GPU: what is added up from samples, what it may be off by, and what is not known."""

from __future__ import annotations

from collections import Counter

import pytest

from services.monitor.core import Core, Probed, RingsRead
from services.monitor.open_tasks import RingRows, Row
from services.monitor.probes.base import Capacity, ContainerReading, Snapshot
from services.monitor.probes.gpu_time import SAMPLE_US, GpuTimes
from services.monitor.probes.nvml_process import AskedSamples, Samples
from shared.effects import Tick
from shared.messages import NodeMetrics, RingInfo, TaskEventKind
from tests.gpu_node import FOREIGN, GPU0, MIG0, OURS, Node, told

OWN, TWIN, OTHER = 11, 12, 21
CONTAINERS = (ContainerReading("a", pids=(OWN, TWIN)), ContainerReading("b", pids=(OTHER,)))


def asked(*samples: tuple[int, int], window_s: float = 1) -> dict[str, AskedSamples]:
    return {"g": AskedSamples(value=Samples(window_us=int(window_s * 1_000_000), samples=samples))}


class Times:
    """GPU g; a cycle a second, as long as nothing else is said."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.times = GpuTimes(self.counts)
        self.now_s = 100.0
        self.cycle(asked(window_s=0))

    def cycle(
        self,
        samples: dict[str, AskedSamples],
        containers: tuple[ContainerReading, ...] = CONTAINERS,
        after_s: float = 1,
        held: dict[int, int | None] | str | None = None,
    ) -> None:
        self.now_s += after_s
        holders = {OWN: 1, TWIN: 1, OTHER: 1} if held is None else held
        self.times.take(samples, {"g": holders}, containers, self.now_s)

    def of(self, container: str) -> tuple[object, object, object]:
        found = self.times.of(container)["g"]
        return found.ratio.value, found.busy_us.value, found.error_us.value


def test_samples_are_added_up_with_a_percent_of_the_time_and_a_sample_period_where_use_began() -> None:
    times = Times()
    times.cycle(asked((OWN, 40), (OTHER, 10)))
    times.cycle(asked((OWN, 60), (OTHER, 10)))
    assert (0.6, 1_000_000, 2 * 10_000 + SAMPLE_US) == times.of("a")
    assert (0.1, 200_000, 2 * 10_000 + SAMPLE_US) == times.of("b")


def test_the_processes_of_a_container_are_added_up_and_never_to_more_than_the_time() -> None:
    times = Times()
    times.cycle(asked((OWN, 40), (TWIN, 30)))
    assert (0.7, 700_000) == times.of("a")[:2]
    times.cycle(asked((OWN, 90), (TWIN, 90)))
    assert (1.0, 1_700_000) == times.of("a")[:2]


def test_no_sample_is_no_use_as_far_as_a_percent_can_be_told() -> None:
    times = Times()
    for _ in range(100):
        times.cycle(asked())
    assert (0.0, 0, 1_000_000) == times.of("a")


def test_time_that_no_sample_saw_may_have_been_used_whole() -> None:
    times = Times()
    times.cycle(asked((OWN, 50)))
    times.cycle(asked((OWN, 50), window_s=2), after_s=10)
    assert (0.5, 1_500_000, 30_000 + SAMPLE_US + 8_000_000) == times.of("a")


def test_M14_a_percentage_that_cannot_be_is_unknown_counted_and_not_added() -> None:
    times = Times()
    times.cycle(asked((OWN, 50), (OTHER, 50)))
    times.cycle(asked((OWN, 4_294_967_295), (OTHER, 50)))
    found = times.times.of("a")["g"]
    assert (None, "implausible", 500_000) == (found.ratio.value, found.ratio.reason, found.busy_us.value)
    assert (0.5, 1_000_000) == times.of("b")[:2]
    assert 1 == times.counts["nvml.samples.implausible"]


@pytest.mark.parametrize(
    "samples, held, reason",
    [
        ({"g": AskedSamples(reason="not_supported")}, None, "not_supported"),
        (asked((OWN, 50)), "own_pidns", "own_pidns"),
    ],
)
def test_what_is_never_told_is_unknown_and_not_zero(
    samples: dict[str, AskedSamples], held: str | None, reason: str
) -> None:
    times = GpuTimes(Counter())
    times.take({"g": AskedSamples(reason="not_supported")}, {"g": {OWN: 1}}, CONTAINERS, 1)
    times.take(samples, {"g": held or {OWN: 1}}, CONTAINERS, 2)
    found = times.of("a")["g"]
    assert [(None, reason)] * 3 == [(each.value, each.reason) for each in (found.ratio, found.busy_us, found.error_us)]


def test_while_the_driver_is_silent_the_sum_stays_and_its_error_grows() -> None:
    times = Times()
    times.cycle(asked((OWN, 50)))
    before = times.of("a")
    times.times.failed("driver_hung", times.now_s + 3)
    found = times.times.of("a")["g"]
    assert (None, "driver_hung", before[1]) == (found.ratio.value, found.ratio.reason, found.busy_us.value)
    assert 3_000_000 + before[2] >= (found.error_us.value or 0) > before[2]  # type: ignore[operator]


def test_a_process_that_is_gone_since_the_cycle_before_is_still_its_containers() -> None:
    times = Times()
    times.cycle(asked((OWN, 50)), (ContainerReading("a", pids=(TWIN,)), CONTAINERS[1]))
    assert (0.5, 500_000) == times.of("a")[:2]


def test_a_container_that_is_gone_is_forgotten() -> None:
    times = Times()
    times.cycle(asked((OWN, 50)))
    times.cycle(asked(), (CONTAINERS[1],))
    assert {} == times.times.of("a")


# --- through the driver's library ---


def use(node: Node) -> dict[str, tuple[float | None, str | None]]:
    (container,) = told(node.seen[-1]).containers
    assert container.use is not None
    ratios = {gpu.uuid: gpu.utilisation_ratio for gpu in container.use.gpus}
    return {uuid: (ratio.value, ratio.reason) for uuid, ratio in ratios.items() if ratio}


def test_a_process_that_computes_is_its_containers_and_a_foreign_one_is_nobodys(node: Node) -> None:
    node.plays("h100", (0, OURS, 300), (0, FOREIGN, 100))
    node.driver.fails(f"DeviceGetProcessUtilization 0 {OURS}:40:0 {FOREIGN}:30:0")
    node.read()
    assert {GPU0: (0.4, None)} == use(node)
    assert node.seen[-1].containers[0].use.gpu_times[GPU0].busy_us.value > 0  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    "row, expected",
    [
        (f"{OURS}:40:5000", (0.0, None)),  # what it still has of long ago
        (f"0:40:0 {OURS}:10:0", (0.1, None)),
        (f"{OURS}:4294967295:0", (None, "implausible")),
        (f"{OURS}:40:-5000", (0.0, None)),  # of a time to come
        ("none", (0.0, None)),
        ("error 3", (None, "not_supported")),
        ("error 999", (None, "driver_error")),
    ],
    ids=["old", "pid 0", "implausible", "to come", "none", "not supported", "failed"],  # pids differ between workers
)
def test_samples_that_say_nothing_of_this_time_are_left_out(
    node: Node, row: str, expected: tuple[float | None, str | None]
) -> None:
    node.plays("h100", (0, OURS, 300))
    node.read()
    node.driver.fails(f"DeviceGetProcessUtilization 0 {row}")
    node.read()
    assert {GPU0: expected} == use(node)


def test_parts_of_a_split_gpu_have_no_samples(node: Node) -> None:
    node.plays("h200-mig")
    node.driver.fails(
        f"DeviceGetComputeRunningProcesses_v3 0.0 {OURS}:1000000", "DeviceGetMemoryInfo_v2 0.0 9MiB 0 0 9MiB"
    )
    node.read()
    assert {MIG0: (None, "mig_enabled")} == use(node)


# --- what tasks say ---


def test_the_time_in_which_tasks_are_open_is_told_beside_it() -> None:
    core = Core("n1", "start", "boot", Capacity(1000, 1000))
    rows = (
        row(1, 0, begin=True),
        row(2, 100, begin=True),
        row(3, 300, ends=1),
        row(4, 500, ends=2),
        row(5, 900, begin=True),
    )
    core.handle(RingsRead(1_000, 1, (RingRows(RingInfo(ring="r", container="a"), rows, taken=5, head=5),)), 1_000)
    assert 500 + 100 == tasks_us(core, 1_000)
    core.handle(
        RingsRead(2_000, 1, (RingRows(RingInfo(ring="r", container="a"), writer_gone=True, taken=5, head=5),)), 2_000
    )
    core.handle(Probed(Snapshot((), CONTAINERS)), 2_000)
    assert 500 + 1_100 == tasks_us(core, 3_000)


def row(seq: int, stamp_us: int, *, begin: bool = False, ends: int = 0) -> Row:
    kind = TaskEventKind.BEGIN if begin else TaskEventKind.END
    return Row(kind, seq, ends, 1, stamp_us, 1_000_000 * begin, "t")


def tasks_us(core: Core, now_us: int) -> int | None:
    (emit,) = core.handle(Tick("metrics", 1), now_us)
    assert isinstance(emit.body, NodeMetrics)
    return {each.container: each.tasks_us for each in emit.body.containers}["a"]
