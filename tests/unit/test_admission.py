"""Known verdicts of the admission tests, and who may use which test."""

from dataclasses import replace

import pytest

from shared.admission import (
    GatedTotals,
    RtTask,
    Sharing,
    Verdict,
    admit,
    admit_kind,
    gated_exact,
    gated_linear,
    hard_guarantee,
    nu_max,
    response_bound_us,
    slices,
)
from shared.messages import Device, Kind, Realtime, Regime

EXCLUSIVE = Sharing(Regime.EXCLUSIVE)
GATED = Sharing(Regime.GATED)
MPS = Sharing(Regime.MPS)
SLICED = Sharing(Regime.TIME_SLICED, slice_us=2_000, switch_us=100)
UNMEASURED = Sharing(Regime.TIME_SLICED)


def task(name: str = "detector", **times: object) -> RtTask:
    """The detector of the design page: 12 ms every 100 ms within 50 ms, through the gate."""
    given: dict[str, object] = {"runtime_us": 12_000, "period_us": 100_000, "deadline_us": 50_000, "gate": True}
    return RtTask(name=name, **(given | times))  # type: ignore[arg-type]


def refused(reason: str) -> Verdict:
    """A refusal that no amount of time would mend."""
    return Verdict(admitted=False, test="none", slack_us=None, reason=reason)


# ------------------------------------------------------------------------------------------ exclusive


@pytest.mark.parametrize("regime", [Regime.EXCLUSIVE, Regime.MIG])
@pytest.mark.parametrize("runtime_us,admitted,slack_us", [(50_000, True, 0), (50_001, False, -1)])
def test_one_tenant_fits_when_its_runtime_is_within_its_deadline(
    regime: Regime, runtime_us: int, admitted: bool, slack_us: int
) -> None:
    verdict = admit(Sharing(regime), [], task(runtime_us=runtime_us))
    assert (admitted, slack_us) == (verdict.admitted, verdict.slack_us)


def test_a_slice_that_was_measured_as_no_time_was_not_measured() -> None:
    facts = {"uuid": "g0", "index": 0, "model": "m", "regime": Regime.TIME_SLICED, "healthy": True, "memory_mib": None}
    device = Device.model_validate(facts | {"slice_us": 0, "switch_us": 100, "handover_us": None})
    assert Sharing(Regime.TIME_SLICED, None, 100) == Sharing.of(device)


def test_the_host_part_counts_against_the_deadline() -> None:
    verdict = admit(EXCLUSIVE, [], task(host_us=8_000))
    assert (True, 30_000) == (verdict.admitted, verdict.slack_us)
    assert "alone it needs 20 ms of 50 ms: 30 ms to spare" == verdict.reason


def test_a_tenant_that_asks_for_more_than_all_time_is_refused() -> None:
    verdict = admit(EXCLUSIVE, [], task(runtime_us=12_000, period_us=10_000))
    assert (False, "detector needs 12 ms every 10 ms") == (verdict.admitted, verdict.reason)


@pytest.mark.parametrize(
    "residents,contexts,holds",
    [
        ([task("camera")], 0, "camera"),
        ([task("camera"), task("lidar")], 1, "camera and 2 more"),
        ([], 2, "2 of no declared runtime"),
    ],
)
def test_an_exclusive_device_takes_nobody_beside_its_tenant(residents: list[RtTask], contexts: int, holds: str) -> None:
    expected = refused(f"needs the device alone (exclusive), it holds {holds}")
    assert expected == admit(EXCLUSIVE, residents, task(), contexts)
    assert expected == admit_kind(Kind.SOFT, EXCLUSIVE, residents, None, contexts)


# ---------------------------------------------------------------------------------------------- gated


def test_one_gated_container_fits_up_to_its_whole_deadline() -> None:
    assert (True, 0) == _short(admit(GATED, [], task(runtime_us=50_000)))
    assert (False, -1) == _short(admit(GATED, [], task(runtime_us=50_001)))


