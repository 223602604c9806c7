"""What one node has left, from its facts and its reservations: plain sums in integers, no arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shared.admission import DeviceType, RtTask, Sharing, Tenant, tenant_of
from shared.devices import core_of
from shared.messages import SHARE_WHOLE_MICRO, DeviceFacts, Kind, NodeFacts, Realtime, Reservation

_MOST_BITS = 62


@dataclass(slots=True)
class Load:
    """Who is on a device. The tasks bear no names, so that like devices compare equal; `names` stand beside them.

    `contexts` counts the reservations that declared no runtime, and foreign use as one more. Not to be changed (frozen
    ones take several times as long to make, and each reservation makes one).
    """

    sharing: Sharing
    residents: tuple[RtTask, ...] = ()
    contexts: int = 0
    device: DeviceType | None = None
    """What was measured on devices of this type holds on it."""
    tenants: tuple[Tenant, ...] | None = ()
    """All who are there, as those whose times are learned; None where somebody's cannot be."""
    foreign: bool = field(default=False, compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)

    def __hash__(self) -> int:
        """What tells most of them apart: the hash of all fields of all tasks takes long."""
        return hash((self.contexts, tuple([(task.deadline_us, task.runtime_us) for task in self.residents])))

    @property
    def promised(self) -> int:
        """How many of its residents something is promised to."""
        return len([task for task in self.residents if task.kind is not Kind.SOFT])


class DeviceAccount:
    """One device and who holds something of it, kept in step one reservation at a time.

    `share_free` is in millionths; unknown foreign use takes nothing off it, it counts as a context instead.
    `memory_free` is None where its memory, or what others use of it, is unknown. `foreign`: somebody of no reservation
    may be computing on it. `open`: it is well, and nobody else than Laxity gave it away.
    """

    __slots__ = (
        "_declared",
        "_device",
        "_held",
        "_memory_used",
        "_share_used",
        "_sharing",
        "facts",
        "foreign",
        "open",
        "share_free",
    )

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts
        self.open = facts.healthy and facts.holder is None
        self.foreign = _foreign(facts)
        self._sharing, self._device = _alike(Sharing.of(facts), DeviceType(facts.model, facts.regime))
        self._held: list[tuple[Reservation, RtTask | None, Tenant | None]] = []
        self._declared: tuple[tuple[RtTask, ...], tuple[str, ...], tuple[Tenant, ...]] | None = ((), (), ())
        """By all of them, in one order: None once somebody came or went who declares something."""
        self._share_used = facts.foreign_share_micro or 0
        self._memory_used = 0
        self.share_free = max(0, SHARE_WHOLE_MICRO - self._share_used)

    def add(self, reservation: Reservation) -> None:
        if timing := reservation.realtime:
            self._held.append((reservation, resident_task(timing), tenant_of(reservation.request_id, timing)))
            self._declared = None
        else:
            self._held.append((reservation, None, None))
        self._share_used += reservation.share_micro
        self._memory_used += reservation.device_memory_mib
        self.share_free = max(0, SHARE_WHOLE_MICRO - self._share_used)

    def remove(self, reservation: Reservation) -> None:
        """Takes off what was added as this very object."""
        place = next(place for place, (held, *_) in enumerate(self._held) if held is reservation)
        del self._held[place]
        if reservation.realtime:
            self._declared = None
        self._share_used -= reservation.share_micro
        self._memory_used -= reservation.device_memory_mib
        self.share_free = max(0, SHARE_WHOLE_MICRO - self._share_used)

    @property
    def memory_free(self) -> int | None:
        return left(self.facts.memory_mib, self._memory_used, self.facts.foreign_memory_mib)

    def load(self) -> Load:
        if self._declared is None:
            self._declared = self._declare()
        residents, names, tenants = self._declared
        return Load(
            self._sharing,
            residents,
            len(self._held) - len(residents) + self.foreign,
            self._device,
            None if self.foreign or len(tenants) < len(self._held) else tenants,
            self.foreign,
            names,
        )

    def _declare(self) -> tuple[tuple[RtTask, ...], tuple[str, ...], tuple[Tenant, ...]]:
        """The tasks, whose they are, and those whose times are learned."""
        named = [(task, held.request_id) for held, task, _ in self._held if task]
        named.sort(key=lambda pair: (pair[0].deadline_us, pair[0].runtime_us, pair[0].period_us, pair[1]))
        tenants = sorted([tenant for _, _, tenant in self._held if tenant], key=_by_profile)
        return tuple([task for task, _ in named]), tuple([name for _, name in named]), tuple(tenants)


