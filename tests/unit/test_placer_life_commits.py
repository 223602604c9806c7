"""Group commit: what gathers, what a conflict, an unknown outcome and a refusal do, and the view of the ledger."""

from __future__ import annotations

import pytest

from services.placer.core.cluster import Cluster
from services.placer.core.commits import MOST_CONFLICTS, PATIENCE, PlanNext
from services.placer.core.containers import Start
from services.placer.core.intents import Rules
from services.placer.core.ledger import Draft, Ledger, parse_key
from services.placer.core.records import new_record, shadow_of
from shared.effects import Commit, CommitDone, CommitOutcome, KeyChanged, Publish, Reply
from shared.errors import FieldError
from shared.messages import DefragmentRequest, RequestRecord, ShadowPlace, State
from shared.subjects import LEDGER
from shared.testing.ledger import MemoryLedger
from tests.placer_world import World, led, request


@pytest.fixture
def world() -> World:
    return led(n1=4)


def plan_next(world: World) -> None:
    while any(isinstance(task.effect, PlanNext) for task in world.tasks):
        world.step_task([isinstance(task.effect, PlanNext) for task in world.tasks].index(True))


def commits(world: World) -> list[Commit]:
    plan_next(world)
    return [task.effect for task in world.tasks if isinstance(task.effect, Commit)]


def take_commit(world: World) -> Commit:
    plan_next(world)
    task = next(task for task in world.tasks if isinstance(task.effect, Commit))
    world.tasks.remove(task)
    assert isinstance(task.effect, Commit)
    return task.effect


def test_while_one_commit_is_in_flight_the_next_requests_gather_into_one_batch(world: World) -> None:
    for number in range(6):
        world.ask("p1", request(request_id=f"r{number}"))
    (first,) = commits(world)
    assert ["request.r0", "node.n1"] == [write.key for write in first.writes]
    world.step_task()
    (second,) = commits(world)

    assert {*(f"request.r{n}" for n in range(1, 6)), "node.n1"} == {write.key for write in second.writes}
    world.settle()
    assert 6 == len(world.running())


def test_all_who_asked_are_answered_before_anything_of_the_batch_is_started(world: World) -> None:
    for number in range(3):
        world.ask("p1", request(request_id=f"r{number}"))
    world.step_task()
    done = world.ledger.commit(take_commit(world))
    effects = world.placers["p1"].handle(done, world.now)

    assert [Reply, Reply, Start, Start] == [type(each) for each in effects if isinstance(each, Reply | Start)]


def test_who_was_answered_hears_so_before_the_next_batch_is_planned(world: World) -> None:
    replies = [world.ask("p1", request(request_id=f"r{number}")) for number in range(3)]
    world.step_task()

    assert [1, 0, 0] == [len(world.replies[reply]) for reply in replies]
    assert not any(isinstance(each.effect, Commit) for each in world.tasks)
    assert 1 == len(commits(world))


def test_writes_of_one_batch_merge_per_node_key(world: World) -> None:
    for number in range(3):
        world.ask("p1", request(request_id=f"r{number}"))
    world.step_task()

    assert 1 == sum(write.key == "node.n1" for write in commits(world)[0].writes)


def test_a_conflict_is_planned_again_on_what_was_read_and_fits_elsewhere_or_not(world: World) -> None:
    world.placer("p2")
    world.settle()
    replies = [world.ask(name, request(request_id=name, gpu={"count": 4})) for name in ("p1", "p2")]
    world.settle()

    assert ["placed", "rejected"] == [world.answer(reply).outcome for reply in replies]
    assert 1 == world.placers["p2"].counters["commits.conflict"]


def test_P17_two_placers_never_spend_the_same_device(world: World) -> None:
    for number in range(2, 5):
        world.placer(f"p{number}")
    world.settle()
    replies = [world.ask(f"p{n % 4 + 1}", request(request_id=f"r{n}", gpu={"share": 1})) for n in range(8)]
    outcomes = sorted(world.answer(reply).outcome for reply in replies)

    assert ["placed"] * 4 + ["rejected"] * 4 == outcomes
    world.check_settled()


def test_one_request_id_at_two_placers_at_once_has_one_effect(world: World) -> None:
    world.placer("p2")
    world.settle()
    replies = [world.ask(name, request()) for name in ("p1", "p2")]
    said = [world.answer(reply) for reply in replies]

    assert [False, True] == [reply.duplicate for reply in said]
    assert said[0].placements[0].devices == said[1].placements[0].devices
    assert 1 == len(world.running())


def test_a_batch_stays_whole_after_a_conflict_and_is_split_from_the_fourth_in_a_row_on(world: World) -> None:
    for number in range(9):
        world.ask("p1", request(request_id=f"r{number}", gpu={"share": 0.1}))
    world.step_task()
    big = take_commit(world)
    assert 9 == len(big.writes)
    for _ in range(PATIENCE - 1):
        world.tell("p1", CommitDone(big.commit, CommitOutcome.CONFLICT, current=()))
        big = take_commit(world)
        assert 9 == len(big.writes)
    world.tell("p1", CommitDone(big.commit, CommitOutcome.CONFLICT, current=()))

    assert 5 == len(commits(world)[0].writes)
    world.settle()
    assert 9 == len(world.running())


