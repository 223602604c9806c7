"""Pods that were refused and might fit now: kube-scheduler does not come back for them by itself; no I/O.

It tries an unschedulable pod again when something of Kubernetes changes; what becomes free in the ledger is nothing of
Kubernetes. A write to the pod's status is: so its condition is written once more, with the time of the probe alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.kube_bridge.calls import WriteCondition
from services.kube_bridge.conditions import Subject
from services.kube_bridge.seen import Condition
from services.kube_bridge.verdicts import Key, Verdicts
from shared.effects import Effect

OF_A_KIND: Final = 8
"""At one tick: as soon as one of them is refused again the others need not try."""
AT_ONCE: Final = 64
MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Refused:
    subject: Subject
    condition: Condition
    key: Key
    world: int


def nudge(subject: Subject, condition: Condition) -> Effect:
    """The pod says what it said."""
    return WriteCondition(subject.namespace, subject.name, subject.uid, condition, turned=False, probed=True)


class Nudging:
    """Those refused last come last, so that each has its turn."""

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts
        self._refused: dict[str, _Refused] = {}

    def refused(self, subject: Subject, condition: Condition, key: Key, world: int) -> None:
        self._refused.pop(subject.uid, None)
        self._refused[subject.uid] = _Refused(subject, condition, key, world)
        if len(self._refused) > MOST:
            del self._refused[next(iter(self._refused))]

    def forget(self, uid: str) -> None:
        """It has a place, or is gone."""
        self._refused.pop(uid, None)

    def tick(self, world: int, now_us: int) -> list[Effect]:
        """Nobody of whose kind was refused since something became free."""
        effects: list[Effect] = []
        of_kind: dict[Key, int] = {}
        for each in list(self._refused.values()):
            if each.world == world or self._verdicts.get(each.key, world, now_us) is not None:
                continue
            of_kind[each.key] = of_kind.get(each.key, 0) + 1
            if of_kind[each.key] > OF_A_KIND:
                continue
            effects.append(nudge(each.subject, each.condition))
            self.refused(each.subject, each.condition, each.key, each.world)
            if len(effects) == AT_ONCE:
                break
        return effects
