"""What is remembered between decisions changes none of them, whatever happened to the cluster in between."""

from decide_draw import Draw, draws, facts_of
from decide_draw import reserve as take
from decide_world import firm, node, place, share
from hypothesis import given, settings

from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import Fits
from services.placer.core.pipeline import decide, fits_more
from services.placer.core.strategies import STRATEGIES
from shared.messages import PlaceRequest

NAMES = ("n0", "n1", "n2", "n3", "n9")


def afresh(made: Cluster) -> Cluster:
    """A cluster of the same facts and reservations that remembers nothing."""
    fresh = Cluster()
    for facts in facts_of(made):
        fresh.set_facts(facts.node, facts, 0)
        fresh.set_reservations(facts.node, made.reservations(facts.node))
    return fresh


def change(draw: Draw, made: Cluster, asked: list[PlaceRequest], number: int) -> None:
    """One of the things that happen: a request is placed or leaves, a node comes, changes, is ill, or goes."""
    name = draw.one(*NAMES)
    held, facts = made.reservations(name), made.facts(name)
    match draw.one("place", "place", "place", "leave", "leave", "renew", "node", "ill", "go"):
        case "place":
            request = draw.one(*asked).model_copy(update={"request_id": f"c-{number}"})
            decision = decide(made, request, 0, advise=False)
            if isinstance(decision, Fits):
                take(made, request, decision)
        case "leave" if held:
            gone = draw.one(*held)
            made.set_reservations(name, tuple(each for each in held if each is not gone))
        case "renew":  # as they come from the ledger: equal, and other objects
            made.set_reservations(name, tuple(each.model_copy() for each in draw.shuffled(held)))
        case "node":
            made.set_facts(name, draw.node(name), 0)
        case "ill" if facts and facts.devices:
            first, *others = facts.devices
            well = first.model_copy(update={"healthy": not first.healthy})
            made.set_facts(name, facts.model_copy(update={"devices": (well, *others)}), 0)
        case "go":
            made.set_facts(name, None, 0)


@settings(max_examples=40)
@given(draws)
def test_a_decision_is_the_same_as_one_that_remembers_nothing(draw: Draw) -> None:
    made = draw.cluster()
    asked = [draw.request() for _ in range(3)]
    for number in range(8):
        change(draw, made, asked, number)
        fresh, tie, aside = afresh(made), draw.one("", "placer-1"), draw.mostly(frozenset[str](), frozenset({"n1"}))
        for request in (each.model_copy(update={"strategy": draw.one(*STRATEGIES)}) for each in asked):
            expected, found = (decide(it, request, 0, tie=tie, set_aside=aside, advise=False) for it in (fresh, made))
            assert expected == found
        assert fits_more(fresh, asked[0], 0, limit=20) == fits_more(made, asked[0], 0, limit=20)


def left_over(made: Cluster) -> dict[str, list[object]]:
    """What is counted of nodes and devices, in the order of their names."""
    slots, rows = made.all_slots(), made.all_rows()
    rows = rows[made.devices["rank"][rows].argsort()]
    rows = rows[made.devices["is_device"][rows]]
    of_nodes = ("cpu_free", "memory_free", "share_free", "whole_free", "devices", "used", "capacity", "rank")
    of_devices = ("share_free", "memory_free", "promised", "risk", "healthy")
    return {
        **{f"node {name}": made.nodes[name][slots].tolist() for name in of_nodes},
        **{f"device {name}": made.devices[name][rows].tolist() for name in of_devices},
        "loads": [made.loads[row] for row in rows.tolist()],
        "kinds": [made.kinds[number] for number in made.devices["load"][rows].tolist()],
    }


@given(draws)
def test_what_is_left_is_the_same_as_counted_anew(draw: Draw) -> None:
    made = draw.cluster()
    asked = [draw.request() for _ in range(3)]
    for number in range(12):
        change(draw, made, asked, number)
    assert left_over(afresh(made)) == left_over(made)


@given(draws)
def test_a_trial_leaves_no_trace_nor_does_one_inside_it(draw: Draw) -> None:
    made, asked = draw.cluster(), draw.request()
    before, expected = {name: made.reservations(name) for name in NAMES}, left_over(made)
    taken = Demand.of(asked).reservation("inside", 0, 1, ())
    with made.trial():
        made.set_reservations("n0", (taken, *made.reservations("n0")))
        with made.trial():
            made.set_reservations("n0", ())
            made.set_reservations("n1", (taken,))
        made.set_reservations("n2", ())
    assert before == {name: made.reservations(name) for name in NAMES}
    assert expected == left_over(made)


def test_kinds_of_load_that_nobody_has_are_forgotten() -> None:
    made = Cluster(kinds_kept=4)
    made.set_facts("a", node("a", 2), 0)
    for number in range(40):
        asked = share(0.1, realtime=firm(50_000 + number, 1_000 + number))
        assert decide(afresh(made), asked, 0) == decide(made, asked, 0)
        place(made, asked, f"r-{number}")
        made.set_reservations("a", made.reservations("a")[-3:])
    assert len(made.kinds) <= 4 + 2 * 2 + 4
