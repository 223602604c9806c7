"""What a list says and how it changes: deltas, pages, counts, reasons, hysteresis at work, and no wall clock."""

from __future__ import annotations

from random import Random

import pytest

from services.node_list.nodes import Policy
from shared.effects import KeyChanged, Received
from shared.lease import Tenure
from shared.messages import DeviceStanding, KubeNodeFacts, Lease, ListDelta, NodeFacts, NodesReply, Regime
from shared.subjects import LISTS_KEY, NODES, node_key
from tests.unit.test_node_list_alone import record
from tests.unit.test_node_list_core import CLASSES, SECOND, Harness, device, reservation

DAY_US = 86_400 * SECOND
SLICED = {"regime": Regime.TIME_SLICED, "slice_us": 3_000, "switch_us": 0}


def changes(it: Harness, wanted: str = "interactive") -> list[ListDelta]:
    return [delta for _, delta in it.changes if delta.deadline_class == wanted]


def page(it: Harness) -> NodesReply:
    body = it.replies[-1].body
    assert isinstance(body, NodesReply)
    return body


def steady(it: Harness) -> Harness:
    """With the hysteresis of the settings."""
    policy = Policy(CLASSES, 3_500_000, 30_000_000, 0.1, 20_000, return_ratio=0.05, return_us=5 * SECOND)
    it.core.policy, it.core.hysteresis.ratio, it.core.hysteresis.after_us = policy, 0.05, 5 * SECOND
    return it


def test_one_write_is_one_message_per_class_however_many_devices_it_changes() -> None:
    it = Harness()
    it.beat("n1", *[device(f"g{n}") for n in range(5)])
    assert [(d.deadline_class, d.revision, len(d.changes)) for _, d in it.changes] == [
        ("interactive", 1, 5),
        ("fast", 1, 5),
    ]


def test_a_change_says_class_revision_device_old_and_new_standing_slack_and_place() -> None:
    it = Harness()
    it.beat("n1", device("g0"), device("g1"), times=2)
    it.hold("n1", reservation("q1", "g0", runtime_us=18_000))
    delta = changes(it)[-1]
    (change,) = delta.changes
    assert (delta.deadline_class, delta.revision, change.node, change.uuid) == ("interactive", 3, "n1", "g0")
    assert (change.was, change.standing, change.slack_us, change.place) == ("guaranteed", "guaranteed", 20_000, 2)


def test_a_class_whose_list_stays_as_it_is_says_nothing() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    before = len(it.changes)
    it.beat("n1", device("g0", group="b"))
    assert len(it.changes) == before


def test_a_device_that_is_not_there_any_more_leaves_the_list() -> None:
    it = Harness()
    it.beat("n1", device("g0"), device("g1"), times=2)
    it.beat("n1", device("g0"))
    (change,) = changes(it)[-1].changes
    assert (change.uuid, change.was, change.standing, change.place) == ("g1", "guaranteed", None, None)
    assert it.listed() == [("n1", "g0", "guaranteed")]


def test_a_change_is_numbered_and_named_after_its_class_its_list_and_its_revision() -> None:
    it = Harness("a")
    it.beat("n1", device("g0"), times=2)
    ids = [event_id for event_id, delta in it.changes if delta.deadline_class == "fast"]
    assert ids == ["list/fast/a/1/1", "list/fast/a/1/2"]


def test_a_takeover_goes_on_with_the_revisions_and_says_again_what_was_not_heard() -> None:
    first = Harness("a")
    first.beat("n1", device("g0"), times=2)
    second = Harness("b", first.bucket)
    second.beat("n1", device("g0"), times=2)
    second.wait(4_000_000, beating=("n1",))
    assert [event_id for event_id, _ in second.changes] == [event_id for event_id, _ in first.changes]
    second.hold("n1", reservation("q1", "g0"))
    assert changes(second)[-1].revision == 3


def test_a_standby_and_a_deposed_writer_say_nothing() -> None:
    first = Harness("a")
    first.beat("n1", device("g0"), times=2)
    second = Harness("b", first.bucket)
    second.beat("n1", device("g0", healthy=False), times=2)
    assert second.changes == []
    second.wait(4_000_000, beating=("n1",))
    before = len(first.changes)
    first.beat("n1", device("g0", healthy=False))
    assert (len(first.changes), first.conflicts) == (before, 1)


