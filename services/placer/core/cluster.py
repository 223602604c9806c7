"""The cluster as arrays, one row per device, kept up to date node by node; decides nothing.

A node without devices has one row that is no device, so that it too is counted and explained. When a node changes,
its rows are computed again and no others, and it gets the number of the change: what others have worked out of a
node, kept in `memo`, holds until then. Devices that are loaded alike have the same number in `load`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from services.placer.core.accounts import DeviceAccount, Load, NodeAccount, exchanged
from services.placer.core.columns import Columns, Ints, name_hash
from services.placer.core.demand import Demand
from services.placer.core.feasible import Verdicts
from services.placer.core.measured import Measured
from services.placer.core.memo import Memo
from shared.admission import Loads, Sharing
from shared.devices import core_of
from shared.messages import SHARE_WHOLE_MICRO, DeviceFacts, DeviceStanding, NodeFacts, NodeState, Reservation

STATES: Final = tuple(NodeState)
UNKNOWN: Final = -1

SLOT_LABEL: Final = "laxity.dev/slot"
"""The label of a node that says which fixed size of request it takes: 1, 2, 4 or 8 devices."""

RESOURCES: Final = ("cpu", "memory", "gpu")
"""Of a node, in milli CPU, MiB, and millionths of a device over all its healthy devices."""

GUARANTEED, TIGHT, AT_RISK = range(3)
"""What the node list says about a device, best first."""

_DEMANDS_KEPT: Final = 128
"""Demands whose admission is remembered for each kind of load: at most 16 bytes each, so 1 MB at 80,000 devices."""
_MEMO_KEPT: Final = 512
"""Things remembered in `memo`, two for each kind of request: at most 1 MB each at 80,000 devices."""

_LOGGED: Final = 4096
"""Changes of nodes that are listed until the list is begun anew."""

_NODE_COLUMNS: Final[dict[str, Any]] = {
    "known": np.bool_,
    "row_count": np.int64,
    "changed": np.int64,
    "facts_changed": np.int64,
    "state": np.int8,
    "closed": np.bool_,
    "cpu_capacity": np.int64,
    "memory_capacity": np.int64,
    "held": (np.int64, (24,)),
    "rank": np.int64,
    "hash": np.uint64,
}
CPU_FREE, MEMORY_FREE, MOST_FREE, WHOLE_FREE, SHARE_FREE, CLASSES = range(6)
ROOM: Final = slice(0, 4)
USED: Final = slice(6, 9)
COUNTED: Final = slice(0, 9)
FIRST_ROW, DEVICES, SLOT, MODEL = range(9, 13)
CAPACITY: Final = slice(13, 16)
SHARES: Final = slice(16, None)
"""Where that stands in the column `held` of a node: all that decisions look at, so that they read it at once. COUNTED
and SHARES change with every reservation, ROOM is what a request needs enough of. `shares` is what is free of each
device, 0 of one that is not open, and MOST_FREE the largest of them; there are as many as the largest node has."""

_HELD: Final[dict[str, tuple[str, int | slice]]] = {
    "cpu_free": ("held", CPU_FREE),
    "memory_free": ("held", MEMORY_FREE),
    "whole_free": ("held", WHOLE_FREE),
    "share_free": ("held", SHARE_FREE),
    "classes": ("held", CLASSES),
    "used": ("held", USED),
    "first_row": ("held", FIRST_ROW),
    "devices": ("held", DEVICES),
    "slot": ("held", SLOT),
    "model": ("held", MODEL),
    "capacity": ("held", CAPACITY),
    "shares": ("held", SHARES),
}
_DEVICE_COLUMNS: Final[dict[str, Any]] = {
    "node": np.int64,
    "is_device": np.bool_,
    "healthy": np.bool_,
    "taken": np.bool_,
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

    Memory is UNKNOWN (-1) where it is not known. `capacity` and `used` of a node stand side by side for RESOURCES, what
    is unknown counting as unused: for ranking only. Nothing here judges how old facts are: the node list does, by when
    it heard a node, and its verdict comes as the node's state.
    """

    compiled = True  # False: decisions about it go by numpy, also where kernels.py is compiled; they are the same

    def __init__(self, kinds_kept: int = 10_000, measured: Measured | None = None) -> None:
        """`kinds_kept`: kinds of load that no device has any more are forgotten when there are so many of them."""
        self._kinds_kept = kinds_kept
        self.measured = measured or Measured()
        self.nodes = Columns(_NODE_COLUMNS, _HELD)
        self.devices = Columns(_DEVICE_COLUMNS)
        self.loads: dict[int, Load] = {}
        self.codes: dict[object, int] = {}
        """Models, groups and ways of sharing as numbers. Never shrinks: there are few."""
        self.things: list[object] = []
        """By their numbers."""
        self._sharings: dict[int, Sharing] = {}
        self.kinds: list[Load] = []
        """The kinds of load by their numbers."""
        self._kind_numbers: dict[Load, int] = {}
        self._arrays = Loads()
        """The first of the kinds of load, as far as many had to be tested at once."""
        self._verdicts: Memo[Verdicts] = Memo(_DEMANDS_KEPT)
        self.memo: Memo[Any] = Memo(_MEMO_KEPT)
        """What others have worked out about this cluster, theirs to keep in step with `changes`."""
        self.changes = 0
        """Counts the changes of nodes. `nodes["changed"]` is the number of a node's last one, `facts_changed` that of
        the last one that was more than a change of what is reserved."""
        self._log = np.zeros(_LOGGED, np.int64)
        self._log_start = 0
        """The nodes of the last changes, from the one after this number on: shorter to look through than all nodes."""
        self.facts_changes = 0
        """The number of the last change of any node's facts."""
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._rows: dict[str, range] = {}
        self._facts: dict[str, NodeFacts] = {}
        self._substance: dict[str, object] = {}
        self._accounts: dict[str, NodeAccount] = {}
        self._reservations: dict[str, tuple[Reservation, ...]] = {}
        self._shadows: dict[str, Mapping[str, tuple[Reservation, ...]]] = {}
        self._shade: dict[str, tuple[Reservation, ...]] = {}
        """By node: what is kept there, counted as if it were reserved."""
        self._undo: dict[str, tuple[Reservation, ...]] | None = None
        self._order: tuple[Ints, Ints, Ints] | None = None
        self.names_changes = 0
        """Counts the changes of which nodes and devices there are: their ranks and hashes hold until then."""

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
        elif known is None or [(d.index, d.uuid) for d in known.devices] != [(d.index, d.uuid) for d in facts.devices]:
            self._rename()
        self._facts[node] = facts
        if self._substance.get(node) != (substance := _substance(facts)):
            self._substance[node] = substance
            self._describe(node, facts)
            self._count(node)
            self._touch(self._slots[node], facts=True)

    def set_reservations(
        self, node: str, reservations: tuple[Reservation, ...], come: Reservation | None = None
    ) -> None:
        """Replaces all reservations of a node, whether or not it is known; `come`: they are those before and this."""
        before = self._reservations.get(node, ())
        if reservations is before:
            return
        if self._undo is not None:
            self._undo.setdefault(node, before)
        if reservations:
            self._reservations[node] = reservations
        else:
            self._reservations.pop(node, None)
        if node in self._facts:
            if come is not None and len(reservations) == len(before) + 1:
                self._write(node, account := self._accounts[node], account.add(come))
            else:
                shade = self._shade.get(node, ())  # mostly there is none, and adding it would copy all of both
                self._recount(node, before + shade, reservations + shade)
            self._touch(self._slots[node])

    def set_shadow(self, request_id: str, kept: Mapping[str, tuple[Reservation, ...]]) -> None:
        """By node, all that is kept for a request that waits: not free for others, though nobody holds it."""
        before = self._shadows.get(request_id, {})
        if before == kept:
            return
        self._shadows.pop(request_id, None)
        if kept:
            self._shadows[request_id] = kept
        for node in {**before, **kept}:
            was = self._shade.pop(node, ())
            now = tuple(each for shadow in self._shadows.values() for each in shadow.get(node, ()))
            if now:
                self._shade[node] = now
            if node in self._facts:
                held = self.reservations(node)
                self._recount(node, (*held, *was), (*held, *now))
                self._touch(self._slots[node])

    @property
    def shadows(self) -> Set[str]:
        """The requests that something is kept for, as they are now."""
        return self._shadows.keys()

    @contextmanager
    def without_shadows(self, request_ids: Collection[str]) -> Iterator[None]:
        """As if nothing were kept for these."""
        taken = {request_id: self._shadows[request_id] for request_id in request_ids if request_id in self._shadows}
        for request_id in taken:
            self.set_shadow(request_id, {})
        try:
            yield
        finally:
            for request_id, kept in taken.items():
                self.set_shadow(request_id, kept)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is reserved inside is taken back at the end; a trial inside a trial takes back its own."""
        outer, self._undo = self._undo, {}
        try:
            yield
        finally:
            undo, self._undo = self._undo, None
            for node, before in undo.items():
                self.set_reservations(node, before)
            self._undo = outer

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

    def rows_of(self, slots: Ints) -> Ints:
        """The device rows of nodes, node by node; one that is not known (any more) has none."""
        if not len(slots):
            return slots
        counts = self.nodes["row_count"][slots]
        ends = counts.cumsum()
        rows: Ints = (self.nodes["first_row"][slots] - ends + counts).repeat(counts)
        rows += np.arange(ends[-1])
        return rows

    def changed_since(self, number: int, *, once: bool = True) -> Ints:
        """The rows of nodes that have changed since `changes` was this number, those that left among them."""
        if number < self._log_start:
            return (self.nodes["changed"] > number).nonzero()[0]
        slots = self._log[number - self._log_start : self.changes - self._log_start]
        return slots[self.nodes["changed"][slots] == np.arange(number + 1, self.changes + 1)] if once else slots

    def device(self, row: int) -> DeviceFacts:
        """The device behind a row that is one."""
        node = self._names[int(self.devices["node"][row])]
        return self._facts[node].devices[row - self._rows[node].start]

    def label(self, row: int) -> str:
        """A device as people call it: `node-3/gpu-0`."""
        device, node = self.device(row), self._names[int(self.devices["node"][row])]
        return f"{node}/{'gpu' if core_of(device.uuid) is None else 'core'}-{device.index}"

    def verdicts(self, demand: Demand, loads: Ints) -> Verdicts:
        """The admission test of this demand, up to date for these kinds of load; the last few are remembered."""
        known = (demand.kind, demand.task, self.measured.key(demand))
        found = self._verdicts.get(known, lambda: Verdicts(demand, self.measured))
        found.refresh(loads, self.kinds, self._arrays)
        return found

    def all_rows(self) -> Ints:
        """All device rows, in the order of their numbers."""
        return self._ordered()[1]

    def nodes_of_all_rows(self) -> Ints:
        """The node row of each of them."""
        return self._ordered()[2]

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
        self._rows[node] = rows = self.devices.take(count)
        self.nodes.widen("held", SHARES.start + count)
        self.nodes.write(range(slot, slot + 1), known=True, first_row=rows.start, row_count=count, shares=0)
        self._rename()

    def _forget(self, node: str) -> None:
        slot, rows = self._slots.pop(node), self._rows.pop(node)
        del self._facts[node], self._names[slot], self._substance[node], self._accounts[node]
        for row in rows:
            self.loads.pop(row, None)
        self.nodes.write(range(slot, slot + 1), known=False, row_count=0)
        self._touch(slot, facts=True)
        self.nodes.give_back(range(slot, slot + 1))
        self.devices.give_back(rows)
        self._rename()

    def _rename(self) -> None:
        self._order = None
        self.names_changes += 1

    def _ordered(self) -> tuple[Ints, Ints, Ints]:
        """Node rows by name, device rows by number, and the node row of each of these. `rank` is a row's place by name;
        devices go by the name of their node, then index and uuid.
        """
        if self._order is None:
            names = sorted(self._slots)
            slots = np.array([self._slots[name] for name in names], np.int64)
            rows = np.array([row for name in names for row in self._by_index(name)], np.int64)
            self.nodes["rank"][slots] = np.arange(len(slots))
            self.devices["rank"][rows] = np.arange(len(rows))
            rows.sort()
            self._order = slots, rows, self.devices["node"][rows]
        return self._order

    def _by_index(self, node: str) -> list[int]:
        found = zip(self._facts[node].devices, self._rows[node], strict=False)
        return [row for _, _, row in sorted((d.index, d.uuid, row) for d, row in found)] or list(self._rows[node])

    def _code(self, thing: object) -> int:
        code = self.codes.setdefault(thing, len(self.codes))
        if code == len(self.things):
            self.things.append(thing)
        return code

    def _sharing(self, device: DeviceFacts) -> int:
        code = self._code(sharing := Sharing.of(device))
        self._sharings[code] = sharing
        return code

    def _describe(self, node: str, facts: NodeFacts) -> None:
        """Writes what does not depend on reservations."""
        slot, rows, devices = self._slots[node], self._rows[node], facts.devices
        self.nodes.write(
            range(slot, slot + 1),
            state=STATES.index(facts.state),
            closed=facts.closed is not None,
            cpu_capacity=facts.cpu_milli,
            memory_capacity=facts.memory_mib,
            devices=(healthy := sum(d.healthy for d in devices)),
            capacity=[facts.cpu_milli, facts.memory_mib, healthy * SHARE_WHOLE_MICRO],
            slot=_slot(facts),
            model=self._code(("model", devices[0].model)) if devices else 0,
            hash=name_hash(node),
        )
        self.devices.write(rows, node=slot, is_device=bool(devices), hash=name_hash(node))
        if devices:
            self.devices.write(
                rows,
                healthy=[d.healthy for d in devices],
                taken=[d.holder is not None for d in devices],
                model=[self._code(("model", d.model)) for d in devices],
                group=[self._code(("group", d.group)) for d in devices],
                sharing=[self._sharing(d) for d in devices],
                memory_capacity=[UNKNOWN if d.memory_mib is None else d.memory_mib for d in devices],
                risk=[_risk(d) for d in devices],
                listed=[not _excluded(d) for d in devices],
                hash=[name_hash(f"{node}\x00{d.uuid}") for d in devices],
            )

    def _touch(self, slot: int, *, facts: bool = False) -> None:
        if self.changes - self._log_start == _LOGGED:
            self._log, self._log_start = np.zeros(_LOGGED, np.int64), self.changes
        self._log[self.changes - self._log_start] = slot
        self.changes += 1
        self.nodes.arrays["changed"][slot] = self.changes
        if facts:
            self.nodes.arrays["facts_changed"][slot] = self.facts_changes = self.changes

    def _count(self, node: str) -> None:
        """Writes what is left of a node and its devices, counted from its facts and its reservations."""
        account = self._accounts[node] = NodeAccount(
            self._facts[node], (*self.reservations(node), *self._shade.get(node, ()))
        )
        self._write(node, account, range(len(account.devices)))

    def _recount(self, node: str, before: tuple[Reservation, ...], after: tuple[Reservation, ...]) -> None:
        """The same from what was counted before: only what came and went is looked at."""
        if (difference := exchanged(before, after)) is None:
            self._count(node)
            return
        account, (gone, come) = self._accounts[node], difference
        places: set[int] = set()
        for reservation in gone:
            places.update(account.remove(reservation))
        for reservation in come:
            places.update(account.add(reservation))
        self._write(node, account, places)

    def _write(self, node: str, account: NodeAccount, places: Iterable[int]) -> None:
        if len(self.kinds) > self._kinds_kept + 2 * len(self.devices):
            self._renumber()
        slot, start, facts = self._slots[node], self._rows[node].start, self._facts[node]
        held, cpu, memory = self.nodes.arrays["held"], account.cpu_free, account.memory_free
        for place in places:
            self._write_device(start + place, account.devices[place])
            held[slot, SHARES.start + place] = account.shares_free[place]
        held[slot, COUNTED] = (
            UNKNOWN if cpu is None else cpu,
            UNKNOWN if memory is None else memory,
            max(account.shares_free) if account.shares_free else 0,
            account.whole_free,
            account.share_free,
            account.classes,
            0 if cpu is None else facts.cpu_milli - cpu,
            0 if memory is None else facts.memory_mib - memory,
            len(account.devices) * SHARE_WHOLE_MICRO - account.share_free,
        )

    def _write_device(self, row: int, account: DeviceAccount) -> None:
        self.loads[row] = load = account.load()
        memory, devices = account.memory_free, self.devices.arrays
        devices["share_free"][row] = account.share_free
        devices["memory_free"][row] = UNKNOWN if memory is None else memory
        devices["promised"][row] = load.promised
        devices["load"][row] = self.kind_number(load)

    def _renumber(self) -> None:
        """Forgets the kinds of load that no device has any more."""
        used = np.unique(self.devices["load"][list(self.loads)])
        new = np.zeros(len(self.kinds), np.int64)
        new[used] = np.arange(len(used))
        self.devices["load"][:] = new[self.devices["load"]]
        self.kinds = [self.kinds[number] for number in used.tolist()]
        self._kind_numbers = {load: number for number, load in enumerate(self.kinds)}
        self._arrays.keep(used[used < len(self._arrays)])  # kinds are met in the order of their numbers
        for verdicts in self._verdicts.values():
            verdicts.keep(used)


def _substance(facts: NodeFacts) -> object:
    """All that decisions look at: the same for facts that differ in when they were written or in words."""
    devices = [
        (d.uuid, d.index, d.model, d.group, d.healthy, d.memory_mib, d.foreign_share_micro, d.foreign_memory_mib)
        for d in facts.devices
    ]
    shared = [(Sharing.of(d), _risk(d), _excluded(d), d.holder is None) for d in facts.devices]
    use = (facts.cpu_milli, facts.memory_mib, facts.foreign_cpu_milli, facts.foreign_memory_mib)
    return facts.state, facts.closed, use, facts.labels, devices, shared


def _slot(facts: NodeFacts) -> int:
    size = facts.labels.get(SLOT_LABEL, "")
    return int(size) if size.isdecimal() and len(size) < 5 else 0


def _risk(device: DeviceFacts) -> int:
    """The worst that is said of it: at risk in one class is at risk, and guaranteed is guaranteed in all."""
    standings = {standing.standing for standing in device.classes.values()}
    if DeviceStanding.AT_RISK in standings:
        return AT_RISK
    return GUARANTEED if standings == {DeviceStanding.GUARANTEED} else TIGHT


def _excluded(device: DeviceFacts) -> bool:
    """Whether the node list keeps it out of every list (its data is too old)."""
    return {standing.standing for standing in device.classes.values()} == {DeviceStanding.EXCLUDED}
