"""The node list: liveness by local receive time, ordered lists by what can still be promised, one writer."""

from __future__ import annotations

import itertools
import json

import pytest

from services.node_list.core import LEASE, Core
from services.node_list.nodes import Policy
from services.node_list.standing import ClassTask, judge
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Publish,
    Received,
    Reconnected,
    Reply,
    Tick,
    WatchReplayed,
)
from shared.messages import (
    ContainerRecord,
    DeadlineEvent,
    DeviceMetrics,
    Kind,
    Lease,
    ListDelta,
    Measured,
    NodeDeadlines,
    NodeMetrics,
    NodeReservations,
    NodesQuery,
    NodeState,
    Realtime,
    Regime,
    Reservation,
    Standing,
)
from shared.subjects import DEADLINES, LEDGER, NODES, Subjects, node_key

SECOND = 1_000_000
CLASSES = (ClassTask("interactive", 50_000, 12_000, 50_000), ClassTask("fast", 20_000, 5_000, 20_000))
POLICY = Policy(CLASSES, grace_us=3_500_000, lost_us=30_000_000, tight_ratio=0.1, foreign_context_micro=20_000)


def device(uuid: str, regime: Regime = Regime.GATED, **said: object) -> DeviceMetrics:
    known = {
        "uuid": uuid,
        "index": 0,
        "model": "H200",
        "regime": regime,
        "healthy": True,
        "memory_mib": 1000,
        "utilisation_ratio": Measured(value=0.5),
        "memory_used_mib": Measured(value=1.0),
    }
    return DeviceMetrics.model_validate(known | said)


def reservation(request: str, uuid: str, runtime_us: int = 12_000, share: int = 250_000) -> Reservation:
    return Reservation(
        request_id=request,
        replica=0,
        generation=1,
        devices=(uuid,),
        share_micro=share,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
        realtime=Realtime(deadline_us=50_000, period_us=50_000, runtime_us=runtime_us, kind=Kind.HARD, gate=True),
    )


