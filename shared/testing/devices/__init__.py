"""Simulated devices in virtual time: shared as the regimes of THEORY say, with releases and overruns as one likes."""

from shared.testing.devices.device import Device, Event, What, run
from shared.testing.devices.jobs import Container, Job, just_before, periodic, sporadic
from shared.testing.devices.many import FAR, Sets, gated_misses, time_sliced_misses

__all__ = [
    "FAR",
    "Container",
    "Device",
    "Event",
    "Job",
    "Sets",
    "What",
    "gated_misses",
    "just_before",
    "periodic",
    "run",
    "sporadic",
    "time_sliced_misses",
]
