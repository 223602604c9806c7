"""What is known of whole GPUs over time and told of each device on them: where they sit, XIDs, what makes them ill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from services.monitor.probes.base import DeviceReading, Reading
from services.monitor.probes.nvml_process import RawGpu
from services.monitor.probes.reasons import Reason
from services.monitor.probes.topology import Topology
from services.monitor.probes.xids import Xids
from shared.log import Logger
from shared.messages import Regime

MOST_RETIRED: Final = 64
"""Pages that a card without spare rows can retire: the next error stays where it is."""

MOST_ERRORS: Final = 1 << 20
"""A larger count is none."""


class Cards:
    """Fed with each answer of the driver. ``quiet_s``: how long after the last fatal error a device is ill."""

    def __init__(self, quiet_s: float, counts: Counter[str], log: Logger) -> None:
        self._quiet_s, self._log = quiet_s, log
        self._xids = Xids(quiet_s, counts)
        self._topology = Topology()
        self._groups: dict[str, str] = {}
        self._of: dict[str, tuple[str, int | None]] = {}
        """GPU and GPU instance of each MIG device."""
        self._ecc: dict[str, tuple[int, float]] = {}
        """Uncorrected ECC errors of each GPU, and when there was another one that no XID told of."""

    def take(self, gpus: Sequence[RawGpu], now_s: float) -> None:
        self._topology.take(gpus)
        self._groups = self._topology.groups()
        for gpu in gpus:
            if isinstance(gpu.uuid.value, str) and gpu.uuid.value:
                self._hear(gpu, now_s)
                for part in gpu.instances.value or () if gpu.instances else ():
                    self._of[part.uuid.value] = gpu.uuid.value, part.instance.value

    def _hear(self, gpu: RawGpu, now_s: float) -> None:
        for xid in self._xids.take(gpu.uuid.value, gpu.xids, now_s):
            self._log.warning("a GPU cannot be relied on", uuid=gpu.uuid.value, xid=xid)
        errors = gpu.health["ecc_uncorrected"].value if "ecc_uncorrected" in gpu.health else None
        if isinstance(errors, int) and 0 <= errors <= MOST_ERRORS:
            before, at_s = self._ecc.get(gpu.uuid.value, (errors, -self._quiet_s))
            unheard = errors > before and gpu.xids.reason is not None
            self._ecc[gpu.uuid.value] = errors, now_s if unheard else at_s

    def told(self, reading: DeviceReading, failed: str | None, now_s: float) -> DeviceReading:
        """The reading with what is known of its GPU. ``failed``: why the driver said nothing at all."""
        gpu, instance = self._of.get(reading.uuid, (reading.uuid, None))
        last = Reading(None, failed) if failed else self._xids.last(gpu, instance)
        mig = reading.regime is Regime.MIG
        return replace(
            reading,
            group=None if mig else self._groups.get(gpu),
            fault=reading.fault or self._xids.fault(gpu, instance, now_s) or self._fault(reading, gpu, now_s),
            health={**reading.health, "xid": last},
            xids=self._xids.told(gpu, instance),
            pci_bus_id=self._topology.bus(gpu),
            gpu_instance=instance,
            parent=gpu if mig else None,
            mig_profile=(reading.model.partition(" MIG ")[2] or None) if mig else None,
        )

    def _fault(self, reading: DeviceReading, gpu: str, now_s: float) -> str | None:
        """What lasts until the card is mended, and uncorrected errors of a driver that tells no XIDs."""
        if _number(reading, "row_remap_failure", 1):
            return Reason.ROW_REMAP_FAILURE
        retired = [_number(reading, f"retired_pages_{cause}", MOST_ERRORS) for cause in ("sbe", "dbe")]
        if sum(retired) >= MOST_RETIRED:
            return Reason.RETIRED_PAGES
        _, at_s = self._ecc.get(gpu, (0, -self._quiet_s))
        return Reason.ECC_UNCORRECTED if now_s - at_s < self._quiet_s else None


def _number(reading: DeviceReading, name: str, most: int) -> int:
    """What is unknown, or cannot be, makes nobody ill."""
    value = reading.health[name].value if name in reading.health else None
    return value if isinstance(value, int) and 0 <= value <= most else 0
