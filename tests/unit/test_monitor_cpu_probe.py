"""What /proc says, also where it says nonsense: a made-up /proc, and the two spinning processes' marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.monitor.probes import proc as procfs
from services.monitor.probes.base import FIRST_SAMPLE, UNREADABLE, Reading
from services.monitor.probes.cpu import CoreSettings, CpuProbe
from services.monitor.probes.proc import CoreTimes
from services.monitor.slices import UNKNOWN, Run, Sharing, judge, measure
from shared.messages import Regime
from tests.monitor_folders import labels_of

KERNEL_FLAG = 0x00200000
MIB_PAGES = round(1 / procfs.PAGE_MIB)


class Machine:
    """A made-up /proc of two cores and 1,000 MiB, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.root = folder / "rings"
        self.proc.mkdir()
        self.root.mkdir()
        self.now_s = 100.0
        self.pinned: dict[int, frozenset[int]] = {}
        self.memory(1000, 700)
        self.times("cpu0 100 0 0 100 0 0 0 0", "cpu1 0 0 0 200 0 0 0 0")
        self.probe = self.a_probe()

    def a_probe(self) -> CpuProbe:
        return CpuProbe(
            self.root,
            {0: CoreSettings(), 1: CoreSettings(Regime.EXCLUSIVE)},
            proc=self.proc,
            machine="m",
            affinity=lambda pid: self.pinned.get(pid, frozenset({0, 1})),
            clock_s=lambda: self.now_s,
        )

    def memory(self, total_mib: object, available_mib: object) -> None:
        scaled = [value * 1024 if isinstance(value, int) else value for value in (total_mib, available_mib)]
        (self.proc / "meminfo").write_text(f"MemTotal: {scaled[0]} kB\nMemFree: 1 kB\nMemAvailable: {scaled[1]} kB\n")

    def times(self, *lines: str) -> None:
        (self.proc / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 0"]))

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        session: int = 0,
        ticks: int = 0,
        mib: int = 0,
        flags: int = 0,
        start: int = 5,
        **env: str,
    ) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        fields = [
            "S",
            parent,
            0,
            session,
            0,
            0,
            flags,
            0,
            0,
            0,
            0,
            ticks,
            0,
            0,
            0,
            20,
            0,
            1,
            0,
            start,
            0,
            mib * MIB_PAGES,
            0,
        ]
        (folder / "stat").write_text(f"{pid} (a) b ( c) {' '.join(map(str, fields))}")
        (folder / "environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in env.items()))

    def end(self, pid: int) -> None:
        for path in (self.proc / str(pid)).iterdir():
            path.unlink()
        (self.proc / str(pid)).rmdir()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_memory_is_the_machines_split_evenly(machine: Machine) -> None:
    assert [(500, 150, 150)] * 2 == [
        (d.memory_mib.value, d.memory_used_mib.value, d.foreign_memory_mib.value) for d in machine.probe.read().devices
    ]


def test_utilisation_is_what_was_not_idle_since_the_last_cycle(machine: Machine) -> None:
    assert [Reading(None, FIRST_SAMPLE)] * 2 == [d.utilisation_ratio for d in machine.probe.read().devices]
    machine.times("cpu0 175 0 0 120 5 0 0 0", "cpu1 0 0 0 300 0 0 0 0")
    assert [0.75, 0.0] == [d.utilisation_ratio.value for d in machine.probe.read().devices]


def test_a_core_whose_counters_stand_still_or_go_back_is_unknown(machine: Machine) -> None:
    machine.probe.read()
    machine.times("cpu0 100 0 0 100 0 0 0 0", "cpu1 0 0 0 90 0 0 0 0")
    assert [Reading(None, UNREADABLE)] * 2 == [d.utilisation_ratio for d in machine.probe.read().devices]


def test_M26_M28_a_line_that_is_no_number_leaves_the_other_core(machine: Machine) -> None:
    machine.times("cpu0 [n/a] 0 0 100 0 0 0 0", "cpu1 0 0 0 200 0 0 0 0")
    assert {1: CoreTimes(200, 200)} == procfs.core_times(machine.proc)
    assert [1] == [device.index for device in machine.probe.read().devices]


@pytest.mark.parametrize("value", ["[n/a]", "-1", "", "1e3"])
def test_M26_M28_memory_that_is_no_number_is_unknown(machine: Machine, value: str) -> None:
    machine.memory(1000, value)
    device = machine.probe.read().devices[0]
    assert (500, None, UNREADABLE, None) == (
        device.memory_mib.value,
        device.memory_used_mib.value,
        device.memory_used_mib.reason,
        device.foreign_memory_mib.value,
    )


def test_without_meminfo_there_is_no_capacity_and_memory_is_unknown(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    assert [None, None] == [device.memory_mib.value for device in machine.probe.read().devices]
    with pytest.raises(OSError, match="MemTotal"):
        machine.probe.capacity()


def test_a_containers_memory_is_not_foreign(machine: Machine) -> None:
    folder = labels_of(machine.root, "c")
    machine.process(10, mib=100, LAXITY_RING_DIR=str(folder))
    machine.process(11, mib=50)
    assert 200 == machine.probe.read().foreign_memory_mib.value


def test_foreign_memory_is_never_below_zero(machine: Machine) -> None:
    machine.process(10, mib=400, LAXITY_RING_DIR=str(labels_of(machine.root, "c")))
    assert 0 == machine.probe.read().foreign_memory_mib.value


def test_children_and_sessions_of_a_container_are_its_own_without_its_environment(machine: Machine) -> None:
    machine.process(10, LAXITY_CONTAINER="c")
    machine.process(11, parent=10)
    machine.process(12, parent=11)
    machine.process(13, parent=1, session=10)
    machine.process(14, parent=1, session=14)
    labels_of(machine.root, "c")
    (container,) = machine.probe.read().containers
    assert (10, 11, 12, 13) == container.pids


def test_a_container_of_another_node_on_this_machine_is_foreign(machine: Machine) -> None:
    machine.process(10, mib=10, LAXITY_RING_DIR="/elsewhere/c", LAXITY_CONTAINER="c")
    snapshot = machine.probe.read()
    assert ((), 300) == (snapshot.containers, snapshot.foreign_memory_mib.value)


def test_foreign_time_counts_only_processes_pinned_to_that_core_alone(machine: Machine) -> None:
    machine.pinned = {20: frozenset({1}), 21: frozenset({0, 1}), 22: frozenset({1}), 23: frozenset({1})}
    labels_of(machine.root, "c")

    def run(ticks: int) -> None:
        machine.process(20, ticks=ticks)
        machine.process(21, ticks=ticks)
        machine.process(22, ticks=ticks, flags=KERNEL_FLAG)
        machine.process(23, ticks=ticks, LAXITY_CONTAINER="c")

    run(1000)
    assert [Reading(None, FIRST_SAMPLE)] * 2 == [d.foreign_share_micro for d in machine.probe.read().devices]
    machine.now_s += 1
    run(1000 + procfs.TICKS_PER_S // 4)
    snapshot = machine.probe.read()
    assert [0, 250_000] == [d.foreign_share_micro.value for d in snapshot.devices]
    assert 250 == snapshot.foreign_cpu_milli.value
    assert 0.25 == snapshot.containers[0].cpu_ratio.value


def test_a_new_process_with_an_old_pid_is_another_one(machine: Machine) -> None:
    machine.pinned = {20: frozenset({0})}
    machine.process(20, ticks=1000)
    machine.probe.read()
    machine.now_s += 1
    machine.process(20, ticks=procfs.TICKS_PER_S // 2, start=6)
    assert 500_000 == machine.probe.read().devices[0].foreign_share_micro.value


def test_M38_a_process_that_vanishes_while_it_is_read_is_skipped(machine: Machine) -> None:
    machine.process(10, mib=10, LAXITY_CONTAINER="c")
    (machine.proc / "11").mkdir()
    (machine.proc / "12").mkdir()
    (machine.proc / "12" / "stat").write_text("12 (half")
    labels_of(machine.root, "c")
    assert [(10,)] == [container.pids for container in machine.probe.read().containers]
    machine.end(10)
    assert [((), None)] == [(c.pids, c.memory_mib.value) for c in machine.probe.read().containers]


def test_a_process_that_becomes_a_container_after_its_fork_is_noticed(machine: Machine) -> None:
    machine.process(10)
    labels_of(machine.root, "c")
    assert ((),) == tuple(container.pids for container in machine.probe.read().containers)
    machine.now_s += 5
    machine.process(10, LAXITY_CONTAINER="c")
    assert ((10,),) == tuple(container.pids for container in machine.probe.read().containers)


def test_malformed_labels_leave_the_container_with_the_name_of_its_folder(machine: Machine) -> None:
    (labels_of(machine.root, "c") / "container.json").write_text("{")
    assert [("c", None)] == [(c.container, c.request_id) for c in machine.probe.read().containers]


def test_the_regime_of_a_core_is_as_stated(machine: Machine) -> None:
    assert [Regime.TIME_SLICED, Regime.EXCLUSIVE] == [device.regime for device in machine.probe.read().devices]


def turns(*lengths_us: int, switch_us: int = 10) -> list[Run]:
    runs, at_us = [], 0
    for index, length_us in enumerate(lengths_us):
        runs.append(Run(at_us * 1_000, (at_us + length_us) * 1_000, index % 2))
        at_us += length_us + switch_us
    return runs


def test_slice_and_switch_cost_are_told_from_who_ran_when() -> None:
    assert Sharing(4000, 10) == judge(turns(*[4000] * 20))


def test_interrupts_within_a_turn_do_not_end_it() -> None:
    split = [Run(r.began_ns, r.began_ns + 1_000_000, r.process) for r in turns(*[4000] * 20)]
    split += [Run(r.began_ns + 1_030_000, r.ended_ns, r.process) for r in turns(*[4000] * 20)]
    assert Sharing(4000, 10) == judge(split)


@pytest.mark.parametrize("runs", [[], turns(4000), turns(*[4000] * 20, switch_us=5000)])
def test_slices_are_unknown_where_the_two_did_not_take_turns(runs: list[Run]) -> None:
    assert UNKNOWN == judge(runs)


def test_slices_of_a_core_that_is_not_there_are_unknown() -> None:
    assert UNKNOWN == measure(100_000, tries=1, length_us=1_000)


def test_processes_of_a_container_that_hide_their_environment_are_its_own(machine: Machine) -> None:
    folder = labels_of(machine.root, "c", request_id="q")
    id_ = "a" * 64
    machine.process(7, LAXITY_RING_DIR=str(folder))
    machine.process(8, start=9)
    for pid in (7, 8):
        (machine.proc / str(pid) / "cgroup").write_text(f"0::/docker/{id_}\n")
    (container,) = machine.probe.read().containers
    assert ((7, 8), id_) == (container.pids, container.use and container.use.runtime_id)
