"""The placer's core: events become intents, written batches become replies, events, starts and stops; no I/O.

How it fits together: whatever happens queues an Intent (intents*.py). One batch of them at a time is planned over
the view (ledger.py), committed (commits.py) and, once written, followed by its effects. What the view shows of a
record that this placer owns is carried out: its steps are published, its stops are pursued, and its starts are kept
up by what the backends list (reconcile.py). So it makes no difference who wrote a state or when it was read, and a
placer that takes over does nothing that a placer does not do anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from services.placer.core.capabilities import Capabilities
from services.placer.core.carrying import Carrying
from services.placer.core.cluster import Cluster
from services.placer.core.commits import Batch, GroupCommit, PlanNext, after_write, was_written
from services.placer.core.containers import PlaceStreamAt, Read, ReadDone
from services.placer.core.delivery import Delivery
from services.placer.core.following import Following
from services.placer.core.intents import Chooser, Intent, Rules, Scope
from services.placer.core.intents_decide import Decide
from services.placer.core.intents_leader import CreateLedger, Lead, RenewLease, Resign
from services.placer.core.intents_life import Confirm, Release
from services.placer.core.intents_lost import NodeGone
from services.placer.core.intents_moves import Defragment
from services.placer.core.intents_resize import SetSize
from services.placer.core.leader import Leader
from services.placer.core.leases import Leases
from services.placer.core.ledger import IDENTITY_KEY, Draft, Ledger
from services.placer.core.losses import Losses
from services.placer.core.measured import Measured
from services.placer.core.moves import Moves
from services.placer.core.outlooks import Learned
from services.placer.core.queue import Queue
from services.placer.core.records import shadow_of
from services.placer.core.recovery import Recovery
from services.placer.core.telling import Delivered, Telling
from shared.effects import (
    Ack,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Received,
    Reply,
    Tick,
    WatchBegins,
    WatchReplayed,
)
from shared.errors import FieldError
from shared.messages import (
    ConfirmRequest,
    DefragmentRequest,
    GoneRequest,
    Message,
    NodeFacts,
    PlaceRequest,
    ReleaseRequest,
    ResizeRequest,
    unknown_fields,
)
from shared.subjects import LEARNED, LEDGER, NODES, Subjects, decode, node_key

BEAT, SOON, LIST = "beat", "soon", "list"
"""Ticks: leases and the leader's rounds; what is due; lists of what runs."""
RETRY_COPY_US = 5_000_000
"""When a stored request comes again to a placer that may not decide."""
LEDGER_CHANGED = (503, "ledger", "another one than at this placer's start", "the same, or one accepted by an operator")


