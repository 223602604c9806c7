"""What one node has left, from its facts and its reservations: plain sums in integers, no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shared.admission import RtTask, Sharing
from shared.devices import core_of
from shared.messages import SHARE_WHOLE_MICRO, DeviceFacts, Kind, NodeFacts, Realtime, Reservation


@dataclass(frozen=True, slots=True)
class Load:
    """Who is on a device. The tasks bear no names, so that like devices compare equal; `names` stand beside them.

    `contexts` counts the reservations that declared no runtime, and foreign use as one more.
    """

    sharing: Sharing
    residents: tuple[RtTask, ...] = ()
    contexts: int = 0
    foreign: bool = field(default=False, compare=False)
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def promised(self) -> int:
        """How many of its residents something is promised to."""
        return sum(task.kind is not Kind.SOFT for task in self.residents)


@dataclass(slots=True)
class DeviceAccount:
    """One device: `memory_free` is None where its memory, or what others use of it, is unknown."""

    facts: DeviceFacts
    held: list[Reservation] = field(default_factory=list)

    @property
    def share_free(self) -> int:
        """In millionths. Unknown foreign use takes nothing off, it counts as a context instead."""
        used = sum(r.share_micro for r in self.held) + (self.facts.foreign_share_micro or 0)
        return max(0, SHARE_WHOLE_MICRO - used)

    @property
    def memory_free(self) -> int | None:
        foreign = self.facts.foreign_memory_mib
        used = sum(r.device_memory_mib for r in self.held)
        return left(self.facts.memory_mib, used, foreign)

    @property
    def foreign(self) -> bool:
        """Whether somebody of no reservation may be computing on it.

        Who holds memory of a GPU has a context on it. Memory used on a machine says nothing about one of its cores.
        """
        facts = self.facts
        return facts.foreign_share_micro != 0 or (facts.foreign_memory_mib != 0 and core_of(facts.uuid) is None)

    def load(self) -> Load:
        named = sorted(
            ((task, r.request_id) for r in self.held if (task := resident_task(r.realtime))),
            key=lambda pair: (pair[0].deadline_us, pair[0].runtime_us, pair[0].period_us, pair[1]),
        )
        return Load(
            sharing=sharing_of(self.facts),
            residents=tuple(task for task, _ in named),
            contexts=len(self.held) - len(named) + self.foreign,
            foreign=self.foreign,
            names=tuple(name for _, name in named),
        )


def sharing_of(facts: DeviceFacts) -> Sharing:
    """How the device is shared. What was measured as no time at all was not measured."""
    return Sharing(facts.regime, facts.slice_us or None, facts.switch_us)


@lru_cache(maxsize=4096)
def resident_task(realtime: Realtime | None) -> RtTask | None:
    """The task that a reservation declares, without a name; None without a runtime."""
    return RtTask.of("", realtime) if realtime else None


def left(capacity: int | None, reserved: int, foreign: int | None) -> int | None:
    """Capacity - reservations - foreign use, 0 where more is held than there is; None where either is unknown."""
    return None if capacity is None or foreign is None else max(0, capacity - reserved - foreign)


def device_accounts(facts: NodeFacts, reservations: Sequence[Reservation]) -> list[DeviceAccount]:
    """One account per device, in the order of the facts; what is reserved on a device that is gone is left out."""
    accounts = [DeviceAccount(device) for device in facts.devices]
    by_uuid = {account.facts.uuid: account for account in accounts}
    for reservation in reservations:
        for uuid in reservation.devices:
            if uuid in by_uuid:
                by_uuid[uuid].held.append(reservation)
    return accounts