def test_a_key_that_cannot_be_agreed_on_makes_no_loop_at_full_speed(world: World) -> None:
    reply = world.ask("p1", request())
    for _ in range(MOST_CONFLICTS):
        world.tell("p1", CommitDone(take_commit(world).commit, CommitOutcome.CONFLICT))
    assert [] == commits(world)
    world.pass_time(0.2)

    assert "placed" == world.answer(reply).outcome


def test_after_a_time_out_a_record_to_which_the_batch_adds_no_step_is_no_evidence(world: World) -> None:
    """What another placer has written on it has all the steps that the lost batch had."""
    world.add_node("n2", 4)
    world.placer("p2")
    for request_id in ("a", "b"):
        world.place("p1", request_id=request_id, gpu={"share": 1.0}, strategy="spread")
    world.pass_time(2)
    world.place("p1", request_id="wide", gpu={"count": 4}, queue=True)
    for message in (request(request_id="first"), DefragmentRequest(request_id="wide"), request(request_id="new")):
        world.ask("p1", message)
    world.step_task()
    lost = take_commit(world)
    assert {"request.wide", "request.new"} <= {write.key for write in lost.writes}
    world.release("p2", "wide")
    world.tell("p1", world.ledger.unknown(lost, written=False))
    world.settle()
    assert world.has_key("new")


@pytest.mark.parametrize("written", [True, False])
def test_after_a_time_out_the_request_key_tells_whether_it_was_written(world: World, written: bool) -> None:
    reply = world.ask("p1", request())
    commit = take_commit(world)
    world.tell("p1", world.ledger.unknown(commit, written=written))
    said = world.answer(reply)

    assert ("placed", False, 1) == (said.outcome, said.duplicate, said.generation)
    assert ["accepted", "placed", "started"] == world.states("a")
    assert 1 == len(world.running())


def test_a_write_that_lands_after_its_outcome_was_read_is_found_by_the_conflict(world: World) -> None:
    reply = world.ask("p1", request())
    commit = take_commit(world)
    world.tell("p1", world.ledger.unknown(commit, written=False))
    world.ledger.commit(commit)
    said = world.answer(reply)

    assert "placed" == said.outcome
    world.pass_time(4)
    assert ["accepted", "placed", "started"] == world.states("a")
    assert 1 == len(world.running())


def test_an_unknown_outcome_that_others_built_on_since_is_known_by_its_step(world: World) -> None:
    world.placer("p2")
    world.settle()
    reply = world.ask("p1", request())
    commit = take_commit(world)
    world.ledger.commit(commit)
    world.step_watch("p2")
    while world.step_watch("p2"):
        pass
    assert "stopping" == world.release("p2", "a").outcome
    current = world.ledger.read([write.key for write in commit.writes])
    world.tell("p1", CommitDone(commit.commit, CommitOutcome.UNKNOWN, current=current))

    assert "placed" == world.answer(reply).outcome
    world.pass_time(4)
    assert State.RELEASED == world.record("a").state
    assert [] == world.running()


def test_what_the_watch_shows_of_a_batch_before_its_end_is_told_once(world: World) -> None:
    reply = world.ask("p1", request())
    commit = take_commit(world)
    done = world.ledger.commit(commit)
    while world.step_watch("p1"):
        pass
    world.tell("p1", done)
    said = world.answer(reply)

    assert ("placed", False) == (said.outcome, said.duplicate)
    assert [f"laxity.place.{step}" for step in ("accepted", "placed", "started")] == [
        e.event_type for e in world.events
    ]


def test_what_the_watch_shows_of_a_batch_that_was_not_written_by_us_is_not_lost(world: World) -> None:
    world.ask("p1", request())
    commit = take_commit(world)
    world.ledger.commit(commit)
    while world.step_watch("p1"):
        pass
    world.tell("p1", CommitDone(commit.commit, CommitOutcome.REFUSED, detail="no"))

    assert world.record("a") == world.placers["p1"].ledger.record("a")


def test_whoever_asked_is_answered_before_anything_else_is_done(world: World) -> None:
    world.ask("p1", request())
    done = world.ledger.commit(take_commit(world))
    effects = world.placers["p1"].handle(done, world.now)

    assert [Reply, Start, Publish, Publish] == list(map(type, effects))


def test_a_placer_sees_what_it_wrote_as_those_do_who_read_it(world: World) -> None:
    world.place("p1")
    world.place("p1", request_id="b", gpu={"share": 0.25, "memory_mib": 512}, queue=True, name="b")
    world.place("p1", request_id="c", gpu={"count": 4}, queue=True)
    world.place("p1", request_id="d", hold_us=1_000_000, gpu={"share": 0.5})
    world.resize("p1", "b", cpu_milli=500, memory_mib=64)
    world.release("p1", "a")
    world.pass_time(4)
    read = Ledger()
    for change in world.ledger.replay():
        read.observe(change, 0)

    assert {key: stored.value for key, stored in read.written()} == {
        key: stored.value for key, stored in world.placers["p1"].ledger.written()
    }


