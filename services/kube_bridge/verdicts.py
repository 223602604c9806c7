"""Refusals that still hold: a pod that fits nowhere is asked about again and again, and costs nothing (case KU09)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.kube_bridge.seen import Condition

MOST = 1_000
"""Kept at most, those that were asked for last."""

Key = tuple[str, frozenset[str]]
"""The kind of the pod and the nodes that were offered."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`world` and `at_us`: as of when."""

    sentence: str
    condition: Condition
    world: int
    at_us: int


class Verdicts:
    """Also what changes without a word, such as times that were learned, is asked about anew after `most_us`."""

    def __init__(self, most_us: int) -> None:
        self._most_us = most_us
        self._known: OrderedDict[Key, Refusal] = OrderedDict()

    def get(self, key: Key, world: int, now_us: int) -> Refusal | None:
        found = self._known.get(key)
        if found is None or found.world != world or now_us - found.at_us > self._most_us:
            return None
        self._known.move_to_end(key)
        return found

    def put(self, key: Key, refusal: Refusal) -> None:
        self._known[key] = refusal
        self._known.move_to_end(key)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
