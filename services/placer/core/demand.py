"""What one replica of a request takes, in exact integers: the one place where a request becomes a reservation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shared.admission import RtTask, Tenant, tenant_of
from shared.errors import FieldError
from shared.messages import Kind, PlaceRequest, Realtime, Reservation
from shared.subjects import MAX_NAME_BYTES
from shared.units import UnitError, share_micro

NEWCOMER = "this request"


@dataclass(eq=False)
class Demand:
    """Share in millionths and memory in MiB are of each of `count` devices; count 0 sees no device at all.

    Not to be changed (frozen ones take several times as long to make, and each decision makes one).
    """

    request: PlaceRequest
    count: int
    share_micro: int
    device_memory_mib: int
    cpu_milli: int
    memory_mib: int

    @classmethod
    def of(cls, request: PlaceRequest) -> Demand:
        """Raises FieldError for a share that is no millionth of a device."""
        gpu = request.gpu
        if gpu is None:
            return cls(request, 0, 0, 0, request.cpu_milli, request.memory_mib)
        return cls(request, gpu.count, _share(gpu.share), gpu.memory_mib, request.cpu_milli, request.memory_mib)

    @property
    def amounts(self) -> tuple[int, int, int, int, int]:
        return self.count, self.share_micro, self.device_memory_mib, self.cpu_milli, self.memory_mib

    @cached_property
    def kind(self) -> Kind:
        """A request without a deadline promises nothing, as a soft one."""
        return self.request.realtime.kind if self.request.realtime else Kind.SOFT

    @cached_property
    def task(self) -> RtTask | None:
        """The recurring task to be admitted; None where no runtime is declared."""
        return RtTask.of(NEWCOMER, self.request.realtime) if self.request.realtime else None

    @cached_property
    def resident(self) -> RtTask | None:
        """The same task without its name, as one that is there already is counted."""
        return replace(self.task, name="") if self.task else None

    @cached_property
    def realtime(self) -> Realtime | None:
        """What it declares, with the name under which its times are learned: one of its image, if it has none."""
        declared = self.request.realtime
        if declared is None or declared.profile or not self.request.image:
            return declared
        name = f"{self.request.image} {declared.runtime_us or ''}".strip()
        return declared.model_copy(update={"profile": name}) if len(name.encode()) <= MAX_NAME_BYTES else declared

    @cached_property
    def tenant(self) -> Tenant | None:
        """The same as one whose times are learned; None where they cannot be."""
        return tenant_of(NEWCOMER, self.realtime)

    def reservation(self, request_id: str, replica: int, generation: int, devices: tuple[str, ...]) -> Reservation:
        """What the ledger holds for one replica that was given these devices."""
        return Reservation(
            request_id=request_id,
            replica=replica,
            generation=generation,
            devices=devices,
            share_micro=self.share_micro,
            device_memory_mib=self.device_memory_mib,
            cpu_milli=self.cpu_milli,
            memory_mib=self.memory_mib,
            realtime=self.realtime if self.request.realtime else None,
            priority=self.request.priority,
        )


@lru_cache(maxsize=4096)
def _share(share: float) -> int:
    try:
        return share_micro(share)
    except UnitError as error:
        raise FieldError("gpu.share", error.found, error.allowed) from None