class Core:
    """One placer. `me` names this start of the process, `new_ledger_id` is used where there is no ledger yet."""

    def __init__(
        self,
        me: str,
        new_ledger_id: str,
        subjects: Subjects,
        capabilities: Mapping[str, Capabilities],
        rules: Rules | None = None,
        wall_offset_us: int = 0,
    ) -> None:
        self.me = me
        self.rules = rules or Rules()
        self.counters: Counter[str] = Counter()
        self.ledger = Ledger()
        self.cluster = Cluster(measured=Measured(self.rules.explored_ratio, self.counters))
        self.leases = Leases(self.ledger, self.rules.lease_ttl_us)
        self.commits = GroupCommit(self.rules.batch)
        self.following = Following()
        self.recovery = Recovery(self.rules.grace_us)
        self.telling = Telling(subjects, me)
        self.chooser = Chooser(self.cluster, capabilities, tie=me, learned=Learned(self.rules.strategies))
        queue = Queue(self.ledger, self.chooser, self.rules, self.counters)
        moves = Moves(self.ledger, self.cluster, queue, self.rules)
        losses = Losses(self.ledger, self.cluster, self.rules)
        self.leader = Leader(me, self.ledger, self.leases, queue, moves, losses)
        self.carrying = Carrying(self)
        self.delivery = Delivery(self)
        self._new_ledger_id = new_ledger_id
        self.now_us = 0
        self._wall_offset_us = wall_offset_us
        self._beat_us: int | None = None
        self._facts: dict[str, NodeFacts] = {}
        self._stream_seq = 0
        self._made_ids = 0
        self._draining = False
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Received: self._received,
            Tick: self._tick,
            KeyChanged: self._key_changed,
            WatchBegins: self._begins,
            WatchReplayed: self._replayed,
            ReadDone: self._read_done,
            CommitDone: self._committed,
            PlaceStreamAt: self._stream_at,
            Delivered: self.delivery.delivered,
            Disconnected: self._disconnected,
            Draining: self._drain,
            **self.carrying.handlers,
        }

    def handle(self, event: object, now_us: int) -> list[Effect]:
        self.now_us = now_us
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        if self.commits.ready:
            if any(isinstance(effect, Reply) for effect in self._effects):
                self._effects.append(PlanNext())
            else:
                self._pump()
        effects, self._effects = self._effects, []
        return effects

    @property
    def health(self) -> str:
        """`ok`, or why this placer decides nothing."""
        return self.following.alarm or "ok"

    @property
    def wall_us(self) -> int:
        """By the last tick: what people read, and what place_by is measured with."""
        return self.now_us + self._wall_offset_us

    def add(self, intent: Intent) -> None:
        """Queue a transition."""
        self.commits.add(intent)

    def say(self, effects: Iterable[Effect]) -> None:
        """Hand effects to the shell."""
        self._effects += effects

    def check(self) -> None:
        """Every invariant that one placer's view can show; across keys only the ledger itself can (invariants.py)."""
        faults = list(self.ledger.faults())
        assert not faults, "; ".join(faults)

    def story(self, id: str) -> list[str]:  # noqa: A002  # the word of the interface
        """What happened to one request: its steps, then what this placer did."""
        stored = self.ledger.records.get(id)
        return self.telling.story(id, stored.value if stored else None)

    # --- planning and committing ---

    def _pump(self) -> None:
        """Plan and commit what waits, unless a batch is in flight or the ledger is not followed."""
        while self.following.ok and (intents := self.commits.take()):
            draft = Draft(self.ledger, self.cluster, self.rules.final_ttl_s)
            scope = Scope(self.me, self.rules, draft, self.leases, self.chooser, self.now_us, self.wall_us)
            effects = [effect for intent in intents for effect in self._plan(intent, scope)]
            if writes := draft.writes():
                self.delivery.begun()
                self._effects.append(self.commits.begin(intents, draft, writes, effects))
            else:
                draft.abandon()
                self.carrying.carry(effects)

    def _plan(self, intent: Intent, scope: Scope) -> tuple[Effect, ...]:
        try:
            return intent.plan(scope)
        except FieldError as fault:
            self.counters["requests.wrong"] += 1
            return intent.refused(400, fault.field, fault.found, fault.allowed)

    def _committed(self, done: CommitDone) -> None:
        batch = self.commits.end(done)
        if batch is None:
            return
        self.counters[f"commits.{done.outcome}"] += 1
        if was_written(batch, done):
            self._written(batch, done)
        else:
            self._not_written(batch, done)
        batch.draft.abandon()

    def _not_written(self, batch: Batch, done: CommitDone) -> None:
        for change in (*batch.seen, *done.current):
            self._take_in(change)
        refused = done.outcome == CommitOutcome.REFUSED
        if refused and len(batch.intents) == 1:
            found = f"a commit that the server refuses: {done.detail}"
            self.carrying.carry(batch.intents[0].refused(500, "(ledger)", found, "one that it takes"))
        else:
            self._again(batch, split=refused)

    def _again(self, batch: Batch, *, split: bool) -> None:
        if self.following.alarm is None:
            self.commits.again(batch, split=split)
            return
        for intent in batch.intents:
            self.carrying.carry(intent.refused(*LEDGER_CHANGED))

    def _written(self, batch: Batch, done: CommitDone) -> None:
        self.commits.written()
        self.carrying.carry(sorted(batch.effects, key=_comes_later))  # first of all, whoever asked is answered
        for change in after_write(batch.commit.writes, done):
            self._take_in(change, batch.draft.ours(change))
        for record, steps_before in batch.draft.records():
            after = 0 if record.owner == self.me else steps_before
            self._effects += self.telling.steps(record, batch.draft.ledger_id, after)

    # --- the ledger and the nodes ---

    def _key_changed(self, change: KeyChanged) -> None:
        if change.bucket == LEDGER:
            self.following.heard(change)
            if not self.commits.await_end(change):
                self._take_in(change)
        elif change.bucket == NODES and change.key.startswith("node."):
            self._facts_changed(change)
        elif change.bucket == LEARNED:
            self.leader.queue.learned(self.cluster.measured.heard(change))

    def _take_in(self, change: KeyChanged, ours: Message | None = None) -> None:
        """`ours`: what it says, where we wrote it."""
        key = self.ledger.observe(change, self.now_us, ours)
        if key is None:
            return
        if key.kind == IDENTITY_KEY:
            self._identity_changed()
        elif key.kind == "node":
            self._node_changed(key.name)
        elif key.kind == "request":
            self._record_changed(key.name)

    def _node_changed(self, node: str) -> None:
        """Where a batch in flight has planned on the node, its end puts things right. A key that cannot be read says
        nothing of what is free: nothing is placed there until it can.
        """
        self.cluster.set_reservations(node, self.ledger.reservations(node))
        if self._unreadable(node):
            self.counters["malformed.reservations"] += 1
            self.cluster.set_facts(node, None, self.now_us)
        elif node in self._facts and self.cluster.facts(node) is None:
            self.cluster.set_facts(node, self._facts[node], self.now_us)
            self.leader.queue.node_changed(node)

    def _unreadable(self, node: str) -> bool:
        stored = self.ledger.nodes.get(node)
        return stored is not None and stored.broken

    def _record_changed(self, request_id: str) -> None:
        """What was waiting for this record goes on, and what this placer owns is carried out."""
        stored = self.ledger.records.get(request_id)
        if stored is None:
            return
        self._effects += self.recovery.known(request_id)
        record = stored.value
        self.cluster.set_shadow(request_id, shadow_of(record) if record else {})
        self._effects += self.carrying.bindings.answers(request_id, record, self.following.ledger_id)
        if record is not None and record.owner == self.me and self.following.ledger_id is not None:
            self._effects += self.telling.steps(record, self.following.ledger_id)
            self.carrying.pursue(record)

    def _facts_changed(self, change: KeyChanged) -> None:
        try:
            node = decode(change.key.removeprefix("node."))
            facts = NodeFacts.trusted(change.value) if change.value is not None else None
        except FieldError:
            self.counters["malformed.node_facts"] += 1
            return
        if not self.chooser.reaches(node):
            self.counters["nodes.without_backend"] += node not in self._facts
            return
        self._facts.pop(node, None)
        if facts is not None:
            self._facts[node] = facts
        before = self.cluster.facts_changes
        self.cluster.set_facts(node, None if self._unreadable(node) else facts, self.now_us)
        if self.cluster.facts_changes != before:
            self.leader.queue.node_changed(node)

    def _identity_changed(self) -> None:
        before, alarmed = self.following.ledger_id, self.following.alarm
        wrong = self.following.identity(self.ledger)
        if wrong is not None:
            self._stop_deciding(wrong)
        elif alarmed is not None and self.following.alarm is None:
            said = f"{self.following.ledger_id}, former {', '.join(self.following.former) or 'none'}"
            self._effects.append(self.telling.ledger("ledger_accepted", said, self.wall_us))
            self._first_words()
        elif before is None:
            for record in list(self.ledger.live_records()):
                self._record_changed(record.request_id)

    def _begins(self, event: WatchBegins) -> None:
        if event.bucket == LEDGER:
            self.following.begins()
            self.ledger.begins()
            self.commits.begins()
            self.delivery.begins()

    def _replayed(self, event: WatchReplayed) -> None:
        if event.bucket == NODES:
            for node in [node for node in self._facts if node_key(node) not in event.keys]:
                self._facts_changed(KeyChanged(NODES, node_key(node), None, 0))
        if event.bucket == LEARNED:
            self.cluster.measured.replayed(event.keys)
        if event.bucket == LEDGER:
            self._ledger_replayed(event)

    def _ledger_replayed(self, event: WatchReplayed) -> None:
        self.leases.grant(self.now_us)
        if doubtful := self.following.replayed(event, self.ledger):
            self._effects.append(Read(doubtful))
        self.delivery.starts()
        self._first_words()

    def _first_words(self) -> None:
        self._renew()
        self.commits.add(CreateLedger(self._new_ledger_id), first=True)

    def _renew(self) -> None:
        self.commits.add(RenewLease(lambda: self.delivery.told), first=True)

    def _read_done(self, event: ReadDone) -> None:
        if event.listed is None and (wrong := self.following.read(event.current)):
            self._stop_deciding(wrong)
            return
        for change in event.current:
            self._take_in(change)
        if event.listed is not None:
            self.carrying.judge(event.listed, event.asked_us)

    def _disconnected(self, _: Disconnected) -> None:
        self.following.lost()

    def _stop_deciding(self, wrong: str) -> None:
        """The ledger is not the one that this placer knew: whoever waits is told, and nothing is touched."""
        if self.following.alarm is None:
            self.counters["ledger_foreign"] += 1
            self._effects.append(self.telling.ledger("ledger_foreign", wrong, self.wall_us))
        self.leader.queue.forget()
        self.delivery.starts_anew()
        nodes = list(self.ledger.nodes)
        for change in self.following.stop(wrong, self.ledger):
            self.ledger.observe(change, self.now_us)
        for node in {*nodes, *self.ledger.nodes}:
            self.cluster.set_reservations(node, self.ledger.reservations(node))
        for request_id in self.cluster.shadows | self.ledger.live:
            record = self.ledger.records[request_id].value if request_id in self.ledger.live else None
            self.cluster.set_shadow(request_id, shadow_of(record) if record else {})
        for intent in (*self.commits.drop(), *self.carrying.bindings.drop()):
            self.carrying.carry(intent.refused(*LEDGER_CHANGED))

    # --- requests ---

    def _received(self, event: Received) -> None:
        match event.message:
            case PlaceRequest() as request if event.ack:
                self._copy(event, request)
            case PlaceRequest() as request:
                self._place(event, request)
            case ConfirmRequest() as asked:
                self._ask(Confirm(asked.request_id, asked.generation, asked.replica, event.reply))
            case ResizeRequest() as asked:
                size = (asked.cpu_milli, asked.memory_mib, asked.generation)
                self._ask(SetSize(asked.request_id, *size, event.reply, self._replicas(asked.request_id)))
            case DefragmentRequest() as asked:
                self._ask(Defragment(asked.request_id, event.reply))
            case GoneRequest() as asked:
                self._ask(NodeGone(asked.node, event.reply, len(self.ledger.reservations(asked.node))))
            case ReleaseRequest() as asked:
                self._ask(Release(asked.request_id, event.reply, self._replicas(asked.request_id)))

    def _replicas(self, request_id: str) -> int:
        """How many keys of nodes a transition of the request can touch at most."""
        stored = self.ledger.records.get(request_id)
        return len(stored.value.replicas) if stored and stored.value else 1

    def _place(self, event: Received, request: PlaceRequest) -> None:
        if request.request_id is None:
            self._made_ids += 1
            request = request.model_copy(update={"request_id": f"{self.me}-{self._made_ids}"})
        warnings = tuple(f"unknown field: {name}" for name in unknown_fields(event.raw)) if event.raw else ()
        self._ask(Decide(request, event.reply, warnings=warnings))

    def _ask(self, intent: Intent) -> None:
        if self.following.alarm is not None:
            self.carrying.carry(intent.refused(*LEDGER_CHANGED))
        else:
            self.commits.add(intent)

    def _copy(self, event: Received, request: PlaceRequest) -> None:
        if why := self.recovery.needs_none(request):
            self.counters[why] += 1
            self._effects.append(Ack(event.ack))
        elif self.following.alarm is not None:
            self._effects.append(Ack(event.ack, RETRY_COPY_US))
        elif request.request_id in self.ledger.records:
            self._effects.append(Ack(event.ack))
        else:
            self.recovery.keep(event, request, self.now_us)

    def _stream_at(self, event: PlaceStreamAt) -> None:
        self._stream_seq = event.seq

    def _decide_copies(self) -> None:
        """Copies whose grace is over; at once those from before this placer's start, where no other is alive."""
        alone = not self.leases.others_alive(self.me, self.now_us)
        for copy in self.recovery.due(self.now_us, lambda seq: alone and seq <= self._stream_seq):
            self.counters["replay.decided"] += 1
            self.commits.add(Decide(copy.request, acks=copy.acks))

    # --- time ---

    def _tick(self, tick: Tick) -> None:
        self._wall_offset_us = tick.wall_us - self.now_us
        self.commits.breathe()
        if not self.following.ok:
            return
        if tick.name == BEAT:
            self._beat()
        elif tick.name == SOON:
            self._decide_copies()
            self._add(self.leader.soon(self.now_us, self.wall_us))
            if not self._draining:
                self.carrying.ask_more_lists()
        elif tick.name == LIST and not self._draining:
            self.carrying.ask_lists([*self._facts])

    def _beat(self) -> None:
        """Leases first: a batch full of other things must not make this placer look dead."""
        if self._beat_us is not None and self.now_us - self._beat_us >= self.rules.lease_ttl_us:
            self.leases.grant(self.now_us)  # stopped for a while: what was renewed meanwhile is still in the inbox
        self._beat_us = self.now_us
        if not self._draining:
            self._renew()
            if self.leader.vacant(self.now_us):
                self.commits.add(Lead())
        if self.leader.leads:
            doubted = self.leader.losses.too_many
            self._add(self.leader.beat(self.now_us))
            if (doubt := self.leader.losses.too_many) and not doubted:
                self._effects.append(self.telling.ledger("nodes_lost", doubt, self.wall_us))
        self.say(self.delivery.beat())
        for request_id in list(self.ledger.pursued):
            record = self.ledger.records[request_id].value
            assert record is not None, "what is pursued can be read"
            self.carrying.pursue(record)
        self._tidy()

    def _add(self, intents: list[Intent]) -> None:
        for intent in intents:
            self.commits.add(intent)

    def _tidy(self) -> None:
        self.carrying.hands.tidy(self.now_us)
        for request_id in self.ledger.outlived(self.now_us - self.rules.final_ttl_s * 1_000_000):
            self.ledger.forget(request_id)
            self.telling.forget(request_id)

    def _drain(self, _: Draining) -> None:
        """What is in hand goes to the others at once, not when they have missed this placer."""
        self._draining = True
        self._effects += self.recovery.give_back()
        self.commits.add(Resign())


def _comes_later(effect: Effect) -> bool:
    return not isinstance(effect, Reply)