def test_more_than_the_whole_device_never_fits() -> None:
    thirds = [task(f"t{i}", runtime_us=100, period_us=300, deadline_us=10**6) for i in range(3)]
    assert admit(GATED, thirds[:2], thirds[2]).admitted
    verdict = admit(GATED, thirds, task("tiny", runtime_us=1, period_us=10**6, deadline_us=10**6))
    assert (False, None, "gated linear") == (verdict.admitted, verdict.slack_us, verdict.test)
    assert "needs 100 % of the device's time, more than all, most for t0" == verdict.reason


def test_a_runtime_of_the_shortest_deadline_closes_the_quick_test() -> None:
    long = task("long", runtime_us=50_000, period_us=10**6, deadline_us=10**6)
    short = task("short", runtime_us=1, period_us=50_000, deadline_us=50_000)
    assert not GatedTotals().plus(long, GATED).plus(short, GATED).fit()
    assert (False, -1) == _short(admit(GATED, [long], short))


def test_the_quick_test_passes_a_light_set_and_the_linear_one_a_heavier() -> None:
    light = admit(GATED, [task("a")], task("b"))
    heavy = admit(GATED, [task("a"), task("b"), task("c")], task("d"))
    assert ("gated quick", "gated linear") == (light.test, heavy.test)
    assert (True, 50_000 - 24_000) == _short(light)
    assert (True, 50_000 - 48_000) == _short(heavy)


def test_one_long_task_closes_a_device_to_short_deadlines_and_is_named() -> None:
    long = task("mapper", runtime_us=40_000, period_us=1_000_000, deadline_us=1_000_000)
    verdict = admit(GATED, [long], task())
    assert (False, -2_000) == _short(verdict)
    assert "demand 12 ms by 50 ms, blocking 40 ms: 2 ms short because of mapper" == verdict.reason


def test_a_newcomer_that_would_break_a_resident_is_refused() -> None:
    resident = task("camera", runtime_us=5_000, deadline_us=10_000, period_us=10_000)
    newcomer = task("mapper", runtime_us=6_000, deadline_us=500_000, period_us=500_000)
    assert (False, -1_000) == _short(admit(GATED, [resident], newcomer))


def test_equal_deadlines_are_demand_and_not_blocking() -> None:
    pair = [task("a", runtime_us=25_000), task("b", runtime_us=25_000)]
    assert (True, 0) == _short(gated_linear(pair, GATED))


def test_a_deadline_beyond_the_period_is_covered() -> None:
    stream = task("stream", runtime_us=9_000, period_us=10_000, deadline_us=30_000)
    assert (True, 21_000) == _short(admit(GATED, [], stream))


def test_the_handover_is_part_of_every_runtime() -> None:
    pair, gate = [task("a", runtime_us=25_000)], Sharing(Regime.GATED, handover_us=1)
    assert (False, -2) == _short(admit(gate, pair, task("b", runtime_us=25_000)))


def test_the_margin_of_the_gate_or_what_was_seen_beyond_the_runtime_counts_whichever_is_more() -> None:
    pair = [task("a", runtime_us=20_000), task("b", runtime_us=20_000, overrun_us=3_000)]
    assert (True, 50_000 - 43_000) == _short(gated_linear(pair, GATED))
    gate = Sharing(Regime.GATED, handover_us=50, margin_us=2_000)
    assert (True, 50_000 - 45_000 - 100) == _short(gated_linear(pair, gate))


def trio(*times: tuple[int, int, int]) -> list[RtTask]:
    """Tasks a, b, c from runtime, period and deadline."""
    return [task(n, runtime_us=c, period_us=t, deadline_us=d) for n, (c, t, d) in zip("abc", times, strict=False)]


def test_the_exact_test_admits_what_only_the_fluid_demand_refuses() -> None:
    """By 7 ms there is work for 3 + 3 ms and 1 ms that blocks; as a fluid, b already wants 0.3 ms of its next job."""
    three = trio((1_000, 20_000, 11_000), (3_000, 10_000, 6_000), (3_000, 10_000, 7_000))
    assert (False, -300) == _short(gated_linear(three, GATED))
    assert (True, 0) == _short(gated_exact(three, GATED))
    assert gated_exact(three, GATED) == admit(GATED, three[:2], three[2])


