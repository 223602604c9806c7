"""Who disturbs whom: the causes of each miss, and noisy neighbours, from batches, heartbeats and the keys of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from services.deadline_tracker.culprits import Scene, causes
from services.deadline_tracker.device_time import OPEN
from services.deadline_tracker.kept import Kept, Running, sane
from services.deadline_tracker.matched import MatchedTask
from services.deadline_tracker.neighbours import Found, Neighbours, beside
from shared.effects import Effect, Publish
from shared.errors import FieldError
from shared.messages import Cause, CauseKind, DeadlineEvent, Regime, TaskBatch
from shared.subjects import LEDGER, decode
from shared.units import format_us

MOST_CONTAINERS: Final = 4_096
"""Of one node; beyond it everything kept of the node is forgotten."""
MOST_LOOKS: Final = 50
"""Misses explained between two ticks, of all nodes: each takes about a millisecond."""
MOST_NODES: Final = 25
"""Looked at for noisy neighbours between two ticks: each takes a millisecond or two. Others are looked at later."""
LOOK_US: Final = 250_000
"""How often it is looked for noisy neighbours, in the node's own time."""
RECENT_US: Final = 2_000_000
"""How far back tasks matter for who was beside those that ended since the last look."""

TELLS_OF_CLOCKS: Final = b'"throttle_reasons"'

Times = dict[tuple[str | None, int | None], tuple[int, int | None]]
"""Begin and end of tasks, by ring and sequence of the begin."""


class Rest(NamedTuple):
    """What a batch has said beside warnings that went ahead of it. An effect that comes back as an event: it is due."""

    batch: TaskBatch
    tasks: Callable[[], Sequence[MatchedTask]]
    said: Sequence[Publish]


class Suspects:
    """All nodes. Fed with what the ledger and rt_nodes say and with each batch's ended tasks; asked about misses."""

    def __init__(self) -> None:
        self._nodes: dict[str, Kept] = {}
        self._left = MOST_LOOKS
        self._nodes_left = MOST_NODES

    def heard(self, bucket: str, key: str, value: bytes | None) -> None:
        """A key of the ledger or of rt_nodes; only those of nodes matter."""
        if not key.startswith("node."):
            return
        try:
            kept = self._kept(decode(key.removeprefix("node.")))
        except FieldError:  # not written by us
            return
        kept.places = None
        if bucket == LEDGER:
            kept.reservations = value
        else:
            kept.facts = value

    def told(self, node: str, body: bytes) -> None:
        """A heartbeat of the node. One that tells of no clock is of no use here."""
        if TELLS_OF_CLOCKS in body:
            self._kept(node).clocks.heard(body)

    def forget(self, node: str) -> None:
        """Its tasks, not its keys: from now on others follow it."""
        self._nodes[node] = self._kept(node).anew()

    def tick(self) -> None:
        self._left = MOST_LOOKS
        self._nodes_left = MOST_NODES

    def parted(self, node: str, said: Sequence[Publish]) -> tuple[list[Publish], list[Publish]]:
        """The warnings that go ahead of a look for causes, where there is one: lists of nodes wait for them. And the
        rest."""
        kept = self._kept(node)
        ahead = [one for one in said if _warns(one)] if kept.facts and kept.reservations else []
        return ahead, [one for one in said if not _warns(one)] if ahead else list(said)

    def explained(
        self,
        batch: TaskBatch,
        matched: Callable[[], Sequence[MatchedTask]],
        effects: Sequence[Effect],
        running: Running,
    ) -> list[Effect]:
        """Takes what one batch matched, and says the causes of the misses that are to be published.

        `running` are the tasks of the node that are open after the batch.
        """
        kept = self._kept(batch.node)
        if kept.facts is None or kept.reservations is None:
            return list(effects)
        if batch.boot_id != kept.boot_id or len(kept.codes) > MOST_CONTAINERS:  # another clock, or too much
            kept = self._nodes[batch.node] = kept.anew(batch.boot_id)
        tasks = matched()
        kept.take(batch.rings, tasks)
        times: Times = {(ring, seq): (begin, end) for ring, seq, begin, end, _ in tasks} if effects else {}
        return [self._with_causes(kept, batch, effect, times, running) for effect in effects]

    def _with_causes(
        self,
        kept: Kept,
        batch: TaskBatch,
        effect: Effect,
        times: Times,
        running: Running,
    ) -> Effect:
        if not isinstance(effect, Publish) or not isinstance(event := effect.body, DeadlineEvent):
            return effect
        late = times.get((event.ring, event.seq))
        if late is None or not self._left:
            return effect
        begin_us, end_us = late
        at_us = batch.watermark_us if end_us is None else end_us
        if not sane(begin_us, at_us, 0):
            return effect
        because = self._because(kept, batch.start_id, event.container, (begin_us, at_us), running)
        return effect._replace(body=event.model_copy(update={"because": because}))

    def noisy(self, node: str, watermark_us: int, running: Running) -> Iterator[tuple[str, Cause]]:
        """Containers that a neighbour is found to slow down by the tasks up to the watermark, and that neighbour."""
        kept = self._kept(node)
        since_us = kept.looked_us
        if not since_us + LOOK_US <= watermark_us < OPEN or not self._nodes_left:
            return
        kept.looked_us = watermark_us
        self._nodes_left -= 1
        shared = [place for place in kept.shared() if place.sharing.regime not in (Regime.EXCLUSIVE, Regime.MIG)]
        for place in shared:
            look = kept.scene(place, running, watermark_us - RECENT_US)
            if len(look.tasks):
                yield from _found(kept.tests, look, since_us, watermark_us)

    def _because(
        self, kept: Kept, start_id: str, container: str, late: tuple[int, int], running: Running
    ) -> tuple[Cause, ...]:
        self._left -= 1
        place = kept.place_of(container)
        if place is None:
            text = "it holds no device in the ledger, or nothing was said of that device"
            return (Cause(cause=CauseKind.UNKNOWN, container=None, amount_us=None, detail=text),)
        scene = kept.scene(place, running, clock=kept.clocks.around(place.uuid, start_id, *late))
        names = [resident.name for resident in scene.residents]
        return causes(scene, names.index(container), *late)

    def _kept(self, node: str) -> Kept:
        kept = self._nodes.get(node)
        if kept is None:
            kept = self._nodes[node] = Kept()
        return kept


def _warns(said: Publish) -> bool:
    return isinstance(said.body, DeadlineEvent) and said.body.task is None


def _found(tests: dict[str, Neighbours], look: Scene, since_us: int, now_us: int) -> Iterator[tuple[str, Cause]]:
    names = [resident.name for resident in look.residents]
    declared = [resident.task for resident in look.residents]
    for who, time_us, there in beside(look.sharing, declared, look.tasks, since_us, now_us):
        test = tests.setdefault(names[who], Neighbours())
        found = test.add(time_us, {names[other]: active for other, active in there.items()})
        if found is not None:
            yield names[who], _noise(found)


def _noise(found: Found) -> Cause:
    beside_us, without_us = round(found.beside_us), round(found.without_us)
    text = f"{format_us(beside_us)} beside it, {format_us(without_us)} without it, medians of {found.tasks} tasks"
    return Cause(cause=CauseKind.NOISY, container=found.neighbour, amount_us=beside_us - without_us, detail=text)
