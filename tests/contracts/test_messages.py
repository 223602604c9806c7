"""The contract does not change without a test saying so: samples, schemas, faults in plain words."""

import hashlib
import json
from pathlib import Path

import pytest

from shared import messages
from shared.errors import FieldError
from shared.messages import Message, PlaceReply, PlaceRequest, unknown_fields

SAMPLES = sorted((Path(__file__).parents[2] / "docs" / "samples").glob("*.json"))
VALID = {
    "command": ["python", "serve.py"],
    "gpu": {"share": 0.25},
    "realtime": {"deadline_us": 50_000, "period_us": 100_000, "runtime_us": 12_000},
}


def with_fields(**changed: object) -> bytes:
    return json.dumps(VALID | changed).encode()


def fault(body: bytes) -> tuple[str, str, str]:
    with pytest.raises(FieldError) as raised:
        PlaceRequest.from_json(body)
    return raised.value.field, raised.value.found, raised.value.allowed


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_each_golden_sample_is_read_and_written_back_unchanged(path: Path) -> None:
    model: type[Message] = getattr(messages, path.stem.split(".")[0])
    expected = json.loads(path.read_text())
    assert json.loads(model.from_json(path.read_bytes()).to_json()) == expected


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_readers_ignore_fields_they_do_not_know(path: Path) -> None:
    model: type[Message] = getattr(messages, path.stem.split(".")[0])
    body = json.loads(path.read_text())
    assert model.from_json(json.dumps(body | {"added_in_v1_9": {"x": 1}}).encode()) == model.from_json(
        path.read_bytes()
    )


def test_unknown_fields_of_a_request_are_named_so_that_a_typo_is_not_silent() -> None:
    assert unknown_fields(with_fields(shre=0.5)) == ["shre"]


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"", ("(body)", "nothing", "a JSON object")),
        (b"[]", ("(body)", "[]", "a JSON object")),
        (b'"place"', ("(body)", "'place'", "a JSON object")),
        (with_fields(gpu={"share": 1.5}), ("gpu.share", "1.5", "above 0, at most 1")),
        (with_fields(gpu={"share": float("nan")}), ("gpu.share", "nan", "a finite number, above 0, at most 1")),
        (with_fields(gpu={"share": "0.5"}), ("gpu.share", "0.5", "a number, above 0, at most 1")),
        (with_fields(gpu={"share": 0}), ("gpu.share", "0", "above 0, at most 1")),
        (
            with_fields(gpu={"count": 2, "share": 0.5}),
            ("gpu.share", "0.5", "1 or absent: count 2 takes whole devices"),
        ),
        (with_fields(replicas=-1), ("replicas", "-1", "at least 1, at most 10000")),
        (with_fields(replicas=10**30), ("replicas", str(10**30), "at least 1, at most 10000")),
        (with_fields(replicas=True), ("replicas", "True", "a whole number, at least 1, at most 10000")),
        (with_fields(replicas="3"), ("replicas", "3", "a whole number, at least 1, at most 10000")),
        (with_fields(request_id="x" * 300), ("request_id", "300 bytes", "1 to 253 bytes of UTF-8")),
        (with_fields(request_id="é" * 127), ("request_id", "254 bytes", "1 to 253 bytes of UTF-8")),
        (with_fields(env={"MODEL": 1}), ("env.MODEL", "1", "text")),
        (with_fields(volumes=[{"source": "a"}]), ("volumes[0].target", "nothing", "a value: this field is required")),
        (
            with_fields(realtime={"runtime_us": 1}),
            ("realtime.deadline_us", "nothing", "a value: this field is required"),
        ),
        (with_fields(spread_over="zone"), ("spread_over", "zone", "'node' or 'pack'")),
        (
            with_fields(realtime={"deadline_us": 1000}),
            ("realtime.runtime_us", "nothing", "a whole number above 0: kind firm needs it"),
        ),
        (b'{"gpu": {}}', ("command", "nothing", "a command, an image, or pods to bind")),
    ],
)
def test_a_wrong_field_is_named_with_what_was_found_and_what_is_allowed(
    body: bytes, expected: tuple[str, str, str]
) -> None:
    assert fault(body) == expected


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"nul", b"[" * 100_000, b'{"a":"\\ud800"}', b"{}" * 2])
def test_what_is_not_json_is_refused_as_a_body(body: bytes) -> None:
    assert fault(body)[0] == "(body)"