def test_a_deadline_that_only_a_later_job_misses_is_found() -> None:
    verdict = gated_exact(trio((3, 10, 8), (3, 10, 8), (2, 5, 4)), GATED, tick_us=1)
    assert "demand 10 us by 9 us, blocking none: 1 us short because of a" == verdict.reason
    assert (False, -1, "c") == (verdict.admitted, verdict.slack_us, verdict.late)


def test_the_exact_test_that_comes_to_no_end_refuses() -> None:
    three = trio((1_000, 20_000, 11_000), (3_000, 10_000, 6_000), (3_000, 10_000, 7_000))
    verdict = gated_exact(three, GATED, steps=0)
    assert (False, None, "the exact test came to no end") == (*_short(verdict), verdict.reason)


def test_a_refusal_says_what_is_short_in_numbers_and_because_of_whom() -> None:
    camera = task("camera-1", runtime_us=6_000, deadline_us=50_000)
    heavy = task("detector-7", runtime_us=41_200, deadline_us=50_000)
    mapper = task("mapper", runtime_us=6_100, deadline_us=1_000_000, period_us=1_000_000)
    verdict = admit(GATED, [camera, heavy], mapper)
    assert "demand 47.2 ms by 50 ms, blocking 6.1 ms: 3.3 ms short because of detector-7" == verdict.reason
    assert (False, -3_300, "camera-1") == (verdict.admitted, verdict.slack_us, verdict.late)


def test_a_host_part_as_long_as_the_period_leaves_the_device_part_no_time() -> None:
    verdict = admit(GATED, [], task(host_us=50_000))
    assert (False, "the host part of detector leaves its device part no time") == (verdict.admitted, verdict.reason)


def test_theorem_of_jeffay_stanat_and_martel_by_hand() -> None:
    """RTSS 1991, D = T: beside a task of C 2, T 4 another one may run at most 4 - 2 at a stretch."""
    short = task("short", runtime_us=2, period_us=4, deadline_us=4)
    fits = task("fits", runtime_us=2, period_us=8, deadline_us=8)
    misses = task("misses", runtime_us=4, period_us=8, deadline_us=8)
    assert (True, 0) == _short(admit(GATED, [short], fits))
    assert (False, -2) == _short(admit(GATED, [short], misses))


def test_a_gated_device_takes_only_what_uses_its_gate() -> None:
    beside = task("outsider", gate=False)
    why = "outsider has no gate: true, which a gated device requires"
    assert refused(why) == admit(GATED, [], beside)
    assert refused(why) == admit(GATED, [beside], task())
    assert not admit(GATED, [], task(), best_effort_contexts=1).admitted
    assert not admit_kind(Kind.SOFT, GATED, [], beside).admitted
    assert not admit_kind(Kind.SOFT, GATED, [], None).admitted


# ---------------------------------------------------------------------------------------- time-sliced


def test_the_response_bound_by_hand() -> None:
    """12 ms in slices of 2 ms are 6; beside 3 others each waits 3 * 2.1 ms: 12 + 0.6 + 6 * 6.3 ms."""
    assert 6 == slices(task(), 2_000)
    assert 12_000 + 600 + 37_800 == response_bound_us(task(), 3, 2_000, 100)
    assert 2 == nu_max(task(), 2_000, 100)


def test_segments_need_more_slices_than_one_piece() -> None:
    split = task(segments=(5_000, 5_000))  # and 2 ms that the runtime has beyond them
    assert (5_000, 5_000, 2_000) == split.parts()
    assert 3 + 3 + 1 == slices(split, 2_000)


def test_a_time_sliced_device_takes_as_many_contexts_as_its_tightest_allows() -> None:
    residents = [task("a"), task("b")]
    assert (True, 50_000 - 37_800) == _short(admit(SLICED, residents, task("c")))
    verdict = admit(SLICED, [*residents, task("c")], task("d", deadline_us=100_000))
    assert (False, -400) == _short(verdict)
    assert "a needs 50.4 ms of 50 ms beside 3 other contexts, at most 2 fit: 400 us short" == verdict.reason


