"""Carrying out what the ledger says, through backends: starts, stops, resizes, lists, and what is learnt from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from services.placer.core.bindings import AwaitBinding, Bindings
from services.placer.core.cluster import Cluster
from services.placer.core.containers import (
    Ended,
    Found,
    Listed,
    ListFailed,
    ListNode,
    Progress,
    Read,
    Resize,
    Resized,
    ResizeFailed,
    ResizeUnknown,
    Start,
    Started,
    StartFailed,
    StartUnknown,
    Stop,
    StopFailed,
    Stopped,
)
from services.placer.core.following import Following
from services.placer.core.hands import Hands
from services.placer.core.intents import Chooser, Intent
from services.placer.core.intents_life import MarkExited, MarkGone, MarkStarted, MarkStartFailed
from services.placer.core.intents_resize import MarkResized, MarkResizeFailed
from services.placer.core.leader import Leader
from services.placer.core.ledger import Ledger
from services.placer.core.reconcile import Judge
from services.placer.core.records import holders, nodes_of, replica_of, said
from services.placer.core.telling import Telling
from shared.effects import Effect
from shared.messages import ReplicaRecord, RequestRecord, Reservation, State, container_name
from shared.subjects import node_key, request_key

MOST_LISTS = 4
"""Asked for at once, the next few a tick later: what they say is looked through while requests wait."""
_IN_HAND = (Start, Stop, Resize, ListNode)


class Placer(Protocol):
    """What is needed of the core."""

    me: str
    ledger: Ledger
    cluster: Cluster
    following: Following
    leader: Leader
    telling: Telling
    chooser: Chooser
    counters: Counter[str]
    now_us: int

    @property
    def wall_us(self) -> int: ...

    def add(self, intent: Intent) -> None: ...

    def say(self, effects: Iterable[Effect]) -> None: ...


class Carrying:
    """Nothing here writes: what is seen of a container becomes an intent, and the ledger decides what follows."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self.hands = Hands()
        self.bindings = Bindings()
        self._to_list: list[str] = []
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            Started: self.started,
            StartFailed: self.start_failed,
            StartUnknown: self.start_unknown,
            Progress: self.progress,
            Stopped: self.stopped,
            StopFailed: self.stop_failed,
            Resized: self.resized,
            ResizeFailed: self.resize_failed,
            ResizeUnknown: self.resize_unknown,
            Ended: self.ended,
            Listed: self.listed,
            ListFailed: self.list_failed,
        }
        """What follows from what backends say."""

    def carry(self, effects: Iterable[Effect]) -> None:
        """Hand effects to the shell, but no start, stop, resize or list of what is in hand already."""
        for each in effects:
            if isinstance(each, AwaitBinding):
                self.bindings.wait(each)
                continue
            effect = self._with_regimes(each) if isinstance(each, Start) else each
            if isinstance(effect, _IN_HAND) and not self._take(effect):
                continue
            if isinstance(effect, Start):
                self._note(effect.labels.reservation, f"start of {effect.labels.container} on {effect.labels.node}")
            self._placer.say([effect])

    def _take(self, effect: Start | Stop | Resize | ListNode) -> bool:
        return self.hands.take(effect, self._placer.now_us)

    def _with_regimes(self, start: Start) -> Start:
        """As the node declares them now: a backend tells a container that shares its device by MPS so."""
        facts = self._placer.cluster.facts(start.labels.node)
        devices = facts.devices if facts else ()
        regimes = (
            next((device.regime for device in devices if device.uuid == uuid), None)
            for uuid in start.labels.reservation.devices
        )
        return Start(start.labels, start.request, tuple(regimes))

    def pursue(self, record: RequestRecord) -> None:
        """Stop and resize what is to be, as its owner; what is under way with a container is left to end first.

        `record` as the view has it.
        """
        if record.owner != self._placer.me or record.request_id not in self._placer.ledger.pursued:
            return
        for each in holders(record):
            assert each.node is not None, "what holds has a node"
            if each.state == State.STOPPING:
                self.carry([Stop(each.node, self._name(record, each))])
            elif each.state == State.STARTED and each.resizing is not None:
                self.carry([Resize(each.node, self._name(record, each), each.resizing)])

    # --- what runs ---

    def ask_lists(self, known: Iterable[str]) -> None:
        """The leader looks at every node that it can reach, others where they own something."""
        placer = self._placer
        wanted = {node for node in {*known, *placer.ledger.nodes} if placer.chooser.reaches(node)}
        if not placer.leader.leads:
            mine = (placer.ledger.records[name].value for name in placer.ledger.owned.get(placer.me, ()))
            wanted &= {node for record in mine if record is not None for node in nodes_of(record)}
        self._to_list = [node for node in self._to_list if node in wanted] or sorted(wanted)
        self.carry([ListNode(node) for node in placer.leader.losses.unheard[:MOST_LISTS]])
        self.ask_more_lists()

    def ask_more_lists(self) -> None:
        """Those that come next. A glance is enough, but where it matters whether the backend answers."""
        if self._to_list:
            lost = self._placer.leader.losses.lost
            self.carry([ListNode(node, glance=node not in lost) for node in self._to_list[:MOST_LISTS]])
            del self._to_list[:MOST_LISTS]

    def listed(self, event: Listed) -> None:
        """What the view does not explain is read first: the watch may be behind, and the container newer than it."""
        placer, asked_us = self._placer, self.hands.listed(event.node)
        if event.complete:
            placer.leader.losses.answered(event.node)
        if asked_us is None or not placer.following.ok or placer.following.ledger_id is None:
            return
        if doubtful := self._judge(asked_us).doubtful(event):
            placer.say([Read((node_key(event.node), *map(request_key, doubtful)), event, asked_us)])
        else:
            self.judge(event, asked_us)

    def _judge(self, asked_us: int) -> Judge:
        following = self._placer.following
        assert following.ledger_id is not None, "a ledger that is followed has its identity"
        return Judge(
            self._placer.ledger,
            self._placer.me,
            following.ledger_id,
            following.own_ids,
            lambda container: self.hands.busy(container, asked_us),
        )

    def judge(self, event: Listed, asked_us: int) -> None:
        """Everything that the list says is known to the view as well as it can be."""
        placer = self._placer
        if not placer.following.ok or placer.following.ledger_id is None:
            return
        judgement = self._judge(asked_us).judge(event, asked_us)
        for intent in judgement.intents:
            placer.add(intent)
        for alarm in judgement.alarms:
            placer.counters[f"containers.{alarm.kind}"] += 1
            placer.say(placer.telling.alarm(alarm, placer.following.ledger_id, placer.wall_us))
        self.carry(judgement.effects)

    def list_failed(self, event: ListFailed) -> None:
        """Nothing is known of the node's containers, so nothing is concluded."""
        self.hands.listed(event.node)
        self._placer.leader.losses.failed(event.node, self._placer.now_us)
        self._placer.counters["lists.failed"] += 1

    def ended(self, event: Ended) -> None:
        """A backend's watch is quicker than the next list; both say the same."""
        labels = event.found.labels
        if labels is not None and labels.ledger_id in self._placer.following.own_ids:
            self._seen(event.found, labels.reservation)

    # --- how starts and stops ended ---

    def started(self, event: Started) -> None:
        begun = self.hands.ended(event.found.container, self._placer.now_us)
        if isinstance(begun, Start):
            held = begun.labels.reservation
            self._note(held, "running" if event.found.running else "ran, and has ended")
            self._seen(event.found, held)

    def _seen(self, found: Found, held: Reservation) -> None:
        if found.running:
            self._placer.add(MarkStarted(*held.which, found.node))
        else:
            self._placer.add(MarkExited(*held.which, found.exit_code, found.cause))
        self._pursue_again(held.request_id)

    def start_failed(self, event: StartFailed) -> None:
        begun = self.hands.ended(event.container, self._placer.now_us)
        if isinstance(begun, Start):
            held = begun.labels.reservation
            self._note(held, f"start failed: {event.reason}")
            self._placer.add(MarkStartFailed(*held.which, event.reason))
            self._pursue_again(held.request_id)

    def start_unknown(self, event: StartUnknown) -> None:
        """It may run: its reservation stays, and the next list shows it, or has it started again."""
        begun = self.hands.ended(event.container, self._placer.now_us)
        self._placer.counters["starts.unknown"] += 1
        if isinstance(begun, Start):
            held = begun.labels.reservation
            self._note(held, f"nobody knows how its start ended: {event.reason}")
            self._pursue_again(held.request_id)

    def progress(self, event: Progress) -> None:
        """Told while its start is in hand: what comes later would contradict what was said since."""
        placer = self._placer
        if placer.following.ledger_id is not None and self.hands.starts(event.labels.container):
            placer.say([placer.telling.progress(event, placer.following.ledger_id, placer.wall_us)])

    def _pursue_again(self, request_id: str) -> None:
        """A stop or a resize may have waited for what was under way to end."""
        stored = self._placer.ledger.records.get(request_id)
        if stored is not None and stored.value is not None:
            self.pursue(stored.value)

    def stopped(self, event: Stopped) -> None:
        self.hands.ended(event.container, self._placer.now_us)
        if held := self._held(event.node, event.container):
            self._note(held, "gone")
            self._placer.add(MarkGone(*held.which))

    def stop_failed(self, event: StopFailed) -> None:
        """It may still run: its reservation stays, and the next beat tries again."""
        self.hands.ended(event.container, self._placer.now_us)
        self._placer.counters["stops.failed"] += 1

    # --- how resizes ended: where the record wants another size by now, that one follows ---

    def resized(self, event: Resized) -> None:
        self.hands.ended(event.container, self._placer.now_us)
        if held := self._held(event.node, event.container):
            self._note(held, f"resized, {said(event.size)}")
            self._settle(MarkResized(*held.which, event.size))

    def resize_failed(self, event: ResizeFailed) -> None:
        self.hands.ended(event.container, self._placer.now_us)
        if held := self._held(event.node, event.container):
            self._note(held, f"resize failed: {event.reason}")
            self._settle(MarkResizeFailed(*held.which, event.size, event.reason))

    def resize_unknown(self, event: ResizeUnknown) -> None:
        """It may have either size: both stay reserved, and the next beat tries again."""
        self.hands.ended(event.container, self._placer.now_us)
        self._placer.counters["resizes.unknown"] += 1
        if held := self._held(event.node, event.container):
            self._note(held, f"resize not answered: {event.reason}")

    def _settle(self, end: MarkResized) -> None:
        """What is being written needs no second try; anything else that the record says does."""
        self._placer.add(end)
        stored = self._placer.ledger.records.get(end.request_id)
        replica = replica_of(stored.value, end.replica) if stored and stored.value else None
        if replica is not None and not (replica.state == State.STARTED and replica.resizing == end.size):
            self._pursue_again(end.request_id)

    def _held(self, node: str, container: str) -> Reservation | None:
        """The reservation that stands for a container of our own."""
        for held in self._placer.ledger.reservations(node):
            if self._container(*held.which) == container:
                return held
        return None

    def _name(self, record: RequestRecord, each: ReplicaRecord) -> str:
        return self._container(record.request_id, each.replica, each.generation)

    def _container(self, request_id: str, replica: int, generation: int) -> str:
        assert self._placer.following.ledger_id is not None
        return container_name(self._placer.following.ledger_id, request_id, replica, generation)

    def _note(self, held: Reservation, text: str) -> None:
        self._placer.telling.note(held, text, self._placer.now_us)