def _by_profile(tenant: Tenant) -> tuple[str, int, float, str]:
    return tenant.profile, tenant.deadline_us or 0, tenant.guarantee, tenant.name


class NodeAccount:
    """One node: what of its CPU and memory is reserved, and its devices in the order of the facts.

    What is reserved on a device that is gone is left out.
    """

    def __init__(self, facts: NodeFacts, reservations: Sequence[Reservation]) -> None:
        self._facts = facts
        self.devices = [DeviceAccount(device) for device in facts.devices]
        self.shares_free = [device.share_free if device.open else 0 for device in self.devices]
        """Of each device, 0 of one that is not open."""
        self.share_free = sum(self.shares_free)
        self.whole_free = self.shares_free.count(SHARE_WHOLE_MICRO)
        """Devices that are well and that nobody uses."""
        self._places = {device.uuid: place for place, device in enumerate(facts.devices)}
        self._cpu_used = self._memory_used = 0
        self._number_of: Counter[int] = Counter()
        self.classes = 0
        """Bit 0 is set where somebody has part of a device, bit k where somebody has k whole ones."""
        for reservation in reservations:
            self.add(reservation)

    def add(self, reservation: Reservation) -> list[int]:
        """The places of the devices that it concerns."""
        return self._change(reservation, 1)

    def remove(self, reservation: Reservation) -> list[int]:
        """Takes back what was added as this very object; the places of the devices that it concerned."""
        return self._change(reservation, -1)

    @property
    def cpu_free(self) -> int | None:
        return left(self._facts.cpu_milli, self._cpu_used, self._facts.foreign_cpu_milli)

    @property
    def memory_free(self) -> int | None:
        return left(self._facts.memory_mib, self._memory_used, self._facts.foreign_memory_mib)

    def _change(self, reservation: Reservation, more: int) -> list[int]:
        """`more`: 1 where it comes, -1 where it goes."""
        places = [self._places[uuid] for uuid in reservation.devices if uuid in self._places]
        for place in places:
            device, before = self.devices[place], self.shares_free[place]
            (device.add if more > 0 else device.remove)(reservation)
            self.shares_free[place] = now = device.share_free if device.open else 0
            self.share_free += now - before
            self.whole_free += (now == SHARE_WHOLE_MICRO) - (before == SHARE_WHOLE_MICRO)
        self._cpu_used += more * reservation.cpu_milli
        self._memory_used += more * reservation.memory_mib
        bit = _class_bit(reservation)
        self._number_of[bit] = number = self._number_of[bit] + more
        self.classes = self.classes | bit if number else self.classes & ~bit
        return places


def _class_bit(reservation: Reservation) -> int:
    if not reservation.devices:
        return 0
    return 1 << min(_MOST_BITS, len(reservation.devices) if reservation.share_micro == SHARE_WHOLE_MICRO else 0)


def exchanged(
    before: Sequence[Reservation], after: Sequence[Reservation]
) -> tuple[list[Reservation], list[Reservation]] | None:
    """Which objects went and which came; None where one stood there twice."""
    gone = {id(reservation): reservation for reservation in before}
    if len(gone) < len(before):
        return None
    come = [reservation for reservation in after if gone.pop(id(reservation), None) is None]
    return list(gone.values()), come


def _foreign(facts: DeviceFacts) -> bool:
    """Who holds memory of a GPU has a context on it. Memory used on a machine says nothing about one of its cores."""
    return facts.foreign_share_micro != 0 or (facts.foreign_memory_mib != 0 and core_of(facts.uuid) is None)


@lru_cache(maxsize=4096)
def _alike(sharing: Sharing, device: DeviceType) -> tuple[Sharing, DeviceType]:
    """The same objects for like devices: these compare sooner than equal ones."""
    return sharing, device


@lru_cache(maxsize=4096)
def resident_task(realtime: Realtime | None) -> RtTask | None:
    """The task that a reservation declares, without a name; None without a runtime."""
    return RtTask.of("", realtime) if realtime else None


def left(capacity: int | None, reserved: int, foreign: int | None) -> int | None:
    """Capacity - reservations - foreign use, 0 where more is held than there is; None where either is unknown."""
    return None if capacity is None or foreign is None else max(0, capacity - reserved - foreign)