def test_a_body_over_256_kib_is_refused_with_its_size() -> None:
    body = with_fields(name="x" * 262_144)
    assert fault(body) == ("(body)", f"{len(body)} bytes", "at most 262144 bytes")


def test_words_of_the_command_line_are_not_silently_ignored_on_the_bus() -> None:
    assert fault(with_fields(place_by="+30s"))[0] == "place_by"


def test_what_was_found_is_cut_and_made_visible_before_it_goes_into_a_reply() -> None:
    _, found, _ = fault(with_fields(replicas="\x1b[31m" + "x" * 5000))
    assert (found[:8], len(found) <= 201 + 3) == ("\\x1b[31m", True)


@pytest.mark.parametrize(
    "said",
    [
        '{"request_id": "ID", "command": ["a", "\\\\ \\" request_id"], "more": 1, "env": {"request": "id"}}',
        '{"name": "\u00e9", "command": ["a"], "request_id" :\t"ID", "more": {"request_ids": 1}}',
        '{"env": {"request_id": "ID"}, "command": ["a"], "request_id": "a", "more": 1}',
        '{"env": {"request_id": "ID"}, "command": ["a"], "request\\u005fid": "a", "more": 1}',
        '{"env": {"request_id": "ID"}, "command": ["a"], "more": 1}',
        '{"request_id": "ID", "command": ["a"], "request_id": "a", "more": 1}',
        '{"request_id": "a\\/b", "command": ["a"], "env": {"request_id": "ID"}, "more": 1}',
    ],
)
@pytest.mark.parametrize("names", [("a", "b", "c"), ("x y.z", "a/b", "a\\/b"), ("\u00e9", "\\u00e9", "q")])
def test_requests_that_share_what_they_say_beside_their_id_say_it_each(said: str, names: tuple[str, ...]) -> None:
    for name in (*names, *names):
        body = said.replace("ID", name).encode()
        alone, read = PlaceRequest.model_validate_json(body), PlaceRequest.from_json(body)
        assert (alone, alone.body_hash(), alone.to_json()) == (read, read.body_hash(), read.to_json())
        assert unknown_fields(body) == ["more"]


def test_the_hash_of_a_copy_is_that_of_what_it_says() -> None:
    one = PlaceRequest.from_json(with_fields(request_id="a"))
    one.body_hash()
    same, other = (one.model_copy(update=change) for change in ({"request_id": "b"}, {"cpu_milli": 7, "env": {}}))
    assert one.body_hash() == same.body_hash()
    assert other.body_hash() == PlaceRequest.from_json(with_fields(request_id="a", cpu_milli=7, env={})).body_hash()


def test_what_is_no_json_is_none_beside_a_like_body_either() -> None:
    PlaceRequest.from_json(b'{"request_id":"a","command":["x"],"name":"no json"}')
    with pytest.raises(FieldError):
        PlaceRequest.from_json(b'{"request_id"\x0b:"b","command":["x"],"name":"no json"}')


def test_a_request_is_the_same_whatever_its_candidates_and_its_id() -> None:
    one = PlaceRequest.from_json(with_fields(request_id="a", candidates=["n1"]))
    other = PlaceRequest.from_json(with_fields(request_id="b", candidates=["n1", "n2"]))
    assert one.body_hash() == other.body_hash()


def test_a_default_that_is_spelled_out_is_no_other_body() -> None:
    assert (
        PlaceRequest.from_json(with_fields()).body_hash() == PlaceRequest.from_json(with_fields(replicas=1)).body_hash()
    )


def test_a_field_that_is_added_leaves_the_hashes_that_ledgers_hold_valid() -> None:
    said = json.dumps(VALID, sort_keys=True).encode()
    assert hashlib.sha256(said).hexdigest() == PlaceRequest.from_json(with_fields()).body_hash()


def test_another_share_is_another_body() -> None:
    one, other = PlaceRequest.from_json(with_fields()), PlaceRequest.from_json(with_fields(gpu={"share": 0.5}))
    assert one.body_hash() != other.body_hash()


def test_an_error_reply_always_has_outcome_and_request_id() -> None:
    reply = PlaceReply.of_error(FieldError("gpu.share", 1.5, "above 0, at most 1"))
    expected = {
        "outcome": "error",
        "request_id": None,
        "error": {"field": "gpu.share", "found": "1.5", "allowed": "above 0, at most 1"},
    }
    assert json.loads(reply.to_json()) == expected
