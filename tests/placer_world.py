"""A world for placer cores: a ledger, nodes, containers and time, all in one thread and in any order a test wants.

Each slow effect of a core is a Task that a test carries out, delays, fails or drops; each core has its own watch on
the ledger, delivered one change at a time. `settle` does everything that is there to do, first come first served.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.commits import PlanNext
from services.placer.core.containers import (
    Cause,
    Ended,
    Found,
    Listed,
    ListFailed,
    ListNode,
    Read,
    ReadDone,
    Remove,
    Resize,
    Resized,
    ResizeFailed,
    ResizeUnknown,
    Start,
    Started,
    StartFailed,
    Stop,
    StopFailed,
    Stopped,
)
from services.placer.core.core import Core
from services.placer.core.intents import Rules
from services.placer.core.invariants import ledger_faults
from services.placer.core.records import moving
from services.placer.core.telling import Deliver, Delivered
from shared.effects import Ack, Commit, Draining, KeyChanged, Publish, Received, Reply, Tick, WatchBegins, WatchReplayed
from shared.messages import (
    ConfirmRequest,
    ContainerLabels,
    DefragmentRequest,
    DeviceFacts,
    LedgerIdentity,
    NodeFacts,
    NodeReservations,
    NodeState,
    PlaceEvent,
    PlaceReply,
    PlaceRequest,
    Regime,
    ReleaseRequest,
    RequestRecord,
    Reservation,
    ResizeRequest,
    Size,
    State,
    container_name,
)
from shared.subjects import LEDGER, NODES, Subjects, node_key, request_key
from shared.testing.ledger import MemoryLedger

SECOND = 1_000_000
WALL = 1_700_000_000 * SECOND
TICKS = (("soon", 200_000), ("beat", SECOND), ("list", 2 * SECOND))
SUBJECTS = Subjects("rt")


@dataclass
class Box:
    """A container as its engine has it."""

    labels: ContainerLabels
    running: bool = True
    exit_code: int | None = None
    cause: Cause | None = None
    limits: Size | None = None
    """Since it was resized; those of its labels where None."""

    def found(self) -> Found:
        return Found(self.labels.node, self.labels.container, self.labels, self.running, self.exit_code, self.cause)


@dataclass
class Task:
    """A slow effect under way."""

    placer: str
    effect: Any


@dataclass
class World:
    rules: Rules = field(default_factory=Rules)
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    now: int = 1_000 * SECOND
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    placers: dict[str, Core] = field(default_factory=dict)
    watched: dict[str, int] = field(default_factory=dict)
    tasks: deque[Task] = field(default_factory=deque)
    boxes: dict[str, Box] = field(default_factory=dict)
    executed: Counter[str] = field(default_factory=Counter)
    events: list[Publish] = field(default_factory=list)
    replies: defaultdict[str, list[PlaceReply]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    acks: list[Ack] = field(default_factory=list)
    generations_fail: dict[str, int] = field(default_factory=dict)
    """Per request: starts of its first so many generations fail."""
    silent_nodes: set[str] = field(default_factory=set)
    shown: tuple[Found, ...] | None = None
    """What was there when backends looked last, which answers a glance; None where they always ask."""
    most_memory_mib: int | None = None
    """Engines refuse to give a container more."""
    resizes: int = 0
    slow_events: bool = False
    """Events are under way for a while, as on the bus, and die with their placer; else they are there at once."""
    started_placers: int = 0
    asked: int = 0
    checking: bool = True
    """False for worlds so large that a check after every event takes longer than the test, or full of rubbish."""
    checked_seq: int = -1
    finals: dict[str, bytes] = field(default_factory=dict)

    # --- placers ---

    def placer(self, name: str = "", *, replay: bool = True) -> str:
        """Start one; its name."""
        self.started_placers += 1
        name = name or f"p{self.started_placers}"
        self.placers[name] = Core(name, f"ledger-{name}", SUBJECTS, ALL_CAN_ALL, self.rules, WALL)
        for node, facts in self.facts.items():
            self.tell(name, KeyChanged(NODES, node_key(node), facts.to_json(), 1))
        self.tell(name, WatchReplayed(NODES, frozenset(map(node_key, self.facts))))
        if replay:
            self.replay(name)
        return name

    def replay(self, name: str) -> None:
        """Its watch on the ledger begins anew."""
        for event in (WatchBegins(LEDGER), *self.ledger.replay()):
            self.tell(name, event)
        self.watched[name] = len(self.ledger.log)
        self.tell(name, WatchReplayed(LEDGER, self.ledger.keys()))

    def kill(self, name: str, *, tasks: str = "lost") -> None:
        """Gone without a word; what it had asked for may still be done (`done`) or not (`lost`)."""
        mine = [task for task in self.tasks if task.placer == name]
        for task in mine:
            self.tasks.remove(task)
        del self.placers[name]
        if tasks == "done":
            for task in mine:
                self._do(task.effect)

    def stop(self, name: str) -> None:
        """A clean end: it may still say its last words."""
        self.tell(name, Draining())
        self.settle()
        self.kill(name)

    def tell(self, name: str, event: object) -> None:
        """One event for one placer; its inline effects happen at once, its slow ones become tasks."""
        core = self.placers[name]
        for effect in core.handle(event, self.now):
            match effect:
                case Publish() if not self.slow_events:
                    self.events.append(effect)
                case Reply(to, body, error):
                    if to:
                        assert isinstance(body, PlaceReply)
                        self.replies[to].append(body)
                        if error:
                            self.errors[to] = error
                case Ack():
                    self.acks.append(effect)
                case _:
                    self.tasks.append(Task(name, effect))
        if self.checking:
            core.check()

    # --- doing what is there to do ---

    def step_watch(self, name: str) -> bool:
        """Deliver one change of the ledger; False where there is none."""
        place = self.watched[name]
        if place >= len(self.ledger.log):
            return False
        self.watched[name] = place + 1
        self.tell(name, self.ledger.log[place])
        return True

    def step_task(self, index: int = 0) -> None:
        """Carry out one task."""
        task = self.tasks[index]
        del self.tasks[index]
        event = self._do(task.effect)
        self.check()
        if event is not None and task.placer in self.placers:
            self.tell(task.placer, event)

    def settle(self, limit: int = 20_000) -> None:
        """Until nothing is left to do at this time."""
        for _ in range(limit):
            if self.tasks:
                self.step_task()
            elif not any(self.step_watch(name) for name in list(self.placers)):
                return
        raise AssertionError(f"not settled after {limit} steps: {list(self.tasks)[:5]}")

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps of the shortest timer, with every tick that falls due, and settle after each."""
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            before, self.now = self.now, self.now + TICKS[0][1]
            for name, period in TICKS:
                if self.now // period > before // period:
                    for placer in list(self.placers):
                        self.tell(placer, Tick(name, WALL + self.now))
            self.settle()
            if self.shown is not None and self.now // SECOND > before // SECOND:
                self.look()

    def _do(self, effect: Any) -> object | None:  # noqa: PLR0911  # one for each kind of effect
        match effect:
            case Commit():
                return self.ledger.commit(effect)
            case Publish():
                self.events.append(effect)
                return None
            case Deliver(revision, gone):
                return Delivered(revision, gone)
            case Start():
                return self._start(effect)
            case Stop():
                return self._stop(effect)
            case Resize():
                return self._resize(effect)
            case Remove(_, container):
                if container in self.boxes and not self.boxes[container].running:
                    del self.boxes[container]
                return None
            case ListNode(node, glance=True) if self.shown is not None:
                return Listed(node, tuple(found for found in self.shown if found.node == node), complete=False)
            case ListNode(node):
                if node in self.silent_nodes:
                    return ListFailed(node, "no answer")
                found = [box.found() for box in self.boxes.values() if box.labels.node == node]
                return Listed(node, tuple(found))
            case PlanNext():
                return effect
            case Read(keys, listed, asked_us):
                return ReadDone(self.ledger.read(list(keys)), listed, asked_us)
        raise TypeError(effect)

    def _start(self, effect: Start) -> object:
        name = effect.labels.container
        held = effect.labels.reservation
        if held.generation <= self.generations_fail.get(held.request_id, 0):
            return StartFailed(effect.labels.node, name, "no such image")
        if name not in self.boxes:
            self.executed[name] += 1
            self.boxes[name] = Box(effect.labels)
        return Started(self.boxes[name].found())

    def _stop(self, effect: Stop) -> object:
        if effect.node in self.silent_nodes:
            return StopFailed(effect.node, effect.container, "no answer")
        self.boxes.pop(effect.container, None)
        return Stopped(effect.node, effect.container)

    def _resize(self, effect: Resize) -> object:
        self.resizes += 1
        node, container, size = effect.node, effect.container, effect.size
        if node in self.silent_nodes:
            return ResizeUnknown(node, container, "no answer")
        if container not in self.boxes:
            return ResizeFailed(node, container, size, "no such container")
        if self.most_memory_mib is not None and size.memory_mib > self.most_memory_mib:
            return ResizeFailed(node, container, size, "too much")
        self.boxes[container].limits = size
        return Resized(node, container, size)

    def end(self, container: str, exit_code: int, *, told: bool = True, cause: Cause | None = None) -> None:
        """A container ends by itself; backends' watches say so to everyone where `told`."""
        box = self.boxes[container]
        box.running, box.exit_code, box.cause = False, exit_code, cause
        if told:
            for name in list(self.placers):
                self.tell(name, Ended(box.found()))

    def look(self) -> None:
        """Backends see what is there now; from now on they answer a glance."""
        self.shown = tuple(box.found() for box in self.boxes.values())

    # --- asking ---

    def ask(self, placer: str, message: Any) -> str:
        """Send a request to one placer; where its reply will be."""
        self.asked += 1
        reply = f"_INBOX.{self.asked}"
        self.tell(placer, Received("rt.place", message, reply=reply, wall_us=WALL + self.now))
        return reply

    def answer(self, reply: str) -> PlaceReply:
        """The one answer there."""
        self.settle()
        assert len(self.replies[reply]) == 1, self.replies[reply]
        return self.replies[reply][0]

    def place(self, placer: str, **body: Any) -> PlaceReply:
        return self.answer(self.ask(placer, request(**body)))

    def release(self, placer: str, request_id: str) -> PlaceReply:
        return self.answer(self.ask(placer, ReleaseRequest(request_id=request_id)))

    def resize(self, placer: str, request_id: str, **size: int) -> PlaceReply:
        return self.answer(self.ask(placer, ResizeRequest(request_id=request_id, **size)))

    def defragment(self, placer: str, request_id: str) -> PlaceReply:
        return self.answer(self.ask(placer, DefragmentRequest(request_id=request_id)))

    def confirm(self, placer: str, request_id: str, generation: int) -> PlaceReply:
        return self.answer(self.ask(placer, ConfirmRequest(request_id=request_id, generation=generation)))

    # --- nodes ---

    def add_node(self, node: str, devices: int = 1, **more: Any) -> None:
        self.set_facts(facts(node, devices, **more))

    def set_facts(self, found: NodeFacts) -> None:
        self.facts[found.node] = found
        for name in list(self.placers):
            self.tell(name, KeyChanged(NODES, node_key(found.node), found.to_json(), 1))

    # --- looking ---

    def record(self, request_id: str) -> RequestRecord:
        value, _ = self.ledger.values[request_key(request_id)]
        assert value is not None
        return RequestRecord.trusted(value)

    def has_key(self, request_id: str) -> bool:
        return request_key(request_id) in self.ledger.values

    def records(self) -> dict[str, RequestRecord]:
        values = {key: value for key, (value, _) in self.ledger.values.items() if value is not None}
        found = [RequestRecord.trusted(value) for key, value in values.items() if key.startswith("request.")]
        return {record.request_id: record for record in found}

    def reservations(self) -> dict[str, tuple[Reservation, ...]]:
        values = {key: value for key, (value, _) in self.ledger.values.items() if value is not None}
        nodes = [NodeReservations.trusted(value) for key, value in values.items() if key.startswith("node.")]
        return {node.node: node.reservations for node in nodes}

    def held_on(self, node: str = "n1") -> list[tuple[str, int, int]]:
        """(request, replica, generation) of each reservation."""
        return [(r.request_id, r.replica, r.generation) for r in self.reservations().get(node, ())]

    def identity(self) -> LedgerIdentity:
        value, _ = self.ledger.values["ledger"]
        assert value is not None
        return LedgerIdentity.trusted(value)

    def states(self, request_id: str) -> list[str]:
        """The states in its events, in order, each event once."""
        seen: dict[str, str] = {}
        for event in self.events:
            if event.subject == SUBJECTS.place_event(request_id):
                seen.setdefault(event.event_id, getattr(event.body, "state"))  # noqa: B009
        return list(seen.values())

    def told(self, request_id: str) -> dict[int, str]:
        """The state of each step that was published; one that was published again must say the same."""
        told: dict[int, str] = {}
        for event in self.events:
            if isinstance(event.body, PlaceEvent) and event.body.request_id == request_id:
                assert event.event_id.endswith(f"/{request_id}/{event.body.step}")
                assert event.body.state == told.setdefault(event.body.step, event.body.state)
        return told

    def bus_events(self) -> list[str]:
        return [getattr(e.body, "kind") for e in self.events if e.subject == SUBJECTS.bus_event("placer")]  # noqa: B009

    def running(self, request_id: str | None = None) -> list[str]:
        return [
            name
            for name, box in self.boxes.items()
            if box.running and request_id in {None, box.labels.reservation.request_id}
        ]

    def leader(self) -> str | None:
        names = [name for name, core in self.placers.items() if core.leader.leads]
        return names[0] if len(names) == 1 else None

    # --- what must hold at any time ---

    def check(self) -> None:
        """The invariants of DESIGN §8 that the ledger and the engines can show, at this very moment."""
        twice = [name for name, times in self.executed.items() if times > 1]
        assert not twice, twice
        doubled = {to: said for to, said in self.replies.items() if len(said) > 1}
        assert not doubled, doubled
        if self.checked_seq == self.ledger.seq or not self.checking:
            return
        self.checked_seq = self.ledger.seq
        records = self.records()
        faults = [*ledger_faults(records, self.reservations()), *self._over_promised()]
        assert not faults, faults
        for request_id, record in records.items():
            if record.final:
                known = self.finals.setdefault(request_id, record.to_json())
                assert known == record.to_json(), f"{request_id} was final"
            else:
                assert request_id not in self.finals, f"{request_id} was final"

    def _over_promised(self) -> Iterator[str]:
        """No node's reservations are more than it has, and no container has more than is reserved for it."""
        for node, held in self.reservations().items():
            cpu, memory = sum(r.cpu_milli for r in held), sum(r.memory_mib for r in held)
            if node in self.facts and (cpu, memory) > (0, 0):
                facts = self.facts[node]
                if cpu > (facts.cpu_milli or 0) or memory > (facts.memory_mib or 0):
                    yield f"{node} promises {cpu} milli and {memory} MiB"
            for each in held:
                name = container_name(self.identity().ledger_id, each.request_id, each.replica, each.generation)
                has = self.boxes[name].limits if name in self.boxes else None
                if has and (has.cpu_milli > each.cpu_milli or has.memory_mib > each.memory_mib):
                    yield f"{name} has {has}, reserved is {each}"

    def check_settled(self) -> None:
        """What must hold once everything had time: what runs is what the keys say, and everything was told."""
        self.check()
        records = self.records()
        assert not [request_id for request_id, record in records.items() if moving(record)]
        wanted = {
            (record.request_id, each.replica, each.generation)
            for record in records.values()
            for each in record.replicas
            if each.state == State.STARTED
        }
        there = {
            (held.request_id, held.replica, held.generation)
            for held in (box.labels.reservation for box in self.boxes.values() if box.running)
        }
        assert wanted == there
        reserved = {(r.request_id, r.replica, r.generation): r for node in self.reservations().values() for r in node}
        for box in (box for box in self.boxes.values() if box.running):
            held = box.labels.reservation
            has = box.limits or Size(cpu_milli=held.cpu_milli, memory_mib=held.memory_mib)
            now = reserved[held.request_id, held.replica, held.generation]
            assert (has.cpu_milli, has.memory_mib) == (now.cpu_milli, now.memory_mib)
        for record in records.values():
            assert {step.number: step.state for step in record.steps} == self.told(record.request_id), record.steps


def led(**devices: int) -> World:
    """Nodes with so many devices each, and one placer that leads."""
    world = World()
    for node, count in devices.items():
        world.add_node(node, count)
    world.placer("p1")
    world.pass_time(2)
    assert world.leader() == "p1"
    return world


def request(**body: Any) -> PlaceRequest:
    """A request as it comes from the bus: half a device unless told otherwise."""
    gpu = body.pop("gpu", {"share": 0.5})
    base: dict[str, Any] = {"request_id": "a", "command": ["serve"], "strategy": "binpack"}
    if gpu is not None:
        base["gpu"] = gpu
    return PlaceRequest.from_json(json.dumps(base | body).encode())


def facts(node: str, devices: int = 1, **more: Any) -> NodeFacts:
    return NodeFacts(
        node=node,
        state=NodeState.READY,
        at_us=0,
        devices=tuple(
            DeviceFacts(
                uuid=f"{node}-gpu-{index}",
                index=index,
                model="fake",
                regime=Regime.TIME_SLICED,
                slice_us=2000,
                switch_us=100,
                healthy=True,
                memory_mib=16_384,
            )
            for index in range(devices)
        ),
        **({"cpu_milli": 64_000, "memory_mib": 65_536} | more),
    )
