"""What makes decisions quick changes nothing: the list of the last changes, and sorting few rows."""

import numpy as np
from decide_world import firm, node, share

from services.placer.core.capabilities import ALL_CAN_ALL
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.options import Tie, first_device, options
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from services.placer.core.strategies import STRATEGIES


def test_the_nodes_changed_since_a_number_are_those_whose_last_change_is_later() -> None:
    made = Cluster()
    names = [f"n{number}" for number in range(7)]
    for name in names:
        made.set_facts(name, node(name, 1), 0)
    taken = Demand.of(share(0.1)).reservation("r", 0, 1, ())
    for number in range(9_000):
        name = names[number * number % len(names)]
        made.set_reservations(name, () if made.reservations(name) else (taken,))
        if number % 250 == 0:
            for since in (0, 7, made.changes - 5_000, made.changes - 1_000, made.changes - 2, made.changes):
                expected = np.flatnonzero(made.nodes["changed"] > since).tolist()
                assert expected == sorted(made.changed_since(since).tolist())


def test_each_node_has_the_same_option_among_many_rows_as_alone() -> None:
    made = Cluster()
    for number in range(80):
        made.set_facts(name := f"n{number}", node(name, 8), 0)
        for device in range(number % 8):
            uuid = made.facts(name).devices[device].uuid  # type: ignore[union-attr]
            taken = Demand.of(share(0.1 * (1 + number % 3))).reservation(f"r-{device}", 0, 1, (uuid,))
            made.set_reservations(name, (*made.reservations(name), taken))
    asked = share(0.2, realtime=firm(50_000, 1_000))
    ask, tie = Ask(made, Demand.of(asked), ALL_CAN_ALL), Tie(made, "word")
    for strategy in STRATEGIES.values():
        together = options(Sieve(ask).passing(made.all_slots()), strategy, tie)
        at = first_device(together.keys, together.parts)
        found = dict(zip(together.node.tolist(), together.columns[at].tolist(), strict=True))
        alone = [options(Sieve(ask).passing(np.array([slot])), strategy, tie) for slot in made.all_slots()]
        assert {int(each.node[0]): int(each.columns[at][0]) for each in alone} == found