class Harness:
    """One node-list over an honest little rt_nodes, with a clock of its own."""

    def __init__(self, holder: str = "a", bucket: dict[str, tuple[bytes | None, int]] | None = None) -> None:
        self.bucket = {} if bucket is None else bucket
        self.core = Core(Subjects(), POLICY, holder, lease_us=3 * SECOND, tick_us=250_000)
        self.now_us = 10 * SECOND
        self.wall_us: int | None = None
        """Where the wall clock is not to go with the other one."""
        self.beats = itertools.count(1)
        self.said: list[Publish] = []
        self.changes: list[tuple[str, ListDelta]] = []
        self.replies: list[Reply] = []
        self.conflicts = 0
        for bucket_name in (LEDGER, DEADLINES):
            self.tell(WatchReplayed(bucket_name, frozenset()))
        for key, (value, revision) in list(self.bucket.items()):
            self.tell(KeyChanged(NODES, key, value, revision))
        self.tell(WatchReplayed(NODES, frozenset(self.bucket)))

    def tell(self, event: object) -> None:
        effects: list[Effect] = self.core.handle(event, self.now_us)
        self.core.check()
        for effect in effects:
            match effect:
                case Commit():
                    done = self._commit(effect)
                    self.tell(done)
                    for write in effect.writes if done.revisions else ():
                        self.tell(KeyChanged(NODES, write.key, write.value, done.revisions[write.key]))
                case Publish(body=ListDelta() as delta):
                    self.changes.append((effect.event_id, delta))
                case Publish():
                    self.said.append(effect)
                case Reply():
                    self.replies.append(effect)

    def _commit(self, commit: Commit) -> CommitDone:
        if any(self.bucket.get(w.fence or w.key, (b"", 0))[1] != w.expected for w in commit.writes):
            self.conflicts += 1
            keys = [key for w in commit.writes for key in (w.key, w.fence) if key]
            found = [(key, *self.bucket.get(key, (None, 0))) for key in keys]
            current = tuple(KeyChanged(NODES, key, value, revision) for key, value, revision in found)
            return CommitDone(commit.commit, CommitOutcome.CONFLICT, current=current)
        top = max([revision for _, revision in self.bucket.values()], default=0)
        revisions = {write.key: top + n for n, write in enumerate(commit.writes, 1)}
        for write in commit.writes:
            self.bucket[write.key] = (write.value, revisions[write.key])
        return CommitDone(commit.commit, CommitOutcome.WRITTEN, revisions)

    def hear_others(self) -> None:
        """What the watch on rt_nodes brings."""
        for key, (value, revision) in list(self.bucket.items()):
            self.tell(KeyChanged(NODES, key, value, revision))

    def beat(self, node: str, *devices: DeviceMetrics, times: int = 1, subject: str = "", **said: object) -> None:
        for _ in range(times):
            known = {
                "node": node,
                "start_id": "s",
                "counter": next(self.beats),
                "at_us": 0,
                "mono_us": 0,
                "period_us": SECOND,
                "devices": devices,
                "cpu_milli": 2000,
                "memory_mib": 1000,
            }
            metrics = NodeMetrics.model_validate(known | said)
            self.tell(Received(subject or f"rt.metrics.{node}", metrics, wall_us=self.wall_us or 0))

    def hold(self, node: str, *reservations: Reservation) -> None:
        value = NodeReservations(node=node, reservations=reservations).to_json()
        self.tell(KeyChanged(LEDGER, node_key(node), value, next(self.beats)))

    def wait(self, duration_us: int, beating: tuple[str, ...] = ()) -> None:
        for _ in range(duration_us // 250_000):
            self.now_us += 250_000
            for node in beating:
                self.beat(node, device("g0"))
            self.tell(Tick("age", self.now_us if self.wall_us is None else self.wall_us))

    def tell_warning(self, request: str, judged: int = 5) -> None:
        self.tell(Received("", warning("at_risk", request, judged)))

    def listed(self, wanted: str = "interactive", **query: object) -> list[tuple[str, str, str]]:
        self.tell(Received("", NodesQuery.from_json(json.dumps({"class": wanted, **query}).encode()), reply="_INBOX.1"))
        return [(d.node, d.uuid, d.standing) for d in self.replies[-1].body.devices]

    def states(self, node: str) -> list[str]:
        return [publish.body.state for publish in self.said if publish.body.node == node]


def warning(kind: str, request: str, judged: int) -> DeadlineEvent:
    return DeadlineEvent(
        at_us=0,
        node="n1",
        container="c",
        kind=kind,
        task=None,
        deadline_us=None,
        request_id=request,
        replica=0,
        generation=1,
        judged=judged,
        met=0,
        missed=1,
        ratio=0.0,
        lower=0.0,
        upper=0.5,
        guarantee=0.99,
    )


def test_a_node_joins_with_its_first_heartbeat_and_is_ready_with_its_second() -> None:
    it = Harness()
    it.beat("n1", device("g0"))
    assert it.listed() == [("n1", "g0", "excluded")]
    it.beat("n1", device("g0"))
    assert (it.listed(), it.states("n1")) == ([("n1", "g0", "guaranteed")], ["joined", "ready"])


def test_a_silent_node_is_unreachable_after_the_grace_and_lost_later() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.wait(3_500_000)
    assert it.states("n1") == ["joined", "ready"]
    it.wait(500_000)
    it.wait(30_000_000)
    assert it.states("n1") == ["joined", "ready", "unreachable", "lost"]


def test_T1_the_time_a_node_claims_plays_no_part() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2, at_us=1, mono_us=1)
    it.beat("n2", device("g0"), times=2, at_us=1 << 52, mono_us=1 << 52)
    it.wait(3_000_000)
    assert (it.states("n1"), it.states("n2")) == (["joined", "ready"], ["joined", "ready"])


@pytest.mark.parametrize("step_us", [86_400 * SECOND, -28_818 * SECOND])
def test_T2_T4_a_step_of_our_wall_clock_changes_no_node(step_us: int) -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.tell(Tick("age", it.now_us))
    it.tell(Tick("age", it.now_us + step_us))
    assert it.states("n1") == ["joined", "ready"]


def test_T5_after_we_were_suspended_nobody_is_declared_lost() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.tell(Tick("age", 0))
    it.now_us += 3600 * SECOND
    it.tell(Tick("age", 0))
    it.wait(3_000_000)
    assert (it.states("n1"), it.core.counters["rebased"]) == (["joined", "ready"], 1)


def test_T6_a_restarted_observer_gives_every_known_node_its_whole_grace() -> None:
    first = Harness()
    first.beat("n1", device("g0"), times=2)
    again = Harness("b", first.bucket)
    again.wait(3_500_000)
    assert {publish.event_id: publish.body.state for publish in again.said} == {"n1/2": "ready"}
    again.wait(500_000)
    assert again.states("n1") == ["ready", "unreachable"]


def test_T6_what_was_not_heard_while_disconnected_counts_against_nobody() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.tell(Disconnected())
    it.wait(20_000_000)
    it.tell(Reconnected(20_000_000))
    it.wait(3_000_000)
    assert it.states("n1") == ["joined", "ready"]


def test_T3_a_node_that_beats_slowly_gets_three_of_its_own_periods() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2, period_us=10 * SECOND)
    it.wait(29_000_000)
    assert it.states("n1") == ["joined", "ready"]


def test_a_heartbeat_that_comes_late_does_not_overwrite_a_newer_one() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2, counter=7)
    it.beat("n1", device("g0", healthy=False), counter=3)
    assert (it.core.counters["heartbeats_out_of_order"], it.listed()[0][2]) == (2, "excluded")


