"""Folders of containers as a backend makes them, for tests of who reads them."""

from __future__ import annotations

from pathlib import Path

from shared.messages import ContainerLabels, Kind, Realtime, Reservation
from shared.subjects import encode

TIMING = Realtime(deadline_us=50_000, runtime_us=1_000, kind=Kind.FIRM, guarantee=0.9)


def labels_of(
    root: Path, container: str, *, request_id: str = "q", realtime: Realtime | None = TIMING, device: str = "CPU-m-0"
) -> Path:
    """Make the folder of a container with its labels; returns the folder."""
    reservation = Reservation(
        request_id=request_id,
        replica=0,
        generation=1,
        devices=(device,),
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=1000,
        memory_mib=64,
        realtime=realtime,
    )
    labels = ContainerLabels(container=container, ledger_id="l", node="n1", reservation=reservation)
    folder = root / encode(container)
    folder.mkdir(parents=True)
    (folder / "container.json").write_bytes(labels.to_json())
    return folder