def test_an_overrun_may_take_one_slice_more_in_each_part() -> None:
    split = task(segments=(6_000, 6_000), overrun_us=2)
    assert 3 + 3 + 2 == slices(split, 2_000)
    assert 12_002 + 8 * 100 == response_bound_us(split, 0, 2_000, 100)


def test_best_effort_contexts_count_on_a_time_sliced_device() -> None:
    assert admit(SLICED, [task("a")], task("b"), best_effort_contexts=1).admitted
    assert not admit(SLICED, [task("a")], task("b"), best_effort_contexts=2).admitted
    soft = task("soft", kind=Kind.SOFT)
    assert not admit(SLICED, [task("a"), soft, soft], task("b")).admitted


def test_a_soft_resident_is_a_context_but_its_own_deadline_counts_for_nothing() -> None:
    hopeless = task("soft", kind=Kind.SOFT, deadline_us=1)
    assert (True, 50_000 - 25_200) == _short(admit(SLICED, [hopeless], task()))


def test_a_deadline_beyond_the_period_is_not_covered_by_the_time_sliced_test() -> None:
    verdict = admit(SLICED, [task("a", period_us=40_000)], task("b"))
    assert (False, None) == _short(verdict)
    assert "deadline 50 ms of a is over its period 40 ms: the test does not cover it" == verdict.reason


@pytest.mark.parametrize(
    "sharing", [UNMEASURED, Sharing(Regime.TIME_SLICED, slice_us=2_000), Sharing(Regime.TIME_SLICED, switch_us=100)]
)
def test_an_unmeasured_slice_or_switch_cost_is_never_taken_for_zero(sharing: Sharing) -> None:
    verdict = admit(sharing, [], task())
    assert (False, None) == _short(verdict)
    assert "not measured" in verdict.reason


# ------------------------------------------------------------------------------------------ the kinds


@pytest.mark.parametrize(
    "sharing,promises,word",
    [
        (EXCLUSIVE, True, "one tenant"),
        (Sharing(Regime.MIG), True, "one tenant"),
        (GATED, True, "earliest deadline first"),
        (SLICED, False, "no hard guarantee: time-sliced"),
        (UNMEASURED, False, "not measured"),
        (MPS, False, "no hard guarantee: no sound test"),
    ],
)
def test_only_regimes_that_enforce_an_order_give_a_hard_guarantee(sharing: Sharing, promises: bool, word: str) -> None:
    sound, why = hard_guarantee(sharing)
    assert promises == sound
    assert word in why
    assert promises == admit_kind(Kind.HARD, sharing, [], task()).admitted


def test_an_admitted_hard_container_is_proven_and_a_firm_one_is_not() -> None:
    hard, firm = (admit_kind(kind, GATED, [], task()) for kind in (Kind.HARD, Kind.FIRM))
    assert (True, False) == (hard.admitted, hard.unproven)
    assert (True, True) == (firm.admitted, firm.unproven)


def test_a_firm_container_uses_the_time_sliced_test_when_it_was_measured() -> None:
    verdict = admit_kind(Kind.FIRM, SLICED, [task("a"), task("b")], task("c"))
    assert (True, "time-sliced", True) == (verdict.admitted, verdict.test, verdict.unproven)


@pytest.mark.parametrize("sharing", [MPS, UNMEASURED])
def test_where_there_is_no_test_a_firm_container_is_alone_on_the_device(sharing: Sharing) -> None:
    assert admit_kind(Kind.FIRM, sharing, [], task()).admitted
    assert not admit_kind(Kind.FIRM, sharing, [task("a", kind=Kind.SOFT)], task("b")).admitted
    assert not admit_kind(Kind.FIRM, sharing, [], task("b"), best_effort_contexts=1).admitted


@pytest.mark.parametrize("kind", [Kind.HARD, Kind.FIRM])
def test_a_promise_needs_a_declared_runtime(kind: Kind) -> None:
    assert refused(f"{kind} needs a declared runtime") == admit_kind(kind, SLICED, [], None)