def test_an_answer_that_comes_when_another_has_the_lease_does_not_take_it_back() -> None:
    lease = Tenure("lease.x", "a", 3 * SECOND)
    lease.changed(KeyChanged(NODES, "lease.x", Lease(holder="b", counter=2, ttl_us=1).to_json(), 9), 0)
    assert (lease.renewed(8, 0), lease.active) == (False, False)
    assert (lease.renewed(10, 0), lease.active) == (True, True)


def test_a_node_key_that_somebody_else_removes_leaves_a_revision_out() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    was = changes(it)[-1].revision
    it.bucket[node_key("n1")] = (None, 99)
    it.hear_others()
    assert (changes(it)[-1].revision, it.listed()) == (was + 2, [("n1", "g0", "guaranteed")])


@pytest.mark.parametrize("key", [LISTS_KEY, node_key("n1")])
def test_a_key_of_its_own_that_cannot_be_read_is_written_anew(key: str) -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.bucket[key] = (b"{", 99)
    it.hear_others()
    it.hold("n1", reservation("q1", "g0"))
    it.hear_others()
    assert (it.listed(), it.core.counters["malformed.rt_nodes"]) == ([("n1", "g0", "guaranteed")], 1)
    assert (it.bucket[key][0] or b"").startswith(b'{"')


def test_the_changes_that_were_heard_are_kept_no_longer() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    for _, delta in it.changes:
        it.tell(Received("rt.events.list.x", delta))
    it.hold("n1", reservation("q1", "g0"))
    assert [(d.deadline_class, d.revision) for d in record(it).unsaid] == [("interactive", 3), ("fast", 3)]


def test_every_instance_answers_what_is_published() -> None:
    first = Harness("a")
    first.beat("n1", device("g0"), times=2)
    second = Harness("b", first.bucket)
    assert (second.listed(), page(second).revision) == ([("n1", "g0", "guaranteed")], 2)
    second.beat("n1", device("g0", healthy=False))
    assert second.listed() == [("n1", "g0", "guaranteed")]


def mixed() -> Harness:
    """One device of each standing and more."""
    it = Harness()
    it.beat("n1", *[device(f"g{n}", group="a" if n % 2 else "b", model="H200" if n < 4 else "L40S") for n in range(6)])
    it.beat("n1", *[device(f"g{n}", group="a" if n % 2 else "b", model="H200" if n < 4 else "L40S") for n in range(6)])
    it.beat("n2", device("g0", healthy=False, reason="gpu_lost"), device("g1", **SLICED), times=2)
    held = [reservation("q1", "g0", runtime_us=30_000), reservation("q2", "g1", share=1_000_000)]
    it.hold("n1", *held, reservation("q3", "g2", runtime_us=1_000))
    it.tell_warning("q3")
    return it


def test_the_counts_are_of_the_whole_list_whatever_is_asked_for() -> None:
    it = mixed()
    it.listed(limit=1, standing=["excluded"])
    counts = page(it).counts or {}
    assert counts == dict(zip(DeviceStanding, (4, 1, 1, 1, 1), strict=True))


def test_an_excluded_device_says_why() -> None:
    it = mixed()
    it.listed(standing=["excluded"])
    assert [d.reason for d in page(it).devices] == ["device not healthy: gpu_lost"]
    it.wait(4_000_000)
    it.listed()
    assert all((d.reason or "").startswith("node unreachable: no heartbeat for") for d in page(it).devices)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"group": "a"},
        {"models": ["L40S"]},
        {"standing": ["full", "tight"]},
        {"group": "b", "models": ["H200"]},
    ],
)
def test_filtered_pages_together_are_the_filtered_list(asked: dict[str, object], limit: int) -> None:
    it = mixed()
    whole, found, after = it.listed(**asked), [], None
    while True:
        found += it.listed(limit=limit, **asked, **({"after": after} if after else {}))
        assert len(page(it).devices) <= limit
        if (after := page(it).after) is None:
            break
    assert found == whole != []


