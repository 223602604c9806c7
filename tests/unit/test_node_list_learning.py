"""The node list learns response times from the tracker's records, keeps them in a bucket, and judges by them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from services.node_list.learning import LEASE, PACE_US, Learning
from services.node_list.nodes import NodeView
from services.node_list.standing import ClassTask, by_measure, excluded, judge
from shared.admission import NEVER_US, DeviceType, Learned, Profile
from shared.effects import Commit, CommitDone, CommitOutcome, Draining, KeyChanged, Tick, WatchReplayed
from shared.messages import (
    ClassStanding,
    ContainerRecord,
    DeviceStanding,
    Kind,
    NodeDeadlines,
    Realtime,
    Regime,
    Reservation,
    Standing,
)
from shared.subjects import DEADLINES, LEARNED, node_key, profile_key
from tests.unit.test_node_list_core import POLICY, SECOND, Harness, device

MPS = DeviceType("H200", Regime.MPS)


def resident(request: str, profile: str | None, kind: Kind = Kind.FIRM, uuid: str = "g0") -> Reservation:
    timing = Realtime(deadline_us=50_000, runtime_us=10_000, kind=kind, profile=profile)
    return Reservation(
        request_id=request,
        replica=0,
        generation=1,
        devices=(uuid,),
        share_micro=250_000,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
        realtime=timing,
    )


class World:
    """A node list that learns, over a little rt_learned; containers run on n1/g0."""

    def __init__(self, bucket: dict[str, tuple[bytes | None, int]] | None = None) -> None:
        self.bucket = {} if bucket is None else bucket
        self.it = Harness()
        self.learning = self.it.core.learning
        self.timed: dict[str, int] = {}
        for key, (value, revision) in self.bucket.items():
            self.learning.handle(KeyChanged(LEARNED, key, value, revision), self.it.now_us)
        self.learning.handle(WatchReplayed(LEARNED, frozenset(self.bucket)), self.it.now_us)
        self.tick()
        self.it.beat("n1", device("g0", Regime.MPS), times=2)

    def tick(self) -> None:
        self.it.now_us += PACE_US
        for effect in self.learning.handle(Tick("age", 7), self.it.now_us):
            self.commit(effect)

    def commit(self, effect: Commit) -> None:
        assert LEARNED == effect.bucket
        revisions = {}
        for write in effect.writes:
            assert self.bucket.get(write.key, (None, 0))[1] == write.expected
            revisions[write.key] = 1 + max([revision for _, revision in self.bucket.values()], default=0)
            self.bucket[write.key] = (write.value, revisions[write.key])
        self.learning.handle(CommitDone(effect.commit, CommitOutcome.WRITTEN, revisions), self.it.now_us)

    def hear(self, **newest_us: list[int | None]) -> None:
        """A checkpoint of the tracker: of each container so many more tasks."""
        records = []
        for request, times_us in newest_us.items():
            self.timed[request] = self.timed.get(request, 0) + len(times_us)
            records.append(record(request, self.timed[request], times_us[-64:]))
        value = NodeDeadlines(node="n1", at_us=0, stream_seq=1, containers=tuple(records)).to_json()
        self.it.tell(KeyChanged(DEADLINES, node_key("n1"), value, next(self.it.beats)))

    def learned(self, profile: str, *beside: str) -> int:
        """How many tasks rt_learned knows of."""
        self.tick()
        known = self.learning.learned.get(MPS, profile)
        times = known.times.get(beside) if known else None
        return len(times) if times else 0


def record(request: str, timed: int, newest_us: list[int | None]) -> ContainerRecord:
    return ContainerRecord(
        container=request,
        request_id=request,
        replica=0,
        generation=1,
        guarantee=0.99,
        met=0,
        missed=0,
        lost=0,
        aborted=0,
        invalid=0,
        late_record=0,
        open=0,
        window_met=0,
        window_missed=0,
        ratio=None,
        lower=None,
        upper=None,
        standing=Standing.UNKNOWN,
        timed=timed,
        newest_us=tuple(newest_us),
    )


SIXTY: list[int | None] = [10_000] * 60


def test_what_is_new_in_a_record_is_learned_once_and_written_with_the_lease() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    for _ in range(3):
        it.hear(a=SIXTY)
    assert 120 == it.learned("detector")
    it.hear(a=[])
    assert 120 == it.learned("detector")
    assert {LEASE, profile_key("detector", *MPS)} == set(it.bucket)


def test_of_more_tasks_than_a_record_holds_the_newest_are_learned() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.hear(a=[])
    it.hear(a=[1] * 1_000)
    assert 64 == it.learned("detector")


def test_a_container_is_learned_of_beside_its_neighbours() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"), resident("b", "speech"), resident("c", "other", uuid="g1"))
    for _ in range(2):
        it.hear(a=SIXTY, b=SIXTY)
    assert [60, 60, 0] == [
        it.learned("detector", "speech"),
        it.learned("speech", "detector"),
        it.learned("detector"),
    ]


def test_nothing_is_learned_while_neighbours_come_or_do_nothing_or_are_of_no_profile() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.hear(a=SIXTY)
    it.it.hold("n1", resident("a", "detector"), resident("b", "speech"))
    it.hear(a=SIXTY)  # the neighbour came meanwhile
    it.hear(a=SIXTY, b=[])  # and has done nothing yet
    it.it.hold("n1", resident("a", "detector"), resident("b", None))
    it.hear(a=SIXTY, b=SIXTY)
    it.hear(a=SIXTY, b=SIXTY)
    assert [0, 0] == [it.learned("detector"), it.learned("detector", "speech")]


def test_nothing_is_learned_beside_foreign_work() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.hear(a=SIXTY)
    it.it.beat("n1", device("g0", Regime.MPS, foreign_share_micro=400_000))
    it.hear(a=SIXTY)
    assert 0 == it.learned("detector")


def test_a_task_that_never_ended_is_learned_as_such() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.hear(a=[])
    it.hear(a=[None] * 60)
    it.tick()
    known = it.learning.learned.get(MPS, "detector")
    assert known
    assert NEVER_US <= known.times[()].order_us(1)


def test_what_was_learned_survives_a_restart_and_is_learned_on_from() -> None:
    first = World()
    first.it.hold("n1", resident("a", "detector"))
    for _ in range(2):
        first.hear(a=SIXTY)
    first.tick()
    second = World(first.bucket)
    assert 60 == second.learned("detector")
    second.learning.lease.active = True
    second.it.hold("n1", resident("a", "detector"))
    for _ in range(2):
        second.hear(a=SIXTY)
    assert 120 == second.learned("detector")


def test_last_words_are_what_was_not_written_yet_and_the_lease() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.hear(a=[])
    it.hear(a=[5] * 10)
    (commit,) = it.learning.handle(Draining(), it.it.now_us)
    assert [(profile_key("detector", *MPS), True), (LEASE, False)] == [
        (write.key, write.value is not None) for write in commit.writes
    ]


def test_what_an_operator_deleted_is_forgotten_and_learned_anew() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    it.learning._most_profiles = 1
    for _ in range(2):
        it.hear(a=SIXTY)
    assert 60 == it.learned("detector")
    key = profile_key("detector", *MPS)
    it.bucket[key] = (None, 99)
    it.learning.handle(KeyChanged(LEARNED, key, None, 99), it.it.now_us)
    assert 0 == it.learned("detector")
    it.hear(a=SIXTY)
    assert 60 == it.learned("detector")


def test_a_standby_follows_what_is_written_and_writes_nothing() -> None:
    writer = World()
    writer.it.hold("n1", resident("a", "detector"))
    for _ in range(2):
        writer.hear(a=SIXTY)
    writer.tick()
    standby = Learning("standby", 1)
    for key, (value, revision) in writer.bucket.items():
        standby.handle(KeyChanged(LEARNED, key, value, revision), 0)
    standby.handle(WatchReplayed(LEARNED, frozenset(writer.bucket)), 0)
    standby.heard(NodeView("n1", writer.it.core.nodes["n1"].liveness), [record("a", 5, [1])])
    assert [] == standby.handle(Tick("age", 0), SECOND)
    known = standby.learned.get(MPS, "detector")
    assert known
    assert 60 == known.total


def test_more_profiles_than_there_is_room_for_are_counted_and_not_learned() -> None:
    it = World()
    it.learning._most_profiles = 1
    it.it.hold("n1", resident("a", "detector"), resident("b", "speech"))
    for _ in range(2):
        it.hear(a=SIXTY, b=SIXTY)
    assert [60, 0] == [it.learned("detector", "speech"), it.learned("speech", "detector")]
    assert 1 == it.learning.counters["profiles_beyond_limit"]


@pytest.mark.parametrize("key", ["profile.x", "profile.a.b.c", "profile.a.b.mps.d", "profile.=zz.b.mps"])
def test_a_key_that_none_of_us_wrote_is_counted_and_left_alone(key: str) -> None:
    it = World()
    it.learning.handle(KeyChanged(LEARNED, key, b"{}", 5), 0)
    assert 1 == it.learning.counters["malformed"]


# ------------------------------------------------------------------------------------------ standings

INTERACTIVE = ClassTask("interactive", 50_000, 12_000, 50_000, profile="detector")


def known(**usual_us: dict[tuple[str, ...], int]) -> Learned:
    learned, chance = Learned(), Random(1)
    for name, sets in usual_us.items():
        profile = Profile()
        for beside, us in sets.items():
            profile.add(beside, [round(us * chance.gauss(1, 0.05)) for _ in range(1_000)])
        learned.put(MPS, name, profile)
    return learned


def standing(learned: Learned, *residents: Reservation, regime: Regime = Regime.MPS) -> ClassStanding:
    on = device("g0", regime)
    return by_measure(
        judge(on, INTERACTIVE, residents, (), foreign=False, tight_ratio=0.1), on, INTERACTIVE, residents, learned
    )


def test_without_measured_times_a_shared_device_without_a_sound_test_takes_nobody_beside_another() -> None:
    assert DeviceStanding.FULL == standing(known(), resident("s", "speech")).standing
    alone = standing(known())
    assert (DeviceStanding.TIGHT, True) == (alone.standing, alone.unproven)


def test_measured_times_that_all_keep_make_a_device_proven() -> None:
    found = standing(known(detector={("speech",): 20_000}, speech={("detector",): 30_000}), resident("s", "speech"))
    assert (DeviceStanding.TIGHT, False) == (found.standing, found.unproven)
    assert found.slack_us is not None
    assert 10_000 < found.slack_us < 20_000
    assert "s/0 take at most" in (found.reason or "")


def test_a_resident_that_would_be_late_beside_one_more_closes_a_device() -> None:
    found = standing(known(detector={("speech",): 20_000}, speech={("detector",): 49_000}), resident("s", "speech"))
    assert DeviceStanding.FULL == found.standing
    assert "s/0" in (found.reason or "")


def test_measured_times_promise_nothing_to_a_hard_resident() -> None:
    learned = known(detector={("speech",): 20_000})
    assert DeviceStanding.FULL == standing(learned, resident("s", "speech", Kind.HARD)).standing
    assert DeviceStanding.TIGHT == standing(learned, resident("s", "speech", Kind.SOFT)).standing


def test_measured_times_open_no_device_that_has_no_share_left_or_a_sound_test_of_its_own() -> None:
    whole = [resident(name, "speech").model_copy(update={"share_micro": 500_000}) for name in ("s", "t")]
    beside = {("speech", "speech"): 20_000, ("speech",): 20_000}
    learned = known(detector=beside, speech={("detector", "speech"): 20_000, ("detector",): 20_000})
    assert DeviceStanding.FULL == standing(learned, *whole).standing
    for each, profile in (("detector", "detector"), ("speech", "speech")):
        learned.put(DeviceType("H200", Regime.EXCLUSIVE), profile, learned.get(MPS, each))
    assert DeviceStanding.FULL == standing(learned, resident("s", "speech"), regime=Regime.EXCLUSIVE).standing


def test_an_excluded_device_stays_excluded() -> None:
    learned, on = known(detector={(): 20_000}), device("g0", Regime.MPS)
    assert excluded("lost") == by_measure(excluded("lost"), on, INTERACTIVE, (), learned)


def test_what_is_learned_reaches_the_list_of_a_class() -> None:
    it = World()
    it.it.core.policy = replace(POLICY, classes=(INTERACTIVE, *POLICY.classes[1:]))
    it.it.hold("n1", resident("a", "detector"))
    assert [("n1", "g0", "full")] == it.it.listed()
    profile = known(detector={("detector",): 20_000}).get(MPS, "detector")
    assert profile
    value = profile.message(MPS, "detector", 0).to_json()
    it.learning.handle(KeyChanged(LEARNED, profile_key("detector", *MPS), value, 50), it.it.now_us)
    it.it.now_us += PACE_US
    it.it.beat("n1", device("g0", Regime.MPS))
    assert [("n1", "g0", "tight")] == it.it.listed()


def test_nodes_are_judged_again_by_what_was_learned_where_it_concerns_them_and_not_too_often() -> None:
    it = World()
    it.it.hold("n1", resident("a", "detector"))
    views = list(it.it.core.nodes.values())

    def concerned(profile: str, after_us: int, revision: int) -> int:
        it.it.now_us += after_us
        it.learning.handle(KeyChanged(LEARNED, profile_key(profile, *MPS), None, revision), it.it.now_us)
        return len(it.learning.concerned(views, [INTERACTIVE], it.it.now_us))

    assert [1, 0, 1, 0] == [
        concerned("detector", PACE_US, 50),
        concerned("detector", 1, 51),
        concerned("unheard", PACE_US, 52),  # the one before it was kept for now
        concerned("unheard", PACE_US, 53),
    ]