def test_a_batch_that_is_refused_is_tried_alone_and_then_answered_with_an_error(world: World) -> None:
    replies = [world.ask("p1", request(request_id=f"r{number}")) for number in range(3)]
    world.step_task()
    world.tell("p1", CommitDone(take_commit(world).commit, CommitOutcome.REFUSED, detail="no"))
    world.tell("p1", CommitDone(take_commit(world).commit, CommitOutcome.REFUSED, detail="no"))
    outcomes = [world.answer(reply).outcome for reply in replies]

    assert ["placed", "error", "placed"] == outcomes
    assert 500 == world.errors[replies[1]][0]


def test_a_gang_that_fills_a_batch_goes_alone() -> None:
    world = World(rules=Rules(batch=500), checking=False)
    for number in range(600):
        world.add_node(f"n{number}", 0)
    world.placer("p1")
    world.settle()
    body = {"gpu": None, "cpu_milli": 64_000}
    replies = [world.ask("p1", request(request_id="first", gpu=None, cpu_milli=1))]
    replies += [world.ask("p1", request(request_id=f"g{n}", replicas=n, **body)) for n in (250, 300)]
    replies += [world.ask("p1", request(request_id="last", gpu=None, cpu_milli=1))]
    outcomes = [world.answer(reply).outcome for reply in replies]

    assert ["placed", "placed", "placed", "placed"] == outcomes
    world.check_settled()


def test_final_keys_are_written_with_a_time_to_live_and_others_without(world: World) -> None:
    world.ask("p1", request(gpu={"count": 9}))
    world.ask("p1", request(request_id="b"))
    rejected = take_commit(world)
    world.tell("p1", world.ledger.commit(rejected))
    placed = take_commit(world)

    assert [86_400] == [write.ttl_s for write in rejected.writes]
    assert {None} == {write.ttl_s for write in placed.writes}


def test_a_key_that_ran_out_is_new_again(world: World) -> None:
    world.place("p1", gpu={"share": 1, "memory_mib": 99_999})
    world.ledger.expire("request.a")
    world.finals.clear()
    world.placers["p1"].ledger.forget("a")

    assert ("rejected", False) == (
        (said := world.place("p1", gpu={"share": 1, "memory_mib": 99_999})).outcome,
        said.duplicate,
    )


# --- the view ---


def change(key: str, value: bytes | None, revision: int) -> KeyChanged:
    return KeyChanged(LEDGER, key, value, revision)


RECORD = RequestRecord(request_id="a", body=None, body_hash="", state=State.RELEASED, owner="p", final=True).to_json()


def test_the_newest_revision_wins_whichever_way_it_came() -> None:
    ledger = Ledger()

    assert ledger.observe(change("request.a", RECORD, 5), 1) is not None
    assert ledger.observe(change("request.a", RECORD, 5), 2) is None
    assert ledger.observe(change("request.a", None, 4), 3) is None
    assert 1 == ledger.records["a"].seen_us


def test_a_record_that_cannot_be_read_is_neither_absent_nor_overwritten(world: World) -> None:
    world.ledger.put("request.a", b"rubbish")
    world.settle()
    said = world.place("p1")

    assert said.error is not None
    assert "request_id" == said.error.field
    assert b"rubbish" == world.ledger.values["request.a"][0]


def test_keys_that_are_not_of_the_ledger_are_left_alone() -> None:
    ledger = Ledger()

    assert ledger.observe(change("other.key", b"x", 1), 0) is None
    with pytest.raises(FieldError):
        parse_key("request")


def test_what_a_draft_takes_and_gives_back_is_not_written() -> None:
    ledger, memory = Ledger(), MemoryLedger()
    memory.put("node.n1", b'{"node":"n1","reservations":[]}')
    ledger.observe(memory.log[0], 0)
    draft = Draft(ledger, Cluster(), 1)
    draft.set_reservations("n1", ())

    assert () == draft.writes()


def test_what_a_batch_that_failed_kept_for_a_request_or_gave_up_is_as_it_was() -> None:
    ledger, memory, cluster = Ledger(), MemoryLedger(), Cluster()
    kept = new_record(request(request_id="kept", queue=True), "p1", 0)
    kept = kept.model_copy(update={"shadow": (ShadowPlace(replica=0, node="n1"),)})
    memory.put("request.kept", kept.to_json())
    ledger.observe(memory.log[0], 0)
    cluster.set_shadow("kept", shadow_of(kept))
    draft = Draft(ledger, cluster, 1)
    draft.put(kept.model_copy(update={"shadow": ()}))
    draft.put(kept.model_copy(update={"request_id": "other"}))
    assert {"other"} == cluster.shadows
    draft.abandon()

    assert {"kept"} == cluster.shadows


def test_a_beat_writes_one_batch_for_both_leases(world: World) -> None:
    before = world.ledger.seq
    world.pass_time(1)

    assert 2 == world.ledger.seq - before