@pytest.mark.parametrize("sharing", [SLICED, UNMEASURED, MPS])
def test_a_soft_container_is_admitted_beside_firm_ones(sharing: Sharing) -> None:
    firm = [task(f"f{i}", kind=Kind.FIRM) for i in range(9)]
    expected = Verdict(admitted=True, test="best effort", slack_us=None, reason="best effort: nothing is promised")
    assert expected == admit_kind(Kind.SOFT, sharing, firm, None)
    assert expected == admit_kind(Kind.SOFT, sharing, [], task(), best_effort_contexts=3)


def test_a_soft_container_never_breaks_a_hard_one() -> None:
    hard, long = task("hard"), task("long", runtime_us=40_000, deadline_us=10**6, period_us=10**6)
    assert not admit_kind(Kind.SOFT, GATED, [hard], long).admitted
    assert admit_kind(Kind.SOFT, GATED, [hard], task("short", runtime_us=38_000)).admitted
    assert not admit_kind(Kind.SOFT, MPS, [hard], None).admitted
    assert not admit_kind(Kind.SOFT, UNMEASURED, [hard], None).admitted
    assert admit_kind(Kind.SOFT, SLICED, [hard], None, best_effort_contexts=1).admitted
    assert not admit_kind(Kind.SOFT, SLICED, [hard], None, best_effort_contexts=2).admitted


def test_at_a_gate_a_soft_container_does_not_break_a_firm_one_either() -> None:
    """Found by simulation: 7 us every 20 us within 15 us, admitted as firm, and then a soft one of 116 us."""
    gate, firm = Sharing(Regime.GATED, handover_us=7), trio((7, 20, 15))[0]
    soft = task("soft", runtime_us=116, period_us=400, deadline_us=773)
    assert admit_kind(Kind.FIRM, gate, [], firm).admitted
    verdict = admit_kind(Kind.SOFT, gate, [replace(firm, kind=Kind.FIRM)], soft)
    assert "demand 14 us by 15 us, blocking 123 us: 122 us short because of soft" == verdict.reason
    assert not verdict.admitted


def test_a_firm_newcomer_never_breaks_a_hard_resident() -> None:
    hard, long = task("hard"), task("long", runtime_us=40_000, deadline_us=10**6, period_us=10**6)
    assert not admit_kind(Kind.FIRM, GATED, [hard], long).admitted


def test_soft_tasks_at_the_gate_block_but_have_no_demand() -> None:
    soft = [task(f"s{i}", runtime_us=10_000, period_us=10_000, kind=Kind.SOFT) for i in range(5)]
    assert (True, 50_000 - 12_000 - 10_000) == _short(admit(GATED, soft, task()))


# --------------------------------------------------------------------------------------- declarations


def test_a_request_declares_a_task_whose_period_is_its_deadline_where_absent() -> None:
    realtime = Realtime(deadline_us=50_000, runtime_us=12_000, kind=Kind.FIRM, gate=True)
    expected = RtTask("x", runtime_us=12_000, period_us=50_000, deadline_us=50_000, kind=Kind.FIRM, gate=True)
    assert expected == RtTask.of("x", realtime)
    assert RtTask.of("x", Realtime(deadline_us=50_000, kind=Kind.SOFT)) is None


@pytest.mark.parametrize(
    "times",
    [
        {"runtime_us": 0},
        {"period_us": 0},
        {"deadline_us": 0},
        {"host_us": -1},
        {"overrun_us": -1},
        {"segments": (12_001,)},
        {"segments": (0, 5)},
    ],
)
def test_times_that_no_task_has_are_refused(times: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        task(**times)


@pytest.mark.parametrize("given", [{"slice_us": 0}, {"switch_us": -1}, {"handover_us": -1}, {"margin_us": -1}])
def test_sharing_that_no_device_has_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a slice is above 0"):
        Sharing(Regime.TIME_SLICED, **given)


def _short(verdict: Verdict) -> tuple[bool, int | None]:
    return verdict.admitted, verdict.slack_us
