"""What holds for every decision, whatever the cluster and the request."""

from collections import Counter

import numpy as np
from decide_draw import Draw, draws, facts_of, reserve
from hypothesis import given

from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.changes import changes
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.filters import DEVICE_FILTERS, NODE_FILTERS, sift
from services.placer.core.outcome import Fits, Never, NotNow
from services.placer.core.pipeline import decide, fits_more
from services.placer.core.planners.defrag import apply
from services.placer.core.question import Question
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from services.placer.core.strategies import STRATEGIES
from shared.messages import (
    SHARE_WHOLE_MICRO,
    NodeState,
    PlaceRequest,
)


def ask_of(made: Cluster, asked: PlaceRequest) -> Ask:
    return Ask(made, Demand.of(asked), ALL_CAN_ALL)


def assert_not_overcommitted(made: Cluster) -> None:
    """Counted here once more, from the reservations alone; foreign use may push a node over, we may not."""
    for facts in facts_of(made):
        held = made.reservations(facts.node)
        assert sum(r.cpu_milli for r in held) <= facts.cpu_milli
        assert sum(r.memory_mib for r in held) <= facts.memory_mib
        for device in facts.devices:
            mine = [r for r in held if device.uuid in r.devices]
            assert sum(r.share_micro for r in mine) <= SHARE_WHOLE_MICRO
            assert sum(r.device_memory_mib for r in mine) <= (device.memory_mib or 0)


@given(draws)
def test_a_decision_never_over_commits_and_places_all_replicas_or_none(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    decision = decide(made, asked, 0)
    if isinstance(decision, Fits):
        assert list(range(asked.replicas)) == [a.replica for a in decision.assignments]
        count = asked.gpu.count if asked.gpu else 0
        assert all(count == len(set(a.devices)) for a in decision.assignments)
        reserve(made, asked, decision)
    assert_not_overcommitted(made)


@given(draws)
def test_a_filter_never_adds_a_row_and_every_row_lost_is_counted_once(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    rows = ask_of(made, asked).everywhere()
    filters = DEVICE_FILTERS if asked.gpu else NODE_FILTERS
    left = set(rows.index.tolist())
    for number in range(1, len(filters) + 1):
        passing = set(sift(rows, filters[:number]).passing.index.tolist())
        assert passing <= left
        left = passing
    sifted = sift(rows)
    assert len(rows) == len(sifted.passing) + sum(reason.count for reason in sifted.reasons())


@given(draws)
def test_the_quick_way_through_the_filters_passes_the_same_rows(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    ask = ask_of(made, asked)
    expected, found = sift(ask.everywhere()).passing, Sieve(ask).passing(made.all_slots())
    assert sorted(expected.index.tolist()) == sorted(found.index.tolist())


@given(draws)
def test_the_answer_for_a_node_does_not_depend_on_the_others(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    ask = ask_of(made, asked)
    together = sorted(sift(ask.everywhere()).passing.index.tolist())
    alone = sorted(row for slot in made.all_slots() for row in sift(ask.on(np.array([slot]))).passing.index.tolist())
    assert together == alone


@given(draws)
def test_the_order_in_which_nodes_came_does_not_matter(draw: Draw) -> None:
    made, asked, tie = draw.cluster(), draw.request(), draw.one("", "placer-1")
    other = Cluster()
    for facts in draw.shuffled(facts_of(made)):
        turned = facts.model_copy(update={"devices": tuple(reversed(facts.devices))})
        other.set_reservations(facts.node, tuple(reversed(made.reservations(facts.node))))
        other.set_facts(facts.node, turned, 0)
    first, second = (decide(one, asked, 0, tie=tie, advise=False) for one in (made, other))
    assert type(first) is type(second)
    if isinstance(first, Fits) and isinstance(second, Fits):
        assert first == second
    elif not isinstance(first, Fits) and not isinstance(second, Fits):
        assert {(r.code, r.count) for r in first.reasons} == {(r.code, r.count) for r in second.reasons}


@given(draws)
def test_keeping_in_step_gives_what_starting_afresh_gives(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    fresh = Cluster()
    for facts in facts_of(made):
        fresh.set_facts(facts.node, facts, 0)
        fresh.set_reservations(facts.node, made.reservations(facts.node))
    assert decide(fresh, asked, 0) == decide(made, asked, 0)


@given(draws)
def test_scores_are_finite_and_from_0_to_1(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    passing = Sieve(ask_of(made, asked)).passing(made.all_slots())
    for strategy in STRATEGIES.values():
        ranking = strategy.rank(passing)
        for values in (ranking.total, *ranking.by.values()):
            assert len(passing.slots if ranking.of_nodes else passing) == len(values)
            assert np.isfinite(values).all()
            assert ((values >= 0) & (values <= 1)).all()


@given(draws)
def test_what_would_make_it_fit_does(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    decision = decide(made, asked, 0, tenants=draw.tenant)
    if isinstance(decision, Fits):
        return
    question = Question(
        made, asked, STRATEGIES[asked.strategy], tuple(range(asked.replicas)), ALL_CAN_ALL, tenants=draw.tenant
    )
    told = changes(question, question.plan())
    assert decision.would_fit_if == tuple(change.text for change in told)
    for change in told:
        if change.request:
            valid = PlaceRequest.from_json(change.request.model_dump_json().encode())
            assert isinstance(decide(made, valid, 0), Fits)
        with made.trial():
            for released, node in change.released:
                made.set_reservations(node, tuple(r for r in made.reservations(node) if r.request_id != released))
            if change.moved:
                apply(question, change.moved)
            assert change.request or isinstance(decide(made, asked, 0), Fits)


@given(draws)
def test_fits_more_is_how_many_do_fit(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    expected = fits_more(made, asked, 0, limit=12)
    done = 0
    while done < 12 and isinstance(decision := decide(made, asked, 0, advise=False), Fits):
        reserve(made, asked.model_copy(update={"request_id": f"more-{done}"}), decision)
        done += 1
    assert expected == done


@given(draws)
def test_never_means_not_on_an_empty_cluster_either(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    """Not now: it fits once all have left, all devices are well and nobody else uses them; never: not even then."""
    decision = decide(made, asked, 0, advise=False)
    ideal = Cluster()
    for facts in facts_of(made):
        well = {"healthy": True, "foreign_share_micro": 0, "foreign_memory_mib": 0, "classes": {}}
        devices = tuple(device.model_copy(update=well) for device in facts.devices)
        idle = {"state": NodeState.READY, "foreign_cpu_milli": 0, "foreign_memory_mib": 0, "devices": devices}
        ideal.set_facts(facts.node, facts.model_copy(update=idle), 0)
    then = decide(ideal, asked, 0, advise=False)
    if isinstance(decision, Never):
        assert not isinstance(then, Fits)
    known = all(facts.state is not NodeState.JOINED for facts in facts_of(made)) and facts_of(made)
    unreported = any(d.memory_mib is None for facts in facts_of(made) for d in facts.devices)
    if isinstance(decision, NotNow) and known and not unreported and not ask_of(made, asked).strangers():
        assert isinstance(then, Fits)


@given(draws)
def test_reasons_are_counted_and_say_something(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    decision = decide(made, asked, 0, advise=False)
    if not isinstance(decision, Fits):
        assert decision.reasons
        assert all(reason.message and reason.count >= 0 for reason in decision.reasons)
        assert 1 == max(Counter(reason.code for reason in decision.reasons).values())