def test_M21_one_sick_device_leaves_the_others_in_the_list() -> None:
    it = Harness()
    it.beat("n1", device("g0", healthy=False, reason="gpu_lost"), device("g1"), times=2)
    assert it.listed() == [("n1", "g1", "guaranteed"), ("n1", "g0", "excluded")]
    assert it.states("n1") == ["joined", "device_lost", "degraded"]


def test_M22_a_device_that_is_well_again_comes_back() -> None:
    it = Harness()
    it.beat("n1", device("g0", healthy=False, reason="x"), times=2)
    it.beat("n1", device("g0"))
    assert (it.listed(), it.states("n1")[-2:]) == ([("n1", "g0", "guaranteed")], ["ready", "device_back"])


def test_a_monitor_that_stops_on_purpose_takes_its_node_out_at_once() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.beat("n1", device("g0"), draining=True)
    assert (it.listed(), it.states("n1")) == ([("n1", "g0", "excluded")], ["joined", "ready", "unreachable"])


def test_the_widest_slack_comes_first_and_each_reservation_narrows_it() -> None:
    it = Harness()
    it.beat("n1", device("g0"), device("g1"), times=2)
    it.hold("n1", reservation("q1", "g0"))
    assert [uuid for _, uuid, _ in it.listed()] == ["g1", "g0"]
    it.hold("n1", reservation("q1", "g1"), reservation("q2", "g1"))
    assert [uuid for _, uuid, _ in it.listed()] == ["g0", "g1"]


def test_what_a_turn_at_the_gate_may_take_beyond_the_runtime_is_taken_from_the_slack() -> None:
    for margin_us in (0, 700):
        judged = judge(device("g", handover_us=margin_us), CLASSES[0], [], [], foreign=False, tight_ratio=0.1)
        assert 38_000 - margin_us == judged.slack_us


def test_one_long_task_closes_a_device_to_the_short_class_only() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.hold("n1", reservation("q1", "g0", runtime_us=18_000))
    assert (it.listed("interactive")[0][2], it.listed("fast")[0][2]) == ("guaranteed", "full")


def test_a_time_sliced_device_says_honestly_that_it_has_no_hard_guarantee() -> None:
    it = Harness()
    it.beat("n1", device("g0", Regime.TIME_SLICED, slice_us=3000, switch_us=5), times=2)
    it.listed()
    listed = it.replies[-1].body.devices[0]
    assert (listed.standing, listed.unproven, "no hard guarantee" in listed.reason) == ("tight", True, True)


def test_a_warned_container_sinks_its_device_and_its_recovery_lifts_it() -> None:
    it = Harness()
    it.beat("n1", device("g0"), device("g1"), times=2)
    it.hold("n1", reservation("q1", "g0", runtime_us=1000))
    it.tell(Received("", warning("at_risk", "q1", judged=5)))
    assert it.listed() == [("n1", "g1", "guaranteed"), ("n1", "g0", "at_risk")]
    it.tell(Received("", warning("recovered", "q1", judged=900)))
    assert it.listed()[1] == ("n1", "g0", "guaranteed")


def test_a_warning_older_than_the_last_word_is_ignored() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.hold("n1", reservation("q1", "g0"))
    it.tell(Received("", warning("recovered", "q1", judged=900)))
    it.tell(Received("", warning("at_risk", "q1", judged=5)))
    assert it.listed() == [("n1", "g0", "guaranteed")]


def test_a_warning_about_a_container_that_is_gone_does_not_stay_with_the_device() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.hold("n1", reservation("q1", "g0"))
    it.tell(Received("", warning("at_risk", "q1", judged=5)))
    it.hold("n1")
    assert it.listed() == [("n1", "g0", "guaranteed")]


def test_the_trackers_checkpoint_tells_a_restarted_node_list_who_is_at_risk() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.hold("n1", reservation("q1", "g0"))
    record = ContainerRecord(
        container="c",
        request_id="q1",
        replica=0,
        generation=1,
        guarantee=0.99,
        met=3,
        missed=9,
        lost=0,
        aborted=0,
        invalid=0,
        late_record=0,
        open=0,
        window_met=3,
        window_missed=9,
        ratio=0.25,
        lower=0.1,
        upper=0.5,
        standing=Standing.AT_RISK,
    )
    value = NodeDeadlines(node="n1", at_us=0, stream_seq=1, containers=(record,)).to_json()
    it.tell(KeyChanged(DEADLINES, node_key("n1"), value, 1))
    assert it.listed() == [("n1", "g0", "at_risk")]


