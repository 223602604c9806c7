"""Reconciliation, and a ledger that was lost, restored or rewound: what is removed, and what never is."""

from __future__ import annotations

import pytest

from services.placer.core.carrying import MOST_LISTS
from services.placer.core.containers import Found, Listed, ListNode
from services.placer.core.records import never_asked
from shared.effects import Disconnected, Received, Reconnected, Tick
from shared.messages import (
    BusEvent,
    ContainerLabels,
    LedgerIdentity,
    Reservation,
    State,
    container_name,
)
from tests.placer_world import SUBJECTS, WALL, Box, World, led, request


@pytest.fixture
def world() -> World:
    return led(n1=2)


def stray(
    world: World, *, ledger_id: str = "ledger-p1", request_id: str = "x", generation: int = 1, node: str = "n1"
) -> str:
    """A container that nobody here started: half of the node's first device."""
    held = Reservation(
        request_id=request_id,
        replica=0,
        generation=generation,
        devices=(f"{node}-gpu-0",),
        share_micro=500_000,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    name = container_name(ledger_id, request_id, 0, generation)
    world.boxes[name] = Box(ContainerLabels(container=name, ledger_id=ledger_id, node=node, reservation=held))
    return name


def alarms(world: World) -> list[tuple[str, str]]:
    events = [event.body for event in world.events if event.subject == SUBJECTS.bus_event("placer")]
    return [(event.kind, event.detail) for event in events if isinstance(event, BusEvent)]


def rebuilt(world: World, node: str = "n1") -> list[str]:
    return [r.container for r in world.reservations().get(node, ()) if r.container]


# --- what is removed ---


@pytest.mark.parametrize("exited", [False, True])
def test_a_container_whose_key_is_final_is_removed(world: World, exited: bool) -> None:
    world.place("p1")
    world.release("p1", "a")
    name = stray(world, request_id="a")
    world.boxes[name].running = not exited
    world.pass_time(3)

    assert {} == world.boxes


def test_P19_a_container_of_an_earlier_generation_is_removed_and_the_present_one_kept(world: World) -> None:
    world.generations_fail["a"] = 1
    world.place("p1")
    world.pass_time(2)
    old = stray(world, request_id="a", generation=1)
    world.pass_time(3)

    assert old not in world.boxes
    assert [container_name("ledger-p1", "a", 0, 2)] == world.running()
    assert [] == alarms(world)


def test_a_container_that_runs_while_its_replica_waits_is_removed(world: World) -> None:
    world.generations_fail["a"] = 9
    world.place("p1")
    name = stray(world, request_id="a", generation=world.record("a").replicas[0].generation)
    world.pass_time(0.2)
    for core in world.placers:
        world.tell(core, Listed("n1", ()))
    world.pass_time(2.4)

    assert name not in world.boxes


# --- what never is ---


def test_an_absent_key_is_never_proof(world: World) -> None:
    name = stray(world)
    world.pass_time(30)

    assert [name] == world.running()
    assert ["container_absent"] == [kind for kind, _ in alarms(world)], "told once"
    assert "laxity ledger forget" in alarms(world)[0][1]
    assert world.placers["p1"].counters["containers.absent"] > 5


def test_what_an_unexplained_container_holds_is_counted_until_it_is_gone(world: World) -> None:
    name = stray(world)
    world.pass_time(3)
    assert [name] == rebuilt(world)
    assert "placed" == world.place("p1", gpu={"share": 1}).outcome
    assert "rejected" == world.place("p1", request_id="b", gpu={"share": 1}).outcome
    del world.boxes[name]
    world.pass_time(3)

    assert [] == rebuilt(world)
    assert "placed" == world.place("p1", request_id="c", gpu={"share": 1}).outcome


def test_a_container_of_a_foreign_ledger_is_left_alone_and_counted(world: World) -> None:
    name = stray(world, ledger_id="foreign", request_id="a")
    world.place("p1")
    world.release("p1", "a")
    world.pass_time(4)

    assert [name] == world.running()
    assert [name] == rebuilt(world)
    assert ["container_foreign"] == [kind for kind, _ in alarms(world)]


def test_a_container_newer_than_its_key_is_left_alone_and_the_next_generation_is_newer_still(world: World) -> None:
    world.place("p1", gpu={"count": 2})
    world.place("p1", request_id="b", queue=True)
    name = stray(world, request_id="b", generation=5)
    world.pass_time(3)
    assert ["container_newer"] == [kind for kind, _ in alarms(world)]
    assert name in world.boxes
    world.release("p1", "a")
    world.pass_time(3)

    assert [6] == [each.generation for each in world.record("b").replicas]
    assert name not in world.boxes, "now its key names another generation"


def test_a_container_that_is_newer_than_what_the_watch_has_delivered_is_no_alarm_and_counted_once(
    world: World,
) -> None:
    world.placer("p2")
    world.pass_time(3)
    leader = next(name for name, core in world.placers.items() if core.leader.leads)
    other = next(name for name in world.placers if name != leader)
    behind = world.step_watch
    world.step_watch = lambda name: name != leader and behind(name)  # type: ignore[method-assign]
    world.place(other)
    world.pass_time(2)

    assert ([], []) == (alarms(world), rebuilt(world))
    assert 1 == len(world.reservations()["n1"])


def test_a_container_that_its_key_has_on_another_node_is_left_alone(world: World) -> None:
    world.add_node("n2", 1)
    world.place("p1", candidates=["n1"])
    right = dict(world.boxes)
    name = stray(world, request_id="a", node="n2")
    world.boxes |= {f"{name}-elsewhere": world.boxes[name]} | right
    world.pass_time(3)

    assert ["container_elsewhere"] == [kind for kind, _ in alarms(world)]


def test_labels_that_cannot_be_read_raise_an_alarm(world: World) -> None:
    world.pass_time(1.8)
    name = "laxity-unlabelled"
    core = world.placers["p1"]
    core.carrying.ask_lists(["n1"])
    world.tell("p1", Listed("n1", (Found("n1", name, None, running=True),)))

    assert ["container_unlabelled"] == [kind for kind, _ in alarms(world)]


def test_a_hold_from_before_its_confirmation_removes_nothing(world: World) -> None:
    """A ledger restored from before the confirm says held, and its container runs."""
    world.place("p1", hold_us=3_600_000_000)
    name = stray(world, request_id="a")
    world.pass_time(5)

    assert [name] == world.running()


def test_forget_writes_the_key_as_released_and_the_container_goes(world: World) -> None:
    name = stray(world)
    world.pass_time(3)
    world.ledger.put("request.x", never_asked("x", "operator", 0).to_json())
    world.settle()
    world.pass_time(5)

    assert name not in world.boxes
    assert [] == rebuilt(world)


def test_an_accepted_former_ledger_counts_as_our_own(world: World) -> None:
    name = stray(world, ledger_id="former", request_id="a")
    world.place("p1")
    world.release("p1", "a")
    mine = world.identity()
    world.ledger.put("ledger", mine.model_copy(update={"former": ("former",)}).to_json())
    world.settle()
    world.pass_time(4)

    assert name not in world.boxes, "the key of its request is final"


# --- starting again ---


def test_what_was_placed_and_never_seen_is_started_again_in_the_same_generation(world: World) -> None:
    world.ask("p1", request())
    world.step_task()
    start = world.tasks.pop()
    world.placers["p1"].carrying.hands.ended(start.effect.labels.container, 0)
    world.pass_time(5)

    assert (State.STARTED, 1) == (world.record("a").state, world.record("a").replicas[0].generation)
    assert [1] == list(world.executed.values())


def test_a_list_that_is_older_than_a_start_concludes_nothing(world: World) -> None:
    world.pass_time(1.8)
    core = world.placers["p1"]
    core.carrying.ask_lists(["n1"])
    world.now += 1
    world.place("p1")
    world.tell("p1", Listed("n1", ()))
    world.settle()

    assert State.STARTED == world.record("a").state


def test_lists_are_asked_for_a_few_at_a_time_and_all_within_the_round(world: World) -> None:
    for number in range(3, 3 + 2 * MOST_LISTS):
        world.add_node(f"n{number}", 1)
    world.settle()
    asked: list[list[str]] = []
    for name in ("list", *["soon"] * 3):
        world.tell("p1", Tick(name, WALL + world.now))
        asked.append([task.effect.node for task in world.tasks if isinstance(task.effect, ListNode)])
        world.settle()

    assert [MOST_LISTS, MOST_LISTS, 1, 0] == [len(nodes) for nodes in asked]
    assert sorted(world.facts) == sorted(node for nodes in asked for node in nodes)


# --- a ledger that is not the one that was known ---


def cut_off(world: World, name: str = "p1") -> None:
    world.tell(name, Disconnected())


def back(world: World, name: str = "p1") -> None:
    world.tell(name, Reconnected(1_000_000))
    world.replay(name)
    world.settle()


def test_another_ledger_id_than_at_the_start_stops_the_placer_and_says_so_once(world: World) -> None:
    world.place("p1")
    world.ledger.put("ledger", LedgerIdentity(ledger_id="other", created_at_us=0).to_json())
    world.settle()
    reply = world.ask("p1", request(request_id="b"))

    assert ("error", "ledger") == ((said := world.answer(reply)).outcome, said.error and said.error.field)
    assert 503 == world.errors[reply][0]
    assert "the ledger is other and was ledger-p1" == world.placers["p1"].health
    world.pass_time(30)
    assert ["ledger_foreign"] == [kind for kind, _ in alarms(world)]
    assert 1 == len(world.running())


def test_a_lost_ledger_removes_nothing_that_runs(world: World) -> None:
    for number in range(3):
        world.place("p1", request_id=f"r{number}")
    cut_off(world)
    world.ledger.values.clear()
    back(world)
    world.pass_time(30)

    assert 3 == len(world.running())
    assert ["ledger_foreign"] == [kind for kind, _ in alarms(world)]
    assert "lost or rewound" in world.placers["p1"].health
    assert frozenset() == world.ledger.keys(), "nothing is written into a ledger that nobody accepted"


def test_a_ledger_restored_from_yesterday_stops_the_placer_until_it_is_accepted(world: World) -> None:
    world.place("p1", request_id="old")
    yesterday, seq = dict(world.ledger.values), world.ledger.seq
    world.place("p1", request_id="new", gpu={"share": 1})
    world.release("p1", "old")
    cut_off(world)
    world.ledger.values, world.ledger.seq = yesterday, seq
    world.finals.clear()
    back(world)
    assert "error" == world.place("p1", request_id="b").outcome
    running = world.running()
    world.pass_time(10)
    assert running == world.running()
    world.finals.clear()
    world.ledger.put("ledger", world.identity().to_json())
    world.settle()
    world.pass_time(10)

    assert "ok" == world.placers["p1"].health
    assert ["ledger_foreign", "ledger_accepted", "container_absent"] == [kind for kind, _ in alarms(world)]
    assert container_name("ledger-p1", "new", 0, 1) in world.running(), "its key is absent, which proves nothing"
    assert "placed" == world.place("p1", request_id="c").outcome


def test_a_new_placer_on_a_new_ledger_leaves_what_the_old_one_started(world: World) -> None:
    world.place("p1")
    world.kill("p1")
    world.ledger.values.clear()
    world.placer("p2")
    world.pass_time(6)

    assert 1 == len(world.running())
    assert ["container_foreign"] == [kind for kind, _ in alarms(world)]
    assert 1 == len(rebuilt(world))


def test_a_replay_that_our_own_commit_has_overtaken_raises_no_alarm(world: World) -> None:
    world.place("p1")
    cut_off(world)
    replay = world.ledger.replay()
    world.tell("p1", Reconnected(1))
    for change in replay:
        world.tell("p1", change)
    world.watched["p1"] = len(world.ledger.log)
    core = world.placers["p1"]
    core.following.ok = True
    world.ask("p1", request(request_id="b"))
    world.step_task()
    back(world)

    assert "ok" == core.health
    assert [] == alarms(world)


def test_while_the_ledger_is_foreign_a_stored_copy_comes_again_later(world: World) -> None:
    world.ledger.put("ledger", LedgerIdentity(ledger_id="other", created_at_us=0).to_json())
    world.settle()
    world.tell("p1", Received("rt.place", request(), seq=1, ack=1))

    assert [(1, 5_000_000)] == [(ack.token, ack.delay_us) for ack in world.acks]


def test_requests_that_wait_when_the_alarm_comes_are_told(world: World) -> None:
    first, second = (world.ask("p1", request(request_id=name)) for name in ("a", "b"))
    world.ledger.put("ledger", LedgerIdentity(ledger_id="other", created_at_us=0).to_json())
    world.step_watch("p1")

    assert ["error"] == [said.outcome for said in world.replies[second]]
    assert world.answer(first).outcome in {"placed", "error"}
