"""The admission test of many loads at once against that of one, on random loads of every kind."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.admission import NO_SLACK, GatedRows, Loads, Newcomer, RtTask, Sharing, admit_kind
from shared.messages import Kind, Regime


@dataclass(frozen=True)
class Load:
    """Who is on a device."""

    sharing: Sharing
    residents: tuple[RtTask, ...]
    contexts: int


def any_task(name: str, chance: Random) -> RtTask:
    """Of a few microseconds or of many milliseconds, and now and then one that has no place anywhere."""
    scale = chance.choice((1, 1, 997, 1_000))
    return RtTask(
        name=name,
        runtime_us=chance.randint(1, 9) * scale,
        period_us=chance.randint(2, 60) * scale,
        deadline_us=chance.randint(2, 60) * scale,
        host_us=chance.choice((0, 0, 0, 1, 5 * scale)),
        segments=chance.choice((None, (1,))),
        kind=chance.choice(list(Kind)),
        gate=chance.random() < 0.95,
        overrun_us=chance.choice((0, 0, 3)),
    )


def any_load(chance: Random) -> Load:
    sharing = Sharing(
        regime=chance.choice((Regime.GATED, Regime.GATED, Regime.TIME_SLICED, *Regime)),
        slice_us=chance.choice((None, 2, 2_000)),
        switch_us=chance.choice((None, 0, 1, 100)),
        handover_us=chance.choice((0, 1)),
        margin_us=chance.choice((0, 2)),
    )
    residents = tuple(any_task("", chance) for _ in range(chance.choice((0, 1, 2, 3, 5))))
    return Load(sharing, residents, chance.choice((0, 0, 0, 2)))


@pytest.mark.parametrize("seed", range(40))
def test_many_loads_asked_at_once_answer_as_each_alone(seed: int) -> None:
    chance = Random(seed)
    loads = [any_load(chance) for _ in range(60)]
    arrays = Loads()
    arrays.extend(loads[:20])
    arrays.extend(loads[20:])
    kept = sorted(chance.sample(range(60), 40))
    arrays.keep(np.array(kept))
    for kind in Kind:
        new = any_task("new", chance) if chance.random() < 0.9 else None
        answers = arrays.ask(kind, new, np.arange(40))
        alone = [
            admit_kind(kind, load.sharing, load.residents, new, load.contexts) for load in map(loads.__getitem__, kept)
        ]
        assert [v.admitted for v in alone] == answers.admitted.tolist()
        assert [NO_SLACK if v.slack_us is None else v.slack_us for v in alone] == answers.slack_us.tolist()
        assert [v.late not in (None, "new") for v in alone] == answers.breaks.tolist()


def test_the_random_loads_are_admitted_refused_and_broken_and_some_are_left_open_by_the_arrays() -> None:
    chance, rows, seen = Random(1), GatedRows(400, width=1), [0, 0, 0, 0]
    for _ in range(8):
        times = np.array([[chance.randint(1, 9), chance.randint(2, 60), chance.randint(2, 60)] for _ in range(400)]).T
        new = Newcomer.of(400, *times)
        answers, is_open = rows.ask(np.arange(400), new)
        rows.add(answers.admitted.nonzero()[0], new[answers.admitted])
        found = (answers.admitted, ~answers.admitted & ~is_open, answers.breaks, is_open)
        seen = [total + int(each.sum()) for total, each in zip(seen, found, strict=True)]
    assert [True] * 4 == [total > 30 for total in seen]


def row(*times: tuple[int, int, int]) -> GatedRows:
    found = GatedRows(1, width=1)
    for runtime, period, deadline in times:
        found.add(np.array([0]), Newcomer.of(1, runtime, period, deadline))
    return found


TIMES = st.tuples(st.integers(1, 9), st.integers(2, 40), st.integers(2, 40))


@given(st.lists(TIMES, min_size=1, max_size=6), TIMES, st.data())
def test_a_row_from_which_a_job_was_removed_answers_as_if_it_had_never_been_there(
    jobs: list[tuple[int, int, int]], new: tuple[int, int, int], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(range(len(jobs))))
    changed, never = row(*jobs), row(*jobs[:place], *jobs[place + 1 :])
    changed.remove(0, place)
    for rows in (changed, never):
        rows.add(np.array([0]), Newcomer.of(1, 3, 1, 1, yields=True))
    found, expected = (rows.ask(np.array([0]), Newcomer.of(1, *new)) for rows in (changed, never))
    assert [a.tolist() for a in (expected[0].admitted, expected[0].slack_us, expected[0].breaks, expected[1])] == [
        a.tolist() for a in (found[0].admitted, found[0].slack_us, found[0].breaks, found[1])
    ]