def test_foreign_work_on_a_device_counts_as_one_more_context() -> None:
    it = Harness()
    sliced = {"slice_us": 3000, "switch_us": 0}
    it.beat("n1", device("g0", Regime.TIME_SLICED, **sliced), device("g1", Regime.TIME_SLICED, **sliced), times=2)
    busy = device("g0", Regime.TIME_SLICED, foreign_share_micro=400_000, **sliced)
    it.beat("n1", busy, device("g1", Regime.TIME_SLICED, **sliced))
    assert [uuid for _, uuid, _ in it.listed()] == ["g1", "g0"]


def test_pages_follow_each_other_without_a_gap_or_a_repeat() -> None:
    it = Harness()
    it.beat("n1", *[device(f"g{n}") for n in range(7)], times=2)
    first = it.listed(limit=3)
    after = it.replies[-1].body.after
    second = it.listed(limit=3, after=after)
    third = it.listed(limit=3, after=it.replies[-1].body.after)
    assert ([u for _, u, _ in first + second + third], it.replies[-1].body.after) == ([f"g{n}" for n in range(7)], None)


@pytest.mark.parametrize(
    ("query", "field"), [({"class": "slow"}, "class"), ({"after": "n9.g9"}, "after"), ({"after": "*"}, "after")]
)
def test_a_query_that_cannot_be_answered_names_its_field(query: dict[str, object], field: str) -> None:
    it = Harness()
    it.tell(Received("", NodesQuery.model_validate(query), reply="_INBOX.1"))
    assert (it.replies[-1].body.error.field, it.replies[-1].error[0]) == (field, 400)


def test_queries_filter_by_model_group_and_standing() -> None:
    it = Harness()
    it.beat("n1", device("g0", group="a"), device("g1", model="L40S", group="b"), device("g2", healthy=False), times=2)
    found = (it.listed(models=["L40S"]), it.listed(group="a"), it.listed(standing=["excluded"]))
    assert [[uuid for _, uuid, _ in page] for page in found] == [["g1"], ["g0"], ["g2"]]


def test_a_standby_takes_over_when_the_lease_runs_out_and_the_old_writer_is_fenced() -> None:
    first = Harness("a")
    first.beat("n1", device("g0"), times=2)
    second = Harness("b", first.bucket)
    second.wait(2_750_000, beating=("n1",))
    assert second.core.lease.active is False
    second.wait(1_000_000, beating=("n1",))
    assert (second.core.lease.active, Lease.from_json(first.bucket[LEASE][0] or b"").holder) == (True, "b")
    first.beat("n1", device("g0", healthy=False))
    assert (first.core.lease.active, first.conflicts) == (False, 1)


def test_a_takeover_says_again_with_the_same_ids_and_numbers_no_change_twice() -> None:
    first = Harness("a")
    first.beat("n1", device("g0"), times=2)
    ids = [publish.event_id for publish in first.said]
    second = Harness("b", first.bucket)
    second.beat("n1", device("g0"), times=2)
    second.hear_others()
    second.wait(4_000_000, beating=("n1",))
    assert ids == ["n1/1", "n1/2"]
    assert {p.event_id: p.body.state for p in second.said} == {"n1/2": "ready"}


def test_a_writer_that_stops_gives_the_lease_back() -> None:
    it = Harness("a")
    it.beat("n1", device("g0"), times=2)
    it.tell(Draining())
    assert it.bucket[LEASE][0] is None


def test_a_malformed_key_is_counted_and_harms_no_other() -> None:
    it = Harness()
    it.tell(KeyChanged(LEDGER, node_key("n1"), b"{}", 1))
    it.beat("n1", device("g0"), times=2)
    assert (it.core.counters["malformed.rt_ledger"], it.listed()) == (1, [("n1", "g0", "guaranteed")])


def test_facts_are_written_once_per_change_and_not_with_every_heartbeat() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    revision = it.bucket[node_key("n1")][1]
    it.beat("n1", device("g0"), times=5)
    assert it.bucket[node_key("n1")][1] == revision


def test_a_lost_node_that_comes_back_is_ready_after_two_heartbeats() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.wait(40_000_000)
    it.beat("n1", device("g0"))
    assert it.core.nodes["n1"].liveness.state == NodeState.JOINED
    it.beat("n1", device("g0"))
    assert it.states("n1")[-2:] == ["joined", "ready"]


def test_a_monitor_speaks_for_its_own_node_alone() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2)
    it.beat("n1", device("g0", healthy=False), subject="rt.metrics.n2")
    assert (it.listed(), it.core.counters["heartbeats_of_another_node"]) == ([("n1", "g0", "guaranteed")], 1)


def test_T12_heartbeats_far_apart_are_a_long_period_and_no_skew() -> None:
    it = Harness()
    it.beat("n1", device("g0"), times=2, period_us=300 * SECOND, at_us=1)
    it.wait(290_000_000)
    it.beat("n1", device("g0"), period_us=300 * SECOND, at_us=2)
    assert (it.states("n1"), it.listed()[0][2]) == (["joined", "ready"], "guaranteed")
