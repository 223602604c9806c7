"""Pods that were refused and might fit now: kube-scheduler does not come back for them by itself; no I/O.

It tries an unschedulable pod again when something of Kubernetes changes; what becomes free in the ledger is nothing of
Kubernetes. A write to the pod's status is: so its condition is written once more, with the time of the probe alone.
Those of a higher priority go first (case KU08): kube-scheduler's own queue forgets that while some wait out a pause.
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
HEAD_START_US: Final = 3_000_000
"""For so long a pod waits for those above it that might fit. They were told to try again, and may not be able to."""
_ANY_TIME: Final = -1
"""The world of one that has not been looked at: it may fit as things are."""


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
        self._waits_since_us: dict[str, int] = {}
        """Those that were put off for others."""

    def refused(self, subject: Subject, condition: Condition, key: Key, world: int) -> None:
        self.forget(subject.uid)
        self._put(_Refused(subject, condition, key, world))

    def put_off(self, subject: Subject, condition: Condition, key: Key, world: int, now_us: int) -> bool:
        """Whether it has to wait for others of a higher priority that were refused and might fit as things are."""
        since_us = self._waits_since_us.get(subject.uid, now_us)
        if now_us - since_us >= HEAD_START_US or not self.comes_after(subject, key, world, now_us):
            return False
        self._refused.pop(subject.uid, None)
        self._put(_Refused(subject, condition, key, _ANY_TIME))
        self._waits_since_us[subject.uid] = since_us
        return True

    def forget(self, uid: str) -> None:
        """It has a place, or is gone."""
        self._refused.pop(uid, None)
        self._waits_since_us.pop(uid, None)

    def tick(self, world: int, now_us: int) -> list[Effect]:
        """Nobody of whose kind was refused since something became free."""
        effects: list[Effect] = []
        of_kind: dict[Key, int] = {}
        may_fit = [each for each in self._refused.values() if self._may_fit(each, world, now_us)]
        for each in sorted(may_fit, key=lambda one: -one.subject.priority):
            of_kind[each.key] = of_kind.get(each.key, 0) + 1
            if of_kind[each.key] > OF_A_KIND:
                continue
            effects.append(nudge(each.subject, each.condition))
            self._refused[each.subject.uid] = self._refused.pop(each.subject.uid)
            if len(effects) == AT_ONCE:
                break
        return effects

    def _may_fit(self, each: _Refused, world: int, now_us: int) -> bool:
        return each.world != world and self._verdicts.get(each.key, world, now_us) is None

    def comes_after(self, subject: Subject, key: Key, world: int, now_us: int) -> bool:
        """Whether one above it might fit on a node that it could take."""
        return any(
            each.subject.priority > subject.priority
            and not each.key[1].isdisjoint(key[1])
            and self._may_fit(each, world, now_us)
            for each in self._refused.values()
        )

    def _put(self, refused: _Refused) -> None:
        self._refused[refused.subject.uid] = refused
        if len(self._refused) > MOST:
            self.forget(next(iter(self._refused)))
