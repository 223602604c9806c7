"""Simulated devices that containers share, each task as long as chance has it: whose response times are predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from shared.admission import Beside, DeviceType, RtTask, Sharing
from shared.messages import Regime
from shared.testing.devices import Container, Device, What, sporadic
from shared.testing.devices.policies import Policy, Together, Work

STEP_US: Final = 10_000_000
"""Time is moved on by so much at most, so that what happened is not all held at once."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What containers of one profile do: tasks of `usual_us` or so, now and then one of `long_us`, as often as that."""

    name: str
    usual_us: int
    spread: float
    long_us: int
    long_ratio: float
    period_us: int
    pressure_milli: int

    @classmethod
    def drawn(cls, name: str, chance: Random) -> Kind:
        usual_us = round(chance.lognormvariate(8.3, 0.6))
        return cls(
            name=name,
            usual_us=usual_us,
            spread=chance.uniform(0.03, 0.4),
            long_us=round(usual_us * chance.uniform(1.5, 4)),
            long_ratio=chance.choice([0, 0.01, 0.03, 0.1]),
            period_us=round(usual_us * chance.uniform(5, 15)),
            pressure_milli=round(chance.uniform(50, 600)),
        )

    def runtime_us(self, chance: Random) -> int:
        base_us = self.long_us if chance.random() < self.long_ratio else self.usual_us
        return max(1, round(base_us * chance.lognormvariate(0, self.spread)))

    def container(self, name: str, horizon_us: int, chance: Random) -> Container:
        task = RtTask(name, self.usual_us, self.period_us, self.period_us)
        runtimes = {number: self.runtime_us(chance) for number in range(horizon_us // self.period_us + 2)}
        gaps = sporadic(chance.randrange(self.period_us), self.period_us, chance, self.period_us)
        return Container(name, task, gaps, runtimes, pressure_milli=self.pressure_milli)


def superlinear(work: Work, beside: list[Work]) -> int:
    """The slowdown where each one more hurts more, in thousandths: neither added nor multiplied."""
    pressure = sum(other.pressure_milli for other in beside if other is not work)
    return 1_000 + pressure + pressure * pressure // 3_000


def multiplied(work: Work, beside: list[Work]) -> int:
    slowdown = 1_000
    for other in beside:
        slowdown = slowdown if other is work else slowdown * (1_000 + other.pressure_milli) // 1_000
    return slowdown


def device_of(world: str, chance: Random) -> tuple[DeviceType, Sharing, Policy | None]:
    """`together` adds slowdowns as the simulator does by itself; the other two of its kind compose them otherwise."""
    match world:
        case "time_sliced":
            sharing = Sharing(
                Regime.TIME_SLICED, slice_us=chance.randrange(500, 3_000), switch_us=chance.randrange(100)
            )
            return DeviceType(world, Regime.TIME_SLICED), sharing, None
        case "gated":
            return DeviceType(world, Regime.GATED), Sharing(Regime.GATED, handover_us=20), None
    slowdowns = {"multiplied": multiplied, "superlinear": superlinear}
    policy = Together(slowdowns[world]) if world in slowdowns else None
    return DeviceType(world, Regime.MPS), Sharing(Regime.MPS), policy


WORLDS: Final = ("time_sliced", "gated", "together", "multiplied", "superlinear")


def responses(world: str, kinds: Sequence[Kind], count: int, chance: Random) -> list[list[int]]:
    """The response times of at least `count` tasks of the first container beside the others, and theirs meanwhile."""
    _, sharing, policy = device_of(world, chance)
    device, names = Device(sharing, policy), [f"{place}" for place in range(len(kinds))]
    step_us = min(STEP_US, count * kinds[0].period_us // 4)
    horizon_us = count * 2 * kinds[0].period_us + step_us
    for name, kind in zip(names, kinds, strict=True):
        device.add(kind.container(name, horizon_us, chance))
    found: dict[str, list[int]] = {name: [] for name in names}
    while len(found["0"]) < count:
        for event in device.advance(device.now_us + step_us):
            if event.what is What.ENDED:
                found[event.job.container].append(event.at_us - event.job.release_us)
    return list(found.values())


def beside(kinds: Iterable[Kind]) -> Beside:
    return tuple(sorted(Counter(kind.name for kind in kinds).elements()))