def test_a_device_that_moves_between_two_pages_makes_no_other_be_left_out() -> None:
    it = Harness()
    it.beat("n1", *[device(f"g{n}") for n in range(6)], times=2)
    first = it.listed(limit=3)
    it.hold("n1", reservation("q1", "g2", runtime_us=30_000))
    second = it.listed(limit=9, after=page(it).after)
    assert {uuid for _, uuid, _ in first + second} == {f"g{n}" for n in range(6)}


def test_foreign_work_that_comes_and_goes_counts_until_none_was_seen_for_a_while() -> None:
    it = steady(Harness())
    shares = [Random(1).choice([0, 400_000]) for _ in range(30)]
    for share in [0, 0, 400_000, *shares]:
        it.beat("n1", device("g0", foreign_share_micro=share, **SLICED))
        it.now_us += SECOND // 2
    assert len(changes(it)) <= 6
    for _ in range(12):
        it.beat("n1", device("g0", **SLICED))
        it.now_us += SECOND
    it.listed()
    assert "foreign" not in (page(it).devices[0].reason or "")


def test_a_device_held_back_at_an_edge_returns_when_its_time_has_come_though_nothing_is_heard() -> None:
    it = steady(Harness())
    it.beat("n1", device("g0"), times=2, period_us=30 * SECOND)
    it.hold("n1", reservation("q1", "g0", runtime_us=18_000), reservation("q2", "g0", runtime_us=15_500))
    it.hold("n1", reservation("q1", "g0", runtime_us=18_000), reservation("q2", "g0", runtime_us=14_900))
    assert it.listed() == [("n1", "g0", "tight")]
    it.wait(4_750_000)
    assert it.listed() == [("n1", "g0", "tight")]
    it.wait(500_000)
    assert it.listed() == [("n1", "g0", "guaranteed")]


@pytest.mark.parametrize("step_us", [DAY_US, -DAY_US])
def test_T2_a_wall_clock_that_jumps_by_a_day_and_back_changes_nothing_but_what_people_read(step_us: int) -> None:
    def told(jumps: bool) -> tuple[object, ...]:
        chance = Random(5)
        it = steady(Harness())
        for turn in range(40):
            it.wall_us = 20_000 * DAY_US + (step_us if jumps and turn % 7 > 3 else 0)
            it.beat("n1", device("g0"), device("g1", healthy=chance.random() < 0.9))
            if chance.random() < 0.5:
                it.hold("n1", reservation("q1", "g0", runtime_us=chance.choice([1_000, 18_000, 30_000])))
            if chance.random() < 0.1:
                it.tell_warning("q1", judged=turn)
            it.wait(chance.choice([250_000, 1_000_000, 4_000_000]))
        states = [(p.event_id, p.body.model_copy(update={"at_us": 0})) for p in it.said]
        return states, [d.model_copy(update={"at_us": 0}) for _, d in it.changes], it.listed()

    assert told(jumps=True) == told(jumps=False)


def test_before_there_is_a_list_it_has_no_name_and_no_revision() -> None:
    it = Harness()
    assert (it.listed(), page(it).start_id, page(it).revision) == ([], None, 0)


def test_KU39_a_device_is_out_of_every_list_from_the_word_of_a_claim_to_the_word_of_its_end() -> None:
    it = Harness()
    it.beat("n1", device("g0"), device("g1"), times=2)
    said = {"node": "n1", "at_us": 0, "ready": True} | dict.fromkeys(("cpu_milli", "memory_mib"), 1000)
    kube = KubeNodeFacts(**said, foreign_cpu_milli=0, foreign_memory_mib=0)  # type: ignore[arg-type]
    for claimed, standing in (({"g0": "claim shop/a"}, "excluded"), ({}, "guaranteed")):
        it.tell(Received("rt.metrics.n1.kube", kube.model_copy(update={"claimed": claimed})))
        assert ("n1", "g0", standing) in it.listed()
        facts = NodeFacts.trusted(it.bucket[node_key("n1")][0])
        assert claimed.get("g0") == facts.devices[0].holder
        assert {standing} == {each.standing for each in facts.devices[0].classes.values()}
