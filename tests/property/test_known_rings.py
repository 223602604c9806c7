"""A batch whose rings are known by their bytes is read as any other: the same batch, or the same fault."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import ValidationError

from shared.errors import FieldError
from shared.messages import RingInfo, TaskBatch
from shared.messages.base import explain

NASTY = st.sampled_from(['"', "\\", "},{", '}],"names":[', ',"rings":[{', "{", "}", "[", ",", "é", "\u2028"])
TEXT = st.one_of(st.just("a"), st.lists(st.one_of(NASTY, st.text(max_size=3)), max_size=3).map("".join))
RING = st.fixed_dictionaries(
    {"ring": TEXT, "container": TEXT},
    optional={
        "request_id": st.one_of(st.none(), TEXT),
        "replica": st.one_of(st.none(), st.integers(0, 3), TEXT),
        "guarantee": st.floats(0, 1),
        "window": st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9))),
        "later": st.lists(st.dictionaries(TEXT, st.integers(), max_size=2), max_size=2),
    },
)
HEAD = st.fixed_dictionaries(
    {"node": TEXT, "start_id": TEXT, "counter": st.integers(), "boot_id": TEXT, "at_us": st.just(1)},
    optional={"later": st.fixed_dictionaries({"a": st.just(1), "rings": st.lists(RING, max_size=1)})},
)
TAIL = st.fixed_dictionaries(
    {"names": st.lists(TEXT, max_size=2), "ring": st.lists(st.integers(0, 1), max_size=2), "watermark_us": st.just(2)},
    optional={"rings": st.lists(RING, max_size=2), "lost_records": st.dictionaries(TEXT, st.integers(), max_size=2)},
)
PLACES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), max_size=2)
COLUMNS = ("ring", "kind", "seq", "begin_seq", "task", "stamp_us", "deadline_us", "name")


def written(parts: list[dict[str, Any]], *, spaced: bool, ascii_only: bool) -> bytes:
    """One object with the keys of all parts, also such as come twice."""
    separators = (", ", ": ") if spaced else (",", ":")
    inside = (json.dumps(part, separators=separators, ensure_ascii=ascii_only)[1:-1] for part in parts)
    return ("{" + separators[0].join(inside) + "}").encode("utf-8", "surrogatepass")


def full(rows: int) -> dict[str, Any]:
    return {column: [0] * rows for column in COLUMNS[1:]}


def moved(body: bytes, places: list[tuple[float, float, float]]) -> bytes:
    """A piece of it once more somewhere else, or gone."""
    for begin, end, to in places:
        a, b = sorted((int(begin * len(body)), int(end * len(body))))
        at = int(to * len(body))
        body = body[:at] + body[a:b] + body[at:] if to < 0.5 else body[:a] + body[b:]
    return body


def read(body: bytes) -> object:
    try:
        batch = TaskBatch.trusted(body)
    except FieldError as fault:
        return str(fault)
    return batch, batch.model_fields_set, batch.to_json()


def plainly_read(body: bytes) -> object:
    try:
        batch = TaskBatch.model_validate_json(body)
    except ValidationError as error:
        return str(explain(TaskBatch, error))
    return batch, batch.model_fields_set, batch.to_json()


@given(HEAD, st.lists(RING, max_size=3), TAIL, st.booleans(), st.booleans(), PLACES)
def test_a_batch_is_read_as_if_nothing_were_known(
    head: dict[str, Any],
    rings: list[dict[str, Any]],
    tail: dict[str, Any],
    spaced: bool,
    ascii_only: bool,
    places: list[tuple[float, float, float]],
) -> None:
    parts = [head, {"rings": rings}, tail, full(len(tail.get("ring", [])))]
    body = moved(written(parts, spaced=spaced, ascii_only=ascii_only), places)
    for _ in range(2):  # the second time its rings are known
        assert plainly_read(body or b" ") == read(body or b" ")


RINGS = '"rings":[{"ring":"r","container":"c"}],"names":[]'
BEGIN = '{"node":"n","start_id":"s","counter":1,"boot_id":"b","at_us":1,"watermark_us":2'


@pytest.mark.parametrize(
    "body",
    [
        f"{BEGIN},{RINGS}}}",
        f'{BEGIN},"later":{{"a":1,{RINGS}}}}}',
        f'{BEGIN},"rings":[],{RINGS}}}',
        f'{BEGIN},{RINGS},"rings":[]}}',
        f'{BEGIN},{RINGS},"\\u0072ings":[]}}',
        f'{BEGIN},"later":[1,{RINGS}]}}',
        f'{BEGIN},"later":"text,{RINGS}}}',
        f"{BEGIN},{RINGS.replace('r', '},{')}}}",
        f"{BEGIN},{RINGS.replace(',', ',,')}}}",
        f"{BEGIN},{RINGS.replace('}', ',}')}}}",
        f"{BEGIN},{RINGS}",
    ],
)
def test_rings_elsewhere_or_twice_are_read_as_if_nothing_were_known(body: str) -> None:
    for _ in range(2):
        assert plainly_read(body.encode()) == read(body.encode())


def test_what_is_said_of_a_ring_is_read_once() -> None:
    rings = tuple(RingInfo(ring=f"r{n}", container=f"c{n}", window=(1, 2)) for n in range(3))
    more = {"node": "n", "start_id": "s", "boot_id": "b", "at_us": 1, "watermark_us": 2, "names": ("infer",)}
    first = TaskBatch.trusted(TaskBatch(counter=1, rings=rings, **more).to_json())
    later = TaskBatch.trusted(TaskBatch(counter=2, rings=rings[::-1], **more).to_json())
    assert rings == first.rings
    assert [id(info) for info in first.rings] == [id(info) for info in later.rings[::-1]]
