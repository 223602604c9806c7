"""Our condition of each pod: written where it says something new, and not for every change of a number; no I/O.

A pod that was never refused has none: its node and its devices say that it is bound, and each write costs the API
server as much as the Binding (decision 105).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.kube_bridge.calls import WriteCondition
from services.kube_bridge.seen import Condition, condition_of
from shared.effects import Effect

MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class Subject:
    """The pod that is spoken of, and what its condition says now as far as that came with it."""

    namespace: str
    name: str
    uid: str
    says: Condition | None = None
    priority: int = 0
    """As Kubernetes has it."""

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> Subject:
        meta = pod["metadata"]
        return cls(meta["namespace"], meta["name"], meta["uid"], condition_of(pod), pod["spec"].get("priority") or 0)


class Conditions:
    """Remembers what it wrote and when: what a pod shows may be older than that."""

    def __init__(self, again_us: int) -> None:
        self._again_us = again_us
        """New numbers under the same reason wait for so long."""
        self._written: OrderedDict[str, tuple[Condition, int]] = OrderedDict()

    def say(self, subject: Subject, condition: Condition, now_us: int) -> list[Effect]:
        """What there is to write: nothing where the pod says so already."""
        known, at_us = self._written.get(subject.uid, (subject.says, None))
        if known is not None and self._same(known, condition, at_us, now_us):
            return []
        self._written[subject.uid] = (condition, now_us)
        self._written.move_to_end(subject.uid)
        if len(self._written) > MOST:
            self._written.popitem(last=False)
        turned = known is None or known.status != condition.status
        return [WriteCondition(subject.namespace, subject.name, subject.uid, condition, turned)]

    def bound(self, subject: Subject, condition: Condition, now_us: int) -> list[Effect]:
        """What there is to write of a pod that is bound: nothing unless it says, or was told, that it has no place."""
        known, _ = self._written.get(subject.uid, (subject.says, 0))
        return self.say(subject, condition, now_us) if known is not None and known.status == "False" else []

    def still_refused(self, subject: Subject, condition: Condition, now_us: int) -> list[Effect]:
        """The same of one that is bound and goes on saying the contrary: another bridge had refused it, or what was
        written of it came before an older write, or not at all."""
        written, at_us = self._written.get(subject.uid, (None, 0))
        if written is not None and written.status == condition.status and now_us - at_us < self._again_us:
            return []
        self.forget(subject.uid)
        return self.say(subject, condition, now_us)

    def _same(self, known: Condition, condition: Condition, at_us: int | None, now_us: int) -> bool:
        if (known.status, known.reason) != (condition.status, condition.reason):
            return False
        return known.message == condition.message or (at_us is not None and now_us - at_us < self._again_us)

    def forget(self, uid: str) -> None:
        self._written.pop(uid, None)
