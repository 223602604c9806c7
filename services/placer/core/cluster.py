"""The cluster as arrays, one row per device, kept up to date node by node; decides nothing.

A node without devices has one row that is no device, so that it too is counted and explained. When a node changes,
its rows are computed again and no others. Devices that are loaded alike have the same number in `load`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from services.placer.core.accounts import DeviceAccount, Load, device_accounts, left, sharing_of
from services.placer.core.columns import Columns, Ints
from services.placer.core.demand import Demand
from services.placer.core.feasible import Verdicts
from shared.admission import Sharing
from shared.devices import core_of
from shared.messages import SHARE_WHOLE_MICRO, DeviceFacts, DeviceStanding, NodeFacts, NodeState, Reservation

STATES: Final = tuple(NodeState)
UNKNOWN: Final = -1

GUARANTEED, TIGHT, AT_RISK = range(3)
"""What the node list says about a device, best first."""

_DEMANDS_REMEMBERED: Final = 16
_KINDS_KEPT: Final = 10_000

_NODE_COLUMNS: Final = {
    "state": np.int8,
    "cpu_capacity": np.int64,
    "cpu_free": np.int64,
    "memory_capacity": np.int64,
    "memory_free": np.int64,
    "devices": np.int64,
    "share_free": np.int64,
    "whole_free": np.int64,
    "rank": np.int64,
    "hash": np.uint64,
}
_DEVICE_COLUMNS: Final = {
    "node": np.int64,
    "is_device": np.bool_,
    "healthy": np.bool_,
    "model": np.int64,
    "group": np.int64,
    "sharing": np.int64,
    "share_free": np.int64,
    "memory_capacity": np.int64,
    "memory_free": np.int64,
    "promised": np.int64,
    "risk": np.int64,
    "listed": np.bool_,
    "load": np.int64,
    "rank": np.int64,
    "hash": np.uint64,
}


class Cluster:
    """What every node has, holds and has left. Free = capacity - reservations - foreign use, never below 0.

    Memory is UNKNOWN (-1) where it is not known. Nothing here judges how old facts are: the node list does, by when
    it heard a node, and its verdict comes as the node's state.
    """

    def __init__(self) -> None:
        self.nodes = Columns(_NODE_COLUMNS)
        self.devices = Columns(_DEVICE_COLUMNS)
        self.loads: dict[int, Load] = {}
        self.codes: dict[object, int] = {}
        """Models, groups and ways of sharing as numbers. Never shrinks: there are few."""
        self._sharings: dict[int, Sharing] = {}
        self.kinds: list[Load] = []
        """The kinds of load by their numbers."""
        self._kind_numbers: dict[Load, int] = {}
        self._verdicts: dict[object, Verdicts] = {}
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._rows: dict[str, range] = {}
        self._facts: dict[str, NodeFacts] = {}
        self._reservations: dict[str, tuple[Reservation, ...]] = {}
        self._order: tuple[Ints, Ints] | None = None

    # ------------------------------------------------------------------------------------------ changes

    def set_facts(self, node: str, facts: NodeFacts | None, now_us: int) -> None:  # noqa: ARG002  # part of the interface: when it was learnt
        """What the node list says about a node; None forgets it (its reservations stay)."""
        known = self._facts.get(node)
        if known is not None and (facts is None or len(known.devices) != len(facts.devices)):
            self._forget(node)
        if facts is None:
            return
        if node not in self._slots:
            self._admit(node, max(1, len(facts.devices)))
        elif known is None or [d.uuid for d in known.devices] != [d.uuid for d in facts.devices]:
            self._order = None
        self._facts[node] = facts
        self._describe(node, facts)
        self._count(node)

    def set_reservations(self, node: str, reservations: tuple[Reservation, ...]) -> None:
        """Replaces all reservations of a node, whether or not it is known."""
        if reservations:
            self._reservations[node] = reservations
        else:
            self._reservations.pop(node, None)
        if node in self._facts:
            self._count(node)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is reserved inside is taken back at the end."""
        before = dict(self._reservations)
        try:
            yield
        finally:
            for node in before.keys() | self._reservations.keys():
                if self._reservations.get(node) is not before.get(node):
                    self.set_reservations(node, before.get(node, ()))

    # ---------------------------------------------------------------------------------------- questions

    def reservations(self, node: str) -> tuple[Reservation, ...]:
        return self._reservations.get(node, ())

    def facts(self, node: str) -> NodeFacts | None:
        return self._facts.get(node)

    def slot(self, node: str) -> int | None:
        """A node's row among the node columns; None where the node is not known."""
        return self._slots.get(node)

    def name(self, slot: int) -> str:
        return self._names[slot]

    def rows_of(self, slot: int) -> Ints:
        """The device rows of a node."""
        rows = self._rows[self._names[slot]]
        return np.arange(rows.start, rows.stop)

    def device(self, row: int) -> DeviceFacts:
        """The device behind a row that is one."""
        node = self._names[int(self.devices["node"][row])]
        return self._facts[node].devices[row - self._rows[node].start]

    def label(self, row: int) -> str:
        """A device as people call it: `node-3/gpu-0`."""
        device, node = self.device(row), self._names[int(self.devices["node"][row])]
        return f"{node}/{'gpu' if core_of(device.uuid) is None else 'core'}-{device.index}"

    def verdicts(self, demand: Demand, rows: Ints) -> Verdicts:
        """The admission test of this demand, up to date for these rows; the last few demands are remembered."""
        key = (demand.kind, demand.task)
        if (found := self._verdicts.pop(key, None)) is None:
            found = Verdicts(demand)
            if len(self._verdicts) >= _DEMANDS_REMEMBERED:
                self._verdicts.pop(next(iter(self._verdicts)))
        self._verdicts[key] = found
        found.refresh(self.devices["load"][rows], self.kinds)
        return found

    def all_rows(self) -> Ints:
        """All device rows, by node name, device index and uuid."""
        return self._ordered()[1]

    def all_slots(self) -> Ints:
        """All node rows, by name."""
        return self._ordered()[0]

    def sharing(self, code: int) -> Sharing:
        """How devices with this code in `sharing` are shared."""
        return self._sharings[code]

    def kind_number(self, load: Load) -> int:
        """The number of a kind of load, a new one for a new kind."""
        number = self._kind_numbers.setdefault(load, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(load)
        return number

    # ---------------------------------------------------------------------------------- keeping in step

    def _admit(self, node: str, count: int) -> None:
        slot = self.nodes.take(1).start
        self._slots[node], self._names[slot] = slot, node
        self._rows[node] = self.devices.take(count)
        self._order = None

    def _forget(self, node: str) -> None:
        slot, rows = self._slots.pop(node), self._rows.pop(node)
        del self._facts[node], self._names[slot]
        for row in rows:
            self.loads.pop(row, None)
        self.nodes.give_back(range(slot, slot + 1))
        self.devices.give_back(rows)
        self._order = None

    def _ordered(self) -> tuple[Ints, Ints]:
        """Node and device rows in the order of their names; `rank` is a row's place in it."""
        if self._order is None:
            names = sorted(self._slots)
            slots = np.array([self._slots[name] for name in names], np.int64)
            rows = np.array([row for name in names for row in self._by_index(name)], np.int64)
            self.nodes["rank"][slots] = np.arange(len(slots))
            self.devices["rank"][rows] = np.arange(len(rows))
            self._order = slots, rows
        return self._order

    def _by_index(self, node: str) -> list[int]:
        found = zip(self._facts[node].devices, self._rows[node], strict=False)
        return [row for _, _, row in sorted((d.index, d.uuid, row) for d, row in found)] or list(self._rows[node])

    def _code(self, thing: object) -> int:
        return self.codes.setdefault(thing, len(self.codes))

    def _sharing(self, device: DeviceFacts) -> int:
        code = self._code(sharing := sharing_of(device))
        self._sharings[code] = sharing
        return code

    def _describe(self, node: str, facts: NodeFacts) -> None:
        """Writes what does not depend on reservations."""
        slot, rows, devices = self._slots[node], self._rows[node], facts.devices
        self.nodes.write(
            range(slot, slot + 1),
            state=STATES.index(facts.state),
            cpu_capacity=facts.cpu_milli,
            memory_capacity=facts.memory_mib,
            devices=sum(d.healthy for d in devices),
            hash=name_hash(node),
        )
        self.devices.write(rows, node=slot, is_device=bool(devices), hash=name_hash(node))
        if devices:
            self.devices.write(
                rows,
                healthy=[d.healthy for d in devices],
                model=[self._code(("model", d.model)) for d in devices],
                group=[self._code(("group", d.group)) for d in devices],
                sharing=[self._sharing(d) for d in devices],
                memory_capacity=[UNKNOWN if d.memory_mib is None else d.memory_mib for d in devices],
                risk=[_risk(d) for d in devices],
                listed=[not _excluded(d) for d in devices],
                hash=[name_hash(f"{node}\x00{d.uuid}") for d in devices],
            )

    def _count(self, node: str) -> None:
        """Writes what is left of a node and its devices."""
        if len(self.kinds) > _KINDS_KEPT + 4 * len(self.devices):
            self._renumber()
        facts, held, slot = self._facts[node], self.reservations(node), self._slots[node]
        accounts = device_accounts(facts, held)
        if accounts:
            self._count_devices(self._rows[node], accounts)
        shares = [account.share_free for account in accounts if account.facts.healthy]
        cpu = left(facts.cpu_milli, sum(r.cpu_milli for r in held), facts.foreign_cpu_milli)
        memory = left(facts.memory_mib, sum(r.memory_mib for r in held), facts.foreign_memory_mib)
        self.nodes.write(
            range(slot, slot + 1),
            cpu_free=UNKNOWN if cpu is None else cpu,
            memory_free=UNKNOWN if memory is None else memory,
            share_free=sum(shares),
            whole_free=shares.count(SHARE_WHOLE_MICRO),
        )

    def _renumber(self) -> None:
        """Forgets the kinds of load that no device has any more."""
        self.kinds, self._kind_numbers, self._verdicts = [], {}, {}
        for row, load in self.loads.items():
            self.devices.write(range(row, row + 1), load=self.kind_number(load))

    def _count_devices(self, rows: range, accounts: list[DeviceAccount]) -> None:
        loads = [account.load() for account in accounts]
        self.loads.update(zip(rows, loads, strict=True))
        memory = [account.memory_free for account in accounts]
        self.devices.write(
            rows,
            share_free=[account.share_free for account in accounts],
            memory_free=[UNKNOWN if free is None else free for free in memory],
            promised=[load.promised for load in loads],
            load=[self.kind_number(load) for load in loads],
        )


def _risk(device: DeviceFacts) -> int:
    """The worst that is said of it: at risk in one class is at risk, and guaranteed is guaranteed in all."""
    standings = {standing.standing for standing in device.classes.values()}
    if DeviceStanding.AT_RISK in standings:
        return AT_RISK
    return GUARANTEED if standings == {DeviceStanding.GUARANTEED} else TIGHT


def _excluded(device: DeviceFacts) -> bool:
    """Whether the node list keeps it out of every list (its data is too old)."""
    return {standing.standing for standing in device.classes.values()} == {DeviceStanding.EXCLUDED}


def name_hash(name: str) -> int:
    """The same number for the same name in every process: breaks ties."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
