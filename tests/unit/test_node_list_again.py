"""What the node list does not do again where nothing changed; and that it sees each change of what that depends on."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from services.node_list.nodes import _read
from shared.admission import Learned
from shared.effects import KeyChanged, Tick
from shared.errors import FieldError
from shared.messages import Heartbeat, KubeNodeFacts, NodeFacts, NodeMetrics, Regime, Reservation
from shared.subjects import LEDGER, NODES, node_key
from tests.unit.test_node_list_core import POLICY, SECOND, Harness, device, reservation

ALL = [device("g0"), device("g1", Regime.TIME_SLICED, slice_us=2_000, switch_us=100), device("g2")]


def standings(it: Harness) -> dict[str, object]:
    return dict(it.core.nodes["n1"].standings)


def judged_anew(*held: Reservation) -> dict[str, object]:
    fresh = Harness("b")
    fresh.hold("n1", *held)
    fresh.beat("n1", *ALL, times=2)
    return standings(fresh)


def test_after_each_change_of_reservations_all_devices_stand_as_if_all_were_judged_anew() -> None:
    it, random = Harness(), Random(7)
    it.beat("n1", *ALL, times=2)
    held: list[Reservation] = []
    for step in range(60):
        if held and random.random() < 0.45:
            held.remove(random.choice(held))
        elif held and random.random() < 0.2:
            at = random.randrange(len(held))  # the same one, moved or larger
            held[at] = held[at].model_copy(update={"devices": (f"g{random.randrange(3)}",), "share_micro": 300_000})
        else:
            runtime_us = random.choice([1_000, 12_000, 30_000])
            held.append(reservation(f"q{step}", f"g{random.randrange(3)}", runtime_us, random.choice([0, 250_000])))
        it.hold("n1", *held)
        assert judged_anew(*held) == standings(it)


def test_the_key_of_a_node_that_says_the_same_makes_no_write() -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2)
    it.hold("n1", reservation("q1", "g0"))
    before = dict(it.bucket)
    it.hold("n1", reservation("q1", "g0"))
    assert before == it.bucket


def test_all_reservations_of_a_node_whose_key_is_gone_are_gone() -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2)
    it.hold("n1", reservation("q1", "g0"))
    it.tell(KeyChanged(LEDGER, node_key("n1"), None, 9_999))
    assert judged_anew() == standings(it)


def test_a_heartbeat_that_says_the_same_is_not_kept_and_still_counts() -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2, counter=7)
    it.beat("n1", *ALL, counter=8, at_us=5, mono_us=5)
    view = it.core.nodes["n1"]
    assert view.metrics is not None
    assert (7, 8, it.now_us) == (view.metrics.counter, view.counter, view.liveness.seen_us)


@pytest.mark.parametrize(
    "change",
    [
        {"group": "a"},
        {"memory_mib": None},
        {"foreign_memory_mib": 5},
        {"foreign_share_micro": None},
        {"handover_us": 500},
        {"plugin_holder": "pod x"},
        {"healthy": False, "reason": "gone"},
        {"regime": Regime.EXCLUSIVE},
        {"index": 4},
    ],
)
def test_what_a_heartbeat_says_of_a_device_otherwise_than_before_is_published(change: dict[str, object]) -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2)
    it.beat("n1", *ALL[:2], device("g2", **change))
    facts = NodeFacts.trusted(it.bucket[node_key("n1")][0] or b"")
    assert change.items() <= facts.devices[2].model_dump().items()


def test_a_device_that_turns_out_to_be_a_part_of_a_claimed_one_is_claimed() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    view = it.core.nodes["n1"]
    said = {"cpu_milli": 1, "memory_mib": 1, "foreign_cpu_milli": 0, "foreign_memory_mib": 0}
    view.kube_says(KubeNodeFacts(node="n1", at_us=1, ready=True, claimed={"GPU-1": "ns/claim"}, **said))
    it.beat("n1", device("g0", parent="GPU-1"))
    assert ["given to ns/claim"] * 2 == [each.reason for each in view.standings["g0"].values()]


def test_a_device_is_published_as_the_very_object_it_was_where_nothing_of_it_changed() -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2)
    before = it.core.nodes["n1"].facts
    it.hold("n1", reservation("q1", "g2"))
    after = it.core.nodes["n1"].facts
    assert before is not None
    assert after is not None
    assert [True, True, False] == [old is new for old, new in zip(before.devices, after.devices, strict=True)]


def test_what_we_wrote_is_not_read_when_it_comes_back_and_what_others_wrote_is() -> None:
    it = Harness()
    it.beat("n1", *ALL, times=2)
    value, revision = it.bucket[node_key("n1")]
    assert value is not None
    ours = it.core._value(NodeFacts, KeyChanged(NODES, node_key("n1"), value, revision))
    theirs = it.core._value(NodeFacts, KeyChanged(NODES, node_key("n1"), value.replace(b"ready", b"lost"), revision))
    assert ours is it.core.nodes["n1"].facts
    assert theirs is not None
    assert "lost" == theirs.state


def test_a_standby_judges_a_node_when_it_says_something_new_and_not_with_each_heartbeat() -> None:
    first = Harness("a")
    first.beat("n1", *ALL, times=2)
    second = Harness("b", first.bucket)
    second.beat("n1", *ALL, times=3)
    view = second.core.nodes["n1"]
    assert (True, False) == (view.dirty, view.stale)
    assert view.judge_devices(POLICY, Learned()) == view.standings


def test_who_was_heard_while_we_stood_still_is_silent_from_then_on_and_not_from_later() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.beat("n2", device("g0"), times=2)
    it.tell(Tick("age", 0))
    it.now_us += 3600 * SECOND
    it.beat("n1", device("g0"))
    it.tell(Tick("age", 0))
    it.wait(4_000_000)
    assert (it.states("n1")[-1], it.states("n2")[-1]) == ("unreachable", "unreachable")


def test_silence_is_noticed_of_whoever_was_silent_for_longest_and_of_no_other() -> None:
    it = Harness()
    for node in ("n1", "n2", "n3"):
        it.beat(node, device("g0"), times=2)
    it.wait(2_000_000, beating=("n1",))
    it.wait(2_000_000, beating=("n3",))
    assert ["ready", "unreachable", "ready"] == [it.states(node)[-1] for node in ("n1", "n2", "n3")]


def test_of_a_heartbeat_only_what_the_node_list_goes_by_is_read() -> None:
    body = json.loads((Path(__file__).parents[2] / "docs" / "samples" / "NodeMetrics.json").read_text())
    whole = NodeMetrics.from_json(json.dumps(body).encode())
    heard = Heartbeat.from_json(json.dumps(body | {"containers": "not ours to judge"}).encode())
    assert all(getattr(whole, name) == getattr(heard, name) for name in Heartbeat.model_fields.keys() - {"devices"})
    assert _read(whole) == _read(heard)
    with pytest.raises(FieldError, match="devices"):
        Heartbeat.from_json(json.dumps(body | {"devices": [{"uuid": 1}]}).encode())
